"""Resampling of pictures, pixel for pixel as Pillow does it, but only the part that is wanted and several times faster.

The weights are worked out here; the sums are compiled (`vlmfast_kernels.cpu.resize`) and of integers. Where the
compiled code is missing, and for pictures so long that the weights would take much memory, Pillow itself does the work,
to the same pixels. The one exception is the Hamming filter, which no checkpoint uses: its cosine may differ from
Pillow's in the last bit, and so a pixel now and then by one grey level.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmfast_kernels.cpu.resize import resize_library

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""RGB, [H, W, 3]; rows may lie apart, pixels of a row do not."""
_Doubles: TypeAlias = npt.NDArray[np.float64]

_PRECISION_BITS = 22
"""Bits of a weight behind the point: sums of 8-bit pixels stay within 32 bits. Pillow's, so that pixels are its own."""

_MAX_WEIGHTS = 2**20
"""Of a side; so many take 8 MiB in each of a few arrays. A side of 512 has them from some 170,000 source pixels on."""


def resize(
    pixels: Pixels, size: tuple[int, int], resample: int, window: tuple[int, int, int, int] | None = None
) -> Pixels:
    """The picture scaled to `size` (width, height), or the `window` (left, top, right, bottom) of that.

    One side after the other, each rounded to 8 bits; a side that keeps its length is left alone. Scaling down widens
    the filter, so that every source pixel counts. What of the result is not wanted is not computed.

    Args:
        resample: Pillow's filter number (`Image.Resampling`).
    """
    left, top, right, bottom = window or (0, 0, *size)
    height, width = pixels.shape[:2]
    down_first = _down_first(width, height, *size)
    library = resize_library()
    if library is None or not (
        _is_plain(resample, width, size[0], right - left) and _is_plain(resample, height, size[1], bottom - top)
    ):
        return _by_pillow(pixels, size, resample, down_first)[top:bottom, left:right]
    across = None if width == size[0] else _weights(width, size[0], resample, left, right)
    down = None if height == size[1] else _weights(height, size[1], resample, top, bottom)
    columns = slice(left, right) if across is None else across.needed
    rows = slice(top, bottom) if down is None else down.needed
    part = pixels[rows, columns]
    if down is not None and down_first:
        part = _down(library, part, down)
    if across is not None:
        part = _across(library, part, across)
    if down is not None and not down_first:
        part = _down(library, part, down)
    return part


def _is_plain(resample: int, length: int, new_length: int, wanted: int) -> bool:
    """Whether so many pixels of a side are made here: of a filter that is known, from weights that are not too many."""
    if resample not in _FILTERS:
        return False
    return length == new_length or _num_taps(length, new_length, resample) * wanted <= _MAX_WEIGHTS


def _num_taps(length: int, new_length: int, resample: int) -> int:
    """Most pixels of a side of `length` that one of `new_length` is made of."""
    return math.ceil(_FILTERS[resample][1] * max(length / new_length, 1.0)) * 2 + 1


