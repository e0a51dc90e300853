"""Training rows: one picture, several questions about it, every answer a target.

    row       <opening with the picture> question answer question answer ... pad
    segment            0                    1       1      2       2          -1
    position  0 1 2 ...              n   n+1 n+2 ...      n+1 n+2 ...

In a parallel row the questions do not see each other and each continues right behind the picture; in a chat row they
are the turns of one conversation (one segment, positions run on).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmfast.train.questions import KINDS, Question, ask
from vlmfast.train.scenes import Scene
from vlmfast.train.tokens import PromptTokens

IGNORED_TARGET = -100
PADDING_SEGMENT = -1

# Captions and lists say most; signs are few; comparing places and counting what is not there are slow to learn.
_ALWAYS = ("what", "caption", "exists", "exists", "sign", "relation", "relation", "count", "count")
_OTHERS = tuple(kind for kind in KINDS if kind not in (*_ALWAYS, "page"))
_ON_A_PAGE = ("page", "page", "page", "caption", "exists")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One packed row; `targets` holds, at each token, the id that should come next, or `IGNORED_TARGET`."""

    ids: list[int]
    positions: list[int]
    segments: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of equal length, each tensor int64 [B, T]."""

    ids: Tensor
    positions: Tensor
    segments: Tensor
    targets: Tensor


def questions_for_row(scene: Scene, rng: random.Random, num_others: int = 3) -> list[Question]:
    """The kinds that are always asked and some of the others, in random order; a page is read in several ways."""
    kinds = list(_ON_A_PAGE) if scene.page is not None else [*_ALWAYS, *rng.sample(_OTHERS, num_others)]
    rng.shuffle(kinds)
    return [question for kind in kinds if (question := ask(scene, kind, rng)) is not None]


def pack(tokens: PromptTokens, opening: Sequence[int], questions: Sequence[Question], *, chat: bool) -> Row:
    """The row that asks all questions about the picture of `opening`, side by side or as one conversation."""
    ids = list(opening)
    start = len(ids)
    positions, segments, targets = list(range(start)), [0] * start, [IGNORED_TARGET] * start
    for number, question in enumerate(questions, start=1):
        first = positions[-1] + 1 if chat else start
        opens = not (chat and number > 1)
        for asked, told in question.turns:
            prompt, answer = tokens.question(asked, first=opens), tokens.answer(told)
            opens = False
            ids += prompt + answer
            # The last token of the prompt predicts the answer's first, and so on; the end of the turn predicts nothing.
            targets += [IGNORED_TARGET] * (len(prompt) - 1) + answer + [IGNORED_TARGET]
        length = len(ids) - len(positions)
        segments += [1 if chat else number] * length
        positions += range(first, first + length)
    return Row(ids=ids, positions=positions, segments=segments, targets=targets)


def collate(rows: Sequence[Row], padding_id: int) -> Batch:
    """The rows filled up on the right to the longest of them."""
    longest = max(len(row.ids) for row in rows)

    def padded(lists: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([values + [filler] * (longest - len(values)) for values in lists])

    return Batch(
        ids=padded([row.ids for row in rows], padding_id),
        positions=padded([row.positions for row in rows], 0),
        segments=padded([row.segments for row in rows], PADDING_SEGMENT),
        targets=padded([row.targets for row in rows], IGNORED_TARGET),
    )
