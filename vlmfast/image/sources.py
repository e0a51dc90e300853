"""From whatever names or holds an encoded picture to its bytes. Knows nothing of what is in them."""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeGuard
from urllib.parse import unquote, urlsplit

from vlmfast.errors import ImageError
from vlmfast.image.fetch import fetch, shown_url
from vlmfast.image.guard import check_bytes
from vlmfast.options import Limits


class Readable(Protocol):
    """A file open for reading bytes."""

    def read(self, num_bytes: int, /) -> Any: ...


EncodedSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | Readable"

_DATA_URL = re.compile(r"data:(?P<mime>[^,]*?)(?P<base64>;base64)?,", re.IGNORECASE)
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+)://", re.IGNORECASE)  # a scheme of one letter is a drive
_URL_SAFE = str.maketrans("-_", "+/")
_SIGNATURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM|II\*\0|MM\0\*|....ftyp|P[1-7][\s#]|\0\0[\1\2]\0|8BPS|qoif|DDS "
    rb"|\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    re.DOTALL,
)
"""How picture files begin. Only decides whether text is base64; what a file is, the decoder says."""
_MIN_BASE64, _MAX_PATH = 32, 4096
_READ_BYTES = 2**20
_SHOWN = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A picture's file content, with how to call it in messages."""

    data: bytes
    name: str


def is_encoded_source(source: object) -> TypeGuard[EncodedSource]:
    """Whether `read_source` takes objects of this type."""
    return isinstance(source, (str, os.PathLike, bytes, bytearray, memoryview)) or callable(
        getattr(source, "read", None)
    )


def is_url(source: object) -> bool:
    """Whether a source is text of an http:// or https:// URL."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def read_source(source: EncodedSource, limits: Limits) -> Encoded:
    """The bytes behind a path, bytes, file object, data URL, base64 text, or file://, http:// or https:// URL.

    A text that names a file is its path, even if it could be base64, too.

    Raises:
        ImageError: there is no such file, it can not be read, or is empty; or the kind of source is switched off.
        ImageFetchError: the URL is refused or did not give a file.
        ImageLimitError: more than `max_image_bytes`; reading stops there.
    """
    if isinstance(source, str):
        return _from_text(source, limits)
    if isinstance(source, os.PathLike):
        return _from_path(Path(os.fsdecode(source)), limits)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _checked(bytes(source), "image bytes", limits)
    return _from_file(source, limits)


def source_label(source: object) -> str | None:
    """How messages call a text or path; None for pictures given by content, which have no name of their own."""
    if isinstance(source, os.PathLike):
        return os.fsdecode(source)
    if not isinstance(source, str) or source[:5].lower() == "data:" or _base64_bytes(source) is not None:
        return None
    return shortened(shown_url(source) if _URL.match(source) else source)


def shortened(text: str) -> str:
    """At most 120 characters of a text that a message names."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _checked(data: bytes, name: str, limits: Limits) -> Encoded:
    check_bytes(len(data), name, limits)
    return Encoded(data=data, name=name)


def _from_text(text: str, limits: Limits) -> Encoded:
    if text[:5].lower() == "data:":
        return _from_data_url(text, limits)
    url = _URL.match(text)
    if url is None:
        is_file = limits.allow_paths and len(text) < _MAX_PATH and os.path.isfile(text)
        data = None if is_file else _base64_bytes(text, limits)
        return _from_path(Path(text), limits) if data is None else _checked(data, "base64 text", limits)
    scheme = url["scheme"].lower()
    if scheme == "file":
        return _from_path(_path_of(text), limits)
    if is_url(text):
        return _checked(fetch(text, limits), shortened(shown_url(text)), limits)
    raise ImageError(f"{shortened(shown_url(text))}: {scheme}:// is not supported; give a path, http(s):// or data URL")


def _path_of(url: str) -> Path:
    from urllib.request import url2pathname  # brings a web client along, which takes as long as all the rest here

    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ImageError(f"{shortened(url)}: is no URL ({error}); a file URL begins with file:///") from error
    if parts.netloc not in ("", "localhost"):
        raise ImageError(f"{shortened(url)}: names a file of another machine; a file URL begins with file:///")
    return Path(url2pathname(parts.path))


def _from_path(path: Path, limits: Limits) -> Encoded:
    name = shortened(str(path))
    if not limits.allow_paths:
        raise ImageError(f"{name}: reading files is switched off; Limits(allow_paths=True) allows it")
    try:
        if not path.is_file():
            raise ImageError(f"{name}: {'is a folder' if path.is_dir() else 'no such file'}")
        check_bytes(path.stat().st_size, name, limits)
        with path.open("rb", buffering=0) as file:
            return _checked(_read_all(file, limits), name, limits)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ImageError(f"{name}: can not be read: {reason}") from error


def _from_file(file: Readable, limits: Limits) -> Encoded:
    """The whole of a file object, from its beginning where it can seek (as Pillow reads one)."""
    label = getattr(file, "name", None)
    name = shortened(label) if isinstance(label, str) else "file object"
    try:
        if getattr(file, "seekable", bool)():
            file.seek(0)  # type: ignore[attr-defined]
        return _checked(_read_all(file, limits), name, limits)
    except ImageError:
        raise
    except Exception as error:  # a file object is anybody's code: closed, a lost connection, text beyond ASCII
        raise ImageError(f"{name}: can not be read: {error}") from error


def _read_all(file: Readable, limits: Limits) -> bytes:
    """All of it, or one byte more than the limit."""
    parts: list[bytes] = []
    left = limits.max_image_bytes + 1
    while left > 0:
        part = file.read(min(left, _READ_BYTES))
        if not isinstance(part, bytes):
            raise TypeError(f"read() gave {type(part).__name__}, not bytes; open the file in mode 'rb'")
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _from_data_url(url: str, limits: Limits) -> Encoded:
    match = _DATA_URL.match(url)
    if match is None or not match["base64"]:
        raise ImageError("data URL: must look like data:image/png;base64,...")
    payload = url[match.end() :]
    try:
        data = _decode_base64(unquote(payload) if "%" in payload else payload, "data URL", limits)
        return _checked(data, "data URL", limits)
    except ValueError as error:  # binascii.Error is one; characters beyond ASCII raise it plain
        raise ImageError(f"data URL: not valid base64 ({error})") from error


def _base64_bytes(text: str, limits: Limits | None = None) -> bytes | None:
    """What a bare base64 text holds, if it is one and begins as a picture does; only its beginning without `limits`."""
    if len(text) < _MIN_BASE64:
        return None
    try:
        start = _decode_base64("".join(text[:64].split())[:24], "base64 text", limits)
        if not _SIGNATURES.match(start):
            return None
        return start if limits is None else _decode_base64(text, "base64 text", limits)
    except ValueError:
        return None


def _decode_base64(text: str, name: str, limits: Limits | None) -> bytes:
    """Of either alphabet; line breaks are skipped, padding may be missing. Raises ValueError for anything else."""
    text = "".join(text.split())
    if limits is not None:
        check_bytes(max(len(text) * 3 // 4 - 2, 1), name, limits)
    text = text.translate(_URL_SAFE)
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
