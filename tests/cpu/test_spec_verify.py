"""Acceptance of drafts: exact in distribution, and every wrong rule is found out.

A target of four tokens is a table of logits by the last token, so the distribution of whole answers is known. Answers
of three tokens are written with drafts, 105,000 tokens in all, and counted: 64 cells, total variation and chi-square.
Chance of a false alarm: below 1e-6, and the seeds are fixed.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch

from vlmfast.errors import ModelError
from vlmfast.options import Sampling
from vlmfast.sample import Sampler, likeliest, penalise, probabilities
from vlmfast.spec import verify as verify_module
from vlmfast.spec.tree import NO_DRAFT, ROOT, Acceptance, DraftTree
from vlmfast.spec.verify import verify

_VOCAB = 4
_LENGTH = 3
_ANSWERS = 35_000
_TABLE = torch.tensor([[1.2, 0.3, -0.5, 0.0], [-1.0, 2.0, 0.4, 0.1], [0.0, 0.2, 0.1, -2.0], [0.7, 0.7, -3.0, 1.5]])
_START = 2

Verifier = Callable[[DraftTree, Any, Sampler], Acceptance]
Draft = Callable[[int, random.Random], DraftTree]


class QuickSampler(Sampler):
    """The sampler with its distributions remembered and Python's random numbers: twenty times as quick."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        super().__init__(sampling, torch.tensor([_START]), _VOCAB)
        self._random = random.Random(seed)
        self._known: dict[int, tuple[torch.Tensor, list[float]]] = {}

    def choose(self, logits: torch.Tensor, best: int | None = None) -> int:
        self.distribution(logits)
        sums = self._known[id(logits)][1]
        return bisect(sums, self._random.random() * sums[-1])

    def distribution(self, logits: torch.Tensor, best: int | None = None) -> torch.Tensor:
        if id(logits) not in self._known:
            target = super().distribution(logits, best)
            self._known[id(logits)] = target, list(accumulate(target.tolist()))
        return self._known[id(logits)][0]

    def draw(self, distribution: torch.Tensor) -> int:
        if id(distribution) not in self._known:
            self._known[id(distribution)] = distribution, list(accumulate(distribution.tolist()))
        sums = self._known[id(distribution)][1]
        return bisect(sums, self._random.random() * sums[-1])

    def chance(self) -> float:
        return self._random.random()


_ROWS = list(_TABLE)


def _write(draft: Draft, sampler: Sampler, rng: random.Random, verifier: Verifier = verify) -> tuple[int, ...]:
    """One answer, step by step; what a step gives beyond its length is cut off, as at `max_new_tokens`."""
    answer: list[int] = []
    while len(answer) < _LENGTH:
        last = answer[-1] if answer else _START
        tree = draft(last, rng)
        acceptance = verifier(tree, [_ROWS[token] for token in (last, *tree.tokens)], sampler)
        answer += [*(tree.tokens[node] for node in acceptance.path), acceptance.token]
    return tuple(answer[:_LENGTH])


