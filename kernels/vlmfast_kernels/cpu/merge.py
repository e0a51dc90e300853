"""Attention over merged tokens as matrix products, one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast_kernels.cpu.attention import fast_bfloat16_cpu
from vlmfast_kernels.ops.merge import attend_sized


@attend_sized.implement("products per head", supports=fast_bfloat16_cpu)
def _attend_sized_per_head(query: Tensor, keys: Tensor, values: Tensor, sizes: Tensor) -> Tensor:
    """As `attend_all`'s products per head; the logarithm of the sizes is added inside the first product."""
    tiles, heads, patches, dim = query.shape
    scaled_keys = (keys * dim**-0.5).transpose(2, 3).contiguous()  # [P, H, D, N]
    bias = sizes.float().log().to(query.dtype)
    mixed = query.new_empty(tiles, patches, heads, dim)
    for tile in range(tiles):
        for head in range(heads):
            weights = torch.addmm(bias[tile], query[tile, head], scaled_keys[tile, head]).softmax(-1)
            mixed[tile, :, head] = torch.mm(weights, values[tile, head])
    return mixed.transpose(1, 2)
