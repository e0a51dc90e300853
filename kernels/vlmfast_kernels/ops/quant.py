"""Products with quantised weights: int8, or int4 in groups of inputs. A weight is codes and scales, two plain tensors:

    int8  codes int8 [N, K], scale float32 [N]                       w = scale * code, -127 .. 127
    int4  codes uint8 [N, 32 G], scale bfloat16 [N, 2 G]             G = ceil(K / 64), inputs beyond K are zeros;
          byte j: input 2 j in the low half, 2 j + 1 in the high;    w = scale[k / 32] * (code - 8), 0 .. 15

Both quantise tokens to int8, with a scale for each 64 inputs, and each token by itself, never with its batch: its
result is the same alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast_kernels.op import Op

Quantization: TypeAlias = Literal["int8", "int4"]
GROUP_SIZE = 64
"""Inputs of a token that share a scale, so that one large activation does not coarsen all others of its token."""
INT4_GROUP_SIZE = 32
"""Inputs of an int4 weight that share a scale."""
_LARGEST = 127
_REACHES = (8.0, 7.0, 7.4, 8.5, 9.0, 9.6)
"""int4: the code, before rounding, that a group's largest value is tried at. More than 8 clips it."""
_CHUNK = 2**22
"""Weights quantised at a time in torch: bounds the memory of the search."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight [N, K] as codes and scales, in the form that the module's docstring gives; fit to be stored."""

    kind: Quantization
    codes: Tensor
    scale: Tensor
    inputs: int

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight that the products compute with, [N, K]."""
        if self.kind == "int8":
            return dequantize_weight(self.codes, self.scale, dtype)
        return dequantize_int4(self.codes, self.scale, self.inputs, dtype)


def quantize(weight: Tensor, kind: Quantization) -> QuantizedWeight:
    """Quantises a weight [N, K] of any float dtype."""
    codes, scale = quantize_weight(weight) if kind == "int8" else quantize_int4(weight)
    return QuantizedWeight(kind=kind, codes=codes, scale=scale, inputs=weight.shape[1])


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (q, scale) with weight [N, K] = scale * q nearly: q int8 [N, K], scale float32 [N]."""
    wide = weight.float()
    reach = wide.abs().amax(-1, keepdim=True)
    return _whole(wide, reach), (reach / _LARGEST)[:, 0]


def dequantize_weight(whole: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns scale * q, [N, K]."""
    return (whole.float() * scale[:, None]).to(dtype)


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the int4 codes and scales of a weight [N, K]: of each group, those with the least squared error.

    A group's largest value is put near code 0 (that is -8, the code without a positive twin), the scale's sign is what
    it takes; of a few such scales, each refitted to its codes by least squares, the best is kept.
    """
    rows = max(1, _CHUNK // weight.shape[1])
    parts = [_quantize_int4_rows(part) for part in weight.split(rows)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts])


def _quantize_int4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    grouped = nnf.pad(weight.float(), (0, -weight.shape[1] % GROUP_SIZE)).unflatten(-1, (-1, INT4_GROUP_SIZE))
    highest, lowest = grouped.amax(-1, keepdim=True), grouped.amin(-1, keepdim=True)
    extreme = torch.where(highest > -lowest, highest, lowest)
    best_codes, best_scale = torch.zeros_like(grouped), torch.zeros_like(extreme)
    best_gain = torch.full_like(extreme, -1.0)
    for reach in _REACHES:
        factor = torch.where(extreme != 0, torch.full_like(extreme, -reach) / extreme, 0.0)
        codes = (grouped * factor).round().clamp(-8, 7)
        product, norm = (grouped * codes).sum(-1, keepdim=True), codes.square().sum(-1, keepdim=True)
        gain = torch.where(norm > 0, product * product / norm, 0.0)  # what the best scale, product / norm, explains
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_codes = torch.where(better, codes, best_codes)
        best_scale = torch.where(better, torch.where(norm > 0, product / norm, 0.0), best_scale)
    finite = grouped.isfinite().all(-1, keepdim=True)
    best_codes = torch.where(finite, best_codes, 0.0)
    best_scale = torch.where(finite, best_scale, torch.nan)
    whole = (best_codes + 8).to(torch.uint8).flatten(1)
    return whole[:, ::2] | whole[:, 1::2] << 4, best_scale[..., 0].to(torch.bfloat16)


def dequantize_int4(codes: Tensor, scale: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Returns scale * (code - 8), [N, K], of what `quantize_int4` gives."""
    grouped = _int4_groups(codes).float() * scale.float()[..., None]
    return grouped.flatten(1)[:, :inputs].to(dtype)


def _int4_groups(codes: Tensor) -> Tensor:
    """The codes less 8, int8 [N, 2 G, 32]."""
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    return (both.to(torch.int8) - 8).unflatten(-1, (-1, INT4_GROUP_SIZE))


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


def _linear_int4(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x W^T + b, [T, N], of x [T, K] to int8 and W [N, K] to int4; sums within 32 inputs are exact."""
    tokens, token_scale = quantize_tokens(x)
    codes, scale = quantize_int4(weight)
    halves = tokens.unflatten(-1, (2, INT4_GROUP_SIZE)).flatten(1, 2)  # [T, 2 G, 32]
    sums = torch.einsum("tgk,ngk->tng", halves.double(), _int4_groups(codes).double()).float()
    out = (sums * scale.float() * token_scale.repeat_interleave(2, -1)[:, None]).sum(-1)
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
linear_int4: Op[Callable[[Tensor, Tensor, Tensor | None], Tensor]] = Op(
    name="linear_int4",
    reference=_linear_int4,
    tolerance=linear_int8.tolerance,
    make_inputs=_inputs,
)
