"""int8 products over many rows, for towers: a scale for each output of the weight, and one for each token.

As in `quant`, a token is quantised by itself: its result is the same alone and among others. One scale a token instead
of one for each 64 inputs, so that the whole sum is an integer and a library's int8 product can make it. Decoders need
the finer scales, vision towers do not. The weight is the int8 form of `quant.QuantizedWeight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vlmfast_kernels.op import Op
from vlmfast_kernels.ops.activation import ACTIVATIONS
from vlmfast_kernels.ops.linear import PreparedLinear
from vlmfast_kernels.ops.quant import QuantizedWeight, quantize

LARGEST = 127
_EXACT_INPUTS = 1024
"""So many int8 products (127 * 127 at most) add up below 2**24: exact in float32, in any order."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (q, scale) with x [T, K] = scale * q nearly: q int8 [T, K], scale float32 [T, 1]; NaN for an odd row."""
    wide = x.float()
    reach = wide.abs().amax(-1, keepdim=True)
    finite = reach.isfinite()
    factor = torch.where(finite & (reach > 0), torch.full_like(reach, LARGEST) / reach, 0.0)
    codes = torch.where(finite, wide, 0.0).mul_(factor).round_().to(torch.int8)
    return codes, torch.where(finite, reach / LARGEST, torch.nan)


def exact_sums(codes: Tensor, weight: Tensor) -> Tensor:
    """Returns float64 [T, N]: the exact integer products of int8 codes [T, K] with int8 weights [N, K]."""
    pieces = zip(codes.split(_EXACT_INPUTS, -1), weight.split(_EXACT_INPUTS, -1), strict=True)
    products = [(rows.float() @ columns.float().T).double() for rows, columns in pieces]
    return torch.stack(products).sum(0)


def _linear_w8a8(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x W^T + b, [T, N], of x [T, K] and W [N, K], both quantised first; the sums are exact."""
    quantised = quantize(weight, "int8")
    codes, token_scale = quantize_rows(x)
    out = exact_sums(codes, quantised.codes).float() * quantised.scale * token_scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def prepare_w8a8(weight: QuantizedWeight, bias: Tensor | None, activation: str | None = None) -> PreparedLinear:
    """A layer on an int8 weight [N, K]: float32 or bfloat16 x [..., K] -> act(x W^T + b) (+ residual) in x's dtype.

    The fastest form that the device has; where it has none, exact float32 products, without gain. Bias, activation and
    residual are added in float32 and rounded once.
    """
    from vlmfast_kernels.cpu.w8a8 import packed_w8a8, why_not_w8a8

    if not why_not_w8a8(weight.codes.device):
        return packed_w8a8(weight, bias, activation)
    wide_bias = None if bias is None else bias.detach().float()
    act = None if activation is None else ACTIVATIONS[activation]

    def apply(x: Tensor, residual: Tensor | None = None) -> Tensor:
        codes, token_scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        out = exact_sums(codes, weight.codes).float() * weight.scale * token_scale
        out = out if wide_bias is None else out + wide_bias
        out = (out if act is None else act(out)).view(*x.shape[:-1], -1)
        return (out if residual is None else out + residual).to(x.dtype)

    return PreparedLinear(name="int8 in float32", apply=apply, owns_weight=True)


def explain_w8a8(device: torch.device) -> str:
    """Which form `prepare_w8a8` chooses on a device, and why not the packed one."""
    from vlmfast_kernels.cpu.w8a8 import why_not_gain, why_not_w8a8

    reason = why_not_w8a8(device)
    if reason:
        return f"int8 tower: packed oneDNN: {reason}\nint8 tower: exact products in float32, without gain: chosen"
    note = why_not_gain()
    return f"int8 tower: packed oneDNN{f', {note}' if note else ''}: chosen"


def _inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    for tokens, width, outputs, bias in (
        (1, 192, 576, True),
        (131, 70, 31, True),
        (17, 3072, 48, False),
        (3, 1, 1, False),
    ):
        x = torch.randn(tokens, width, generator=generator)
        x[0] *= 30
        x[tokens // 2, 0] = 0.0
        weight = torch.randn(outputs, width, generator=generator) / width**0.5
        weight[outputs // 2] = 0.0
        row = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        yield x.to(dtype), weight.to(dtype), row


linear_w8a8: Op[Callable[[Tensor, Tensor, Tensor | None], Tensor]] = Op(
    name="linear_w8a8",
    reference=_linear_w8a8,
    # Of the inputs as they are: only the rounding of the result differs.
    tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},
    make_inputs=_inputs,
)
