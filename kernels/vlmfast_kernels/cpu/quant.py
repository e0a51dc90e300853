"""int8 and int4 products by the compiled kernel."""

from __future__ import annotations

from torch import Tensor

from vlmfast_kernels.cpu.library import why_not_compiled
from vlmfast_kernels.cpu.packed import PackedWeight, quantize_compiled
from vlmfast_kernels.ops.quant import linear_int4, linear_int8


@linear_int8.implement("compiled", supports=why_not_compiled)
def _linear_int8_compiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same with AVX512-VNNI; packs the weight anew, which layers do once (`PackedWeight`)."""
    return PackedWeight(quantize_compiled(weight, "int8"), bias).apply(x).to(x.dtype)


@linear_int4.implement("compiled", supports=why_not_compiled)
def _linear_int4_compiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same for int4, unpacked in registers."""
    return PackedWeight(quantize_compiled(weight, "int4"), bias).apply(x).to(x.dtype)
