"""Attention: of new tokens over a sequence's cache (`attend`), of a draft tree over it (`attend_masked`), and of all
patches of a tile (`attend_all`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast_kernels.masks import causal_mask, tree_mask
from vlmfast_kernels.op import Op

_FEW_TOKENS = 32
"""Up to here `attend_masked` reads keys and values once for all heads of a group."""


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns softmax(q k^T / sqrt(D)) v, [T, H, D], of the last T tokens of a sequence of S.

    query [T, H, D]; keys, values [G, S, D] with S >= T; H is a multiple of G. Query t sees keys 0 .. S-T+t.
    """
    return _attend_masked(query, keys, values, causal_mask(query.shape[0], keys.shape[1], query.device))


def _attend_masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """As `attend`, but query t sees the keys where mask [T, S] (bool) is true."""
    num_tokens, num_heads, head_dim = query.shape
    num_groups = keys.shape[0]
    grouped = query.view(num_tokens, num_groups, num_heads // num_groups, head_dim)
    scores = torch.einsum("tgrd,gsd->grts", grouped.float(), keys.float()) * head_dim**-0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    mixed = torch.einsum("grts,gsd->tgrd", scores.softmax(-1), values.float())
    return mixed.reshape(num_tokens, num_heads, head_dim).to(query.dtype)


def _attend_inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    shapes = ((1, 1, 9, 3, 64), (1, 130, 9, 3, 64), (7, 7, 4, 4, 32), (5, 23, 4, 1, 16), (64, 91, 8, 2, 32))
    for tokens, length, heads, groups, dim in shapes:
        query = torch.randn(tokens, heads, dim, generator=generator)
        # A window of a longer buffer, as the cache hands it out: rows are not contiguous across heads.
        keys = torch.randn(groups, length + 9, dim, generator=generator)[:, :length]
        values = torch.randn(groups, length + 9, dim, generator=generator)[:, :length]
        yield query.to(dtype), keys.to(dtype), values.to(dtype)


attend: Op[Callable[[Tensor, Tensor, Tensor], Tensor]] = Op(
    name="attend",
    reference=_attend,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1.2e-2},
    make_inputs=_attend_inputs,
)


@attend.implement("sdpa", supports=lambda device, dtype: "")
def _attend_sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same by torch's fused attention.

    One new token: the heads of a group become the rows of one small attention, so keys are read once and nothing is
    expanded. (`enable_gqa` takes torch's slow path on the CPU in bf16.)
    """
    num_tokens, num_heads, head_dim = query.shape
    num_groups, length, _ = keys.shape
    if num_tokens == 1:
        rows = query.view(1, num_groups, num_heads // num_groups, head_dim)
        mixed = nnf.scaled_dot_product_attention(rows, keys[None], values[None])
        return mixed.view(1, num_heads, head_dim)
    if num_tokens < length:
        return _attend_masked_sdpa(query, keys, values, causal_mask(num_tokens, length, query.device))
    repeat = num_heads // num_groups
    if repeat > 1:
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    heads_first = query.transpose(0, 1)[None]  # [1, H, T, D]
    return nnf.scaled_dot_product_attention(heads_first, keys[None], values[None], is_causal=True)[0].transpose(0, 1)


def _attend_masked_inputs(
    dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    trees = ((-1,), (-1, 0, 0), (-1, 0, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2, 2, 3), (-1, *(0, 1) * 20))
    shapes = ((9, 3, 64), (4, 4, 32), (8, 2, 64), (4, 1, 16), (9, 3, 64))
    for parents, (heads, groups, dim) in zip(trees, shapes, strict=True):
        for num_past in (0, 37):
            length = num_past + len(parents)
            query = torch.randn(len(parents), heads, dim, generator=generator)
            keys = torch.randn(groups, length + 9, dim, generator=generator)[:, :length]
            values = torch.randn(groups, length + 9, dim, generator=generator)[:, :length]
            yield query.to(dtype), keys.to(dtype), values.to(dtype), tree_mask(parents, length, query.device)


attend_masked: Op[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = Op(
    name="attend_masked",
    reference=_attend_masked,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1.2e-2},
    make_inputs=_attend_masked_inputs,
)


@attend_masked.implement("sdpa", supports=lambda device, dtype: "")
def _attend_masked_sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The same by torch's fused attention.

    Few tokens: as with one, the heads of a group become rows of one attention. Many: the mask would grow with the
    heads, so keys and values do.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_groups, length, _ = keys.shape
    repeat = num_heads // num_groups
    if num_tokens <= _FEW_TOKENS:
        rows = query.view(num_tokens, num_groups, repeat, head_dim).permute(1, 2, 0, 3)  # [G, H/G, T, D]
        rows = rows.reshape(1, num_groups, repeat * num_tokens, head_dim)
        mask = mask.expand(repeat, num_tokens, length).reshape(repeat * num_tokens, length)
        mixed = nnf.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask)
        by_token = mixed.view(num_groups, repeat, num_tokens, head_dim).permute(2, 0, 1, 3)
        return by_token.reshape(num_tokens, num_heads, head_dim)
    if repeat > 1:
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    heads_first = query.transpose(0, 1)[None]  # [1, H, T, D]
    mixed = nnf.scaled_dot_product_attention(heads_first, keys[None], values[None], attn_mask=mask)
    return mixed[0].transpose(0, 1)


def _attend_all(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns softmax(q k^T / sqrt(D)) v without a mask, all [P, H, N, D]."""
    return nnf.scaled_dot_product_attention(query, keys, values)


def _attend_all_inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for tiles, heads, patches, dim in ((1, 1, 1, 16), (2, 3, 49, 16), (1, 12, 256, 64), (3, 4, 196, 32)):
        fused = torch.randn(tiles, patches, 3, heads, dim, generator=generator)
        query, keys, values = fused.to(dtype).permute(2, 0, 3, 1, 4)  # strided, as a fused projection gives them
        yield query, keys, values


attend_all: Op[Callable[[Tensor, Tensor, Tensor], Tensor]] = Op(
    name="attend_all",
    reference=_attend_all,
    # bf16: scores and weights are rounded once each where an implementation keeps them in the dtype of its inputs.
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1.6e-2},
    make_inputs=_attend_all_inputs,
)
