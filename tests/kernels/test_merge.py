"""Token merging: what is merged with what, that nothing is lost, and that it can be undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vlmfast_kernels.ops.attention import attend_all
from vlmfast_kernels.ops.merge import attend_sized, bipartite_match, merge_tokens, merged_sizes, unmerge

_SHAPES = [(1, 2, 1), (2, 9, 4), (3, 64, 20), (1, 33, 0), (2, 64, 32)]
"""Tiles, tokens, merged."""


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _match_by_hand(metric: Tensor, num_merged: int, protect_first: bool) -> list[int]:
    """`bipartite_match` of one tile by its definition, with loops."""
    count = len(metric)
    unit = (metric / metric.norm(dim=-1, keepdim=True)).double()
    pairs = []
    for even in range(2 if protect_first else 0, count, 2):
        similarities = [float(unit[even] @ unit[odd]) for odd in range(1, count, 2)]
        if similarities:
            best = max(similarities)
            pairs.append((-best, even, 2 * similarities.index(best) + 1))
    into = {even: odd for _, even, odd in sorted(pairs)[:num_merged]}
    kept = [token for token in range(count) if token not in into]
    return [kept.index(into.get(token, token)) for token in range(count)]


@pytest.mark.parametrize(("tiles", "patches", "merged"), _SHAPES)
@pytest.mark.parametrize("protect_first", [False, True])
def test_matching_follows_its_definition(tiles: int, patches: int, merged: int, protect_first: bool) -> None:
    merged = min(merged, (patches - protect_first) // 2)
    metric = _random(tiles, patches, 16, seed=patches)
    source = bipartite_match(metric, merged, protect_first=protect_first)
    assert source.tolist() == [_match_by_hand(tile, merged, protect_first) for tile in metric]
    if protect_first:
        assert (source == 0).sum() == tiles and not source[:, 0].any()


def _check_merge(match: Callable[[Tensor, int], Tensor], tiles: int, patches: int, merged: int) -> None:
    """Sizes add up, the mean of all tokens stays, order stays, and a token that was not merged comes back unchanged."""
    x, sizes = _random(tiles, patches, 5), torch.ones(tiles, patches)
    source = match(_random(tiles, patches, 8, seed=1), merged)
    out, total = (
        merge_tokens.reference(x, sizes, source, patches - merged),
        merged_sizes(sizes, source, patches - merged),
    )
    assert out.shape == (tiles, patches - merged, 5)
    assert torch.equal(total.sum(1), torch.full((tiles,), float(patches)))
    torch.testing.assert_close((out * total[..., None]).sum(1), x.sum(1))
    back = unmerge(out, source)
    assert back.shape == x.shape
    alone = total.gather(1, source) == 1
    assert int(alone.sum()) >= tiles * (patches - 2 * merged)
    assert torch.equal(back[alone], x[alone])
    for tile in range(tiles):
        order = [int(token) for token in source[tile][alone[tile]]]
        assert order == sorted(order), "tokens that were not merged changed places"


@pytest.mark.parametrize(("tiles", "patches", "merged"), _SHAPES)
def test_merging_loses_nothing(tiles: int, patches: int, merged: int) -> None:
    _check_merge(bipartite_match, tiles, patches, merged)


def _reversed(metric: Tensor, merged: int) -> Tensor:
    """Known wrong: the order of the output is turned round, as [unmerged, merged] orders lose it."""
    return metric.shape[1] - merged - 1 - bipartite_match(metric, merged)


@pytest.mark.parametrize("wrong", [_reversed, lambda metric, merged: bipartite_match(metric, max(merged - 1, 0))])
def test_the_checks_catch(wrong: Callable[[Tensor, int], Tensor]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        _check_merge(wrong, 2, 64, 20)


def test_nothing_merged_is_nothing_changed() -> None:
    """Guards case 46: r = 0 is the identity, bit for bit, in bf16 too."""
    x, sizes = _random(2, 9, 7).bfloat16(), torch.full((2, 9), 3.0)
    source = bipartite_match(_random(2, 9, 4), 0)
    assert torch.equal(source, torch.arange(9).expand(2, -1))
    assert torch.equal(merge_tokens.reference(x, sizes, source, 9), x)


def test_two_merges_are_one() -> None:
    """Guards the sizes: the weighted mean of means is the mean of the tokens; plain means are not."""
    x, ones = _random(2, 32, 6), torch.ones(2, 32)
    first = bipartite_match(_random(2, 32, 4, seed=2), 12)
    once, sizes = merge_tokens.reference(x, ones, first, 20), merged_sizes(ones, first, 20)
    second = bipartite_match(_random(2, 20, 4, seed=3), 9)
    twice = merge_tokens.reference(once, sizes, second, 11)
    joined = second.gather(1, first)
    torch.testing.assert_close(twice, merge_tokens.reference(x, ones, joined, 11))
    assert torch.equal(merged_sizes(sizes, second, 11), merged_sizes(ones, joined, 11))
    assert not torch.allclose(twice, merge_tokens.reference(once, torch.ones(2, 20), second, 11))


def test_equal_tokens_merge_in_their_order() -> None:
    """Guards a blank tile, where every similarity ties: the first leave, each into the first odd token."""
    source = bipartite_match(torch.ones(1, 8, 4), 2)
    assert source.tolist() == [[0, 0, 0, 1, 2, 3, 4, 5]]
    source = bipartite_match(torch.ones(1, 512, 4), 100)  # long enough for an unstable sort to show
    stay = [place for place in range(512) if place % 2 or place >= 200]
    assert source[0, stay].tolist() == list(range(412)) and not source[0, :200:2].any()


def test_sums_are_taken_in_float32() -> None:
    """Guards large clusters: in bf16, 1 added to 256 is lost."""
    x = torch.ones(1, 1026, 1, dtype=torch.bfloat16)
    x[:, 1] = 2.0
    source = torch.zeros(1, 1026, dtype=torch.int64)
    source[:, 1025] = 1
    out = merge_tokens.reference(x, torch.ones(1, 1026), source, 2)
    assert out.dtype == torch.bfloat16 and out.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("attend", [attend_sized.reference, *(one.function for one in attend_sized.implementations)])
def test_a_token_of_size_s_counts_as_s_tokens(attend: Callable[..., Tensor]) -> None:
    """Guards proportional attention against attention over the tokens written out; all sizes 1 is plain attention."""
    query, keys, values = (_random(1, 2, 6, 16, seed=seed) for seed in range(3))
    sizes = torch.tensor([[1, 3, 1, 2, 5, 1]])
    written_out = [each.repeat_interleave(sizes[0], 2) for each in (keys, values)]
    torch.testing.assert_close(attend(query, keys, values, sizes.float()), attend_all.reference(query, *written_out))
    ones = torch.ones(1, 6)
    torch.testing.assert_close(attend(query, keys, values, ones), attend_all.reference(query, keys, values))
