"""Pictures that are refused: too large, damaged, missing, of a wrong type (cases.md 24, 27, 29, 47)."""

from __future__ import annotations

import base64
import io
import struct
import sys
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
from vlmfast.image.load import load_images

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


def test_big_files_are_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the byte limit, by path, by bytes and by data URL."""
    data = encode(Image.fromarray(_PICTURE))
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    limits = Limits(max_image_bytes=len(data) - 1)
    for source in (file, data, data_url(data)):
        with pytest.raises(ImageLimitError, match="max_image_bytes"):
            load_image(source, limits=limits)
    assert load_image(file, limits=Limits(max_image_bytes=len(data))).width == 31
    monkeypatch.setattr(base64, "b64decode", None)
    with pytest.raises(ImageLimitError, match=r"data URL: .*max_image_bytes"):
        load_image(data_url(bytes(1000)), limits=Limits(max_image_bytes=900))


@pytest.mark.parametrize("mode", ["1", "L"])
def test_12000_squared_of_a_few_kilobytes_is_refused(mode: str) -> None:
    """Guards case 27 (vllm 47010): within the pixel limit, but no file so small holds a picture so large."""
    data = encode(Image.new(mode, (12000, 12000)), compress_level=9)
    with pytest.raises(ImageLimitError, match=rf"12000x12000 pixels out of {len(data)} bytes.*max_image_pixels"):
        load_image(data)


def test_files_that_are_small_for_their_size() -> None:
    """Guards that rule's borders: blank pictures up to half the limit, full ones up to the limit, all by option."""
    blank = encode(Image.new("RGB", (400, 400)), compress_level=9)
    assert 500 * len(blank) < 400 * 400 * 3
    assert load_image(blank, limits=Limits(max_image_pixels=2 * 400 * 400)).width == 400
    with pytest.raises(ImageLimitError, match="out of"):
        load_image(blank, limits=Limits(max_image_pixels=2 * 400 * 400 - 1))
    full = encode(Image.fromarray(noise(400, 400)), "JPEG")
    assert load_image(full, limits=Limits(max_image_pixels=400 * 400)).width == 400


@pytest.mark.parametrize("kind", ["PNG", "BMP"])
def test_icons_that_hold_more_than_they_say(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the limit where the header lies: an icon of 16x16 with a large picture inside, which Pillow would decode
    on opening."""
    inner = encode(Image.fromarray(noise(300, 300)), kind)
    if kind == "BMP":  # without the file header, and twice as high: the mask is counted
        inner = inner[14:22] + struct.pack("<i", 600) + inner[26:]
    small = encode(Image.fromarray(noise(16, 16)))
    entries = [(small, 38), (inner, 38 + len(small))]
    data = struct.pack("<HHH", 0, 1, 2)
    for content, start in entries:
        data += struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(content), start)
    data += small + inner
    assert load_image(data).width in (16, 300)
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(ImageLimitError, match="300x300"):
        load_image(data, limits=Limits(max_image_pixels=1000))


def test_pictures_of_a_request_share_a_limit() -> None:
    """Guards memory: 64 pictures within the limit each; the one that is too much is not decoded."""
    data = encode(Image.fromarray(noise(40, 30)))
    sources = [data, Image.fromarray(noise(40, 30)), noise(40, 30)]
    for last in (data, Image.fromarray(noise(40, 30)), noise(40, 30), load_image(data)):
        limits = Limits(max_decoded_bytes=3 * 40 * 30 * 3)
        assert len(load_images(sources, limits=limits)) == 3
        with pytest.raises(ImageLimitError, match=r"40x30 pixels after 10800 decoded bytes.*max_decoded_bytes"):
            load_images([*sources, last], limits=limits)
    with pytest.raises(ImageLimitError, match="4 pictures in one request, the limit is 3"):
        load_images([*sources, "missing.png"], limits=Limits(max_images=3))


def test_formats_are_those_allowed() -> None:
    """Guards the list of formats, for files and for PIL pictures that were opened elsewhere and not yet decoded."""
    data = encode(Image.fromarray(_PICTURE), "TIFF")
    limits = Limits(formats=("PNG", "JPEG"))
    with pytest.raises(ImageError, match=r"image bytes: not a picture of a format that is read here \(PNG, JPEG\)"):
        load_image(data, limits=limits)
    with pytest.raises(ImageError, match="TIFF files are not read; allowed are PNG, JPEG"):
        load_image(Image.open(io.BytesIO(data)), limits=limits)
    decoded = Image.open(io.BytesIO(data))
    decoded.load()
    assert load_image(decoded, limits=limits).width == 31


def test_no_file_starts_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against EPS, which Pillow hands to Ghostscript."""
    import subprocess

    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "check_call", started)
    monkeypatch.setattr(subprocess, "Popen", started)
    data = encode(Image.fromarray(_PICTURE), "EPS")
    for source in (data, Image.open(io.BytesIO(data))):
        with pytest.raises(ImageError):
            load_image(source)


