"""The one decoder: encoded bytes or a PIL picture to upright RGB, within limits, first frame of animations.

Everything that Pillow raises over a picture leaves here as an ImageError that names it.
"""

from __future__ import annotations

import importlib
import io
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import ExifTags, Image, UnidentifiedImageError

from vlmfast.errors import ImageError, ImageLimitError, VLMFastError
from vlmfast.image.convert import Colour, Pixels, rgb_of_picture
from vlmfast.image.guard import check_expansion, check_size
from vlmfast.options import Limits

_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what makes the stored picture upright."""
_FORMAT_OF = {"MPO": "JPEG", "DIB": "BMP"}
"""Pillow's names for what a reader of another name may find in a file."""
_ICON = b"\0\0\1\0"
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def decode_bytes(data: bytes, name: str, limits: Limits, *, background: Colour, decoded_bytes: int = 0) -> Pixels:
    """Upright RGB of an encoded picture. Peak memory is about 12 bytes a pixel at most beside `data`.

    `decoded_bytes` is what the request's other pictures take already.

    Raises:
        ImageError: not a picture, of a format that is not allowed, or damaged.
        ImageLimitError: beyond `limits`, by its header.
    """
    if data[:4] == _ICON:
        _check_icon(data, name, limits)
    with _damage_named(name), _open(data, name, limits) as picture:
        check_size(*picture.size, name, limits, decoded_bytes=decoded_bytes)
        check_expansion(*picture.size, picture.mode, len(data), name, limits)
        return _decode(picture, limits, background)


def decode_picture(
    picture: Image.Image, name: str, limits: Limits, *, background: Colour, decoded_bytes: int = 0
) -> Pixels:
    """As `decode_bytes`, for a PIL picture; one that was opened and not yet loaded is held to the allowed formats."""
    check_size(*picture.size, name, limits, decoded_bytes=decoded_bytes)
    format_ = picture.format and _FORMAT_OF.get(picture.format, picture.format)
    if format_ and getattr(picture, "tile", None) and format_ not in limits.formats:
        raise ImageError(f"{name}: {format_} files are not read; allowed are {', '.join(limits.formats)}")
    with _damage_named(name):
        return _decode(picture, limits, background)


def _decode(picture: Image.Image, limits: Limits, background: Colour) -> Pixels:
    _load(picture, limits.allow_truncated)
    turn = _TURN.get(_orientation(picture))
    return rgb_of_picture(picture if turn is None else picture.transpose(turn), background)


def _load(picture: Image.Image, allow_truncated: bool) -> None:
    try:
        picture.load()
    except (OSError, SyntaxError):
        if not allow_truncated or not getattr(picture, "tile", None):
            raise
        # The rows decoded so far stand. (Pillow's own switch holds for the whole process, so for other threads too.)
        picture.tile = []  # type: ignore[attr-defined]
        picture.load()


def _orientation(picture: Image.Image) -> int:
    """The EXIF (or XMP) orientation; unreadable or absent counts as upright."""
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        # Malformed EXIF raises anything from struct.error to SyntaxError in Pillow; the pixels are still good.
        return 1
    return orientation if isinstance(orientation, int) else 1


def _check_icon(data: bytes, name: str, limits: Limits) -> None:
    """Holds every picture inside an icon file to the limits: Pillow decodes one of them to tell the file's size."""
    (num_entries,) = struct.unpack_from("<H", data, 4) if len(data) >= 6 else (0,)
    for index in range(num_entries):
        entry = 6 + 16 * index
        if entry + 16 > len(data):
            return  # cut short, which the reader finds
        (start,) = struct.unpack_from("<I", data, entry + 12)
        if start + 24 > len(data):
            continue
        if data[start : start + 4] == b"\x89PNG":
            width, height = struct.unpack_from(">II", data, start + 16)
        else:  # a bitmap and its mask, one above the other
            width, height = (abs(side) for side in struct.unpack_from("<ii", data, start + 4))
            height //= 2
        if width and height:  # the reader refuses those without pixels
            check_size(width, height, name, limits)
            check_expansion(width, height, "L", len(data), name, limits)


_lifting = threading.Lock()


def _open(data: bytes, name: str, limits: Limits) -> Image.Image:
    """The picture of a file, its header read. Pillow's own size limit is lifted where it objects: ours decides."""
    formats = [format_ for format_ in limits.formats if format_ != "HEIF"]
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS and "HEIF" in limits.formats and _has_heif(data, name):
        formats = ["HEIF"]
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise ImageError(
            f"{name}: not a picture of a format that is read here ({', '.join(limits.formats)}), or a damaged one"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # the latter where warnings are errors
        with _lifting:
            theirs, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                return Image.open(io.BytesIO(data), formats=formats)
            finally:
                Image.MAX_IMAGE_PIXELS = theirs


def _has_heif(data: bytes, name: str) -> bool:
    """Makes Pillow read HEIF. False for a file of the shared brands that is AVIF inside, which Pillow reads itself."""
    if b"avif" in data[12:64]:
        return False
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError:
        raise ImageError(f"{name}: reading HEIC pictures needs a package more: pip install pillow-heif") from None
    return True


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    try:
        yield
    except VLMFastError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageLimitError(f"{name}: {error}") from error
    except Exception as error:
        # Damaged files make Pillow's readers raise anything: OSError, SyntaxError, struct.error, KeyError, ...
        raise ImageError(f"{name}: the picture is damaged, cut short or of an unusual mode ({error})") from error
