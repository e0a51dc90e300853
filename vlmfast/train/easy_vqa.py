"""easy-VQA: 64-pixel pictures of one shape with yes/no, shape and colour questions, made by others.

The pictures and questions come with the PyPI package `easy-vqa` (Victor Zhou, MIT licence). Its `train` split may be
trained on; its `test` split is an outside check that no scene of ours can influence. Answers are one word.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from PIL import Image

from vlmfast.errors import InputError
from vlmfast.train.scenes import Split
from vlmfast.train.wording import Question

KINDS = ("easy yes/no", "easy shape", "easy colour")

_SHAPES = ("circle", "rectangle", "triangle")


class _Package(Protocol):
    """The functions of easy_vqa that are used here."""

    def get_train_questions(self) -> tuple[list[str], list[str], list[int]]: ...
    def get_test_questions(self) -> tuple[list[str], list[str], list[int]]: ...
    def get_train_image_paths(self) -> dict[int, str]: ...
    def get_test_image_paths(self) -> dict[int, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EasyPicture:
    """One picture and all that is asked about it."""

    path: Path
    questions: tuple[Question, ...]

    def open(self) -> Image.Image:
        with Image.open(self.path) as picture:
            return picture.convert("RGB")


def easy_pictures(split: Split) -> list[EasyPicture]:
    """Every picture of the package's `train` or (held out) `test` split, in the order of its numbers.

    Raises:
        InputError: the package is not installed.
    """
    package = require_easy_vqa()
    if split is Split.TRAIN:
        (prompts, answers, numbers), paths = package.get_train_questions(), package.get_train_image_paths()
    else:
        (prompts, answers, numbers), paths = package.get_test_questions(), package.get_test_image_paths()
    asked: defaultdict[int, list[Question]] = defaultdict(list)
    for prompt, answer, number in zip(prompts, answers, numbers, strict=True):
        asked[number].append(Question(kind=_kind(answer), prompt=prompt, answer=answer, expect={"word": answer}))
    return [EasyPicture(path=Path(paths[number]), questions=tuple(asked[number])) for number in sorted(asked)]


def _kind(answer: str) -> str:
    return KINDS[0] if answer in ("yes", "no") else KINDS[1] if answer in _SHAPES else KINDS[2]


def require_easy_vqa() -> _Package:
    """The installed package.

    Raises:
        InputError: there is none.
    """
    try:
        import easy_vqa
    except ImportError as error:
        raise InputError("easy-VQA comes with a package more: pip install easy-vqa") from error
    return cast(_Package, easy_vqa)
