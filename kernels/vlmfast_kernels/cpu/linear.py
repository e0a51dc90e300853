"""Linear layers through oneDNN with the weight laid out once in its blocked format."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast_kernels.ops.linear import PreparedLinear


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


def packed_linear(weight: Tensor, bias: Tensor | None) -> PreparedLinear:
    """Packs weight [N, K]; the bias and residual are added inside the product."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
    plain = torch.ops.mkldnn._linear_pointwise.default
    fused = torch.ops.mkldnn._linear_pointwise.binary

    def apply(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return plain(x, packed, bias, "none", [], "")
        return fused(x, residual, packed, bias, "add")

    return PreparedLinear(name="packed oneDNN", apply=apply, owns_weight=True)
