"""Refusals that come before decoding: sizes read from the header against `Limits`."""

from __future__ import annotations

from vlmfast.errors import ImageError, ImageLimitError
from vlmfast.options import Limits


def check_bytes(num_bytes: int, name: str, limits: Limits) -> None:
    """Raises ImageError for an empty file and ImageLimitError for one beyond `max_image_bytes`."""
    if num_bytes == 0:
        raise ImageError(f"{name}: the file is empty")
    if num_bytes > limits.max_image_bytes:
        raise ImageLimitError(
            f"{name}: {num_bytes} bytes, the limit is {limits.max_image_bytes}; raise Limits(max_image_bytes=...)"
        )


def check_size(width: int, height: int, name: str, limits: Limits) -> None:
    """Raises ImageError for a side of zero and ImageLimitError beyond `max_image_pixels`."""
    if width < 1 or height < 1:
        raise ImageError(f"{name}: the picture has no pixels ({width}x{height})")
    if width * height > limits.max_image_pixels:
        raise ImageLimitError(
            f"{name}: {width}x{height} pixels, the limit is {limits.max_image_pixels} in all; "
            "scale it down or raise Limits(max_image_pixels=...)"
        )
