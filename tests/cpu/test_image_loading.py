"""Every kind of picture source and file, upright and in RGB: cases.md 1-2, 6-7, 19-23, 25, 28."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import noise
from pictures import assert_close, data_url, encode
from PIL import Image

from vlmfast import Limits, load_image
from vlmfast.errors import ImageError, ImageLimitError, InputError
from vlmfast.image.known import PictureFacts
from vlmfast.image.load import load_images

_PICTURE = noise(31, 17)


# --- the same picture by every door ---


def test_every_source_gives_the_same_digest(tmp_path: Path) -> None:
    """Guards identity by content: path, string, bytes, data URL, PIL, array and a loaded picture are one picture."""
    picture = Image.fromarray(_PICTURE)
    data = encode(picture)
    file = tmp_path / "picture with no ending"
    file.write_bytes(data)
    padded = np.zeros((17, 62, 3), np.uint8)
    padded[:, ::2] = _PICTURE
    sources = [
        file, str(file), file.as_uri(), file.as_uri().replace("file://", "FILE://localhost"), data, bytearray(data),
        memoryview(data), io.BytesIO(data), data_url(data), data_url(data, "text/plain"),
        base64.b64encode(data).decode(), "\n" + base64.encodebytes(data).decode(),
        picture, Image.open(io.BytesIO(data)), _PICTURE, padded[:, ::2], np.asfortranarray(_PICTURE),
        np.dstack([_PICTURE, np.full((17, 31), 255, np.uint8)]), picture.convert("RGBA"),
        encode(picture, "BMP"), encode(picture, "WEBP", lossless=True),
    ]  # fmt: skip
    loaded = [load_image(source) for source in sources]
    assert {image.digest for image in loaded} == {loaded[0].digest}
    assert all(np.array_equal(image.pixels, _PICTURE) for image in loaded)
    assert load_image(loaded[0]) is loaded[0]
    assert (loaded[0].width, loaded[0].height) == (31, 17)
    assert loaded[0].name == loaded[2].name == str(file)


def test_a_jpeg_has_one_digest(tmp_path: Path) -> None:
    """Guards lossy files: one decoder by every door, also for a PIL picture that Pillow opened by itself."""
    data = encode(Image.fromarray(_PICTURE), "JPEG", quality=70)
    file = tmp_path / "photo.jpg"
    file.write_bytes(data)
    with file.open("rb") as opened, Image.open(file) as picture:
        sources = [data, file, opened, picture, data_url(data), base64.b64encode(data).decode(), file.as_uri()]
        assert len({load_image(source).digest for source in sources}) == 1


def test_file_objects(tmp_path: Path) -> None:
    """Guards files open for reading: read from their start where they can seek, in pieces where reads are short."""

    class Pipe:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def read(self, num_bytes: int) -> bytes:
            piece, self.data = self.data[: min(num_bytes, 7)], self.data[min(num_bytes, 7) :]
            return piece

    data = encode(Image.fromarray(_PICTURE))
    written = io.BytesIO()
    written.write(data)  # stands at its end
    assert load_image(written).digest == load_image(Pipe(data)).digest == load_image(data).digest
    assert load_image(Pipe(data)).name == "file object"
    with pytest.raises(ImageLimitError, match="max_image_bytes"):
        load_image(Pipe(data), limits=Limits(max_image_bytes=len(data) - 1))
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    with file.open("rb") as opened:
        assert load_image(opened).name == str(file)
    with pytest.raises(ImageError, match=r"picture\.png: can not be read: .*closed"):
        load_image(opened)
    with file.open(encoding="latin-1") as text, pytest.raises(ImageError, match="mode 'rb'"):
        load_image(text)


def test_file_urls(tmp_path: Path) -> None:
    """Guards names that a URL has to write otherwise."""
    file = tmp_path / "a b%20ü#?.png"
    file.write_bytes(encode(Image.fromarray(_PICTURE)))
    assert load_image(file.as_uri()).digest == load_image(str(file)).digest
    with pytest.raises(ImageError, match="of another machine"):
        load_image("file://elsewhere/picture.png")
    with pytest.raises(ImageError, match="no such file"):
        load_image("file:///no/such.png")


def test_a_path_that_could_be_base64_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = base64.b64encode(encode(Image.fromarray(_PICTURE[:2, :2]))).decode().replace("/", "_").rstrip("=")
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(encode(Image.fromarray(_PICTURE)))
    assert load_image(name).width == 31


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
    file.write_bytes(encode(Image.fromarray(_PICTURE)))
    first = load_image(file)
    file.write_bytes(encode(Image.fromarray(_PICTURE[::-1])))
    assert load_image(file).digest != first.digest


class _Memory(dict[str, PictureFacts]):
    """Remembers pictures by what they were encoded as."""

    def recall(self, key: str) -> PictureFacts | None:
        return self.get(key)

    def remember(self, key: str, facts: PictureFacts) -> None:
        self[key] = facts


def test_known_pictures_are_decoded_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the memory of encoded bytes: no decoding on a hit, the same pixels later; what the call decides is part of
    the key; limits hold for known pictures, too."""
    known = _Memory()
    data = encode(Image.fromarray(np.dstack([_PICTURE, np.full((17, 31), 9, np.uint8)])))
    first = load_image(data, known=known)
    other = load_image(data, known=known, background=(0, 0, 0))
    assert other.digest != first.digest and len(known) == 2
    load_image(data, known=known, limits=Limits(allow_truncated=True))
    load_image(data, known=known, limits=Limits(formats=("PNG",)))
    assert len(known) == 4
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", None)
        again = load_image(data_url(data), known=known)
        assert (again.digest, again.width, again.height) == (first.digest, 31, 17)
        with pytest.raises(ImageLimitError, match="max_image_pixels"):
            load_image(data, known=known, limits=Limits(max_image_pixels=5))
        with pytest.raises(ImageLimitError, match="max_decoded_bytes"):
            load_images([data, data], known=known, limits=Limits(max_decoded_bytes=31 * 17 * 3))
    assert np.array_equal(again.pixels, first.pixels)


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
        digests.add(load_image(encode(coloured)).digest)
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
    data = encode(stored, "PNG", exif=exif)
    file = tmp_path / "turned.png"
    file.write_bytes(data)
    source = {"path": file, "bytes": data, "data url": data_url(data), "pil": Image.open(io.BytesIO(data))}[door]
    image = load_image(source)
    assert (image.width, image.height) == (24, 10)
    assert np.array_equal(image.pixels, np.asarray(upright))


