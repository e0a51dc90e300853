"""int8 products by the compiled kernel."""

from __future__ import annotations

from torch import Tensor

from vlmfast_kernels.cpu.library import why_not_compiled
from vlmfast_kernels.cpu.packed import PackedWeight
from vlmfast_kernels.ops.quant import linear_int8


@linear_int8.implement("compiled", supports=why_not_compiled)
def _linear_int8_compiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same with AVX512-VNNI; packs the weight anew, which layers do once (`PackedWeight`)."""
    return PackedWeight(weight, bias, int8=True).apply(x).to(x.dtype)
