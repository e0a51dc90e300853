"""Merging of similar tokens (ToMe: Bolya et al., arXiv 2210.09461), and attention over tokens that stand for several.

What was merged is one map: `source` int64 [P, N] names, for each of N tokens, the output token that it went into. The
output keeps the order of the tokens that stayed, so neighbours stay neighbours; two maps in a row are one gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast_kernels.op import Op


def bipartite_match(metric: Tensor, num_merged: int, *, protect_first: bool = False) -> Tensor:
    """Returns `source` int64 [P, N] of a merge that leaves N - num_merged tokens a tile.

    Tokens at even places may go into one at an odd place: the `num_merged` of them that have the most similar partner
    (cosine of `metric` [P, N, D]) do, each into that partner. Of equals the first. `protect_first` keeps token 0, a
    class token, out of it.
    """
    tiles, patches, _ = metric.shape
    first = int(protect_first)
    assert 0 <= num_merged <= (patches - first) // 2, f"{num_merged} of {patches} tokens can not be merged at once"
    unit = nnf.normalize(metric.float(), dim=-1)
    similarity = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)  # [P, even, odd]
    if protect_first:
        similarity[:, 0] = float("-inf")
    best, partner = similarity.max(-1)
    leaving = best.sort(dim=-1, descending=True, stable=True).indices[:, :num_merged]
    stays = torch.ones(tiles, patches, dtype=torch.bool, device=metric.device).scatter_(1, 2 * leaving, False)
    place = stays.cumsum(1) - 1  # of the tokens that stay
    return place.scatter(1, 2 * leaving, place.gather(1, 2 * partner.gather(1, leaving) + 1))


def merged_sizes(sizes: Tensor, source: Tensor, num_out: int) -> Tensor:
    """Returns how many original tokens each output token stands for, float32 [P, num_out]; sizes [P, N]."""
    return sizes.new_zeros(sizes.shape[0], num_out).scatter_add_(1, source, sizes)


def unmerge(x: Tensor, source: Tensor) -> Tensor:
    """Returns [P, N, E]: every token that went into row i of x [P, M, E] has that row."""
    return x.gather(1, source[..., None].expand(-1, -1, x.shape[-1]))


def _merge_tokens(x: Tensor, sizes: Tensor, source: Tensor, num_out: int) -> Tensor:
    """Returns the mean of the tokens [P, N, E] that share an output, weighted by their sizes [P, N]: [P, num_out, E].

    Summed in float32: half precision would lose what is added last.
    """
    tiles, patches, width = x.shape
    offsets = torch.arange(tiles, device=x.device)[:, None] * num_out
    weighted = (x.float() * sizes[..., None]).view(tiles * patches, width)
    summed = weighted.new_zeros(tiles * num_out, width).index_add_(0, (source + offsets).flatten(), weighted)
    return (summed.view(tiles, num_out, width) / merged_sizes(sizes, source, num_out)[..., None]).to(x.dtype)


def _merge_tokens_inputs(
    dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    for tiles, patches, width, merged in ((1, 2, 3, 1), (2, 49, 16, 24), (3, 256, 33, 17), (1, 7, 8, 0)):
        x = torch.randn(tiles, 2 * patches, width, generator=generator)[:, ::2].to(dtype)
        sizes = torch.randint(1, 5, (tiles, patches), generator=generator).float()
        source = bipartite_match(torch.randn(tiles, patches, 8, generator=generator), merged)
        yield x, sizes, source, patches - merged


merge_tokens: Op[Callable[[Tensor, Tensor, Tensor, int], Tensor]] = Op(
    name="merge_tokens",
    reference=_merge_tokens,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},
    make_inputs=_merge_tokens_inputs,
)


def _attend_sized(query: Tensor, keys: Tensor, values: Tensor, sizes: Tensor) -> Tensor:
    """Returns softmax(q k^T / sqrt(D) + log size) v, all [P, H, N, D]: a token of size s counts as s equal ones.

    sizes is [P, N]. (ToMe's proportional attention.)
    """
    bias = sizes.float().log()[:, None, None].to(query.dtype)  # [P, 1, 1, N]
    return nnf.scaled_dot_product_attention(query, keys, values, attn_mask=bias)


def _attend_sized_inputs(
    dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    for tiles, heads, patches, dim in ((1, 1, 1, 16), (2, 3, 49, 16), (1, 12, 256, 64), (3, 4, 196, 32)):
        fused = torch.randn(tiles, patches, 3, heads, dim, generator=generator)
        query, keys, values = fused.to(dtype).permute(2, 0, 3, 1, 4)  # strided, as a fused projection gives them
        yield query, keys, values, torch.randint(1, 9, (tiles, patches), generator=generator).to(dtype)


attend_sized: Op[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = Op(
    name="attend_sized",
    reference=_attend_sized,
    # As `attend_all`, and the logarithm is rounded to the inputs' dtype.
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1.6e-2},
    make_inputs=_attend_sized_inputs,
)
