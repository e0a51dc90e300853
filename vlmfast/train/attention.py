"""Attention for training: a faster spelling for CPUs, and the mask of packed questions.

On CPU the backward pass of torch's fused attention takes 2.3 times as long as three plain products at these sizes
(256 patches, 3 heads of 64, bf16: 33 ms against 15 ms a layer for 32 pictures), so `fast_on_cpu` spells it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _SpelledOut(TorchFunctionMode):
    """Answers calls of `scaled_dot_product_attention` with plain products while it is entered."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nnf.scaled_dot_product_attention:
            return spelled_out_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def fast_on_cpu(device: torch.device) -> Iterator[None]:
    """Inside, attention on CPU runs as plain products; on other devices nothing changes."""
    if device.type != "cpu":
        yield
        return
    with _SpelledOut():
        yield


def spelled_out_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v over [..., T, D]; the mask is added to the scores."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, dim=-1, dtype=scores.dtype) @ value


class PackedAttention:
    """Decoder attention over B rows of T tokens, in each of which several questions share one picture.

    A token sees itself and what stands before it in its own segment and in segment 0, the picture:

        segment   0 0 0 0 | 1 1 1 | 2 2 2 2 | pad
        token of 2 sees  x x x x |       | x x ...
    """

    def __init__(self, segments: Tensor, dtype: torch.dtype) -> None:
        self.num_rows, self.num_tokens = segments.shape
        before = torch.ones(self.num_tokens, self.num_tokens, dtype=torch.bool, device=segments.device).tril()
        shared = segments[:, None, :] == 0
        same = segments[:, None, :] == segments[:, :, None]
        allowed = before & (shared | same)  # [B, T, T]
        mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
        self.mask = mask.masked_fill_(~allowed, float("-inf"))[:, None, None]  # [B, 1, 1, T, T]
        self.num_shared = int((segments == 0).sum(1).min())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B * T, H, D], key and value [B * T, G, D] -> [B * T, H, D]."""
        del layer
        query, key, value, shared = self._rows(query), self._rows(key), self._rows(value), self.num_shared
        # The picture sees no question: two smaller products instead of one.
        picture = _grouped(query[:, :shared], key[:, :shared], value[:, :shared], self.mask[..., :shared, :shared])
        questions = _grouped(query[:, shared:], key, value, self.mask[..., shared:, :])
        return torch.cat((picture, questions), 1).flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        return x.view(self.num_rows, self.num_tokens, *x.shape[1:])


class CachedAttention:
    """Decoder attention of batched greedy decoding: every row keeps its keys and values by position.

    Rows of different length stand side by side, filled up on the right. What a filler wrote at a position is behind
    every valid token of its row, so it is never seen, and is overwritten when the row gets there.
    """

    def __init__(self, num_rows: int, max_positions: int) -> None:
        self.num_rows = num_rows
        self.max_positions = max_positions
        self.positions = torch.zeros(num_rows, 0, dtype=torch.long)
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def at(self, positions: Tensor) -> CachedAttention:
        """The same cache, for a pass over tokens at these positions [B, T]. Mutates it."""
        self.positions = positions
        return self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores key and value [B * T, G, D]; query [B * T, H, D] -> [B * T, H, D]."""
        shape = (self.num_rows, self.positions.shape[1])
        keys, values = self._stored.setdefault(
            layer,
            (
                key.new_zeros(self.num_rows, self.max_positions, *key.shape[1:]),
                value.new_zeros(self.num_rows, self.max_positions, *value.shape[1:]),
            ),
        )
        rows = torch.arange(self.num_rows, device=key.device)[:, None]
        keys[rows, self.positions] = key.view(*shape, *key.shape[1:])
        values[rows, self.positions] = value.view(*shape, *value.shape[1:])
        seen = torch.arange(self.max_positions, device=key.device) <= self.positions[..., None]  # [B, T, S]
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=key.device).masked_fill_(~seen, float("-inf"))
        return _grouped(query.view(*shape, *query.shape[1:]), keys, values, mask[:, None, None]).flatten(0, 1)


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """query [B, T, H, D], key and value [B, S, G, D], mask [B, 1, 1, T, S] -> [B, T, H, D]."""
    num_rows, num_tokens, num_heads, head_dim = query.shape
    groups = key.shape[2]
    grouped = query.view(num_rows, num_tokens, groups, num_heads // groups, head_dim).permute(0, 2, 3, 1, 4)
    keys, values = (x.transpose(1, 2)[:, :, None].to(query.dtype) for x in (key, value))  # [B, G, 1, S, D]
    mixed = spelled_out_attention(grouped, keys, values, mask)  # [B, G, H / G, T, D]
    return mixed.permute(0, 3, 1, 2, 4).reshape(num_rows, num_tokens, num_heads, head_dim)
