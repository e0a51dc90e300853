"""What can be asked about a scene, in varied words, with a right answer and what any right answer must contain.

A question is a pure function of (scene, kind, random stream). Its `expect` is plain JSON, so that a truth file can be
scored without the scene; `answers.is_right` reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from vlmfast.train import page_questions
from vlmfast.train.captioning import caption
from vlmfast.train.relations import follow, relation
from vlmfast.train.scenes import Scene
from vlmfast.train.vocabulary import COLOURS, NUMBER_WORDS, plural, with_article
from vlmfast.train.wording import (
    Question,
    absent_name,
    at,
    is_there,
    one_of_a_kind,
    sign_text,
    sole_shapes,
    something,
    there_are,
)

__all__ = ["KINDS", "Question", "ask", "ask_all"]


def ask(scene: Scene, kind: str, rng: random.Random) -> Question | None:
    """A question of this kind about the scene, or None where the scene gives no occasion for one."""
    if scene.page is not None and kind not in _OF_PAGES:
        return None
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
            "Name everything in the image.",
            "What is shown here?",
        )
    )
    return Question(kind="what", prompt=prompt, answer=f"{there_are(scene)}.", expect={"things": dict(scene.counts)})


def _colour(scene: Scene, rng: random.Random) -> Question | None:
    """Of a shape, or of the background unless that is a photograph."""
    unique = sole_shapes(scene)
    if unique and (rng.random() < 0.7 or scene.background not in COLOURS):
        thing = rng.choice(unique)
        subject, colour = thing.shape, thing.colour
    elif scene.background in COLOURS:
        subject, colour = "background", scene.background
    else:
        return None
    prompt = rng.choice(
        (
            f"What colour is the {subject}?",
            f"What color is the {subject}?",
            f"Which colour does the {subject} have?",
            f"Tell me the colour of the {subject}.",
            f"What is the color of the {subject}?",
        )
    )
    return Question(kind="colour", prompt=prompt, answer=f"The {subject} is {colour}.", expect={"colour": colour})


def _exists(scene: Scene, rng: random.Random) -> Question:
    """Yes and no equally often; a "no" asks for what the twin has, or for a near miss, or for anything else."""
    yes = scene.page is None and rng.random() < 0.5
    if yes:
        name = scene.swapped if rng.random() < 0.5 else rng.choice(list(scene.counts))
    else:
        name = scene.absent if scene.absent and rng.random() < 0.5 else absent_name(scene, rng)
    answer = f"Yes, there {something(name, scene.counts[name])}." if yes else f"No, there is no {name}."
    return Question(kind="exists", prompt=is_there(name, rng), answer=answer, expect={"exists": yes})


def _count(scene: Scene, rng: random.Random) -> Question:
    """How many things in all, or of one name; sometimes of a name that does not occur."""
    if rng.random() < 0.4:
        number, singular, several = len(scene.things), "thing", "things"
        prompt = rng.choice(
            (
                "How many things are there?",
                "How many things are in the picture?",
                "Count the things.",
                "How many things can you see?",
            )
        )
    else:
        repeated = [name for name, number in scene.counts.items() if number > 1]
        present = repeated if repeated and rng.random() < 0.6 else list(scene.counts)
        singular = absent_name(scene, rng) if rng.random() < 0.2 else rng.choice(present)
        number, several = scene.counts[singular], plural(singular)
        prompt = rng.choice(
            (
                f"How many {several} are there?",
                f"How many {several} are in the picture?",
                f"Count the {several}.",
                f"How many {several} can you see?",
            )
        )
    words = f"is {NUMBER_WORDS[1]} {singular}" if number == 1 else f"are {NUMBER_WORDS[number]} {several}"
    return Question(kind="count", prompt=prompt, answer=f"There {words}.", expect={"number": number})


def _where(scene: Scene, rng: random.Random) -> Question | None:
    unique = one_of_a_kind(scene)
    if not unique:
        return None
    thing = rng.choice(unique)
    prompt = rng.choice(
        (
            f"Where is the {thing.name}?",
            f"Where in the picture is the {thing.name}?",
            f"Where do you see the {thing.name}?",
            f"In which part of the picture is the {thing.name}?",
        )
    )
    answer = f"The {thing.name} is {at(thing)}."
    return Question(kind="where", prompt=prompt, answer=answer, expect={"place": thing.place})


def _at_place(scene: Scene, rng: random.Random) -> Question | None:
    """The reverse of `where`: what lies at a place."""
    places = [thing.place for thing in scene.things]
    alone = [thing for thing in scene.things if places.count(thing.place) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    prompt = rng.choice(
        (
            f"What is {at(thing)}?",
            f"What can you see {at(thing)}?",
            f"What do you see {at(thing)}?",
            f"Which thing is {at(thing)}?",
        )
    )
    answer = f"There is {with_article(thing.name)} {at(thing)}."
    return Question(kind="at", prompt=prompt, answer=answer, expect={"things": {thing.name: 1}})


def _sign(scene: Scene, rng: random.Random) -> Question | None:
    text = sign_text(scene)
    if text is None:
        return None
    prompt = rng.choice(
        (
            "What does the sign say?",
            "What is written on the sign?",
            "Read the sign.",
            "Which word is on the sign?",
            "What is on the sign?",
            "Can you read the sign?",
        )
    )
    return Question(kind="sign", prompt=prompt, answer=f"The sign says {text}.", expect={"text": text})


def _page(scene: Scene, rng: random.Random) -> Question | None:
    return None if scene.page is None else page_questions.page(scene.page, rng)


_ASKERS: dict[str, Callable[[Scene, random.Random], Question | None]] = {
    "what": _what,
    "colour": _colour,
    "exists": _exists,
    "count": _count,
    "where": _where,
    "at": _at_place,
    "sign": _sign,
    "caption": caption,
    "relation": relation,
    "page": _page,
    "follow": follow,
}
_OF_PAGES = frozenset({"exists", "caption", "page"})

KINDS = tuple(_ASKERS)
"""New kinds go to the end."""
