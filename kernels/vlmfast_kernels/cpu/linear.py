"""Linear layers through oneDNN with the weight laid out once in its blocked format."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast_kernels.cpu.memory import prefer_huge_pages
from vlmfast_kernels.ops.activation import ACTIVATIONS
from vlmfast_kernels.ops.linear import PreparedLinear

_FUSED_ACTIVATIONS: dict[str | None, tuple[str, str]] = {
    "gelu": ("gelu", "none"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
}
"""Activations that oneDNN applies to the product while it is still in registers: (its name, its algorithm)."""


def why_not_packed(device: torch.device, dtype: torch.dtype) -> str:
    """Why the packed form can not be used here; empty when it can."""
    if device.type != "cpu":
        return "runs on the CPU only"
    if dtype != torch.bfloat16:
        return f"only bfloat16 gains from it, this is {dtype}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no fast bfloat16"
    return ""


def packed_linear(weight: Tensor, bias: Tensor | None, activation: str | None = None) -> PreparedLinear:
    """Packs weight [N, K]; bias, residual and the common activations are applied inside the product."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
    prefer_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    plain = torch.ops.mkldnn._linear_pointwise.default
    fused = torch.ops.mkldnn._linear_pointwise.binary

    fused_activation = _FUSED_ACTIVATIONS.get(activation)
    after = ACTIVATIONS[activation] if activation is not None and fused_activation is None else None
    kind, algorithm = fused_activation or ("none", "")

    def apply(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            out = plain(x, packed, bias, kind, [], algorithm)
            return out if after is None else after(out)
        return fused(x, residual, packed, bias, "add")

    return PreparedLinear(name="packed oneDNN", apply=apply, owns_weight=True)
