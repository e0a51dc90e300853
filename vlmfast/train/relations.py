"""Questions about how two things lie to each other, and questions that lean on an earlier turn of the chat."""

from __future__ import annotations

import random

from vlmfast.train.scenes import Kind, Scene, Thing
from vlmfast.train.vocabulary import NUMBER_WORDS, plural, with_article
from vlmfast.train.wording import Question, at, is_there, one_of_a_kind, sole_shapes

RELATIONS = ("left of", "right of", "above", "below")

_CLEAR = 0.15
"""Distance of centres, as a fraction of the shorter side, from which a thing is surely on one side of another."""
_NONE = 0.04
"""Distance below which it is surely not."""


def relation(scene: Scene, rng: random.Random) -> Question | None:
    """What lies on one side of a thing, or whether a thing does; only where nobody could quarrel about it."""
    yes_no = rng.random() < 0.5
    pairs = [(thing, word) for thing in one_of_a_kind(scene) for word in RELATIONS]
    rng.shuffle(pairs)
    for thing, word in pairs:
        others = [other for other in scene.things if other is not thing]
        offsets = {other: _offset(scene, other, thing, word) for other in others}
        if yes_no:
            clear = [other for other in others if abs(offsets[other]) >= _CLEAR and scene.counts[other.name] == 1]
            if clear:
                other = rng.choice(clear)
                return _yes_or_no(other, thing, word, yes=offsets[other] > 0, rng=rng)
        elif sum(offset >= _CLEAR for offset in offsets.values()) == 1 and all(
            offset >= _CLEAR or offset <= _NONE for offset in offsets.values()
        ):
            return _what_lies(max(others, key=lambda other: offsets[other]), thing, word, rng)
    return None


def follow(scene: Scene, rng: random.Random) -> Question | None:
    """A question with "it" or "they" after a turn that says what is meant."""
    makers = [_follow_where, _follow_colour, _follow_sign, _follow_count, _follow_place]
    rng.shuffle(makers)
    for maker in makers:
        if (question := maker(scene, rng)) is not None:
            return question
    return None


def _offset(scene: Scene, thing: Thing, other: Thing, word: str) -> float:
    """How far `thing` lies on that side of `other`, as a fraction of the picture's shorter side."""
    axis = 0 if word in ("left of", "right of") else 1
    side = (scene.width, scene.height)[axis]
    distance = (thing.box[axis] + thing.box[axis + 2] - other.box[axis] - other.box[axis + 2]) / 2
    sign = -1 if word in ("left of", "above") else 1
    return sign * distance * side / min(scene.width, scene.height)


def _yes_or_no(thing: Thing, other: Thing, word: str, *, yes: bool, rng: random.Random) -> Question:
    prompt = rng.choice(
        (
            f"Is the {thing.name} {word} the {other.name}?",
            f"Does the {thing.name} lie {word} the {other.name}?",
            f"Is the {thing.name} somewhere {word} the {other.name}?",
        )
    )
    opposite = RELATIONS[RELATIONS.index(word) ^ 1]
    answer = f"{'Yes' if yes else 'No'}, the {thing.name} is {word if yes else opposite} the {other.name}."
    return Question(kind="relation", prompt=prompt, answer=answer, expect={"exists": yes})


def _what_lies(thing: Thing, other: Thing, word: str, rng: random.Random) -> Question:
    prompt = rng.choice(
        (
            f"What is {word} the {other.name}?",
            f"What can you see {word} the {other.name}?",
            f"Which thing is {word} the {other.name}?",
        )
    )
    answer = f"There is {with_article(thing.name)} {word} the {other.name}."
    return Question(
        kind="relation", prompt=prompt, answer=answer, expect={"things": {thing.name: 1}, "about": other.name}
    )


def _follow_where(scene: Scene, rng: random.Random) -> Question | None:
    alone = one_of_a_kind(scene)
    if not alone:
        return None
    thing = rng.choice(alone)
    before = (is_there(thing.name, rng), f"Yes, there is {with_article(thing.name)}.")
    return Question(
        kind="follow",
        prompt=rng.choice(("Where is it?", "Where?", "And where is it?", "Where in the picture is it?")),
        answer=f"The {thing.name} is {at(thing)}.",
        expect={"asks": "where", "place": thing.place},
        before=(before,),
    )


def _follow_place(scene: Scene, rng: random.Random) -> Question | None:
    """The turn before asks for another thing's place, so that "and" carries the question over."""
    alone = one_of_a_kind(scene)
    if len(alone) < 2:
        return None
    first, second = rng.sample(alone, 2)
    return Question(
        kind="follow",
        prompt=f"And the {second.name}?",
        answer=f"The {second.name} is {at(second)}.",
        expect={"asks": "where", "place": second.place},
        before=((f"Where is the {first.name}?", f"The {first.name} is {at(first)}."),),
    )


def _follow_colour(scene: Scene, rng: random.Random) -> Question | None:
    shapes = sole_shapes(scene)
    if not shapes:
        return None
    thing = rng.choice(shapes)
    shape = thing.shape or ""
    before = rng.choice(
        (
            (f"Is there a {shape}?", f"Yes, there is one {shape}."),
            (f"Where is the {shape}?", f"The {shape} is {at(thing)}."),
        )
    )
    return Question(
        kind="follow",
        prompt=rng.choice(("What colour is it?", "What color is it?", "Which colour does it have?", "And its colour?")),
        answer=f"The {shape} is {thing.colour}.",
        expect={"asks": "colour", "colour": thing.colour},
        before=(before,),
    )


def _follow_sign(scene: Scene, rng: random.Random) -> Question | None:
    sign = next((thing for thing in scene.things if thing.kind is Kind.SIGN), None)
    if sign is None:
        return None
    before = rng.choice(
        ((is_there(sign.name, rng), "Yes, there is a sign."), ("Where is the sign?", f"The sign is {at(sign)}."))
    )
    return Question(
        kind="follow",
        prompt=rng.choice(("What does it say?", "What is written on it?", "Can you read it?", "Read it.")),
        answer=f"The sign says {sign.text}.",
        expect={"asks": "sign", "text": sign.text},
        before=(before,),
    )


def _follow_count(scene: Scene, rng: random.Random) -> Question | None:
    name = rng.choice(list(scene.counts))
    number = scene.counts[name]
    if number == 1 and rng.random() < 0.5:
        return None
    words = f"is {NUMBER_WORDS[1]} {name}" if number == 1 else f"are {NUMBER_WORDS[number]} {plural(name)}"
    return Question(
        kind="follow",
        prompt=rng.choice(("How many are there?", "How many?", "And how many are there?")),
        answer=f"There {words}.",
        expect={"asks": "count", "number": number},
        before=((f"Are there any {plural(name)}?", f"Yes, there {'is' if number == 1 else 'are'}."),),
    )