def _expected(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of every answer, by the target alone."""
    rows = [probabilities(row, sampling).double().tolist() for row in _TABLE]
    answers = {}
    for answer in itertools.product(range(_VOCAB), repeat=_LENGTH):
        chance = 1.0
        for last, token in zip((_START, *answer), answer, strict=False):
            chance *= rows[last][token]
        answers[answer] = chance
    return answers


def _distances(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """Total variation and chi-square; the latter infinite where something impossible was written."""
    total = sum(counts.values())
    variation = sum(abs(counts.get(answer, 0) / total - chance) for answer, chance in expected.items()) / 2
    if any(counts.get(answer, 0) for answer, chance in expected.items() if chance == 0):
        return variation, float("inf")
    chi_square = sum(
        (counts.get(answer, 0) - chance * total) ** 2 / (chance * total)
        for answer, chance in expected.items()
        if chance > 0
    )
    return variation, chi_square


@pytest.fixture(autouse=True)
def quick_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each residual is computed once (by what `verify` has under that name at the time), for speed alone."""
    _remember_residuals(monkeypatch, verify_module._residual)


def _remember_residuals(monkeypatch: pytest.MonkeyPatch, residual: Callable[..., torch.Tensor]) -> None:
    known: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def remembered(target: torch.Tensor, proposal: torch.Tensor) -> torch.Tensor:
        key = id(target), id(proposal)
        if key not in known:
            known[key] = residual(target, proposal), target, proposal  # kept alive, so that no id is used twice
        return known[key][0]

    monkeypatch.setattr(verify_module, "_residual", remembered)


def _is_exact(draft: Draft, sampling: Sampling, *, verifier: Verifier = verify, answers: int = _ANSWERS) -> bool:
    sampler, rng = QuickSampler(sampling, seed=11), random.Random(5)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(answers):
        answer = _write(draft, sampler, rng, verifier)
        counts[answer] = counts.get(answer, 0) + 1
    variation, chi_square = _distances(counts, _expected(sampling))
    # 63 degrees of freedom: 133 is exceeded once in a million. The expected variation is at most 0.017.
    return variation < 0.03 and chi_square < 133.0


# --- drafts ---


def _chain(last: int, rng: random.Random) -> DraftTree:
    """The likeliest continuation, and one that never fits."""
    first = int(_TABLE[last].argmax())
    return DraftTree.chain((first, int(_TABLE[first].argmax()), 3))


def _tree(last: int, rng: random.Random) -> DraftTree:
    """Two levels, duplicate siblings on both, in an order that is not that of the probabilities."""
    return DraftTree(tokens=(3, 3, 1, 0, 0, 1, 2, 0), parents=(-1, -1, -1, 0, 0, 1, 2, 2))


def _unlikely(last: int, rng: random.Random) -> DraftTree:
    """Nearly always all rejected."""
    return DraftTree(tokens=(int(_TABLE[last].argmin()),) * 2, parents=(-1, -1))


def _everything(last: int, rng: random.Random) -> DraftTree:
    """Every token is there: never rejected."""
    return DraftTree(tokens=(2, 3, 1, 0), parents=(-1,) * 4)


_QS = [torch.tensor(row) for row in ([0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4, [0.0, 0.05, 0.9, 0.05])]
_SUMS = [list(accumulate(row.tolist())) for row in _QS]


def _drawn(last: int, rng: random.Random) -> int:
    return bisect(_SUMS[last], rng.random() * _SUMS[last][-1])


def _drawn_chain(last: int, rng: random.Random) -> DraftTree:
    first = _drawn(last, rng)
    return DraftTree.chain((first, _drawn(first, rng)), proposals=(_QS[last], _QS[first]))


def _drawn_siblings(last: int, rng: random.Random) -> DraftTree:
    """Three independent draws, so duplicates occur, and one draw below the first."""
    tokens = [_drawn(last, rng) for _ in range(3)]
    below = _drawn(tokens[0], rng)
    proposals = (*(_QS[last],) * 3, _QS[tokens[0]])
    return DraftTree(tokens=(*tokens, below), parents=(-1, -1, -1, 0), proposals=proposals)


def _without_replacement(last: int, rng: random.Random) -> DraftTree:
    """Two draws without replacement: the second from what the first left."""
    first = _drawn(last, rng)
    left = _left_without(last, first)
    sums = list(accumulate(left.tolist()))
    second = bisect(sums, rng.random() * sums[-1])
    return DraftTree(tokens=(first, second), parents=(-1, -1), proposals=(_QS[last], left))


@cache
def _left_without(last: int, first: int) -> torch.Tensor:
    left = _QS[last].clone()
    left[first] = 0
    return left / left.sum()


_DETERMINISTIC = [_chain, _tree, _unlikely, _everything]
_STOCHASTIC = [_drawn_chain, _drawn_siblings, _without_replacement]
_PLAIN = Sampling(temperature=1.0)
_CUT = Sampling(temperature=0.8, top_k=3, top_p=0.9)


@pytest.mark.parametrize("sampling", [_PLAIN, _CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("draft", [*_DETERMINISTIC, *_STOCHASTIC], ids=lambda draft: draft.__name__.strip("_"))
def test_answers_follow_the_target(draft: Draft, sampling: Sampling) -> None:
    """Guards the whole point: temperature, top-k and top-p included, whatever was drafted."""
    assert _is_exact(draft, sampling)


def test_the_real_sampler_draws_the_same_way() -> None:
    """Guards what `QuickSampler` replaces, on duplicate siblings and drawn ones."""
    for draft in (_tree, _drawn_siblings):
        sampler, rng = (
            Sampler(Sampling(temperature=0.8, top_k=3, top_p=0.9, seed=1), torch.tensor([_START]), 4),
            random.Random(2),
        )
        counts: dict[tuple[int, ...], int] = {}
        for _ in range(1500):
            answer = _write(draft, sampler, rng)
            counts[answer] = counts.get(answer, 0) + 1
        _, chi_square = _distances(counts, _expected(_CUT))
        assert chi_square < 133.0


# --- known-wrong rules ---


def _typical(tree: DraftTree, logits: Sequence[torch.Tensor], sampler: QuickSampler) -> Acceptance:
    """Medusa's typical acceptance (arXiv 2401.10774): a draft is taken where p > min(eps, alpha * exp(-H(p)))."""
    node, path = ROOT, []
    while True:
        target = sampler.distribution(logits[node + 1])
        entropy = float(-(target * target.clamp_min(1e-9).log()).sum())
        threshold = min(0.09, 0.3 * 2.718281828**-entropy)
        fitting = [child for child in tree.children(node) if float(target[tree.tokens[child]]) > threshold]
        if not fitting:
            return Acceptance(path=tuple(path), token=sampler.choose(logits[node + 1]))
        node = max(fitting, key=lambda child: float(target[tree.tokens[child]]))
        path.append(node)


def _redraw_from_all(tree: DraftTree, logits: Sequence[torch.Tensor], sampler: QuickSampler) -> Acceptance:
    """Rejects rightly, but then draws from p instead of what is left of it: the rejected token comes too often."""
    node, path = ROOT, []
    while True:
        target = sampler.distribution(logits[node + 1])
        children = tree.children(node)
        taken = next((child for child in children if sampler.chance() < float(target[tree.tokens[child]])), None)
        if taken is None:
            return Acceptance(path=tuple(path), token=sampler.choose(logits[node + 1]))
        path.append(taken)
        node = taken


def _wrong_row(tree: DraftTree, logits: Sequence[torch.Tensor], sampler: QuickSampler) -> Acceptance:
    """Takes the token after a path from the row before its last node."""
    acceptance = verify(tree, logits, sampler)
    if not acceptance.path:
        return acceptance
    before = tree.parents[acceptance.path[-1]]
    return Acceptance(path=acceptance.path, token=sampler.choose(logits[before + 1]))


@pytest.mark.parametrize(
    ("draft", "verifier"),
    [
        (_chain, _typical),
        (_tree, _typical),
        (_chain, _redraw_from_all),
        (_tree, _redraw_from_all),
        (_unlikely, _redraw_from_all),
        (_chain, _wrong_row),
    ],
    ids=lambda value: value.__name__.strip("_"),
)
def test_wrong_rules_are_found_out(draft: Draft, verifier: Verifier) -> None:
    """Negative controls: the test above fails for each, Medusa's typical acceptance among them."""
    assert not _is_exact(draft, _PLAIN, verifier=verifier, answers=10_000)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda target, proposal: target,
        lambda target, proposal: (target - proposal).abs(),
        lambda target, proposal: torch.where(proposal > target, 0.0, target),
    ],
    ids=["not subtracted", "absolute", "zeroed"],
)
def test_wrong_residuals_are_found_out(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """Negative controls for drawn drafts."""
    _remember_residuals(monkeypatch, wrong)
    assert not _is_exact(_drawn_siblings, _PLAIN, answers=10_000)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_a_fixed_threshold_is_found_out(monkeypatch: pytest.MonkeyPatch, chance: float) -> None:
    """Negative control: acceptance must be a matter of chance, not of rank."""
    monkeypatch.setattr(QuickSampler, "chance", lambda self: chance)
    assert not _is_exact(_drawn_chain, _PLAIN, answers=10_000)


def test_ignoring_what_was_drawn_is_found_out() -> None:
    """Negative control: drafts whose tokens were picked for what they are (only good draws kept) are not exact."""

    def picked(last: int, rng: random.Random) -> DraftTree:
        tree = _drawn_chain(last, rng)
        return tree if tree.tokens[0] != 3 else NO_DRAFT

    assert not _is_exact(picked, _PLAIN, answers=10_000)


# --- single cases ---


def test_seeded_draws_are_those_of_the_plain_run() -> None:
    """Guards a stronger promise for drafts that were not drawn: with a seed, the very same answer."""
    for seed in range(40):
        sampling = Sampling(temperature=1.3, top_p=0.95, repetition_penalty=1.2, seed=seed)
        plain = Sampler(sampling, torch.tensor([_START]), _VOCAB)
        expected: list[int] = []
        while len(expected) < 8:
            expected.append(plain.choose(_TABLE[expected[-1] if expected else _START]))
        for draft in _DETERMINISTIC:
            sampler = Sampler(sampling, torch.tensor([_START]), _VOCAB)
            answer: list[int] = []
            while len(answer) < 8:
                last = answer[-1] if answer else _START
                tree = draft(last, random.Random(0))
                acceptance = verify(tree, _TABLE[[last, *tree.tokens]], sampler)
                answer += [*(tree.tokens[node] for node in acceptance.path), acceptance.token]
            assert answer[:8] == expected


def test_the_penalty_grows_along_the_path() -> None:
    """Guards the repetition penalty: a token accepted from the draft is penalised for those after it."""
    options = Sampling(repetition_penalty=4.0)
    logits = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    sampler = Sampler(options, torch.tensor([0]), 3)
    # 1, then not 1 again (3 / 4) but 2, then 0.25 < 0.5 < 0.75.
    assert verify(DraftTree.chain((1, 2)), logits, sampler) == Acceptance(path=(0, 1), token=1)
    assert verify(DraftTree.chain((1, 1)), logits, Sampler(options, torch.tensor([0]), 3)).path == (0,)


@pytest.mark.parametrize("proposals", [False, True], ids=["chosen", "drawn"])
def test_greedy_is_the_likeliest_path(proposals: bool) -> None:
    """Guards temperature 0: the longest path of likeliest tokens, ties to the first token, then the next likeliest."""
    logits = torch.zeros(6, 3)
    for row, token in enumerate((2, 0, 1, 0, 2, 1)):
        logits[row, token] = 1.0
    drawn = (torch.full((3,), 1 / 3),) * 5 if proposals else ()
    tree = DraftTree(tokens=(0, 2, 1, 0, 2), parents=(-1, -1, 0, 1, 3), proposals=drawn)
    sampler = Sampler(Sampling(), torch.tensor([0]), 3)
    # The root chooses 2 (node 1); row 2 chooses 1, which node 1 has no child for.
    assert verify(tree, logits, sampler) == Acceptance(path=(1,), token=1)
    logits[2] = torch.tensor([5.0, 1.0, 5.0])
    assert verify(tree, logits, sampler) == Acceptance(path=(1, 3, 4), token=1)
    assert verify(NO_DRAFT, logits[:1], sampler) == Acceptance(path=(), token=2)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=3.0), Sampling(temperature=0.8, seed=4)])
