"""The compiled products and decoder step (csrc/step.cpp): where they are, whether they run here, their structures."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from vlmfast_kernels.cpu.shared import open_library

_ABI = 3
"""`vlmfast_abi` of the library that these structures belong to."""
OFF_SWITCH = "VLMFAST_COMPILED_STEP"
"""Environment variable: 0 runs on torch alone."""


class LinearStruct(Structure):
    """`Linear` of csrc/linear.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("format", c_int32),
    )


class LayerStruct(Structure):
    """`Layer` of csrc/step.cpp."""

    _fields_ = (
        ("attn_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
    )


class DecoderStruct(Structure):
    """`Decoder` of csrc/step.cpp."""

    _fields_ = (
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("groups", c_int64),
        ("dim", c_int64),
        ("intermediate", c_int64),
        ("eps", c_float),
        ("layers", POINTER(LayerStruct)),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("norm", c_void_p),
        ("head", LinearStruct),
    )


class BatchStruct(Structure):
    """`Batch` of csrc/step.cpp."""

    _fields_ = (
        ("rows", c_int64),
        ("hidden", c_void_p),
        ("positions", c_void_p),
        ("part", c_void_p),
        ("index", c_void_p),
        ("pages", c_void_p),
        ("capacities", c_void_p),
        ("lengths", c_void_p),
    )


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's memory begins; None is C's null."""
    return None if tensor is None else tensor.data_ptr()


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "vlmfast_abi": (c_int, ()),
    "vlmfast_supported": (c_int, ()),
    "vlmfast_tiles": (c_int, ()),
    "vlmfast_set_runtime": (None, (c_void_p, c_void_p)),
    "vlmfast_packed_bytes": (c_int64, (c_int64, c_int64, c_int32)),
    "vlmfast_quantize": (None, (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_int)),
    "vlmfast_pack": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int)),
    "vlmfast_linear_bytes": (c_int64, (c_int64, c_int64)),
    "vlmfast_linear": (None, (POINTER(LinearStruct), c_void_p, c_int64, c_void_p, c_void_p, c_int)),
    "vlmfast_workspace_bytes": (c_int64, (POINTER(DecoderStruct), c_int64, c_int64, c_int)),
    "vlmfast_layers": (
        None,
        (POINTER(DecoderStruct), POINTER(BatchStruct), c_int64, c_int64, c_int64, c_void_p, c_int),
    ),
    "vlmfast_continue": (
        None,
        (
            *(POINTER(DecoderStruct), POINTER(BatchStruct), c_void_p, c_void_p, c_int64, c_int64, c_int64),
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
        ),
    ),
    "vlmfast_logits": (None, (POINTER(DecoderStruct), c_void_p, c_int64, c_void_p, c_void_p, c_int)),
}
"""Function -> (result, arguments). ctypes lets go of the interpreter lock during a call."""


def library() -> ctypes.CDLL:
    """The loaded library; only where `why_not_compiled` is empty."""
    loaded = _load()
    assert isinstance(loaded, ctypes.CDLL), loaded
    return loaded


def instructions() -> str:
    """What the loaded library computes with; `VLMFAST_TILES=0` is its word for no AMX."""
    return "AMX tiles" if library().vlmfast_tiles() else "AVX-512"


def why_not_compiled(device: torch.device, dtype: torch.dtype) -> str:
    """Why the compiled products can not be used here; empty when they can."""
    if device.type != "cpu":
        return "runs on the CPU only"
    if dtype != torch.bfloat16:
        return f"bfloat16, int8 and int4 only, this is {dtype}"
    if os.environ.get(OFF_SWITCH) == "0":
        return f"switched off by {OFF_SWITCH}=0"
    loaded = _load()
    return loaded if isinstance(loaded, str) else ""


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | str:
    """The library, ready to call, or why there is none."""
    loaded = open_library("step", _SIGNATURES, abi=("vlmfast_abi", _ABI), needs="a C++ compiler (gcc or clang, x86-64)")
    if isinstance(loaded, str):
        return loaded
    if not loaded.vlmfast_supported():
        return "this CPU has no AVX512-BF16 and VNNI"
    threads = _torch_threads()
    if threads is None:
        return "this torch does not run on GNU OpenMP, whose threads it shares"
    loaded.vlmfast_set_runtime(*threads)
    return loaded


def _torch_threads() -> tuple[int, int] | None:
    """Entry points of the OpenMP runtime that torch has loaded: start a team, ask its size."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        start, size = (
            ctypes.cast(getattr(torch_library, name), c_void_p).value or 0
            for name in ("GOMP_parallel", "omp_get_num_threads")
        )
    except (OSError, AttributeError):
        return None
    return start, size
