"""int8 products: a scale for each output of the weight, and for each token's groups of inputs.

A token is quantised by itself, never with its batch: its result is the same alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast_kernels.op import Op

GROUP_SIZE = 64
"""Inputs that share a scale, so that one large activation does not coarsen all others of its token."""
_LARGEST = 127


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (q, scale) with weight [N, K] = scale * q nearly: q int8 [N, K], scale float32 [N]."""
    wide = weight.float()
    reach = wide.abs().amax(-1, keepdim=True)
    return _whole(wide, reach), (reach / _LARGEST)[:, 0]


def dequantize_weight(whole: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns scale * q, [N, K]."""
    return (whole.float() * scale[:, None]).to(dtype)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (q, scale) of x [T, K]: q int8 [T, ceil(K / 64), 64], zeros beyond K, scale float32 [T, ceil(K / 64)]."""
    grouped = nnf.pad(x.float(), (0, -x.shape[-1] % GROUP_SIZE)).unflatten(-1, (-1, GROUP_SIZE))
    reach = grouped.abs().amax(-1, keepdim=True)
    return _whole(grouped, reach), (reach / _LARGEST)[..., 0]


def _whole(wide: Tensor, reach: Tensor) -> Tensor:
    """Returns int8 round(wide * (127 / reach)), ties to even; zeros where all is zero."""
    factor = torch.full_like(reach, _LARGEST) / reach  # a plain 127 / reach is 127 * (1 / reach) in torch
    return (wide * torch.where(reach > 0, factor, 0.0)).round().to(torch.int8)


def _linear_int8(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x W^T + b, [T, N], of x [T, K] and W [N, K], both quantised first; sums within a group are exact."""
    tokens, token_scale = quantize_tokens(x)
    whole, scale = quantize_weight(weight)
    grouped = nnf.pad(whole, (0, -whole.shape[-1] % GROUP_SIZE)).unflatten(-1, (-1, GROUP_SIZE))
    sums = torch.einsum("tgk,ngk->tng", tokens.double(), grouped.double()).float()  # int8 products fit a double
    out = (sums * token_scale[:, None]).sum(-1) * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    for tokens, width, outputs, bias in (
        (1, 576, 960, False),
        (9, 70, 31, True),
        (17, 130, 49, True),
        (3, 1, 1, False),
    ):
        x = torch.randn(tokens, width, generator=generator)
        x[0, width // 2] *= 50  # an outlier, as decoders have them
        weight = torch.randn(outputs, width, generator=generator) / width**0.5
        weight[outputs // 2] = 0.0
        row = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        yield x.to(dtype), weight.to(dtype), row


linear_int8: Op[Callable[[Tensor, Tensor, Tensor | None], Tensor]] = Op(
    name="linear_int8",
    reference=_linear_int8,
    # Of the inputs as they are: only the order of float32 sums and the rounding of the result differ.
    tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},
    make_inputs=_inputs,
)
