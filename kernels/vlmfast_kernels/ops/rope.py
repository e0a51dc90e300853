"""Rotary positions (Su et al., arXiv 2104.09864), in the half-split layout that Llama checkpoints use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vlmfast_kernels.op import Op


def rope_table(num_positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (cos, signed sin), each float32 [num_positions, head_dim].

    The first half of the sine row is negated, so that a rotation is x * cos + swap_halves(x) * sin.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequencies = 1.0 / theta**exponent  # [D/2]
    angles = torch.arange(num_positions, device=device).float()[:, None] * frequencies  # [S, D/2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [T, H, D] rotated by the rows cos, sin [T, 1, D] of `rope_table`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rope_inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for tokens, heads, dim in ((1, 12, 64), (7, 3, 32), (33, 5, 16)):
        cos, sin = rope_table(tokens, dim, 10_000.0, torch.device("cpu"))
        x = torch.randn(tokens, heads, dim, generator=generator)
        yield x.to(dtype), cos[:, None].to(dtype), sin[:, None].to(dtype)


rotate: Op[Callable[[Tensor, Tensor, Tensor], Tensor]] = Op(
    name="rotate",
    reference=_rotate,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1.6e-2},
    make_inputs=_rope_inputs,
)