def test_orientation_of_a_jpeg() -> None:
    """Guards the usual camera file."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = load_image(encode(Image.fromarray(_PICTURE), "JPEG", exif=exif))
    assert (image.width, image.height) == (17, 31)


@pytest.mark.parametrize(
    "exif", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0" + b"\xff" * 40, b"MM"]
)
def test_malformed_exif_is_ignored(exif: bytes) -> None:
    """Guards case 19: the pixels of a file with broken EXIF are still good."""
    image = load_image(encode(Image.fromarray(_PICTURE), "PNG", exif=exif))
    assert np.array_equal(image.pixels, _PICTURE)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_orientations_that_do_not_exist_are_ignored(value: int) -> None:
    """Guards orientation values outside 1-8."""
    exif = Image.Exif()
    exif[0x0112] = value
    assert np.array_equal(load_image(encode(Image.fromarray(_PICTURE), "PNG", exif=exif)).pixels, _PICTURE)


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
        data = encode(picture) if key is None else encode(picture, transparency=key)
        source = data if door == "file" else Image.open(io.BytesIO(data))
    pixels = load_image(source).pixels
    assert pixels[:, :2].min() == 255
    assert pixels[:, 2:].max() <= 11


def test_16_bit_grey_with_a_transparent_value() -> None:
    """Guards tRNS of 16-bit greys: the value named there is white, whatever it is."""
    values = np.array([[5, 20000, 5, 40000]], np.uint16)
    pixels = load_image(encode(Image.fromarray(values), transparency=5)).pixels[0, :, 0]
    assert pixels.tolist() == [255, 78, 255, 156]


def test_alpha_on_another_colour() -> None:
    """Guards the option for the colour, in files, arrays and 16-bit greys; the colour is part of identity (case 2)."""
    clear = np.zeros((3, 3, 4), np.uint8)
    wide = encode(Image.fromarray(np.array([[5, 20000]], np.uint16)), transparency=5)
    for source in (clear, encode(Image.fromarray(clear)), Image.fromarray(clear), wide):
        image = load_image(source, background=(10, 200, 30))
        assert image.pixels[0, 0].tolist() == [10, 200, 30]
        assert image.digest != load_image(source).digest
    (several,) = load_images([clear], background=(10, 200, 30))
    assert several.pixels[0, 0].tolist() == [10, 200, 30]
    for colour in ((1, 2), (1, 2, 256), (-1, 0, 0), "red", None, 5):
        with pytest.raises(InputError, match="background must be three numbers"):
            load_image(clear, background=colour)  # type: ignore[arg-type]


def test_half_alpha_mixes_with_white() -> None:
    """Guards the mixture itself: black at half alpha is middle grey."""
    grey = np.zeros((3, 3, 4), np.uint8)
    grey[..., 3] = 128
    assert_close(load_image(grey).pixels, 127)


# --- depths and colour spaces ---


def test_16_bit_ramp_keeps_256_levels() -> None:
    """Guards case 21 (unsloth 10094): clipping a 16-bit ramp left two levels."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for source in (encode(Image.fromarray(ramp)), encode(Image.fromarray(ramp), "TIFF"), Image.fromarray(ramp)):
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
    pixels = load_image(encode(picture.convert("CMYK"), "JPEG", quality=98)).pixels
    assert_close(pixels[4, 4], (220, 30, 40), 12)
    assert_close(pixels[4, 28], (20, 60, 230), 12)


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


def test_heic_photographs() -> None:
    """Guards photographs of phones, where the package that reads them is installed."""
    heif = pytest.importorskip("pillow_heif")
    out = io.BytesIO()
    heif.from_pillow(Image.new("RGB", (64, 48), (200, 60, 30))).save(out, quality=90)
    image = load_image(out.getvalue())
    assert (image.width, image.height) == (64, 48)
    assert_close(image.pixels, (200, 60, 30), 6)


@pytest.mark.parametrize("format_", ["GIF", "PNG", "WEBP"])
def test_animations_show_their_first_frame(format_: str) -> None:
    """Guards case 28: GIF, APNG and WebP give the first frame."""
    frames = [Image.new("RGB", (9, 9), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format_ == "WEBP" else {}
    data = encode(frames[0], format_, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as picture:
        assert getattr(picture, "n_frames", 1) == 3
    assert_close(load_image(data).pixels, (255, 0, 0))


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (500, 19), (332, 27), (1, 3000)], ids=str)
def test_small_and_long_pictures_load(size: tuple[int, int]) -> None:
    """Guards case 25."""
    image = load_image(encode(Image.fromarray(noise(*size))))
    assert (image.width, image.height) == size
