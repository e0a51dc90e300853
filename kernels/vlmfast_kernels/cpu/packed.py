"""Linear layers over few rows at the speed of reading their weights: bf16, or int8 with exact integer sums.

A row's result does not depend on the other rows. See csrc/linear.h for the layout.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from vlmfast_kernels.cpu.library import LinearStruct, address, library
from vlmfast_kernels.cpu.memory import prefer_huge_pages
from vlmfast_kernels.ops.activation import ACTIVATIONS
from vlmfast_kernels.ops.linear import PreparedLinear

_BF16, _INT8 = 0, 1


class PackedWeight:
    """A weight [N, K] in the layout of the compiled products, with its bias [N] or None. Reads bfloat16 on the CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, int8: bool) -> None:
        assert weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        self.outputs, self.inputs = weight.shape
        self.int8 = int8
        compiled, kind = library(), _INT8 if int8 else _BF16
        self.packed = torch.empty(compiled.vlmfast_packed_bytes(self.inputs, self.outputs, kind), dtype=torch.uint8)
        prefer_huge_pages(self.packed.data_ptr(), self.packed.numel())
        self.scale = torch.empty(self.outputs) if int8 else None
        self.bias = None if bias is None else bias.detach().float()
        weight = weight.detach().contiguous()
        compiled.vlmfast_pack(
            weight.data_ptr(),
            self.inputs,
            self.outputs,
            kind,
            self.packed.data_ptr(),
            address(self.scale),
            torch.get_num_threads(),
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
            format=_INT8 if self.int8 else _BF16,
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

    return PreparedLinear(name="compiled int8" if weight.int8 else "compiled bf16", apply=apply, owns_weight=True)
