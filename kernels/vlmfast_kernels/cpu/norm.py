"""RMS normalisation by torch's fused layer norm."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast_kernels.ops.norm import rms_norm

_MAX_MIRRORED_ROWS = 4


def _cpu_only(device: torch.device, dtype: torch.dtype) -> str:
    return "" if device.type == "cpu" else "runs on the CPU only"


@rms_norm.implement("mirrored layer norm", supports=_cpu_only)
def _rms_norm_mirrored(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of few rows as the layer norm of [x, -x], whose mean is 0 and whose variance is mean(x^2).

    Torch's layer norm is one fused CPU kernel with float32 sums; its RMS norm is a chain of operations. For a row or
    two, twice the arithmetic costs less than the extra calls: 9 against 13 microseconds (17 for the reference).
    """
    if x.shape[:-1].numel() > _MAX_MIRRORED_ROWS:
        return nnf.rms_norm(x, x.shape[-1:], weight, eps)
    width = x.shape[-1]
    mirrored = torch.cat((x, -x), -1)
    return torch.layer_norm(mirrored, (2 * width,), None, None, eps, False)[..., :width] * weight
