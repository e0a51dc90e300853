"""Building blocks shared by towers and decoders.

As constructed they run the torch references, which autograd can follow; `prepare_for_inference` binds each block to
the fastest implementation for its device and dtype, once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vlmfast_kernels.cpu.library import why_not_compiled
from vlmfast_kernels.cpu.packed import PackedWeight, compiled_linear, quantize_compiled
from vlmfast_kernels.ops.linear import Apply, PreparedLinear, linear, prepare_linear
from vlmfast_kernels.ops.norm import rms_norm
from vlmfast_kernels.ops.quant import Quantization, QuantizedWeight, quantize
from vlmfast_kernels.ops.w8a8 import prepare_w8a8


class Linear(nn.Module):
    """act(x W^T + b), or x W^T + b with a residual added: [..., K] -> [..., N]."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool, activation: str | None = None) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None
        self.quantized: QuantizedWeight | None = None
        """The weight quantised, from `quantize` (or from disk: then `weight` may be unfilled) until it is packed."""
        self._apply_prepared: Apply | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._apply_prepared is not None:
            return self._apply_prepared(x, residual)
        return linear(x, self.weight, self.bias, residual, self.activation)

    def bound(self) -> Apply:
        """The layer as a plain function, for callers that count microseconds; ask again after `prepare`."""
        return self.forward if self._apply_prepared is None else self._apply_prepared

    def prepare(self) -> None:
        """Lays the weight out for inference and lets go of the original (whoever it is tied to keeps it)."""
        if self._apply_prepared is not None:
            return
        bias = None if self.bias is None else self.bias.detach()
        self._take(prepare_linear(self.weight.detach(), bias, self.activation))

    def quantize(self, quantization: Quantization) -> QuantizedWeight:
        """The weight quantised; what was quantised before is kept."""
        if self.quantized is None:
            compiled = not why_not_compiled(self.weight.device, self.weight.dtype)
            function = quantize_compiled if compiled else quantize
            self.quantized = function(self.weight.detach(), quantization)
        assert self.quantized.kind == quantization
        return self.quantized

    def pack_w8a8(self) -> None:
        """Runs on an int8 weight and int8 tokens from now on: for many rows at a time, as in a tower."""
        if self._apply_prepared is not None:
            return
        bias = None if self.bias is None else self.bias.detach()
        self._take(prepare_w8a8(self.quantize("int8"), bias, self.activation))

    def pack(self, quantization: Quantization | None) -> PackedWeight:
        """The weight laid out for the compiled products, which this layer runs on from now on, too."""
        weight = self.weight if quantization is None else self.quantize(quantization)
        packed = PackedWeight(weight, self.bias)
        self._take(compiled_linear(packed, self.activation))
        return packed

    def round_to(self, quantization: Quantization) -> None:
        """Rounds the weight to what int8 or int4 can hold, where such products are not to be had."""
        rounded = self.quantize(quantization).dequantize(self.weight.dtype)
        self.weight = nn.Parameter(rounded, requires_grad=False)  # the old tensor may be tied to the embeddings
        self.quantized = None

    def _take(self, prepared: PreparedLinear) -> None:
        self._apply_prepared = prepared.apply
        self.quantized = None
        if prepared.owns_weight:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self._function = rms_norm.reference

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self.weight, self.eps)

    def bound(self) -> Callable[[Tensor], Tensor]:
        """The norm as a plain function of x; ask again after `prepare`."""
        return self.forward

    def prepare(self) -> None:
        self._function = rms_norm.resolve(self.weight.device, self.weight.dtype)


def prepare_for_inference(module: nn.Module) -> None:
    """Freezes the parameters and binds every block below `module` to its implementation. Idempotent."""
    module.requires_grad_(False)
    module.eval()
    for child in module.modules():
        prepare = getattr(child, "prepare", None)
        if prepare is not None:
            prepare()


def initialize(module: nn.Module, *, seed: int = 0, std: float = 0.02) -> None:
    """Fills a fresh network for training: normal(0, std) matrices, unit norms, zero biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
