"""Accuracy of anything that answers questions about pictures, on held-out scenes and on easy-VQA's test split.

Training draws its scenes from the streams of `Split.TRAIN`, this file from those of `Split.HELD_OUT`: no seed can make
them meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from PIL import Image

from vlmfast.train.easy_vqa import easy_pictures
from vlmfast.train.questions import Question
from vlmfast.train.render import render
from vlmfast.train.scenes import Split, sample_scene
from vlmfast.train.tally import Tally
from vlmfast.train.truth import scene_questions
from vlmfast.train.unseen import unseen_questions, unseen_scenes

Ask = Callable[[Image.Image, str], str]
"""(picture, prompt) -> answer."""

Continue = Callable[[Image.Image, tuple[tuple[str, str], ...], str], str]
"""(picture, earlier turns, prompt) -> answer; the turns are (prompt, answer) pairs."""


def score(ask: Ask, seed: int, count: int, continue_chat: Continue | None = None) -> Tally:
    """Accuracy of `ask(picture, prompt)` for each kind over scenes 0 .. count - 1 of a held-out seed."""
    return Tally.of(answered(ask, seed, count, continue_chat))


def answered(ask: Ask, seed: int, count: int, continue_chat: Continue | None = None) -> Iterator[tuple[Question, str]]:
    """Every question that is scored, with the answer it got, scene by scene.

    Questions that follow an earlier turn go to `continue_chat`; without it they are left out.
    """
    for index in range(count):
        scene = sample_scene(seed, index, split=Split.HELD_OUT)
        picture = render(scene).picture
        for question in scene_questions(scene):
            if not question.before:
                yield question, ask(picture, question.prompt)
            elif continue_chat is not None:
                yield question, continue_chat(picture, question.before, question.prompt)


def score_unseen(ask: Ask, seed: int, count: int) -> Tally:
    """Accuracy over `count` held-out scenes whose stickers no training picture ever held; see `unseen`."""
    return Tally.of(
        (question, ask(picture, question.prompt))
        for scene in islice(unseen_scenes(seed), count)
        for picture in [render(scene).picture]
        for question in unseen_questions(scene)
    )


def score_easy_vqa(ask: Ask, count: int) -> Tally:
    """Accuracy over the first `count` pictures of easy-VQA's test split.

    Raises:
        InputError: the package easy-vqa is not installed.
    """
    return Tally.of(
        (question, ask(picture, question.prompt))
        for entry in islice(easy_pictures(Split.HELD_OUT), count)
        for picture in [entry.open()]
        for question in entry.questions
    )
