"""Opens the package's own compiled libraries, which ctypes calls; none of them is a Python module."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

Signatures = Mapping[str, tuple[object, tuple[object, ...]]]
"""Function -> (result, arguments)."""


def open_library(name: str, signatures: Signatures, *, abi: tuple[str, int], needs: str) -> ctypes.CDLL | str:
    """The library csrc/`name`, ready to call, or why there is none.

    Args:
        abi: the function that tells the library's version, and the version that the caller is written for.
        needs: what building it takes.
    """
    folder = Path(__file__).parents[1] / "csrc"
    files = [path for suffix in EXTENSION_SUFFIXES if (path := folder / f"{name}{suffix}").is_file()]
    if not files:
        return f"not built: it takes {needs} when vlmfast is installed"
    try:
        loaded = ctypes.CDLL(str(files[0]))
        for function_name, (result, arguments) in signatures.items():
            function = getattr(loaded, function_name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"{files[0].name} does not load: {error}"
    function_name, version = abi
    if getattr(loaded, function_name)() != version:
        return f"{files[0].name} was built from other sources; install vlmfast again"
    return loaded
