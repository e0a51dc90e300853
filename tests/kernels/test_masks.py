"""Masks against their definition, spelt out."""

from __future__ import annotations

import pytest
import torch

from vlmfast_kernels.masks import causal_mask, tree_mask


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 4), (3, 11), (0, 5), (10, 10)])
def test_causal_mask_is_its_definition(queries: int, keys: int) -> None:
    """Guards chunks of a prompt: query t of the last T tokens sees keys 0 .. S - T + t, and no later one."""
    mask = causal_mask(queries, keys, torch.device("cpu"))
    assert mask.dtype == torch.bool
    expected = [[key <= keys - queries + query for key in range(keys)] for query in range(queries)]
    assert mask.tolist() == expected


@pytest.mark.parametrize("num_past", [0, 3])
@pytest.mark.parametrize(
    "parents",
    [(), (-1,), (-1, -1, -1), (-1, 0, 1, 2), (-1, 0, 0, 1, 1, 2, 2), (-1, 0, 0, 0, 1, 1, 4, 6)],
    ids=["empty", "one", "star", "chain", "full", "uneven"],
)
def test_tree_mask_is_its_definition(parents: tuple[int, ...], num_past: int) -> None:
    """Guards draft trees: a row sees what stood before the tree, itself and those above it, and no sibling."""

    def above(row: int) -> set[int]:
        return {row} | (above(parents[row]) if parents[row] >= 0 else set())

    mask = tree_mask(parents, num_past + len(parents), torch.device("cpu"))
    assert mask.dtype == torch.bool and mask.shape == (len(parents), num_past + len(parents))
    expected = [
        [key < num_past or key - num_past in above(row) for key in range(num_past + len(parents))]
        for row in range(len(parents))
    ]
    assert mask.tolist() == expected


def test_the_tree_mask_of_a_chain_is_causal() -> None:
    assert torch.equal(tree_mask((-1, 0, 1, 2), 9, torch.device("cpu")), causal_mask(4, 9, torch.device("cpu")))
