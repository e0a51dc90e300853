"""Masks against their definition, spelt out."""

from __future__ import annotations

import pytest
import torch

from vlmfast_kernels.masks import causal_mask


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 4), (3, 11), (0, 5), (10, 10)])
def test_causal_mask_is_its_definition(queries: int, keys: int) -> None:
    """Guards chunks of a prompt: query t of the last T tokens sees keys 0 .. S - T + t, and no later one."""
    mask = causal_mask(queries, keys, torch.device("cpu"))
    assert mask.dtype == torch.bool
    expected = [[key <= keys - queries + query for key in range(keys)] for query in range(queries)]
    assert mask.tolist() == expected
