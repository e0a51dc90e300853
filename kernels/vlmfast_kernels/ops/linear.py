"""Linear layers. The weight is fixed at inference, so an implementation may lay it out once (`prepare_linear`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast_kernels.ops.activation import ACTIVATIONS

Apply = Callable[[Tensor, Tensor | None], Tensor]
"""apply(x [..., K], residual [..., N] or None) -> act(x W^T + b) (+ residual), [..., N]."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Returns act(x W^T + b) (+ residual): x [..., K], weight [N, K], bias [N], residual [..., N]."""
    out = nnf.linear(x, weight, bias)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out if residual is None else residual + out


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLinear:
    """A linear layer bound to one laid-out weight. `owns_weight`: the original tensor is no longer needed."""

    name: str
    apply: Apply
    owns_weight: bool


def prepare_linear(weight: Tensor, bias: Tensor | None, activation: str | None = None) -> PreparedLinear:
    """The fastest form of this layer for its device and dtype; plain torch where nothing better applies.

    A layer has a residual or an activation, not both: `activation` layers are called with residual None.
    """
    from vlmfast_kernels.cpu.linear import packed_linear, why_not_packed

    if not why_not_packed(weight.device, weight.dtype):
        return packed_linear(weight, bias, activation)

    def apply(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias, residual, activation)

    return PreparedLinear(name="torch", apply=apply, owns_weight=False)


def explain_linear(device: torch.device, dtype: torch.dtype) -> str:
    """Which form `prepare_linear` chooses for a device and dtype, and why not the packed one."""
    from vlmfast_kernels.cpu.linear import why_not_packed

    reason = why_not_packed(device, dtype)
    return f"linear: packed oneDNN: {reason or 'chosen'}" + ("\nlinear: torch: chosen" if reason else "")