def _down_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether the height is scaled before the width: where it loses more than twice the pixels that the width does.

    Of the two orders' pixels, some differ by a grey level. This is what Pillow 13 does; those before go across first.
    """
    return height - new_height > 2 * max(width - new_width, 0)


def _by_pillow(pixels: Pixels, size: tuple[int, int], resample: int, down_first: bool) -> Pixels:
    picture = Image.fromarray(pixels)
    if resample != Image.Resampling.NEAREST:  # which rounds nothing
        between = (picture.width, size[1]) if down_first else (size[0], picture.height)
        picture = picture.resize(between, Image.Resampling(resample))
    return np.asarray(picture.resize(size, Image.Resampling(resample)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Weights:
    """What every pixel of a line is made of, int32 [N], [N] and [N, taps]: `counts` pixels of the needed ones, from
    `firsts` on, by `weights`, which are in units of 2^-22, add up to about 1, and are zero behind `counts`."""

    firsts: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.int32]
    needed: slice
    """The part of the source line that any of them is made of."""


def _weights(length: int, new_length: int, resample: int, start: int, stop: int) -> _Weights:
    """The weights of pixels start .. stop - 1 of a line of `length` pixels scaled to `new_length`.

    A convolution with the filter around each new pixel's centre, cut at the line's ends and made to add up to 1; that
    is Pillow's rule (github.com/python-pillow/Pillow, src/libImaging/Resample.c, 11.3), to the order of the additions.
    """
    filter_, radius = _FILTERS[resample]
    scale = length / new_length
    stretch = max(scale, 1.0)
    reach = radius * stretch
    centres = (np.arange(start, stop) + 0.5) * scale
    firsts = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    counts = np.minimum((centres + reach + 0.5).astype(np.int64), length) - firsts
    places = np.arange(_num_taps(length, new_length, resample))
    weights = filter_((places + firsts[:, None] - centres[:, None] + 0.5) * (1.0 / stretch))
    weights[places >= counts[:, None]] = 0.0
    total = np.cumsum(weights, axis=1)[:, -1:]  # one after the other, as a plain sum in numpy is not
    np.divide(weights, total, out=weights, where=total != 0)
    weights *= 1 << _PRECISION_BITS
    weights += np.copysign(0.5, weights)
    needed = slice(int(firsts.min()), int((firsts + counts).max()))
    return _Weights(
        firsts=(firsts - needed.start).astype(np.int32),
        counts=counts.astype(np.int32),
        weights=np.trunc(weights).astype(np.int32),
        needed=needed,
    )


def _across(library: ctypes.CDLL, pixels: Pixels, line: _Weights) -> Pixels:
    out = np.empty((len(pixels), len(line.firsts), 3), np.uint8)
    scratch = np.empty(library.vlmfast_resize_scratch(pixels.shape[1]), np.uint8)
    library.vlmfast_resize_across(
        *_place(pixels), *pixels.shape[:2], *_places(line), out.shape[1], *_place(out), scratch.ctypes.data
    )
    return out


def _down(library: ctypes.CDLL, pixels: Pixels, line: _Weights) -> Pixels:
    out = np.empty((len(line.firsts), *pixels.shape[1:]), np.uint8)
    library.vlmfast_resize_down(
        *_place(pixels), pixels.shape[1] * 3, *_places(line), len(out), out.ctypes.data, out.strides[0]
    )
    return out


def _place(pixels: Pixels) -> tuple[int, int]:
    """Address and bytes from row to row."""
    # In a single column nothing goes from one to the next, and its stride may be any number.
    in_rows = pixels.strides[2] == 1 and (pixels.strides[1] == 3 or pixels.shape[1] == 1)
    assert pixels.dtype == np.uint8 and in_rows, (pixels.dtype, pixels.strides)
    return pixels.ctypes.data, pixels.strides[0]


def _places(line: _Weights) -> tuple[int, int, int, int]:
    return line.firsts.ctypes.data, line.counts.ctypes.data, line.weights.ctypes.data, line.weights.shape[1]


def _box(x: _Doubles) -> _Doubles:
    return ((x > -0.5) & (x <= 0.5)).astype(np.float64)


def _bilinear(x: _Doubles) -> _Doubles:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _hamming(x: _Doubles) -> _Doubles:
    return np.where(np.abs(x) < 1, _sinc(x) * (0.54 + 0.46 * np.cos(x * math.pi)), 0.0)


def _bicubic(x: _Doubles) -> _Doubles:
    """Keys' cubic convolution with a = -1/2 (IEEE TASSP 29(6), 1981)."""
    x = np.abs(x)
    inner = (1.5 * x - 2.5) * x * x + 1.0
    outer = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))


def _lanczos(x: _Doubles) -> _Doubles:
    """Lanczos' window of three lobes."""
    return np.where((x >= -3) & (x < 3), _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: _Doubles) -> _Doubles:
    x = x * math.pi
    return np.divide(np.sin(x), x, out=np.ones_like(x), where=x != 0)


_FILTERS: dict[int, tuple[Callable[[_Doubles], _Doubles], float]] = {
    Image.Resampling.LANCZOS: (_lanczos, 3.0),
    Image.Resampling.BILINEAR: (_bilinear, 1.0),
    Image.Resampling.BICUBIC: (_bicubic, 2.0),
    Image.Resampling.BOX: (_box, 0.5),
    Image.Resampling.HAMMING: (_hamming, 1.0),
}
"""Filter number -> the filter and its radius in new pixels."""
