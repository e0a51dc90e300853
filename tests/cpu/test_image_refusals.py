"""Pictures that are refused: too large, damaged, missing, of a wrong type (cases.md 24, 27, 29, 47)."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import noise
from pictures import data_url, encode
from PIL import Image

from vlmfast import Limits, load_image
from vlmfast.errors import ImageError, ImageLimitError

_PICTURE = noise(31, 17)


def _png_header(width: int, height: int) -> bytes:
    """A PNG of a few kilobytes whose header claims any size: its data is zeros that compress to almost nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(12000, 15000), (30000, 30000), (2**31 - 1, 2**31 - 1)], ids=str)
@pytest.mark.parametrize("door", ["bytes", "pil"])
def test_huge_pictures_are_refused_from_the_header(
    size: tuple[int, int], door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards case 27 (vllm 47010): nothing is decoded before the size is known to be allowed."""
    from PIL import ImageFile

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # Pillow's own guard out of the way: ours must do

    def decoding(*args: Any) -> None:
        raise AssertionError("the picture was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoding)
    data = _png_header(*size)
    source = data if door == "bytes" else Image.open(io.BytesIO(data))
    with pytest.raises(ImageLimitError, match=rf"{size[0]}x{size[1]} pixels.*max_image_pixels"):
        load_image(source)


def test_12000_squared_is_refused_under_a_lower_limit_and_allowed_under_a_higher() -> None:
    """Guards case 27's limit option, both ways, with an ordinary picture."""
    data = encode(Image.fromarray(noise(40, 30)))
    with pytest.raises(ImageLimitError, match="40x30"):
        load_image(data, limits=Limits(max_image_pixels=1199))
    assert load_image(data, limits=Limits(max_image_pixels=1200)).width == 40
    with pytest.raises(ImageLimitError):
        load_image(noise(40, 30), limits=Limits(max_image_pixels=1199))
    with pytest.raises(ImageLimitError):
        load_image(_png_header(12000, 12000), limits=Limits(max_image_pixels=100_000_000))


def test_our_limit_decides_where_pillow_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards case 27's option: Pillow refuses at a limit of its own, which raising `Limits` has to get past."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = encode(Image.fromarray(_PICTURE))
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(data))
    assert np.array_equal(load_image(data, limits=Limits(max_image_pixels=31 * 17)).pixels, _PICTURE)
    assert Image.MAX_IMAGE_PIXELS == 100
    with pytest.raises(ImageLimitError, match="31x17 pixels"):
        load_image(data, limits=Limits(max_image_pixels=31 * 17 - 1))
    monkeypatch.undo()
    with pytest.raises(ImageLimitError, match="30000x30000 pixels"):
        load_image(_png_header(30000, 30000))


def test_big_files_are_refused_before_reading(tmp_path: Path) -> None:
    """Guards the byte limit, by path, by bytes and by data URL."""
    data = encode(Image.fromarray(_PICTURE))
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    limits = Limits(max_image_bytes=len(data) - 1)
    for source in (file, data, data_url(data)):
        with pytest.raises(ImageLimitError, match="max_image_bytes"):
            load_image(source, limits=limits)
    assert load_image(file, limits=Limits(max_image_bytes=len(data))).width == 31


def _cut(data: bytes) -> bytes:
    return data[:-128]


