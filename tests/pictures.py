"""Encoded pictures for the tests of the loader, and how near pixels must come."""

from __future__ import annotations

import base64
import io
import struct
from functools import cache
from typing import Any

import numpy as np
from PIL import Image


def encode(picture: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, format_, **options)
    return out.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def assert_close(got: np.ndarray, expected: Any, tolerance: int = 2) -> None:
    assert int(np.abs(got.astype(int) - np.asarray(expected, int)).max()) <= tolerance


def psd(pixels: np.ndarray) -> bytes:
    """A Photoshop file of one flat RGB picture [H, W, 3], uncompressed; Pillow reads these and does not write them."""
    height, width, _ = pixels.shape
    header = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, height, width, 8, 3)
    return header + bytes(12) + bytes(2) + pixels.transpose(2, 0, 1).tobytes()


@cache
def samples() -> dict[str, bytes]:
    """Small files of every format that the loader reads, several kinds of each, by a name of "FORMAT kind"."""
    colours = np.random.default_rng(3).integers(0, 256, (6, 8, 3), np.uint8)
    colour = Image.fromarray(colours).resize((40, 28), Image.Resampling.BICUBIC)
    grey, wide = colour.convert("L"), Image.fromarray(np.asarray(colour.convert("L")).astype(np.uint16) * 257)
    palette, ink, bilevel = colour.quantize(16), colour.convert("CMYK"), colour.convert("1")
    clear = colour.copy()
    clear.putalpha(grey)
    exif = Image.Exif()
    exif[0x0112] = 6
    more = {"save_all": True, "append_images": [colour.rotate(90), colour.rotate(180)]}
    pictures: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "JPEG plain": (colour, {"exif": exif}),
        "JPEG progressive": (colour, {"progressive": True, "subsampling": 0}),
        "JPEG ink": (ink, {}),
        "JPEG grey": (grey, {}),
        "PNG colour": (colour, {"exif": exif}),
        "PNG alpha": (clear, {}),
        "PNG palette": (palette, {"transparency": 3}),
        "PNG wide": (wide, {"transparency": 257}),
        "PNG bilevel": (bilevel, {}),
        "PNG moving": (colour, more),
        "GIF plain": (palette, {"transparency": 2}),
        "GIF moving": (palette, {"save_all": True, "append_images": [palette.rotate(90)]}),
        "BMP colour": (colour, {}),
        "BMP palette": (palette, {}),
        "PPM colour": (colour, {}),
        "PPM bilevel": (bilevel, {}),
        "PPM float": (grey.convert("F"), {}),
        "WEBP lossy": (clear, {}),
        "WEBP lossless": (colour, {"lossless": True, "exif": exif}),
        "WEBP moving": (colour, more),
        "AVIF plain": (clear, {}),
        "AVIF moving": (colour, more),
        "TIFF plain": (colour, {"exif": exif}),
        "TIFF lzw": (palette, {"compression": "tiff_lzw"}),
        "TIFF deflate": (wide, {"compression": "tiff_adobe_deflate"}),
        "TIFF fax": (bilevel, {"compression": "group4"}),
        "TIFF jpeg": (colour, {"compression": "jpeg"}),
        "TIFF ink": (ink, {"compression": "packbits"}),
        "TIFF float": (grey.convert("F"), {}),
        "TIFF pages": (colour, more),
        "JPEG2000 plain": (clear, {}),
        "JPEG2000 wide": (wide, {"irreversible": True}),
        "ICO several": (clear, {"sizes": [(16, 16), (24, 24)]}),
        "ICO bitmaps": (clear, {"sizes": [(16, 16)], "bitmap_format": "bmp"}),
        "QOI plain": (clear, {}),
        "DDS plain": (clear, {}),
        "DDS compressed": (clear, {"pixel_format": "DXT5"}),
        "SGI plain": (colour, {}),
        "PCX colour": (colour, {}),
        "PCX palette": (palette, {}),
        "TGA plain": (clear, {}),
        "TGA packed": (colour, {"compression": "tga_rle"}),
    }
    files = {name: encode(picture, name.split()[0], **options) for name, (picture, options) in pictures.items()}
    files["JPEG several"] = encode(colour, "MPO", **more)
    files["PSD plain"] = psd(np.asarray(colour))
    return files
