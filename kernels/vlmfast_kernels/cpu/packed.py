"""Linear layers over few rows at the speed of reading their weights: bf16, or int8 and int4 with exact integer sums.

A row's result does not depend on the other rows. See csrc/linear.h for the layouts.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from vlmfast_kernels.cpu.library import LinearStruct, address, library
from vlmfast_kernels.cpu.memory import prefer_huge_pages
from vlmfast_kernels.ops.activation import ACTIVATIONS
from vlmfast_kernels.ops.linear import PreparedLinear
from vlmfast_kernels.ops.quant import GROUP_SIZE, INT4_GROUP_SIZE, Quantization, QuantizedWeight

_FORMATS: dict[Quantization | None, int] = {None: 0, "int8": 1, "int4": 2}


def quantize_compiled(weight: Tensor, kind: Quantization) -> QuantizedWeight:
    """As `ops.quant.quantize`, of a bfloat16 weight [N, K] on the CPU, many times as fast."""
    assert weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    weight = weight.detach().contiguous()
    outputs, inputs = weight.shape
    if kind == "int8":
        codes, scale = torch.empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs)
    else:
        groups = -(-inputs // GROUP_SIZE)
        codes = torch.empty(outputs, groups * GROUP_SIZE // 2, dtype=torch.uint8)
        scale = torch.empty(outputs, groups * GROUP_SIZE // INT4_GROUP_SIZE, dtype=torch.bfloat16)
    sizes = (inputs, outputs, _FORMATS[kind])
    library().vlmfast_quantize(weight.data_ptr(), *sizes, address(codes), address(scale), torch.get_num_threads())
    return QuantizedWeight(kind=kind, codes=codes, scale=scale, inputs=inputs)


class PackedWeight:
    """A weight [N, K] in the layout of the compiled products, with its bias [N] or None. Reads bfloat16 on the CPU."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> None:
        quantised = weight if isinstance(weight, QuantizedWeight) else None
        values = (weight if isinstance(weight, Tensor) else weight.codes).detach().contiguous()
        assert values.device.type == "cpu" and (quantised is not None or values.dtype == torch.bfloat16)
        self.kind = None if quantised is None else quantised.kind
        self.outputs = len(values)
        self.inputs = values.shape[1] if quantised is None else quantised.inputs
        self.scale = quantised.scale.contiguous() if quantised is not None and quantised.kind == "int8" else None
        self.bias = None if bias is None else bias.detach().float()
        compiled, kind = library(), _FORMATS[self.kind]
        size = compiled.vlmfast_packed_bytes(self.inputs, self.outputs, kind)
        self.packed = torch.empty(size, dtype=torch.uint8)
        prefer_huge_pages(self.packed.data_ptr(), size)
        scale = None if quantised is None else quantised.scale.contiguous()
        sizes = (self.inputs, self.outputs, kind)
        compiled.vlmfast_pack(
            values.data_ptr(), address(scale), *sizes, self.packed.data_ptr(), torch.get_num_threads()
        )

    @property
    def num_bytes(self) -> int:
        """What one pass over it reads."""
        return self.packed.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def struct(self) -> LinearStruct:
        """For C; valid as long as this object lives."""
        return LinearStruct(
            weight=address(self.packed),
            scale=address(self.scale),
            bias=address(self.bias),
            inputs=self.inputs,
            outputs=self.outputs,
            format=_FORMATS[self.kind],
        )

    def apply(self, x: Tensor) -> Tensor:
        """Returns x W^T + b in float32, [..., N], of bfloat16 x [..., K]."""
        assert x.dtype == torch.bfloat16 and x.shape[-1] == self.inputs
        rows = x.reshape(-1, self.inputs).contiguous()
        out = torch.empty(len(rows), self.outputs)
        compiled, struct = library(), self.struct()
        memory = torch.empty(compiled.vlmfast_linear_bytes(len(rows), self.inputs), dtype=torch.uint8)
        compiled.vlmfast_linear(
            ctypes.byref(struct),
            rows.data_ptr(),
            len(rows),
            out.data_ptr(),
            memory.data_ptr(),
            torch.get_num_threads(),
        )
        return out.view(*x.shape[:-1], self.outputs)


def compiled_linear(weight: PackedWeight, activation: str | None = None) -> PreparedLinear:
    """A layer on a packed weight; bias, activation and residual are added in float32 and rounded once."""
    act = None if activation is None else ACTIVATIONS[activation]

    def apply(x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = weight.apply(x)
        if act is not None:
            out = act(out)
        return (out if residual is None else out + residual).to(x.dtype)

    return PreparedLinear(name=f"compiled {weight.kind or 'bf16'}", apply=apply, owns_weight=True)
