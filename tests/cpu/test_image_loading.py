"""Every kind of picture source and file, and what is refused: cases.md 1-2, 7, 19-22, 24-25, 27-29."""

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
from PIL import Image

from vlmfast import Limits, load_image
from vlmfast.errors import ImageError, ImageLimitError

_PICTURE = noise(31, 17)


def _encode(picture: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, format_, **options)
    return out.getvalue()


def _data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _close(got: np.ndarray, expected: Any, tolerance: int = 2) -> None:
    assert int(np.abs(got.astype(int) - np.asarray(expected, int)).max()) <= tolerance


# --- the same picture by every door ---


def test_every_source_gives_the_same_digest(tmp_path: Path) -> None:
    """Guards identity by content: path, string, bytes, data URL, PIL, array and a loaded picture are one picture."""
    picture = Image.fromarray(_PICTURE)
    data = _encode(picture)
    file = tmp_path / "picture with no ending"
    file.write_bytes(data)
    padded = np.zeros((17, 62, 3), np.uint8)
    padded[:, ::2] = _PICTURE
    sources = [
        file, str(file), data, bytearray(data), memoryview(data), _data_url(data), _data_url(data, "text/plain"),
        picture, Image.open(io.BytesIO(data)), _PICTURE, padded[:, ::2], np.asfortranarray(_PICTURE),
        np.dstack([_PICTURE, np.full((17, 31), 255, np.uint8)]), picture.convert("RGBA"),
        _encode(picture, "BMP"), _encode(picture, "WEBP", lossless=True),
    ]  # fmt: skip
    loaded = [load_image(source) for source in sources]
    assert {image.digest for image in loaded} == {loaded[0].digest}
    assert all(np.array_equal(image.pixels, _PICTURE) for image in loaded)
    assert load_image(loaded[0]) is loaded[0]
    assert (loaded[0].width, loaded[0].height) == (31, 17)
    assert loaded[0].name == str(file)


def test_loaded_pixels_can_not_be_written_to_and_are_a_copy() -> None:
    """Guards the digest: neither the caller's array nor the loaded one can change under it."""
    source = _PICTURE.copy()
    image = load_image(source)
    source[:] = 0
    assert np.array_equal(image.pixels, _PICTURE)
    with pytest.raises(ValueError, match="read-only"):
        image.pixels[0, 0] = 1


def test_a_file_overwritten_is_loaded_anew(tmp_path: Path) -> None:
    """Guards case 6: a path is never identity."""
    file = tmp_path / "picture.png"
    file.write_bytes(_encode(Image.fromarray(_PICTURE)))
    first = load_image(file)
    file.write_bytes(_encode(Image.fromarray(_PICTURE[::-1])))
    assert load_image(file).digest != first.digest


# --- pairs that must differ ---


def test_equal_bytes_of_other_sizes_differ() -> None:
    """Guards case 1 (vllm 17378): 30x150 and 150x30 of the same bytes."""
    values = np.arange(30 * 150 * 3, dtype=np.uint32).astype(np.uint8)
    assert load_image(values.reshape(150, 30, 3)).digest != load_image(values.reshape(30, 150, 3)).digest


def test_palettes_and_flattening_are_part_of_identity() -> None:
    """Guards cases 2 and 7: same indices with another palette; same colours under another alpha."""
    indices = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) % 4, "P")
    digests = set()
    for palette in ([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255], [9, 9, 9, 0, 255, 0, 255, 0, 0, 0, 0, 255]):
        coloured = indices.copy()
        coloured.putpalette(palette)
        digests.add(load_image(_encode(coloured)).digest)
    assert len(digests) == 2
    half = np.dstack([_PICTURE, np.full((17, 31), 128, np.uint8)])
    assert load_image(half).digest != load_image(_PICTURE).digest


# --- orientation ---

_TURNS = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
"""EXIF orientation -> the PIL transpose that makes the stored picture of the upright one."""


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("door", ["path", "bytes", "data url", "pil"])
def test_exif_orientation_is_applied(orientation: int, door: str, tmp_path: Path) -> None:
    """Guards case 19 (llama.cpp 20870): every orientation comes out upright by every door."""
    upright = Image.new("RGB", (24, 10), (200, 200, 200))
    upright.paste((255, 0, 0), (0, 0, 12, 5))  # red: top left
    upright.paste((0, 0, 255), (12, 5, 24, 10))  # blue: bottom right
    method = _TURNS[orientation]
    stored = upright if method is None else upright.transpose(Image.Transpose(method))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = _encode(stored, "PNG", exif=exif)
    file = tmp_path / "turned.png"
    file.write_bytes(data)
    source = {"path": file, "bytes": data, "data url": _data_url(data), "pil": Image.open(io.BytesIO(data))}[door]
    image = load_image(source)
    assert (image.width, image.height) == (24, 10)
    assert np.array_equal(image.pixels, np.asarray(upright))


