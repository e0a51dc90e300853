"""Arrays and tensors as pictures: layouts, types, value ranges (cases.md 21, 23)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import noise
from pictures import assert_close
from PIL import Image

from vlmfast import load_image
from vlmfast.errors import ImageError
from vlmfast.image.load import is_image_source

_PICTURE = noise(31, 17)
_DIGEST = load_image(_PICTURE).digest


def test_layouts_are_one_picture() -> None:
    """Guards the order of axes: [H, W, C], [C, H, W], and strides of any kind."""
    planes = _PICTURE.transpose(2, 0, 1)
    for array in (_PICTURE, planes, np.ascontiguousarray(planes), np.asfortranarray(_PICTURE), _PICTURE[::-1][::-1]):
        assert load_image(array).digest == _DIGEST
    clear = np.dstack([_PICTURE, np.full((17, 31), 255, np.uint8)])
    assert load_image(clear.transpose(2, 0, 1)).digest == load_image(clear).digest == _DIGEST


def test_the_last_axis_counts_where_both_fit() -> None:
    array = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    assert np.array_equal(load_image(array).pixels, array)
    assert load_image(np.zeros((3, 50, 4), np.uint8)).height == 3


def test_grey_arrays() -> None:
    """Guards case 23: grey as [H, W], [H, W, 1] and [1, H, W] becomes three equal channels."""
    grey = _PICTURE[..., 0]
    flat = load_image(grey)
    assert np.array_equal(flat.pixels, np.dstack([grey] * 3))
    assert load_image(grey[..., None]).digest == load_image(grey[None]).digest == flat.digest


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
@pytest.mark.parametrize("full", [1, 255, 65535])
def test_floats_by_their_range(dtype: Any, full: int) -> None:
    """Guards case 21 for arrays: 0-1, 0-255 and 0-65535 are one picture, up to a level where float16 is coarse."""
    if dtype == np.float16 and full == 65535:
        pytest.skip("float16 ends at 65504")
    array = (_PICTURE / 255 * full).astype(dtype)
    if full == 1:
        assert array.max() > 0.9
    assert_close(load_image(array).pixels, _PICTURE, 1 if dtype == np.float16 else 0)


def test_sixteen_bits_have_the_range_of_their_type() -> None:
    """Guards dark 16-bit pictures: they are not stretched, and not cut to their low bytes."""
    assert_close(load_image(_PICTURE.astype(np.uint16) * 257).pixels, _PICTURE, 0)
    assert load_image(np.full((4, 4), 255, np.uint16)).pixels.max() == 1


@pytest.mark.parametrize("full", [1.0, 255.0, 65535.0])
def test_overshoot_is_cut_off(full: float) -> None:
    """Guards resampled floats: a value a little beyond 1.0 must not make the whole picture black."""
    array = np.linspace(-0.1 * full, 1.1 * full, 64).reshape(8, 8)
    pixels = load_image(array).pixels[..., 0].reshape(-1)
    assert pixels[0] == 0 and pixels[-1] == 255
    assert abs(int(pixels[32]) - 130) <= 2


def test_other_ranges_are_stretched() -> None:
    """Guards normalised pictures and measurements: lowest black, highest white, in proportion, colours together."""
    array = np.linspace(-1, 1, 48).reshape(4, 4, 3)
    pixels = load_image(array).pixels.reshape(-1).astype(int)
    assert pixels[0] == 0 and pixels[-1] == 255 and np.all(np.diff(pixels) >= 5)
    assert load_image(np.full((4, 4), 1e9)).pixels.max() == 0
    fine = load_image(np.linspace(1e6, 1e6 + 1, 64).reshape(8, 8)).pixels[..., 0].reshape(-1).astype(int)
    assert fine[0] == 0 and fine[-1] == 255 and np.all(np.diff(fine) >= 4)


@pytest.mark.filterwarnings("error")
def test_what_is_no_number() -> None:
    """Guards NaN and infinities: black, and the ends of the range, without a warning."""
    array = np.array([[np.nan, np.inf, -np.inf, 0.5]])
    assert load_image(array).pixels[0, :, 0].tolist() == [0, 255, 0, 128]
    assert load_image(np.full((3, 3), np.nan)).pixels.max() == 0
    assert load_image(np.full((3, 3), np.inf)).pixels.min() == 255
    assert load_image(np.array([[-1.7e308, 1.7e308]])).pixels.shape == (1, 2, 3)


def test_large_pictures_are_converted_alike_in_every_strip() -> None:
    """Guards the strips that conversion works in: their borders, one row and one column."""
    for size in ((300, 700), (1, 140_000), (70_000, 2), (65_536, 1)):
        picture = noise(*size)
        assert_close(load_image(picture.astype(np.float32) / 255).pixels, picture, 0)
        assert np.array_equal(load_image(Image.fromarray(picture)).pixels, picture)
        clear = np.dstack([picture, np.full(picture.shape[:2], 255, np.uint8)])
        assert np.array_equal(load_image(clear).pixels, picture)


@pytest.mark.parametrize(
    "make",
    [
        lambda array: torch.from_numpy(array.copy()),
        lambda array: torch.from_numpy(array.copy()).permute(2, 0, 1),
        lambda array: torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255,
        lambda array: torch.from_numpy(array.copy()).double().requires_grad_(),
        lambda array: torch.nn.Parameter(torch.from_numpy(array.copy()).float()),
    ],
    ids=["uint8 HWC", "uint8 CHW", "float CHW", "with gradient", "parameter"],
)
def test_tensors(make: Any) -> None:
    """Guards torch tensors: the same picture as the array, whatever hangs on them."""
    assert load_image(make(_PICTURE)).digest == _DIGEST


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats(dtype: torch.dtype) -> None:
    assert_close(load_image(torch.from_numpy(_PICTURE.copy()).to(dtype)).pixels, _PICTURE, 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(5, 5, 3, dtype=torch.int64), torch.zeros(2, 3, 5, 5), torch.zeros(5, 5, dtype=torch.bool),
        torch.zeros(5, 5, 3, device="meta"), torch.zeros(5, 5, 3).to_sparse(), torch.zeros(0, 5, 3),
    ],
    ids=str,
)  # fmt: skip
def test_tensors_that_are_no_picture(tensor: torch.Tensor) -> None:
    with pytest.raises(ImageError, match="tensor"):
        load_image(tensor)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 5, 3), np.uint8), np.zeros((5, 0, 3), np.uint8), np.zeros((0, 0), np.uint8),
        np.zeros((5, 5, 3), complex), np.zeros((5, 5, 3), np.int64), np.zeros((5, 5), bool),
        np.zeros((5, 5, 2), np.uint8), np.zeros((5, 5, 5), np.uint8), np.zeros((2, 5, 5), np.uint8),
        np.zeros((1, 5, 5, 3), np.uint8), np.zeros(5, np.uint8), np.zeros((), np.uint8), np.zeros((5, 5), object),
        np.zeros((0, 5, 3), np.float32), np.zeros((5, 0), np.float64),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)  # fmt: skip
def test_arrays_of_wrong_shape_or_type(array: np.ndarray) -> None:
    """Guards array input: shapes and types that stand for no picture."""
    with pytest.raises(ImageError, match="array"):
        load_image(array)


def test_one_picture_or_several() -> None:
    """Guards captioning: an array or tensor is one picture, not a row of its first axis; a list is several."""
    for value in (_PICTURE, torch.from_numpy(_PICTURE.copy()), Image.fromarray(_PICTURE), "a.png", b"x"):
        assert is_image_source(value)
    for value in ([], (), [_PICTURE], iter(()), None, 5):
        assert not is_image_source(value)
