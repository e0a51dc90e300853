"""How much one token looks at each token before it: the row of attention that FastV ranks visual tokens by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vlmfast_kernels.op import Op


def _attention_row(query: Tensor, keys: Tensor) -> Tensor:
    """Returns the mean over heads of softmax(q k^T / sqrt(D)), float32 [S], which sums to 1.

    query [H, D] is one token's, keys [G, S, D] are those that it sees, itself the last; H is a multiple of G. It is row
    S - 1 of the layer's attention, found beside a fused attention that never writes its weights (FastV: Chen et al.,
    arXiv 2403.06764, whose code averages the heads of the last row).
    """
    num_groups, length, head_dim = keys.shape
    grouped = query.view(num_groups, -1, head_dim)  # [G, H / G, D]
    scores = (grouped @ keys.transpose(1, 2)).float() * head_dim**-0.5
    return scores.softmax(-1).view(-1, length).mean(0)


def _attention_row_inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    for length, heads, groups, dim in ((1, 4, 2, 16), (23, 4, 1, 16), (455, 9, 3, 64), (91, 4, 4, 32)):
        keys = torch.randn(groups, length + 9, dim, generator=generator)[:, :length]  # a window of a page
        yield torch.randn(heads, dim, generator=generator).to(dtype), keys.to(dtype)


attention_row: Op[Callable[[Tensor, Tensor], Tensor]] = Op(
    name="attention_row",
    reference=_attention_row,
    tolerance={torch.float32: 1e-6},  # half precision comes in, float32 goes out: tests/kernels/test_score.py
    make_inputs=_attention_row_inputs,
)