def test_orientation_of_a_jpeg() -> None:
    """Guards the usual camera file."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = load_image(_encode(Image.fromarray(_PICTURE), "JPEG", exif=exif))
    assert (image.width, image.height) == (17, 31)


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0" + b"\xff" * 40, b"MM"])
def test_malformed_exif_is_ignored(exif: bytes) -> None:
    """Guards case 19: the pixels of a file with broken EXIF are still good."""
    image = load_image(_encode(Image.fromarray(_PICTURE), "PNG", exif=exif))
    assert np.array_equal(image.pixels, _PICTURE)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_orientations_that_do_not_exist_are_ignored(value: int) -> None:
    """Guards orientation values outside 1-8."""
    exif = Image.Exif()
    exif[0x0112] = value
    assert np.array_equal(load_image(_encode(Image.fromarray(_PICTURE), "PNG", exif=exif)).pixels, _PICTURE)


# --- alpha ---


def _half_transparent() -> dict[str, Image.Image]:
    """4x2 pictures of dark pixels, in each mode with alpha: left half transparent, right half opaque."""
    alpha = np.zeros((2, 4), np.uint8)
    alpha[:, 2:] = 255
    dark = np.full((2, 4), 10, np.uint8)
    palette = Image.fromarray((alpha > 0).astype(np.uint8), "P")
    palette.putpalette([10, 10, 10, 11, 11, 11])
    with_alpha = palette.convert("PA")
    with_alpha.putalpha(Image.fromarray(alpha))
    return {
        "RGBA": Image.fromarray(np.dstack([dark, dark, dark, alpha])),
        "LA": Image.merge("LA", [Image.fromarray(dark), Image.fromarray(alpha)]),
        "PA": with_alpha,
        "P": palette,
        "L": Image.fromarray(np.where(alpha > 0, 10, 7).astype(np.uint8)),
        "RGB": Image.fromarray(np.dstack([np.where(alpha > 0, 10, 7).astype(np.uint8)] * 3)),
    }


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "L", "RGB"])
@pytest.mark.parametrize("door", ["file", "pil"])
def test_alpha_is_flattened_on_white(mode: str, door: str) -> None:
    """Guards case 20 (hermes-agent 64548): transparent parts are white, in every mode that has them."""
    picture = _half_transparent()[mode]
    key = {"P": 0, "L": 7, "RGB": (7, 7, 7)}.get(mode)
    if mode == "PA":
        if door == "file":
            pytest.skip("no file format that Pillow writes holds PA")
        source: Any = picture
    else:
        data = _encode(picture) if key is None else _encode(picture, transparency=key)
        source = data if door == "file" else Image.open(io.BytesIO(data))
    pixels = load_image(source).pixels
    assert pixels[:, :2].min() == 255
    assert pixels[:, 2:].max() <= 11


def test_16_bit_grey_with_a_transparent_value() -> None:
    """Guards tRNS of 16-bit greys: the value named there is white, whatever it is."""
    values = np.array([[5, 20000, 5, 40000]], np.uint16)
    pixels = load_image(_encode(Image.fromarray(values), transparency=5)).pixels[0, :, 0]
    assert pixels.tolist() == [255, 78, 255, 156]


def test_half_alpha_mixes_with_white() -> None:
    """Guards the mixture itself: black at half alpha is middle grey."""
    grey = np.zeros((3, 3, 4), np.uint8)
    grey[..., 3] = 128
    _close(load_image(grey).pixels, 127)


# --- depths and colour spaces ---


def test_16_bit_ramp_keeps_256_levels() -> None:
    """Guards case 21 (unsloth 10094): clipping a 16-bit ramp left two levels."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for source in (_encode(Image.fromarray(ramp)), _encode(Image.fromarray(ramp), "TIFF"), Image.fromarray(ramp)):
        pixels = load_image(source).pixels
        assert len(np.unique(pixels)) == 256
        assert (pixels[0, 0] == 0).all() and (pixels[-1, -1] == 255).all()
        assert np.all(np.diff(pixels[..., 0].reshape(-1).astype(int)) >= 0)