def _broken_chunk(data: bytes) -> bytes:
    at = data.index(b"IDAT") + 20
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\0" * 300, id="zeros"),
        pytest.param(b"not a picture", id="text"),
        pytest.param(b"\x89PNG\r\n\x1a\n", id="signature only"),
        pytest.param(_cut(encode(Image.fromarray(noise(90, 90)), "JPEG")), id="cut jpeg"),
        pytest.param(_cut(encode(Image.fromarray(noise(90, 90)))), id="cut png"),
        pytest.param(_cut(encode(Image.fromarray(noise(90, 90)), "WEBP")), id="cut webp"),
        pytest.param(_cut(encode(Image.fromarray(noise(90, 90)), "GIF")), id="cut gif"),
        pytest.param(encode(Image.fromarray(noise(90, 90)), "JPEG")[:40], id="jpeg header"),
        pytest.param(_broken_chunk(encode(Image.fromarray(noise(90, 90)))), id="broken chunk"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", id="svg"),
        pytest.param(b"%PDF-1.4 nothing", id="pdf"),
    ],
)
@pytest.mark.parametrize("door", ["path", "bytes"])
def test_damaged_files_are_named(data: bytes, door: str, tmp_path: Path) -> None:
    """Guards case 24: empty, garbage, cut and broken files are errors that name the item."""
    file = tmp_path / "broken.png"
    file.write_bytes(data)
    with pytest.raises(ImageError, match=r"broken\.png" if door == "path" else "image bytes"):
        load_image(file if door == "path" else data)


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "TGA", "PPM"])
@pytest.mark.filterwarnings("ignore")
def test_flipped_bytes_give_a_picture_or_an_error_of_ours(format_: str) -> None:
    """Guards damaged files of every kind, on which Pillow's readers raise all sorts of exceptions; seeds are fixed."""
    exif = {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"} if format_ in ("JPEG", "WEBP", "PNG") else {}
    data = encode(Image.fromarray(noise(24, 16)), format_, **exif)
    generator = np.random.default_rng(5)
    for _ in range(150):
        broken = bytearray(data)
        for at in generator.integers(0, min(len(data), 400), 3):
            broken[at] = int(generator.integers(0, 256))
        try:
            load_image(bytes(broken), limits=Limits(max_image_pixels=100_000))
        except ImageError as error:
            assert "image bytes" in str(error)


def test_a_lazy_pil_picture_that_is_cut() -> None:
    """Guards PIL pictures, which decode when first used: the failure is an error of ours, too."""
    data = _cut(encode(Image.fromarray(noise(90, 90)), "JPEG"))
    with pytest.raises(ImageError, match="PIL image"):
        load_image(Image.open(io.BytesIO(data)))


def test_a_closed_pil_picture() -> None:
    """Guards PIL pictures whose file is closed already."""
    picture = Image.open(io.BytesIO(encode(Image.fromarray(_PICTURE))))
    picture.close()
    with pytest.raises(ImageError, match="PIL image"):
        load_image(picture)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    """Guards paths that are no files."""
    with pytest.raises(ImageError, match=r"nothing\.png: no such file"):
        load_image(tmp_path / "nothing.png")
    with pytest.raises(ImageError, match="is a folder"):
        load_image(tmp_path)
    with pytest.raises(ImageError):
        load_image("")
    with pytest.raises(ImageError):
        load_image("a\0b.png")
    with pytest.raises(ImageError):
        load_image("x" * 5000)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", "https://example.com/a.png", "file:///etc/passwd", "S3://b/k"]
)
def test_urls_are_not_fetched(url: str) -> None:
    """Guards case 47: nothing is fetched, `file://` is no way around."""
    with pytest.raises(ImageError, match="not supported"):
        load_image(url)


@pytest.mark.parametrize("value", [None, 5, 1.5, object(), ["a.png"], {"image": b""}, io.BytesIO(b"x")], ids=repr)
def test_other_types_are_named(value: Any) -> None:
    """Guards the message for what is no picture source at all."""
    with pytest.raises(ImageError, match=type(value).__name__):
        load_image(value)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 5, 3), np.uint8), np.zeros((5, 0, 3), np.uint8), np.zeros((0, 0), np.uint8),
        np.zeros((5, 5, 3), np.float32), np.zeros((5, 5, 3), np.int64), np.zeros((5, 5), bool),
        np.zeros((5, 5, 2), np.uint8), np.zeros((5, 5, 5), np.uint8), np.zeros((3, 5, 5), np.uint8),
        np.zeros((1, 5, 5, 3), np.uint8), np.zeros(5, np.uint8), np.zeros((), np.uint8), np.zeros((5, 5), object),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)  # fmt: skip
def test_arrays_of_wrong_shape_or_type(array: np.ndarray) -> None:
    """Guards array input: no guessing of channel order or value range."""
    with pytest.raises(ImageError, match="array"):
        load_image(array)


def test_grey_and_rgba_arrays() -> None:
    """Guards case 23: grey in [H, W] and [H, W, 1] become three equal channels."""
    grey = _PICTURE[..., 0]
    flat = load_image(grey)
    assert np.array_equal(flat.pixels, np.dstack([grey] * 3))
    assert load_image(grey[..., None]).digest == flat.digest


# --- data URLs ---


def test_base64_with_newlines_and_without_padding() -> None:
    """Guards case 29 (vllm 28123): what mail programs and browsers make of base64 is accepted."""
    for extra in range(3):  # so that each length of padding occurs
        data = encode(Image.fromarray(noise(31 + extra, 17)))
        text = base64.b64encode(data).decode()
        wrapped = "\n".join(text[start : start + 76] for start in range(0, len(text), 76)) + "\r\n"
        digests = {
            load_image(f"data:image/png;base64,{payload}").digest
            for payload in (text, wrapped, text.rstrip("="), f" {text} ")
        }
        assert len(digests) == 1
        assert load_image(f"DATA:image/png;charset=utf-8;BASE64,{text}").digest in digests
        assert load_image(f"data:;base64,{text}").digest in digests


@pytest.mark.parametrize(
    "url",
    [
        "data:", "data:image/png", "data:image/png,abc", "data:image/png;base64", "data:image/png;base64,",
        "data:image/png;base64,a", "data:image/png;base64,!!!!", "data:image/png;base64,äöü=",
        "data:image/png;base64,aGVsbG8=", "data:image/png;base64,aG==VsbG8",
    ],
)  # fmt: skip
def test_bad_data_urls_are_errors_of_ours(url: str) -> None:
    """Guards case 29: a bad data URL is a clear error, not one of the base64 module."""
    with pytest.raises(ImageError):
        load_image(url)
