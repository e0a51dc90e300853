"""Held-out scenes whose stickers no training picture ever held, and what can fairly be asked about them.

A model can not know what they are called: it names the likest of the things it knows, which is no answer to score. So
no question that is asked here, and no right answer, names one: how many things there are, the colours of shapes and
background, where shapes and signs lie, what signs say, and whether something is there that is not (or a shape that is).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import count

from vlmfast.train.questions import Question, ask
from vlmfast.train.scenes import Kind, Scene, sample_scene, stream

KINDS = ("colour", "exists", "count", "where", "sign")

_TRIES = 24


@cache
def unseen_names() -> tuple[str, ...]:
    """Names of the stickers of `unseen/`."""
    return tuple(json.loads((files("vlmfast.train") / "unseen" / "index.json").read_text(encoding="utf-8")))


def unseen_scenes(seed: int) -> Iterator[Scene]:
    """The held-out scenes of the seed that hold stickers, each name replaced by one that was never seen."""
    for index in count():
        scene = sample_scene(seed, index)
        rng = stream("unseen", seed, index)
        stickers = list(dict.fromkeys(thing.name for thing in scene.things if thing.kind is Kind.STICKER))
        if not stickers:
            continue
        names = dict(zip(stickers, rng.sample(unseen_names(), len(stickers)), strict=True))
        yield replace(
            scene,
            things=tuple(replace(thing, name=names.get(thing.name, thing.name)) for thing in scene.things),
            swapped=names.get(scene.swapped, scene.swapped),
        )


def unseen_questions(scene: Scene) -> list[Question]:
    """One question of each of `KINDS` that can be asked, and answered, without naming an unseen thing."""
    rng = stream("unseen asked", scene.seed, scene.index)
    found = []
    for kind in KINDS:
        for _ in range(_TRIES):
            question = ask(scene, kind, rng)
            if question is not None and not _names_unseen(question):
                found.append(question)
                break
    return found


def _names_unseen(question: Question) -> bool:
    text = f"{question.prompt} {question.answer}"
    return any(name in text for name in unseen_names())