@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [
        ("I", 0, 255), ("I", 0, 65535), ("I", -5, 2_000_000), ("I", 3, 3), ("F", 0.0, 1.0), ("F", 0.0, 255.0),
        ("F", -1e30, 1e30), ("F", 0.0, 0.0), ("F", 0.0, 3e38),
    ],
)  # fmt: skip
def test_wide_greys_never_raise_by_mode(mode: str, low: float, high: float) -> None:
    """Guards case 21: 32-bit and float greys become 8 bits by their range, dark to bright."""
    values = np.linspace(low, high, 64).reshape(8, 8).astype(np.int32 if mode == "I" else np.float32)
    picture = Image.fromarray(values)
    assert picture.mode == mode
    pixels = load_image(picture).pixels
    assert pixels.shape == (8, 8, 3)
    assert np.all(np.diff(pixels[..., 0].reshape(-1).astype(int)) >= 0)
    if high > low:
        assert pixels.min() <= 3 and pixels.max() >= 252


@pytest.mark.filterwarnings("error")
def test_floats_that_are_no_numbers() -> None:
    """Guards NaN and infinities in float pictures: finite pixels keep their place, the others become ends of it."""
    values = np.array([[0.0, 1.0, np.nan, np.inf, -np.inf, 0.5]], np.float32)
    pixels = load_image(Image.fromarray(values)).pixels[0, :, 0].astype(int)
    assert pixels[0] == 0 and pixels[1] == 255 and abs(pixels[5] - 128) <= 1
    assert pixels[3] == 255 and pixels[4] == 0


def test_cmyk_jpeg_has_right_colours() -> None:
    """Guards case 22 (ms-swift 697): inverted or swapped inks."""
    picture = Image.new("RGB", (32, 16), (220, 30, 40))
    picture.paste((20, 60, 230), (16, 0, 32, 16))
    pixels = load_image(_encode(picture.convert("CMYK"), "JPEG", quality=98)).pixels
    _close(pixels[4, 4], (220, 30, 40), 12)
    _close(pixels[4, 28], (20, 60, 230), 12)


@pytest.mark.parametrize("mode", ["1", "L", "P", "YCbCr", "HSV", "LAB", "RGBX", "RGBa", "La", "CMYK"])
def test_every_pillow_mode_loads_or_is_refused_clearly(mode: str) -> None:
    """Guards rare modes handed in as PIL pictures: an answer, or an error of ours."""
    try:
        image = load_image(Image.new(mode, (5, 4)))
    except ImageError as error:
        assert mode in ("LAB", "La"), f"{mode} should load"
        assert "PIL image" in str(error)
    else:
        assert image.pixels.shape == (4, 5, 3)


@pytest.mark.parametrize("format_", ["GIF", "PNG", "WEBP"])
def test_animations_show_their_first_frame(format_: str) -> None:
    """Guards case 28: GIF, APNG and WebP give the first frame."""
    frames = [Image.new("RGB", (9, 9), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format_ == "WEBP" else {}
    data = _encode(frames[0], format_, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as picture:
        assert getattr(picture, "n_frames", 1) == 3
    _close(load_image(data).pixels, (255, 0, 0))


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (500, 19), (332, 27), (1, 3000)], ids=str)
def test_small_and_long_pictures_load(size: tuple[int, int]) -> None:
    """Guards case 25."""
    image = load_image(_encode(Image.fromarray(noise(*size))))
    assert (image.width, image.height) == size


# --- refusals ---


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
    data = _encode(Image.fromarray(noise(40, 30)))
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
    data = _encode(Image.fromarray(_PICTURE))
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
    data = _encode(Image.fromarray(_PICTURE))
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    limits = Limits(max_image_bytes=len(data) - 1)
    for source in (file, data, _data_url(data)):
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
        pytest.param(_cut(_encode(Image.fromarray(noise(90, 90)), "JPEG")), id="cut jpeg"),
        pytest.param(_cut(_encode(Image.fromarray(noise(90, 90)))), id="cut png"),
        pytest.param(_cut(_encode(Image.fromarray(noise(90, 90)), "WEBP")), id="cut webp"),
        pytest.param(_cut(_encode(Image.fromarray(noise(90, 90)), "GIF")), id="cut gif"),
        pytest.param(_encode(Image.fromarray(noise(90, 90)), "JPEG")[:40], id="jpeg header"),
        pytest.param(_broken_chunk(_encode(Image.fromarray(noise(90, 90)))), id="broken chunk"),
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
    data = _encode(Image.fromarray(noise(24, 16)), format_, **exif)
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
    data = _cut(_encode(Image.fromarray(noise(90, 90)), "JPEG"))
    with pytest.raises(ImageError, match="PIL image"):
        load_image(Image.open(io.BytesIO(data)))


def test_a_closed_pil_picture() -> None:
    """Guards PIL pictures whose file is closed already."""
    picture = Image.open(io.BytesIO(_encode(Image.fromarray(_PICTURE))))
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


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "https://example.com/a.png", "file:///etc/passwd", "S3://b/k"])
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
        data = _encode(Image.fromarray(noise(31 + extra, 17)))
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
