"""What a question is, and the phrases that questions, answers and captions share."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmfast.train.scenes import Kind, Scene, Thing
from vlmfast.train.vocabulary import COLOURS, SHAPES, counted, joined, sticker_names, with_article


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of one kind, one right answer, and the content that makes an answer right."""

    kind: str
    prompt: str
    answer: str
    expect: Mapping[str, Any]
    before: tuple[tuple[str, str], ...] = ()
    """Earlier turns of the chat, (prompt, answer) each, without which the prompt makes no sense."""

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """The whole chat, this question and its answer last."""
        return (*self.before, (self.prompt, self.answer))


def at(thing: Thing) -> str:
    """Where the thing is: "at the top left", "in the middle"."""
    return "in the middle" if thing.place == "middle" else f"at the {thing.place}"


def there_are(scene: Scene) -> str:
    """All things, without places: "There is a dog and two cats"."""
    return f"There {is_or_are(scene)} {joined([counted(name, number) for name, number in scene.counts.items()])}"


def is_or_are(scene: Scene) -> str:
    """English lets the verb agree with what stands next to it."""
    return "is" if next(iter(scene.counts.values())) == 1 else "are"


def one_of_a_kind(scene: Scene) -> list[Thing]:
    """The things that share their name with no other."""
    return [thing for thing in scene.things if scene.counts[thing.name] == 1]


def sole_shapes(scene: Scene) -> list[Thing]:
    """The shapes that can be told by their form alone."""
    shapes = [thing for thing in scene.things if thing.kind is Kind.SHAPE]
    return [thing for thing in shapes if sum(other.shape == thing.shape for other in shapes) == 1]


def sign_text(scene: Scene) -> str | None:
    return next((thing.text for thing in scene.things if thing.kind is Kind.SIGN), None)


def something(name: str, number: int) -> str:
    """With its verb: "is a dog", "are two dogs"."""
    return f"{'is' if number == 1 else 'are'} {counted(name, number)}"


def absent_name(scene: Scene, rng: random.Random) -> str:
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


def is_there(name: str, rng: random.Random) -> str:
    """A yes/no question for a thing."""
    thing = with_article(name)
    return rng.choice(
        (
            f"Is there {thing} in the picture?",
            f"Is there {thing}?",
            f"Can you see {thing}?",
            f"Does the picture show {thing}?",
            f"Do you see {thing}?",
            f"Is {thing} in the image?",
        )
    )
