"""Questions about held-out scenes, answered in batches; what is answered is kept, so a long run may stop and go on.

Blocks of pictures are answered one after another. Within a block every picture's first question comes first: the ones
after it find the picture's keys and values computed, where the method allows it.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from paired import TEXT_KINDS

from vlmfast.options import Batching, Caching, Sampling, Vision
from vlmfast.train.answers import credit, is_right
from vlmfast.train.asking import conversation
from vlmfast.train.questions import Question
from vlmfast.train.render import render
from vlmfast.train.scenes import Split, sample_scene
from vlmfast.train.truth import scene_questions
from vlmfast.types import Answer, ImageInput
from vlmfast.vlm import VLM

SEED = 20_260
BLOCK_PICTURES = 32
QUESTIONS_A_PICTURE = 6
ANSWER_TOKENS = 48
_SUMS = ("prompt_tokens", "visual_tokens_before", "visual_tokens", "visual_tokens_after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question about a picture. The caption of a page counts as "page": it, too, is read off the picture."""

    image: ImageInput
    kind: str
    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """How one way of answering did on a block."""

    right: tuple[bool, ...]
    credits: tuple[float, ...]
    """Of the questions that read text: the share of the words that are right."""
    sums: Mapping[str, int]
    """Of the answers' usage, over all questions."""
    seconds: float


class HeldOut:
    """`num_questions` questions or a few more, in whole blocks. Pictures are drawn anew when looked at."""

    def __init__(self, vlm: VLM, num_questions: int, block_pictures: int = BLOCK_PICTURES) -> None:
        self._vlm = vlm
        self._block_pictures = block_pictures
        self.blocks: list[list[Asked]] = []
        while sum(map(len, self.blocks)) < num_questions:
            self.blocks.append(self._block(len(self.blocks)))

    @property
    def kinds(self) -> list[str]:
        """Of all questions, in order."""
        return [asked.kind for block in self.blocks for asked in block]

    def name(self, block: int) -> str:
        """Names the block's pictures and questions: other scenes or other rules, another name."""
        content = [
            (asked.image.digest, asked.kind, asked.question.before, asked.question.prompt)
            for asked in self.blocks[block]
        ]
        return hashlib.sha256(json.dumps([ANSWER_TOKENS, content]).encode()).hexdigest()[:16]

    def _block(self, index: int) -> list[Asked]:
        """The questions of the block, first ones first."""
        numbered: list[tuple[int, Asked]] = []
        for number in range(index * self._block_pictures, (index + 1) * self._block_pictures):
            scene = sample_scene(SEED, number, split=Split.HELD_OUT)
            (image,) = self._vlm.load_images(render(scene).picture)
            image = replace(image, source=lambda scene=scene: np.asarray(render(scene).picture.convert("RGB")))
            for place, question in enumerate(_sampled(scene_questions(scene), number)):
                numbered.append((place, Asked(image=image, kind=_kind(question), question=question)))
        numbered.sort(key=lambda pair: pair[0])
        return [asked for _, asked in numbered]


def _kind(question: Question) -> str:
    return "page" if "words" in question.expect else question.kind


def _sampled(questions: Sequence[Question], number: int) -> list[Question]:
    """All that read text, which are few, and as many of the others as a picture may have; always the same."""
    rng = random.Random(f"{SEED}:{number}")
    text = [question for question in questions if _kind(question) in TEXT_KINDS]
    others = [question for question in questions if _kind(question) not in TEXT_KINDS]
    chosen = [*text, *rng.sample(others, min(len(others), max(QUESTIONS_A_PICTURE - len(text), 0)))]
    rng.shuffle(chosen)
    return chosen


def load(folder: Path, *, cpu_batch: int = BLOCK_PICTURES) -> VLM:
    """The model as quality is measured on it: many answers at a time, pictures and prefixes kept in memory only."""
    return VLM.from_pretrained(
        folder,
        device="cpu",
        batching=Batching(max_sequences=cpu_batch, max_step_tokens=8192),
        caching=Caching(features_disk_bytes=0, features_ram_bytes=2**30, prefix_ram_bytes=2**29),
        speculation="off",
    )


def answer_all(vlm: VLM, block: Sequence[Asked], vision: Vision | None) -> Iterator[Answer]:
    """The answer to each question, in order; the engine has all of them at once."""
    sampling = Sampling(max_new_tokens=ANSWER_TOKENS)
    talks = [conversation((asked.image,), asked.question.before, asked.question.prompt) for asked in block]
    streams = [vlm.answer_messages(talk, sampling=sampling, vision=vision) for talk in talks]
    for stream in streams:
        answer = None
        for chunk in stream:
            answer = chunk.answer
        assert answer is not None
        yield answer


def marks(vlm: VLM, block: Sequence[Asked], vision: Vision | None) -> Marks:
    """Asks a block and marks it."""
    started = time.perf_counter()
    right: list[bool] = []
    credits: list[float] = []
    sums = dict.fromkeys(_SUMS, 0)
    for asked, answer in zip(block, answer_all(vlm, block, vision), strict=True):
        question = asked.question
        right.append(is_right(question.kind, question.expect, answer.text))
        if asked.kind in TEXT_KINDS:
            credits.append(round(credit(question.kind, question.expect, answer.text), 4))
        for name in _SUMS:
            sums[name] += getattr(answer.usage, name)
    seconds = time.perf_counter() - started
    return Marks(right=tuple(right), credits=tuple(credits), sums=sums, seconds=seconds)


class WorkFile:
    """Marks on disk, a line of JSON a block; only those of the same weights, method and questions are found again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[tuple[str, str, str], Marks] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            return
        text = file.read_text(encoding="utf-8")
        for line in text.splitlines():
            try:
                values = json.loads(line)
            except ValueError:  # cut short when the run was stopped
                continue
            key = (values["weights"], values["method"], values["block"])
            self._found[key] = Marks(
                right=tuple(mark == "1" for mark in values["right"]),
                credits=tuple(values["credits"]),
                sums=values["sums"],
                seconds=values["seconds"],
            )
        if text and not text.endswith("\n"):
            with file.open("a", encoding="utf-8") as whole:
                whole.write("\n")

    def get(self, weights: str, method: str, block: str) -> Marks | None:
        return self._found.get((weights, method, block))

    def put(self, weights: str, method: str, block: str, found: Marks) -> None:
        """Keeps the marks, on disk once this returns."""
        self._found[weights, method, block] = found
        values: dict[str, Any] = {
            "weights": weights,
            "method": method,
            "block": block,
            "right": "".join("01"[mark] for mark in found.right),
            "credits": list(found.credits),
            "sums": dict(found.sums),
            "seconds": round(found.seconds, 3),
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def names_digest(held_out: HeldOut) -> str:
    """Names all questions together."""
    names = [held_out.name(block) for block in range(len(held_out.blocks))]
    return hashlib.sha256("".join(names).encode()).hexdigest()[:16]
