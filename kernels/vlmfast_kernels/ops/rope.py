"""Rotary positions (Su et al., arXiv 2104.09864), in the half-split layout that Llama checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vlmfast_kernels.op import Op


def rope_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Returns theta^(-2i/D), float32 [D/2]: the angle by which each pair of dimensions turns from token to token."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return 1.0 / theta**exponent


def llama3_frequencies(frequencies: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Returns the frequencies [D/2] of Llama 3.1: slow ones divided by `factor`, fast ones kept, a ramp between.

    A frequency is slow if it turns fewer than `low` times within `original` positions, fast if more than `high` times.
    """
    wavelengths = 2 * math.pi / frequencies
    share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)  # 0 slow, 1 fast
    return (1 - share) * frequencies / factor + share * frequencies


def yarn_frequencies(
    frequencies: Tensor, theta: float, factor: float, slow: float, fast: float, original: int, truncate: bool
) -> Tensor:
    """Returns the frequencies [D/2] of YaRN (Peng et al., arXiv 2309.00071, section 3.2), "NTK by parts".

    Dimensions that turn fewer than `slow` times within `original` positions are divided by `factor`, those that turn
    more than `fast` times are kept, with a linear ramp over the dimension's index between.
    """
    half = len(frequencies)

    def index(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index(fast), index(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    steps = torch.arange(half, dtype=torch.float32, device=frequencies.device)
    divided = ((steps - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return frequencies / factor * divided + frequencies * (1 - divided)


def rope_table(num_positions: int, frequencies: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns (cos, signed sin) times `magnitude`, each float32 [num_positions, D], of frequencies [D/2].

    The first half of the sine row is negated, so that a rotation is x * cos + swap_halves(x) * sin.
    """
    angles = torch.arange(num_positions, device=frequencies.device).float()[:, None] * frequencies  # [S, D/2]
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [T, H, D] rotated by the rows cos, sin [T, 1, D] of `rope_table`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rope_inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for tokens, heads, dim in ((1, 12, 64), (7, 3, 32), (33, 5, 16)):
        cos, sin = rope_table(tokens, rope_frequencies(dim, 10_000.0, torch.device("cpu")))
        x = torch.randn(tokens, heads, dim, generator=generator)
        yield x.to(dtype), cos[:, None].to(dtype), sin[:, None].to(dtype)


rotate: Op[Callable[[Tensor, Tensor, Tensor], Tensor]] = Op(
    name="rotate",
    reference=_rotate,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1.6e-2},
    make_inputs=_rope_inputs,
)
