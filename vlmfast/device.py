"""Which device and number format to run on: decided once, said when asked."""

from __future__ import annotations

from typing import Any

import torch

from vlmfast.errors import DeviceError
from vlmfast_kernels.op import all_ops
from vlmfast_kernels.ops.linear import explain_linear
from vlmfast_kernels.ops.w8a8 import explain_w8a8

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """ "auto" is a CUDA device where there is one, else the CPU.

    Raises:
        DeviceError: the device is unknown or absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"device '{name}' is not known; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device '{name}' is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device '{name}': this torch sees no CUDA device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device '{name}': there are {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """ "auto" keeps a checkpoint's 16-bit format where the device is fast in it, else float32.

    A CPU runs 16-bit checkpoints in bfloat16 if it has instructions for it (AVX512-BF16, AMX, Arm BF16). Of "int8" and
    "int4" it is what stays beside the decoder's quantised weights: bfloat16 where the CPU has it.

    Raises:
        DeviceError: the name is unknown, or the device does not run it.
    """
    if name == "auto":
        if stored not in ("bfloat16", "float16"):
            return torch.float32
        if device.type == "cuda":
            return _DTYPES[stored]
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    if name in ("int8", "int4"):
        if device.type != "cpu":
            raise DeviceError(f"dtype '{name}' runs on the CPU only, not on {device.type}; use bfloat16 or float16")
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    if name not in _DTYPES:
        raise DeviceError(
            f"dtype '{name}' is not supported; use auto, float32, bfloat16, "
            "int8 or int4 (CPU only), or float16 (CUDA only)"
        )
    if name == "float16" and device.type == "cpu":
        raise DeviceError("dtype 'float16' is slow and imprecise on CPUs; use bfloat16 or float32")
    return _DTYPES[name]


def check_vision_dtype(name: str, device: torch.device) -> None:
    """Raises DeviceError where the vision tower's number format is unknown, or the device does not run it."""
    if name not in ("auto", "int8"):
        raise DeviceError(f"vision_dtype '{name}' is not supported; use auto (as the rest of the model) or int8")
    if name == "int8" and device.type != "cpu":
        raise DeviceError(f"vision_dtype 'int8' runs on the CPU only, not on {device.type}; leave it at auto")


def explain(model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Which implementation each operation of a loaded model runs on, and why not a faster one."""
    lines = [op.explain(device, dtype) for op in all_ops().values()]
    if model.vision.int8:
        lines = [explain_w8a8(device), *lines]
    return "\n".join(
        [f"device {device}, dtype {dtype}", model.decoder.explain(), explain_linear(device, dtype), *lines]
    )
