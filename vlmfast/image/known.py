"""Pictures met before: from the hash of encoded bytes to what their pixels are, so that a known one is not decoded.

Says what is remembered and how it is named; where it is kept is the caller's business (`KnownPictures`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import numpy as np
import numpy.typing as npt
import PIL
from PIL import features

from vlmfast.image.identity import digest_of
from vlmfast.types import ImageInput

_SCHEMA = 1
"""Raise it when the loader makes other pixels of the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFacts:
    """What is known of a file's pixels without decoding it."""

    digest: str
    width: int
    height: int


class KnownPictures(Protocol):
    """A memory of pictures by `encoded_key`. It may forget, and must not raise."""

    def recall(self, key: str) -> PictureFacts | None:
        """The facts remembered under a key."""

    def remember(self, key: str, facts: PictureFacts) -> None:
        """Keeps them, if it can."""


def encoded_key(data: bytes, *rules: str | int) -> str:
    """Names encoded bytes and everything else that decides their pixels: the decoder, the loader's own rules and those
    of the call (`rules`: background, what is allowed)."""
    return digest_of("encoded picture", _SCHEMA, _decoder(), *rules, data)


@cache
def _decoder() -> str:
    """Pillow and the libraries of lossy formats, whose rounding differs between versions."""
    codecs = ("jpg", "jpg_2000", "webp", "avif")
    versions = [(codec, features.version(codec)) for codec in codecs if codec in features.get_supported()]
    with contextlib.suppress(PackageNotFoundError):
        versions.append(("heif", version("pillow-heif")))
    return repr((PIL.__version__, *versions))


def undecoded(facts: PictureFacts, name: str, decode: Callable[[], ImageInput]) -> ImageInput:
    """A picture whose pixels are decoded when they are first asked for, if ever."""
    held: list[ImageInput] = []

    def pixels() -> npt.NDArray[np.uint8]:
        if not held:
            held.append(decode())
        return held[0].pixels

    return ImageInput(width=facts.width, height=facts.height, digest=facts.digest, name=name, source=pixels)
