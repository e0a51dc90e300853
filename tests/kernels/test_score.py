"""The row of attention that visual tokens are ranked by, against attention with all its rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vlmfast_kernels.masks import causal_mask
from vlmfast_kernels.ops.score import attention_row


def _eager_row(query: Tensor, keys: Tensor, row: int) -> Tensor:
    """Row `row` of softmax(q k^T / sqrt(D)) under the causal mask, mean over heads; query [S, H, D], keys [G, S, D]."""
    length, num_heads, dim = query.shape
    expanded = keys.repeat_interleave(num_heads // keys.shape[0], 0)
    scores = (query.transpose(0, 1) @ expanded.transpose(1, 2)).float() * dim**-0.5
    return scores.masked_fill(~causal_mask(length, length, query.device), float("-inf")).softmax(-1).mean(0)[row]


def _tensors(dtype: torch.dtype, length: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(length, 6, 16, generator=generator) * 2
    return query.to(dtype), torch.randn(2, length, 16, generator=generator).to(dtype)


def _check(row_of: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    query, keys = _tensors(dtype)
    for row in (0, 7, 39):
        score = row_of(query[row], keys[:, : row + 1])
        assert score.dtype == torch.float32
        # Products of bf16 are rounded at the same place in both; float32 sums differ in order only.
        torch.testing.assert_close(score, _eager_row(query, keys, row)[: row + 1], rtol=1e-5, atol=1e-6)
        assert abs(float(score.sum()) - 1) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_row_is_that_of_eager_attention(dtype: torch.dtype) -> None:
    _check(attention_row.reference, dtype)


def _heads_interleaved(query: Tensor, keys: Tensor) -> Tensor:
    """Known wrong: head h reads group h % G, not h // (H / G)."""
    groups = keys.shape[0]
    return attention_row.reference(query.view(-1, groups, query.shape[-1]).transpose(0, 1).reshape(query.shape), keys)


def _unscaled(query: Tensor, keys: Tensor) -> Tensor:
    """Known wrong: logits without 1 / sqrt(D)."""
    return attention_row.reference(query * query.shape[-1] ** 0.5, keys)


def _mean_before_softmax(query: Tensor, keys: Tensor) -> Tensor:
    """Known wrong: one softmax of the mean logits."""
    grouped = query.view(keys.shape[0], -1, query.shape[-1])
    return ((grouped @ keys.transpose(1, 2)).float() * query.shape[-1] ** -0.5).flatten(0, 1).mean(0).softmax(-1)


@pytest.mark.parametrize("wrong", [_heads_interleaved, _unscaled, _mean_before_softmax])
def test_the_check_catches(wrong: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError):
        _check(wrong, torch.float32)
