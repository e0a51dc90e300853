"""The compiled resampling of pictures (csrc/resize.cpp): where it is, and whether it runs here."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import lru_cache

from vlmfast_kernels.cpu.shared import open_library

_ABI = 2
"""`vlmfast_resize_abi` of the library that these signatures belong to."""

_WEIGHTS = (c_void_p, c_void_p, c_void_p, c_int64)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "vlmfast_resize_abi": (c_int, ()),
    "vlmfast_resize_scratch": (c_int64, (c_int64,)),
    "vlmfast_resize_across": (
        None,
        (c_void_p, c_int64, c_int64, c_int64, *_WEIGHTS, c_int64, c_void_p, c_int64, c_void_p),
    ),
    "vlmfast_resize_down": (None, (c_void_p, c_int64, c_int64, *_WEIGHTS, c_int64, c_void_p, c_int64)),
    "vlmfast_look_up": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
}
"""Function -> (result, arguments). ctypes lets go of the interpreter lock during a call."""


def resize_library() -> ctypes.CDLL | None:
    """The loaded library, or None where `why_no_resize` says why not."""
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def why_no_resize() -> str:
    """Why pictures are not resampled by the compiled code here; empty when they are."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else ""


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | str:
    return open_library("resize", _SIGNATURES, abi=("vlmfast_resize_abi", _ABI), needs="a C++ compiler")
