"""Attention: of new tokens over a sequence's cache (`attend`), and of all patches of a tile (`attend_all`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast_kernels.masks import causal_mask
from vlmfast_kernels.op import Op


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns softmax(q k^T / sqrt(D)) v, [T, H, D], of the last T tokens of a sequence of S.

    query [T, H, D]; keys, values [G, S, D] with S >= T; H is a multiple of G. Query t sees keys 0 .. S-T+t.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_groups, length, _ = keys.shape
    grouped = query.view(num_tokens, num_groups, num_heads // num_groups, head_dim)
    scores = torch.einsum("tgrd,gsd->grts", grouped.float(), keys.float()) * head_dim**-0.5
    scores = scores.masked_fill(~causal_mask(num_tokens, length, query.device), float("-inf"))
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
    repeat = num_heads // num_groups
    if repeat > 1:
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    heads_first = query.transpose(0, 1)[None]  # [1, H, T, D]
    if num_tokens == length:
        mixed = nnf.scaled_dot_product_attention(heads_first, keys[None], values[None], is_causal=True)
    else:
        mask = causal_mask(num_tokens, length, query.device)
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
