"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vlmfast_kernels.op import Op


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich, arXiv 1910.07467).

    The mean is taken in float32; the scaled value is rounded to x's dtype before the weight, as Llama does.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def _norm_inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
    for rows, width in ((1, 64), (3, 7), (17, 576)):
        x = torch.randn(rows, width, generator=generator) * 3
        weight = torch.randn(width, generator=generator)
        yield x.to(dtype), weight.to(dtype), 1e-5
    strided = torch.randn(5, 128, generator=generator)[:, ::2]
    yield strided.to(dtype), torch.ones(64, dtype=dtype), 1e-6


rms_norm: Op[Callable[[Tensor, Tensor, float], Tensor]] = Op(
    name="rms_norm",
    reference=_rms_norm,
    # bf16 keeps 8 bits; two roundings (scaled value, product) lose up to 2^-8 each.
    tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3},
    make_inputs=_norm_inputs,
)
