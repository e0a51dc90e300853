"""Where training pictures come from: generated scenes, and the pictures of easy-VQA.

A source is a numbered list of pictures; everything about number i is a function of the source's fields and i.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Protocol

from PIL import Image

from vlmfast.train.easy_vqa import EasyPicture, easy_pictures
from vlmfast.train.packing import questions_for_row
from vlmfast.train.questions import Question, ask_all
from vlmfast.train.render import Rendering, render
from vlmfast.train.scenes import Scene, Split, Style, sample_scene, stream

_EASY_QUESTIONS = 6
_SMALLEST_PRINT = 22
"""Size of a page's font in pixels, as shown, from which its letters fill a patch and are asked for."""


class Source(Protocol):
    """What frames are drawn from and what is asked about them."""

    @property
    def count(self) -> int: ...

    def draw(self, position: int) -> Image.Image | tuple[Scene, Rendering]:
        """The picture, or a scene and its drawing, whose patches can be labelled."""
        ...

    def questions(self, position: int, rng: random.Random, side: int) -> Sequence[Question]:
        """Some questions for a training row about the picture as shown, `side` pixels wide."""
        ...

    def scored_questions(self, position: int) -> Sequence[Question]:
        """The questions that are scored while training; always the same."""
        ...

    def describe(self) -> str:
        """A text that differs whenever the frames would."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneSource:
    """Scenes of one split, seed and style."""

    split: Split
    seed: int
    count: int
    style: Style
    step: int = 1
    """2 takes one of each pair of twins."""

    def scene(self, position: int) -> Scene:
        return sample_scene(self.seed, position * self.step, split=self.split, style=self.style)

    def draw(self, position: int) -> tuple[Scene, Rendering]:
        scene = self.scene(position)
        return scene, render(scene)

    def questions(self, position: int, rng: random.Random, side: int) -> list[Question]:
        scene = self.scene(position)
        asked = questions_for_row(scene, rng)
        legible = scene.page is None or scene.page.size * side >= _SMALLEST_PRINT
        return asked if legible else [question for question in asked if "words" not in question.expect]

    def scored_questions(self, position: int) -> list[Question]:
        return ask_all(self.scene(position), stream("held-out questions", position))

    def describe(self) -> str:
        return json.dumps({**asdict(self), "split": self.split.value}, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EasySource:
    """The first pictures of a split of easy-VQA; needs its package."""

    split: Split
    count: int

    def draw(self, position: int) -> Image.Image:
        return self._picture(position).open()

    def questions(self, position: int, rng: random.Random, side: int) -> list[Question]:
        asked = self._picture(position).questions
        return rng.sample(asked, min(len(asked), _EASY_QUESTIONS))

    def scored_questions(self, position: int) -> Sequence[Question]:
        return self._picture(position).questions

    def describe(self) -> str:
        return json.dumps({"easy-vqa": self.split.value, "count": self.count})

    def _picture(self, position: int) -> EasyPicture:
        return _easy_pictures(self.split)[position]


@cache
def _easy_pictures(split: Split) -> list[EasyPicture]:
    return easy_pictures(split)
