"""Reducers of a picture's visual tokens: counts, order, identity, and what each of them is for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vlmfast.options import REDUCERS, Reduce
from vlmfast.prune.counts import run_counts
from vlmfast.prune.reducers import DROPPED, Reduction, auto_counts, reduce_tokens

_RUNS = (16, 16, 16)
_DROPPING = ("diversity", "scope", "random")
_KEEPS = [0.02, 0.25, 0.4, 0.9, 7, 47]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _picture(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return _random(48, 32, seed=seed).to(dtype), _random(48, seed=seed + 1).softmax(0)


def _reduce(method: str, keep: float, seed: int = 0, dtype: torch.dtype = torch.float32) -> Reduction:
    return reduce_tokens(*_picture(seed, dtype), _RUNS, Reduce(method, keep=keep))


@pytest.mark.parametrize("method", REDUCERS)
@pytest.mark.parametrize("keep", _KEEPS)
def test_counts_order_and_sources(method: str, keep: float) -> None:
    """Guards the contract of every method: as many tokens of each run as its prompt has room for, in order."""
    tokens, _ = _picture()
    counts = run_counts(_RUNS, Reduce(method, keep=keep))
    reduced = _reduce(method, keep)
    assert reduced.tokens.shape == (sum(counts), 32) and reduced.tokens.dtype == tokens.dtype
    assert reduced.source.shape == (48,)
    used = reduced.source[reduced.source != DROPPED]
    assert used.unique().tolist() == list(range(sum(counts))), "an output token comes from nothing"
    starts = [0, counts[0], counts[0] + counts[1], sum(counts)]
    for run in range(3):
        mine = reduced.source[16 * run : 16 * run + 16]
        mine = mine[mine != DROPPED]
        assert int(mine.min()) == starts[run] and int(mine.max()) == starts[run + 1] - 1
    for place in range(sum(counts)):
        members = (reduced.source == place).nonzero()[:, 0]
        if method != "pool":  # the means of the others are plain; pooled squares may overlap
            torch.testing.assert_close(reduced.tokens[place], tokens[members].mean(0))
    alone = [place for place in range(sum(counts)) if (reduced.source == place).sum() == 1]
    homes = [int((reduced.source == place).nonzero()) for place in alone]
    assert homes == sorted(homes), "tokens that are kept as they are changed places"


@pytest.mark.parametrize("method", REDUCERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeping_all_is_the_identity(method: str, dtype: torch.dtype) -> None:
    """Guards case 46, bit for bit."""
    tokens, _ = _picture(dtype=dtype)
    for keep in (1.0, 48, 1000):
        reduced = _reduce(method, keep, dtype=dtype)
        assert torch.equal(reduced.tokens, tokens) and torch.equal(reduced.source, torch.arange(48))


@pytest.mark.parametrize("method", REDUCERS)
def test_same_features_same_tokens_and_inputs_unchanged(method: str) -> None:
    """Guards features shared with the cache, and reduced sets that are cut again instead of stored."""
    tokens, saliency = _picture(3, torch.bfloat16)
    kept = tokens.clone(), saliency.clone()
    first = reduce_tokens(tokens, saliency, _RUNS, Reduce(method, keep=0.25))
    again = reduce_tokens(kept[0], kept[1], _RUNS, Reduce(method, keep=0.25))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.source, again.source)
    assert torch.equal(tokens, kept[0]) and torch.equal(saliency, kept[1])


@pytest.mark.parametrize("method", _DROPPING)
def test_dropping_methods_change_no_token(method: str) -> None:
    tokens, _ = _picture()
    reduced = _reduce(method, 0.25)
    places = (reduced.source != DROPPED).nonzero()[:, 0]
    assert torch.equal(reduced.tokens, tokens[places])
    assert reduced.places() == places.tolist()


def test_merged_tokens_stand_in_the_middle_of_their_members() -> None:
    source = torch.tensor([0, DROPPED, 0, 1, 2, 2, 2])
    assert Reduction(tokens=torch.zeros(3, 1), source=source).places() == [1, 3, 5]


def _least_distance(tokens: Tensor) -> float:
    unit = torch.nn.functional.normalize(tokens.float(), dim=-1)
    return float((1 - unit @ unit.T).fill_diagonal_(float("inf")).min())


def test_diversity_keeps_tokens_apart() -> None:
    """Guards the max-min rule on clusters: one token of each of six clusters, where random picks repeat some."""
    centres = _random(6, 32)
    tokens = centres.repeat_interleave(8, 0) + 0.02 * _random(48, 32, seed=1)
    reduced = reduce_tokens(tokens, None, (48,), Reduce("diversity", keep=6))
    assert sorted({place // 8 for place in (reduced.source != DROPPED).nonzero()[:, 0].tolist()}) == list(range(6))
    control = reduce_tokens(tokens, None, (48,), Reduce("random", keep=6))
    assert _least_distance(reduced.tokens) > 0.2 > _least_distance(control.tokens)


def _by_hand(tokens: Tensor, count: int) -> list[int]:
    """Max-min selection by its definition."""
    unit = torch.nn.functional.normalize(tokens.double(), dim=-1)
    distance = (1 - unit @ unit.T).tolist()
    size = len(tokens)
    taken = [max(range(size), key=lambda i: min(distance[i][j] for j in range(size) if j != i))]
    while len(taken) < count:
        others = [i for i in range(size) if i not in taken]
        taken.append(max(others, key=lambda i: min(distance[i][j] for j in taken)))
    return sorted(taken)


def test_diversity_follows_its_definition() -> None:
    tokens = _random(30, 8, seed=4)
    reduced = reduce_tokens(tokens, None, (30,), Reduce("diversity", keep=9))
    assert (reduced.source != DROPPED).nonzero()[:, 0].tolist() == _by_hand(tokens, 9)


def test_saliency_keeps_what_is_looked_at_and_merges_the_rest() -> None:
    tokens, saliency = _picture()
    reduced = reduce_tokens(tokens, saliency, (48,), Reduce("saliency", keep=0.5))
    sizes = torch.bincount(reduced.source, minlength=24)
    top = saliency.topk(20).indices
    assert (sizes[reduced.source[top]] == 1).all(), "20 of 24 are the most salient, as they are"
    assert int(sizes.sum()) == 48 and int((sizes > 1).sum()) <= 4, "the others are in the other 4"
    turned = reduce_tokens(tokens, saliency.flip(0), (48,), Reduce("saliency", keep=0.5))
    assert not torch.equal(turned.source, reduced.source), "saliency plays no part"


def test_saliency_ranks_each_run_by_its_own() -> None:
    tokens, saliency = _picture()
    reduced = reduce_tokens(tokens, saliency, _RUNS, Reduce("saliency", keep=12))
    sizes = torch.bincount(reduced.source, minlength=12)
    for start in (0, 16, 32):
        top = start + saliency[start : start + 16].topk(3).indices
        assert (sizes[reduced.source[top]] == 1).all()


@pytest.mark.parametrize("method", REDUCERS)
def test_blank_pictures_have_their_counts_too(method: str) -> None:
    """Guards ties: all tokens equal, none looked at; what is left equals them."""
    tokens = torch.ones(48, 8)
    for keep in (0.4, 0.8):
        reduced = reduce_tokens(tokens, torch.zeros(48), _RUNS, Reduce(method, keep=keep))
        assert len(reduced.tokens) == sum(run_counts(_RUNS, Reduce(method, keep=keep)))
        assert torch.equal(reduced.tokens, tokens[: len(reduced.tokens)])


def test_scope_weighs_coverage_by_saliency() -> None:
    """Guards both factors: of two clusters the larger comes first, unless the smaller is looked at far more."""
    tokens = _random(2, 32).repeat_interleave(torch.tensor([12, 4]), 0) + 0.02 * _random(16, 32, seed=1)
    even = torch.full((16,), 1 / 16)

    def first_of(saliency: Tensor) -> int:
        reduced = reduce_tokens(tokens, saliency, (16,), Reduce("scope", keep=1 / 16))
        return int((reduced.source != DROPPED).nonzero())

    assert first_of(even) < 12
    assert first_of(torch.where(torch.arange(16) < 12, 0.1, 5.0)) >= 12
    both = reduce_tokens(tokens, even, (16,), Reduce("scope", keep=2)).source
    places = (both != DROPPED).nonzero()[:, 0].tolist()
    assert places[0] < 12 <= places[1], "the second token covers what the first does not"


def test_merge_weighs_by_size() -> None:
    """Guards repeated rounds: a token that stands for many is not averaged as if it were one."""
    tokens, _ = _picture()
    reduced = reduce_tokens(tokens, None, (48,), Reduce("merge", keep=3))
    sizes = torch.bincount(reduced.source)
    torch.testing.assert_close((reduced.tokens * sizes[:, None]).sum(0), tokens.sum(0), rtol=1e-4, atol=1e-5)


def test_pool_averages_squares() -> None:
    grid = torch.arange(16.0).view(4, 4)
    reduced = reduce_tokens(grid.flatten()[:, None], None, (16,), Reduce("pool", keep=0.25))
    assert reduced.tokens.flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert reduced.source.view(4, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]


def test_random_differs_from_picture_to_picture() -> None:
    """Guards the control: a fixed pattern would be one draw, however many pictures it is measured on."""
    patterns = [_reduce("random", 0.25, seed=seed).source for seed in range(4)]
    assert len({tuple(pattern.tolist()) for pattern in patterns}) == 4
    tokens, _ = _picture()
    other = reduce_tokens(tokens, None, _RUNS, Reduce("random", keep=0.25, seed=1))
    assert not torch.equal(other.source, patterns[0])


def test_auto_keeps_what_differs() -> None:
    """Guards keep="auto": a page of different tokens stays whole, a wall goes to the floor, text on a wall stays."""
    page, wall = _random(64, 32), torch.ones(64, 32) + 0.01 * _random(64, 32)
    assert auto_counts(page, (64,), 0.25) == (64,)
    assert auto_counts(wall, (64,), 0.25) == (16,)
    assert auto_counts(torch.cat((wall, page)), (64, 64), 0.1) == (6, 64)
    sign = wall.clone()
    sign[10:30] = page[10:30]
    assert auto_counts(sign, (64,), 0.1) in {(20,), (21,)}
    reduced = reduce_tokens(sign, None, (64,), Reduce("diversity", keep="auto", floor=0.1))
    assert set(range(10, 30)) <= set((reduced.source != DROPPED).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("method", ["saliency", "scope"])
def test_saliency_is_asked_for(method: str) -> None:
    """Guards the caller: features without saliency must not be ranked by nothing."""
    with pytest.raises(AssertionError, match="without saliency"):
        reduce_tokens(_picture()[0], None, _RUNS, Reduce(method, keep=0.25))


@pytest.mark.parametrize("pick", [lambda order: order, lambda order: order.flip(0)])
def test_the_definition_test_can_fail(pick: Callable[[Tensor], Tensor]) -> None:
    """Negative control: the nearest-first and the first-come selections are no max-min selections."""
    tokens = _random(30, 8, seed=4)
    assert pick(torch.arange(30))[:9].sort().values.tolist() != _by_hand(tokens, 9)
