"""Huge pages for weights: a decoding step reads all of them once, and small pages cost it address look-ups."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

_HUGE_PAGE = 2 * 2**20
_MIN_BYTES = 512 * 2**10
"""Smaller weights stay in the cache, where look-ups are cheap."""
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
"""Linux 6.1: puts the range into huge pages now; older kernels refuse, and may do it in time for the first advice."""


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Asks the system to back this memory, and what shares its pages, with huge pages. Advice only: never fails."""
    libc = _libc()
    if libc is None or num_bytes < _MIN_BYTES:
        return
    start = address // _HUGE_PAGE * _HUGE_PAGE
    length = -(-(address + num_bytes - start) // _HUGE_PAGE) * _HUGE_PAGE
    libc.madvise(start, length, _MADV_HUGEPAGE)
    libc.madvise(start, length, _MADV_COLLAPSE)