def test_heic_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards photographs of phones: the error says what to install."""
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    data = b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(200)
    with pytest.raises(ImageError, match="pip install pillow-heif"):
        load_image(data)
    with pytest.raises(ImageError, match="not a picture of a format"):
        load_image(data, limits=Limits(formats=("PNG",)))


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


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("door", ["bytes", "pil"])
def test_cut_files_when_asked_for(format_: str, door: str) -> None:
    """Guards case 24: the rows before the cut are those of the whole picture; other threads still refuse cut files."""
    data = encode(Image.fromarray(noise(90, 90)), format_)
    whole = load_image(data).pixels
    half = data[: len(data) // 2]
    source = half if door == "bytes" else Image.open(io.BytesIO(half))
    pixels = load_image(source, limits=Limits(allow_truncated=True)).pixels
    same_rows = (pixels == whole).all((1, 2))
    assert 0.1 * 90 < same_rows.sum() < 90
    with pytest.raises(ImageError):
        load_image(half)


def test_files_without_a_row_are_errors_even_then() -> None:
    for data in (b"", b"not a picture", encode(Image.fromarray(noise(90, 90)), "WEBP")[:-128]):
        with pytest.raises(ImageError):
            load_image(data, limits=Limits(allow_truncated=True))


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


@pytest.mark.parametrize("place", ["path", "text", "file url", "missing"])
def test_files_can_be_switched_off(place: str, tmp_path: Path) -> None:
    """Guards case 47: a server reads no file that a client names; `file://` is no way around. What is there and what is
    not looks the same from outside."""
    file = tmp_path / "picture.png"
    file.write_bytes(encode(Image.fromarray(_PICTURE)))
    source = {"path": file, "text": str(file), "file url": file.as_uri(), "missing": str(tmp_path / "no.png")}[place]
    limits = Limits(allow_paths=False)
    with pytest.raises(ImageError, match="allow_paths"):
        load_image(source, limits=limits)
    data = file.read_bytes()
    assert load_image(data, limits=limits).digest == load_image(data_url(data), limits=limits).digest


@pytest.mark.parametrize("value", [None, 5, 1.5, object(), ["a.png"], {"image": b""}], ids=repr)
def test_other_types_are_named(value: Any) -> None:
    """Guards the message for what is no picture source at all."""
    with pytest.raises(ImageError, match=type(value).__name__):
        load_image(value)


# --- base64 ---


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


def test_bare_base64() -> None:
    """Guards base64 without a prefix: either alphabet, wrapped or not, refused by size; other texts stay paths."""
    for format_ in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"):
        data = encode(Image.fromarray(_PICTURE), format_)
        text = base64.b64encode(data).decode()
        wrapped = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
        urlsafe = base64.urlsafe_b64encode(data).decode().rstrip("=")
        images = [load_image(source) for source in (data, text, wrapped, urlsafe)]
        assert len({image.digest for image in images}) == 1
        assert images[1].name == "base64 text"
        with pytest.raises(ImageLimitError, match="max_image_bytes"):
            load_image(text, limits=Limits(max_image_bytes=len(data) - 3))
    with pytest.raises(ImageError, match=r"base64 text: .*damaged"):
        load_image(text[: len(text) // 2])
    nothing = base64.b64encode(bytes(range(100))).decode()
    for text in (nothing, "photos/" + "a" * 40, "x" * 3000):
        with pytest.raises(ImageError, match=r"no such file|can not be read") as caught:
            load_image(text)
        assert len(str(caught.value)) < 200


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
