"""One loader for every kind of picture a caller may hold. There is one decoder (Pillow), so the same file has the
same digest by every door.
"""

from __future__ import annotations

import base64
import io
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from vlmfast.errors import ImageError, VLMFastError
from vlmfast.image.guard import check_bytes, check_size
from vlmfast.image.identity import pixel_digest
from vlmfast.options import Limits
from vlmfast.types import ImageInput

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | npt.NDArray[Any] | ImageInput"
"""A path, encoded bytes, a data URL, a PIL picture, a uint8 array [H, W], [H, W, 1|3|4], or a loaded picture."""

_DATA_URL = re.compile(r"data:(?P<mime>[^,]*?)(?P<base64>;base64)?,", re.IGNORECASE)
_WHITE = (255, 255, 255)


def load_image(source: ImageSource, *, limits: Limits | None = None) -> ImageInput:
    """Decodes a picture to upright RGB: EXIF orientation applied, alpha flattened on white, first frame of animations.

    Raises:
        ImageError: the source is missing, no picture, damaged, or of a type that is not supported; it is named.
        ImageLimitError: it is beyond `limits`, checked from the header before decoding.
    """
    limits = limits or Limits()
    if isinstance(source, ImageInput):
        return source
    if isinstance(source, Image.Image):
        check_size(source.width, source.height, "PIL image", limits)
        with _damage_named("PIL image"):
            return _from_pil(source, "PIL image")
    if isinstance(source, np.ndarray):
        return _from_array(source, limits)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_bytes(bytes(source), "image bytes", limits)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _from_bytes(_data_url_bytes(source), "data URL", limits)
    if isinstance(source, str) and re.match(r"[a-z][a-z0-9+.-]*://", source, re.IGNORECASE):
        raise ImageError(f"{source}: fetching from URLs is not supported; download the file and give its path")
    if isinstance(source, (str, os.PathLike)):
        return _from_path(Path(source), limits)
    raise ImageError(f"a picture can be a path, bytes, data URL, PIL image or numpy array, not {type(source).__name__}")


def source_name(source: object, index: int) -> str:
    """How messages and result rows call a source that may not have loaded."""
    if isinstance(source, ImageInput):
        return source.name
    if isinstance(source, (str, os.PathLike)) and str(source)[:5].lower() != "data:":
        return str(source)
    return f"{type(source).__name__} #{index}"


def _from_path(path: Path, limits: Limits) -> ImageInput:
    name = str(path)
    try:
        if not path.is_file():
            raise ImageError(f"{name}: {'is a folder' if path.is_dir() else 'no such file'}")
        check_bytes(path.stat().st_size, name, limits)
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ImageError(f"{name}: can not be read: {reason}") from error
    return _from_bytes(data, name, limits)


def _from_bytes(data: bytes, name: str, limits: Limits) -> ImageInput:
    check_bytes(len(data), name, limits)
    with _damage_named(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's size warning: our own limit decides
        with _open(data) as picture:
            check_size(picture.width, picture.height, name, limits)
            picture.load()
            return _from_pil(picture, name)


_lifting = threading.Lock()


def _open(data: bytes) -> Image.Image:
    """The picture of a file, its header read. Pillow's own size limit is lifted where it objects: ours decides."""
    try:
        return Image.open(io.BytesIO(data))
    except Image.DecompressionBombError:
        with _lifting:
            theirs, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                return Image.open(io.BytesIO(data))
            finally:
                Image.MAX_IMAGE_PIXELS = theirs


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Turns whatever Pillow raises over a picture into an ImageError that names it."""
    try:
        yield
    except VLMFastError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: not a picture in a format that Pillow reads") from error
    except Exception as error:
        # Damaged files make Pillow's readers raise anything: OSError, SyntaxError, struct.error, KeyError, ...
        raise ImageError(f"{name}: the picture is damaged, cut short or of an unusual mode ({error})") from error


def _data_url_bytes(url: str) -> bytes:
    match = _DATA_URL.match(url)
    if match is None or not match["base64"]:
        raise ImageError("data URL: must look like data:image/png;base64,...")
    payload = "".join(url[match.end() :].split())
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except ValueError as error:  # binascii.Error is one; characters beyond ASCII raise it plain
        raise ImageError(f"data URL: not valid base64 ({error})") from error


def _from_array(array: npt.NDArray[Any], limits: Limits) -> ImageInput:
    name = f"array {list(array.shape)}"
    if array.dtype != np.uint8:
        raise ImageError(f"{name}: dtype must be uint8 with values 0-255, got {array.dtype}")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise ImageError(f"{name}: shape must be [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]")
    check_size(array.shape[1], array.shape[0], name, limits)
    pixels = np.ascontiguousarray(array)
    return _from_pil(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels), name)


def _from_pil(picture: Image.Image, name: str) -> ImageInput:
    pixels = np.array(_to_rgb(_upright(picture)), dtype=np.uint8)
    pixels.flags.writeable = False
    return ImageInput(pixels=pixels, digest=pixel_digest(pixels), name=name)


def _upright(picture: Image.Image) -> Image.Image:
    """Applies EXIF orientation; unreadable EXIF counts as none."""
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:
        # Malformed EXIF raises anything from struct.error to SyntaxError in Pillow; the pixels are still good.
        return picture


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode in ("I", "F") or picture.mode.startswith("I;"):
        return _to_grey8(picture).convert("RGB")
    if picture.has_transparency_data:
        layered = picture.convert("RGBA")
        flat = Image.new("RGB", layered.size, _WHITE)
        flat.paste(layered, mask=layered.getchannel("A"))
        return flat
    return picture.convert("RGB")


def _to_grey8(picture: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float greys to 8 bits by value range: up to 1, up to 255, up to 65535, else min to max.

    What is no number is as dark as the darkest; infinities are the ends of the range. A value that
    is named transparent becomes white.
    """
    values = np.asarray(picture).astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    grey = values
    if low < 0 or high > 65535:
        grey = (values - low) / max(high - low, 1e-12) * 255
    elif picture.mode.startswith("I;16") or high > 255:
        grey = values / 257
    elif picture.mode == "F" and high <= 1:
        grey = values * 255
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        grey = np.where(values == transparent, 255, grey)
    return Image.fromarray(np.rint(grey).astype(np.uint8))
