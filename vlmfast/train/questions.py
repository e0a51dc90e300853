"""What can be asked about a scene, in varied words, with a right answer and what any right answer must contain.

A question is a pure function of (scene, kind, random stream). Its `expect` is plain JSON, so that a truth file can be
scored without the scene; `answers.is_right` reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmfast.train.scenes import Kind, Scene, Thing
from vlmfast.train.vocabulary import COLOURS, NUMBER_WORDS, SHAPES, counted, joined, plural, sticker_names, with_article


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of one kind, one right answer, and the content that makes an answer right."""

    kind: str
    prompt: str
    answer: str
    expect: Mapping[str, Any]


def ask(scene: Scene, kind: str, rng: random.Random) -> Question | None:
    """A question of this kind about the scene, or None where the scene gives no occasion for one."""
    return _ASKERS[kind](scene, rng)


def ask_all(scene: Scene, rng: random.Random) -> list[Question]:
    """One question of every kind that the scene gives occasion for, in the order of `KINDS`."""
    return [question for kind in KINDS if (question := ask(scene, kind, rng)) is not None]


def _what(scene: Scene, rng: random.Random) -> Question:
    prompt = rng.choice(
        (
            "What is in the picture?",
            "What is in the image?",
            "What can you see in the picture?",
            "What do you see?",
            "Which things are in the picture?",
            "List the things in the picture.",
        )
    )
    return Question(kind="what", prompt=prompt, answer=f"{_there_are(scene)}.", expect={"things": dict(scene.counts)})


def _colour(scene: Scene, rng: random.Random) -> Question:
    shapes = [thing for thing in scene.things if thing.kind is Kind.SHAPE]
    unique = [thing for thing in shapes if sum(other.shape == thing.shape for other in shapes) == 1]
    if unique and rng.random() < 0.7:
        thing = rng.choice(unique)
        subject, colour = thing.shape, thing.colour
    else:
        subject, colour = "background", scene.background
    prompt = rng.choice(
        (f"What colour is the {subject}?", f"What color is the {subject}?", f"Which colour does the {subject} have?")
    )
    return Question(kind="colour", prompt=prompt, answer=f"The {subject} is {colour}.", expect={"colour": colour})


def _exists(scene: Scene, rng: random.Random) -> Question:
    """Yes and no equally often; a "no" asks for what the twin has, or for a near miss, or for anything else."""
    yes = rng.random() < 0.5
    if yes:
        name = scene.swapped if rng.random() < 0.5 else rng.choice(list(scene.counts))
    else:
        name = scene.absent if rng.random() < 0.5 else _absent_name(scene, rng)
    thing = with_article(name)
    prompt = rng.choice(
        (
            f"Is there {thing} in the picture?",
            f"Is there {thing}?",
            f"Can you see {thing}?",
            f"Does the picture show {thing}?",
        )
    )
    number = scene.counts[name]
    verb = "are" if number > 1 else "is"
    answer = f"Yes, there {verb} {counted(name, number)}." if yes else f"No, there is no {name}."
    return Question(kind="exists", prompt=prompt, answer=answer, expect={"exists": yes})


def _count(scene: Scene, rng: random.Random) -> Question:
    """How many things in all, or of one name; sometimes of a name that does not occur."""
    if rng.random() < 0.4:
        number, singular, several = len(scene.things), "thing", "things"
        prompt = rng.choice(("How many things are there?", "How many things are in the picture?", "Count the things."))
    else:
        repeated = [name for name, number in scene.counts.items() if number > 1]
        present = repeated if repeated and rng.random() < 0.6 else list(scene.counts)
        singular = _absent_name(scene, rng) if rng.random() < 0.2 else rng.choice(present)
        number, several = scene.counts[singular], plural(singular)
        prompt = rng.choice((f"How many {several} are there?", f"How many {several} are in the picture?"))
    words = f"is {NUMBER_WORDS[1]} {singular}" if number == 1 else f"are {NUMBER_WORDS[number]} {several}"
    return Question(kind="count", prompt=prompt, answer=f"There {words}.", expect={"number": number})


def _where(scene: Scene, rng: random.Random) -> Question | None:
    unique = [thing for thing in scene.things if scene.counts[thing.name] == 1]
    if not unique:
        return None
    thing = rng.choice(unique)
    prompt = rng.choice((f"Where is the {thing.name}?", f"Where in the picture is the {thing.name}?"))
    answer = f"The {thing.name} is {_at(thing)}."
    return Question(kind="where", prompt=prompt, answer=answer, expect={"place": thing.place})


