"""Full attention of a tile as matrix products, one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast_kernels.ops.attention import attend_all


def fast_bfloat16_cpu(device: torch.device, dtype: torch.dtype) -> str:
    """Why products of bfloat16 matrices are not the fastest way here; empty where they are."""
    if device.type != "cpu":
        return "runs on the CPU only"
    if dtype != torch.bfloat16:
        return f"only bfloat16 products beat torch's fused attention, this is {dtype}"
    return "" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "this CPU has no fast bfloat16"


@attend_all.implement("products per head", supports=fast_bfloat16_cpu)
def _attend_all_per_head(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same as two bf16 products a head, which run at the speed of a linear layer.

    Torch's fused CPU attention computes in smaller blocks and reaches half of that. A head's scores [N, N] stay in the
    cache; they are rounded to bf16 before the softmax, as transformers' eager attention does.
    """
    tiles, heads, patches, dim = query.shape
    # [P, H, D, N]: as the right side of a product a third faster than a transposed view.
    scaled_keys = (keys * dim**-0.5).transpose(2, 3).contiguous()
    rows = []
    for tile in range(tiles):
        weights = (torch.mm(query[tile, head], scaled_keys[tile, head]).softmax(-1) for head in range(heads))
        rows.append(torch.cat([torch.mm(weight, values[tile, head]) for head, weight in enumerate(weights)], -1))
    mixed = rows[0] if tiles == 1 else torch.cat(rows)  # [P * N, H * D]
    return mixed.view(tiles, patches, heads, dim).transpose(1, 2)
