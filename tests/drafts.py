"""Drafters that always, never and sometimes fit, and the questions that drafting is tested on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from oracle import build, noise

from vlmfast import Sampling
from vlmfast.spec.options import Speculation
from vlmfast.spec.tree import NO_DRAFT, Acceptance, DraftTree

GREEDY = Sampling(max_new_tokens=24)
DRAWN = Sampling(max_new_tokens=24, temperature=1.1, top_p=0.9, top_k=40, repetition_penalty=1.1, seed=5)
ALL = Speculation(adaptive=False)
QUESTIONS: list[tuple[list[Any], str]] = [
    ([noise(61, 37)], "What is in the picture?"),
    ([], "Is there a red circle?"),
    ([noise(33, 33, 1), noise(64, 64, 2), noise(20, 30, 3)], "What is in the picture? There is a red circle."),
    ([noise(20, 90)], "a"),
    ([noise(100, 12), noise(1, 1)], "How many dogs?"),
]


class Stub:
    """Proposes from the answer that the plain run gave, made wrong in some way.

    Args:
        answers: prompt ids and answer of each question.
        shape: makes a draft of (right tokens, budget, random numbers).
    """

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], shape: Callable[..., DraftTree]) -> None:
        self._answers, self._shape = answers, shape
        self._rng = random.Random(7)

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        for prompt, answer in self._answers.items():
            if tuple(context[: len(prompt)]) == prompt:
                return self._shape(answer[len(context) - len(prompt) :], budget, self._rng)
        return NO_DRAFT

    def observe(self, draft: DraftTree, acceptance: Acceptance) -> None: ...


def always(right: tuple[int, ...], budget: int, rng: random.Random) -> DraftTree:
    return DraftTree.chain(right[:budget])


def never(right: tuple[int, ...], budget: int, rng: random.Random) -> DraftTree:
    return DraftTree.chain([(token + 1) % 500 for token in right[:budget]])


def sometimes(right: tuple[int, ...], budget: int, rng: random.Random) -> DraftTree:
    return DraftTree.chain([token if rng.random() < 0.7 else 17 for token in right[: rng.randrange(budget + 1)]])


def anything(right: tuple[int, ...], budget: int, rng: random.Random) -> DraftTree:
    return DraftTree.chain([rng.randrange(512) for _ in range(budget)])


def tree(right: tuple[int, ...], budget: int, rng: random.Random) -> DraftTree:
    """Random branches; each node is right for its depth half of the time, so siblings are often duplicates."""
    parents, tokens, depths = [], [], []
    for node in range(budget):
        parent = rng.randrange(-1, node)
        depth = 1 + (depths[parent] if parent >= 0 else 0)
        fits = rng.random() < 0.5 and depth <= len(right)
        tokens.append(right[depth - 1] if fits else rng.randrange(512))
        parents.append(parent)
        depths.append(depth)
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


def twins(right: tuple[int, ...], budget: int, rng: random.Random) -> DraftTree:
    """Two equal branches below two equal siblings: the first of equals is taken, and its keys and values kept."""
    branch = right[: budget // 2]
    parents = [-1, *range(len(branch) - 1)] if branch else []
    second = [-1, *range(len(branch), 2 * len(branch) - 1)] if branch else []
    return DraftTree(tokens=branch * 2, parents=(*parents, *second))


SHAPES = [always, never, sometimes, anything, tree, twins]


def with_stub(loaded: Any, shape: Callable[..., DraftTree], answers: list[tuple[int, ...]]) -> Any:
    """The model, drafting with stubs from now on."""
    known = {build(loaded, *question)[0].ids: answer for question, answer in zip(QUESTIONS, answers, strict=True)}
    loaded._speculator._drafters = lambda: [Stub(known, shape)]
    return loaded