def test_rows_that_were_read_before_change_nothing(sampling: Sampling) -> None:
    """Guards the pass that looks at all rows at once: chains and trees go as they do row by row."""
    rng = random.Random(3)
    for _ in range(200):
        size = rng.randrange(6)
        parents = [rng.randrange(-1, node) for node in range(size)]
        tokens = [rng.randrange(4) for _ in range(size)]
        logits = _TABLE[[rng.randrange(4), *tokens]]
        for tree in (DraftTree(tokens=tuple(tokens), parents=tuple(parents)), DraftTree.chain(tokens)):
            alone, read = (Sampler(sampling, torch.tensor([0]), 4) for _ in range(2))
            assert verify(tree, logits, alone) == verify(tree, logits, read, likeliest(logits))


@pytest.mark.parametrize("read", [False, True])
def test_scores_that_are_no_numbers_are_an_error(read: bool) -> None:
    """Guards damaged weights: the row that the walk comes to, not those it never looks at."""
    logits = torch.zeros(3, 4)
    logits[2, 1] = float("nan")
    tree = DraftTree.chain((0, 0))
    for sampling in (Sampling(), Sampling(temperature=0.5, seed=0)):
        sampler = Sampler(sampling, torch.tensor([0]), 4)
        with pytest.raises(ModelError, match="not numbers"):
            for _ in range(1000):
                verify(tree, logits, sampler, likeliest(logits) if read else None)
    sampler = Sampler(Sampling(), torch.tensor([0]), 4)
    assert verify(DraftTree.chain((1, 0)), logits, sampler, likeliest(logits)) == Acceptance(path=(), token=0)


def test_equal_distributions_leave_no_empty_residual() -> None:
    """Guards a division by zero: q equal to p rejects by rounding alone, and p is drawn from."""
    target = torch.softmax(_TABLE[0], -1)
    assert torch.equal(verify_module._residual(target, target), target)
    assert penalise(target, torch.zeros(4, dtype=torch.bool), 2.0).equal(target)
