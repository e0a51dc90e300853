"""int8 products over many rows through oneDNN, with the weight laid out once.

oneDNN takes one scale for all rows, so it is given the codes alone; a token's scale, the bias and what comes after are
applied to its float32 result, a few rows at a time, which then lie in the cache. These passes are torch's and cost as
much as the product on a CPU with AMX, where bfloat16 stays ahead; see docs/cpu.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast_kernels.ops.activation import ACTIVATIONS
from vlmfast_kernels.ops.linear import PreparedLinear
from vlmfast_kernels.ops.quant import QuantizedWeight, quantize
from vlmfast_kernels.ops.w8a8 import LARGEST, linear_w8a8

_ROWS = 128
"""Rows at a time: 128 x 3072 in float32 fill most of a core's 2 MB."""
_ZERO_POINT = 128
"""Codes go in as unsigned bytes: oneDNN multiplies unsigned by signed."""


def why_not_w8a8(device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Why the packed form can not be used here; empty when it can."""
    if device.type != "cpu":
        return "runs on the CPU only"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"float32 and bfloat16 only, this is {dtype}"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return "this torch has no int8 products of oneDNN"
    if not torch.cpu._is_vnni_supported():
        return "this CPU has no AVX512-VNNI"
    return ""


def why_not_gain() -> str:
    """Why bfloat16 is faster than this here; empty where it is not."""
    return "slower than bfloat16, which this CPU has AMX for" if torch.cpu._is_amx_tile_supported() else ""


def packed_w8a8(weight: QuantizedWeight, bias: Tensor | None, activation: str | None = None) -> PreparedLinear:
    """Packs an int8 weight [N, K]; see `ops.w8a8.prepare_w8a8`."""
    assert weight.kind == "int8"
    packed = torch.ops.onednn.qlinear_prepack(weight.codes.contiguous(), None)
    outputs, inputs = weight.codes.shape
    scale = weight.scale.clone()
    zero_points = torch.zeros(outputs, dtype=torch.int64)
    wide_bias = None if bias is None else bias.detach().float()
    act = None if activation is None else ACTIVATIONS[activation]
    product = torch.ops.onednn.qlinear_pointwise.default

    def apply(x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, inputs)
        out = x.new_empty(len(rows), outputs)
        before = None if residual is None else residual.reshape(-1, outputs)
        wide, codes = torch.empty(_ROWS, inputs), torch.empty(_ROWS, inputs, dtype=torch.uint8)
        for start in range(0, len(rows), _ROWS):
            some = slice(start, min(start + _ROWS, len(rows)))
            count = some.stop - start
            token_scale = _quantize(rows[some], wide[:count], codes[:count])
            unit, zero, none = 1.0, _ZERO_POINT, "none"
            sums = product(
                codes[:count], unit, zero, packed, scale, zero_points, None, 1.0, 0, torch.float32, none, [], ""
            )
            # One operation a pass: each is exact to the last bit in any lane, a fused one need not be.
            sums.mul_(token_scale)
            if wide_bias is not None:
                sums.add_(wide_bias)
            if act is not None:
                sums = act(sums)
            if before is not None:
                sums.add_(before[some])
            out[some] = sums
        return out.view(*x.shape[:-1], outputs)

    return PreparedLinear(name="int8 oneDNN", apply=apply, owns_weight=True)


def _quantize(rows: Tensor, wide: Tensor, codes: Tensor) -> Tensor:
    """`quantize_rows` of [T, K] with codes shifted to unsigned, into `codes`; `wide` is float32 scratch.

    A few cheap passes: torch's own row maximum of bfloat16, and its conversions to unsigned bytes, are many times
    slower than these of float32 and signed bytes.
    """
    wide.copy_(rows)
    reach = wide.abs().amax(-1, keepdim=True)
    finite = reach.isfinite()
    factor = torch.where(finite & (reach > 0), torch.full_like(reach, LARGEST) / reach, 0.0)
    codes.view(torch.int8).copy_(wide.mul_(factor).round_())
    codes.bitwise_xor_(_ZERO_POINT)  # + 128, in place
    return torch.where(finite, reach / LARGEST, torch.nan)


@linear_w8a8.implement("packed oneDNN", supports=why_not_w8a8)
def _linear_w8a8_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same; packs the weight anew, which layers do once."""
    return packed_w8a8(quantize(weight, "int8"), bias).apply(x, None)
