"""Activations of the feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast_kernels.op import Op


def _quick_gelu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(1.702 x), CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return nnf.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nnf.silu,
    "gelu": nnf.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}
"""Activation functions under the names that checkpoint configurations use."""


def _silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [..., F], of a fused [..., 2F] projection (SwiGLU, Shazeer, arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return nnf.silu(gate) * up


def _silu_mul_inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[Tensor]]:
    for rows, width in ((1, 1536), (5, 7), (33, 64)):
        yield ((torch.randn(rows, 2 * width, generator=generator) * 2).to(dtype),)


silu_mul: Op[Callable[[Tensor], Tensor]] = Op(
    name="silu_mul",
    reference=_silu_mul,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1.2e-2},
    make_inputs=_silu_mul_inputs,
)
