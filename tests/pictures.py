"""Encoded pictures for the tests of the loader, and how near pixels must come."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def encode(picture: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, format_, **options)
    return out.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def close(got: np.ndarray, expected: Any, tolerance: int = 2) -> None:
    assert int(np.abs(got.astype(int) - np.asarray(expected, int)).max()) <= tolerance