def _at_place(scene: Scene, rng: random.Random) -> Question | None:
    """The reverse of `where`: what lies at a place."""
    places = [thing.place for thing in scene.things]
    alone = [thing for thing in scene.things if places.count(thing.place) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    prompt = rng.choice((f"What is {_at(thing)}?", f"What can you see {_at(thing)}?"))
    answer = f"There is {with_article(thing.name)} {_at(thing)}."
    return Question(kind="at", prompt=prompt, answer=answer, expect={"things": {thing.name: 1}})


def _sign(scene: Scene, rng: random.Random) -> Question | None:
    text = _sign_text(scene)
    if text is None:
        return None
    prompt = rng.choice(
        ("What does the sign say?", "What is written on the sign?", "Read the sign.", "Which word is on the sign?")
    )
    return Question(kind="sign", prompt=prompt, answer=f"The sign says {text}.", expect={"text": text})


def _caption(scene: Scene, rng: random.Random) -> Question:
    """A description in two or three sentences: background, things, places, sign text, in varied order and words."""
    prompt = rng.choice(
        (
            "Describe the picture.",
            "Describe the image.",
            "Write a caption for the picture.",
            "Tell me about the picture.",
            "What does the picture show?",
        )
    )
    placed = joined([_placed(scene, name, number, rng) for name, number in scene.counts.items()])
    colour, verb = scene.background, _is_or_are(scene)
    if rng.random() < 0.5:
        parts = [
            rng.choice(
                (
                    f"On a {colour} background there {verb} {placed}.",
                    f"In front of a {colour} background we see {placed}.",
                    f"The background is {colour}. The picture shows {placed}.",
                )
            )
        ]
    else:
        parts = [
            rng.choice((f"The picture shows {placed}.", f"There {verb} {placed}.", f"We see {placed}.")),
            rng.choice((f"The background is {colour}.", f"Behind {_them(scene)} is a {colour} background.")),
        ]
    text = _sign_text(scene)
    if text is not None:
        parts.append(f"The sign says {text}.")
    return Question(
        kind="caption",
        prompt=prompt,
        answer=" ".join(parts),
        expect={
            "things": dict(scene.counts),
            "places": {thing.name: thing.place for thing in scene.things if scene.counts[thing.name] == 1},
            "background": colour,
            "text": text,
        },
    )


_ASKERS: dict[str, Callable[[Scene, random.Random], Question | None]] = {
    "what": _what,
    "colour": _colour,
    "exists": _exists,
    "count": _count,
    "where": _where,
    "at": _at_place,
    "sign": _sign,
    "caption": _caption,
}

KINDS = tuple(_ASKERS)


def _at(thing: Thing) -> str:
    return "in the middle" if thing.place == "middle" else f"at the {thing.place}"


def _placed(scene: Scene, name: str, number: int, rng: random.Random) -> str:
    """The thing with its place; several of a name go without one."""
    if number > 1:
        return counted(name, number)
    place = next(_at(thing) for thing in scene.things if thing.name == name)
    return f"{with_article(name)} {place}"


def _there_are(scene: Scene) -> str:
    return f"There {_is_or_are(scene)} {joined([counted(name, number) for name, number in scene.counts.items()])}"


def _is_or_are(scene: Scene) -> str:
    """English lets the verb agree with what stands next to it."""
    return "is" if next(iter(scene.counts.values())) == 1 else "are"


def _them(scene: Scene) -> str:
    return "it" if len(scene.things) == 1 else "them"


def _sign_text(scene: Scene) -> str | None:
    return next((thing.text for thing in scene.things if thing.kind is Kind.SIGN), None)


def _absent_name(scene: Scene, rng: random.Random) -> str:
    """The name of a thing that is not in the scene; half of those for a shape differ from it in one word only."""
    shapes = [thing for thing in scene.things if thing.kind is Kind.SHAPE]
    while True:
        if shapes and rng.random() < 0.5:
            near = rng.choice(shapes)
            colour, shape = (
                (rng.choice(COLOURS), near.shape) if rng.random() < 0.5 else (near.colour, rng.choice(SHAPES))
            )
            name = f"{colour} {shape}"
        elif rng.random() < 0.35:
            name = f"{rng.choice(COLOURS)} {rng.choice(SHAPES)}"
        else:
            name = rng.choice(sticker_names())
        if name not in scene.counts:
            return name
