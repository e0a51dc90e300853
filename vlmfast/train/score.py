"""Accuracy of anything that answers questions about pictures, on held-out scenes.

Training draws its scenes from the streams of `Split.TRAIN`, this file from those of `Split.HELD_OUT`: no seed can make
them meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from PIL import Image

from vlmfast.train.questions import Question
from vlmfast.train.render import render
from vlmfast.train.scenes import Split, sample_scene
from vlmfast.train.tally import Tally
from vlmfast.train.truth import scene_questions


def score(ask: Callable[[Image.Image, str], str], seed: int, count: int) -> Tally:
    """Accuracy of `ask(picture, prompt)` for each kind over scenes 0 .. count - 1 of a held-out seed."""
    return Tally.of(answered(ask, seed, count))


def answered(ask: Callable[[Image.Image, str], str], seed: int, count: int) -> Iterator[tuple[Question, str]]:
    """Every question that is scored, with the answer it got, scene by scene."""
    for index in range(count):
        scene = sample_scene(seed, index, split=Split.HELD_OUT)
        picture = render(scene).picture
        for question in scene_questions(scene):
            yield question, ask(picture, question.prompt)
