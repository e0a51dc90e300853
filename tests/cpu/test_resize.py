"""Resampling and preprocessing against Pillow, pixel for pixel, with the compiled code and without it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import PIL
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import noise
from PIL import Image

from vlmfast.image import preprocess as preprocess_module
from vlmfast.image import resize as resize_module
from vlmfast.image.load import load_image
from vlmfast.image.preprocess import preprocess
from vlmfast.image.resize import Pixels, resize
from vlmfast_kernels.cpu.resize import why_no_resize
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan, idefics3_plan, llava_next_plan, llava_plan

_FILTERS = [Image.Resampling(number) for number in range(6)]
_SIZES = [
    ((1, 1), (64, 48)), ((1, 1), (1, 1)), ((2, 3), (1, 1)), ((640, 427), (503, 336)), ((97, 61), (97, 200)),
    ((97, 61), (31, 61)), ((500, 19), (7, 90)), ((3, 700), (340, 2)), ((1, 900), (33, 17)), ((17, 16), (16, 17)),
    ((64, 64), (63, 65)), ((15, 33), (640, 512)), ((1000, 700), (5, 3)),
]  # fmt: skip


def _by_pillow(pixels: Pixels, size: tuple[int, int], resample: int) -> Pixels:
    """Pillow's own pixels, or those of its later versions."""
    picture = Image.fromarray(pixels)
    if int(PIL.__version__.split(".")[0]) < 13 and resize_module._down_first(*picture.size, *size):
        picture = picture.resize((picture.width, size[1]), Image.Resampling(resample))
    return np.asarray(picture.resize(size, Image.Resampling(resample)))


@pytest.fixture(params=["compiled", "pillow"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in turn."""
    if request.param == "compiled" and (reason := why_no_resize()):
        pytest.skip(reason)
    if request.param == "pillow":
        for module in (resize_module, preprocess_module):
            monkeypatch.setattr(module, "resize_library", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("resample", _FILTERS)
def test_pixels_are_those_of_pillow(way: str, resample: int) -> None:
    """Guards the weights and their rounding, up and down, one side alone, and lines shorter than the filter."""
    for (width, height), size in _SIZES:
        pixels = noise(width, height)
        assert np.array_equal(resize(pixels, size, resample), _by_pillow(pixels, size, resample)), (width, height, size)


@pytest.mark.parametrize("resample", _FILTERS)
def test_a_window_is_cut_from_the_whole(way: str, resample: int) -> None:
    """Guards the pixels at a window's border, which are made of pixels beyond it."""
    for (width, height), size in _SIZES:
        pixels, whole = noise(width, height), _by_pillow(noise(width, height), size, resample)
        for left, top, right, bottom in [
            (0, 0, 1, 1),
            (size[0] - 1, size[1] - 1, *size),
            (size[0] // 3, size[1] // 4, size[0] // 3 + (size[0] + 1) // 2, size[1] // 4 + (size[1] + 1) // 2),
        ]:
            got = resize(pixels, size, resample, (left, top, right, bottom))
            assert np.array_equal(got, whole[top:bottom, left:right]), (width, height, size, left, top)


_SIDES = st.integers(1, 150)


@settings(deadline=None, max_examples=60)
@given(source=st.tuples(_SIDES, _SIDES), size=st.tuples(_SIDES, _SIDES), resample=st.sampled_from(_FILTERS))
def test_any_size_matches(source: tuple[int, int], size: tuple[int, int], resample: int) -> None:
    """As above, over sizes that nobody chose."""
    pixels = noise(*source)
    assert np.array_equal(resize(pixels, size, resample), _by_pillow(pixels, size, resample))


def test_rows_may_lie_apart(way: str) -> None:
    """Guards strides: a view into a larger picture is read where it lies."""
    pixels = noise(90, 70)[5:60, 10:80]
    assert np.array_equal(resize(pixels, (41, 37), 3), _by_pillow(np.ascontiguousarray(pixels), (41, 37), 3))


def test_a_very_long_side_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards weights by the million: Pillow scales such a picture, to the same pixels. Without a limit it shows."""
    if reason := why_no_resize():
        pytest.skip(reason)
    for pixels, size in ((noise(400_000, 1), (64, 1)), (noise(1, 400_000), (1, 64))):
        peaks = []
        for limit in (2**18, 2**40):
            monkeypatch.setattr(resize_module, "_MAX_WEIGHTS", limit)
            tracemalloc.start()
            assert np.array_equal(resize(pixels, size, 1), _by_pillow(pixels, size, 1))
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[0] < 2**23 < peaks[1]


def test_the_stride_of_a_single_pixel_does_not_matter(way: str) -> None:
    """Guards rows and columns of one pixel, which numpy gives any stride and still calls contiguous."""
    for shape, strides in (((7, 1, 3), (3, 999, 1)), ((1, 7, 3), (999, 3, 1)), ((1, 1, 3), (55, 77, 1))):
        pixels = np.lib.stride_tricks.as_strided(noise(7, 1), shape, strides)
        assert pixels.flags.c_contiguous
        for size in ((5, 4), (1, 9), (9, 1)):
            assert np.array_equal(resize(pixels, size, 3), _by_pillow(pixels.copy(), size, 3))


def test_other_weights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a cubic of another sharpness (a = -3/4, that of OpenCV) does not pass as Pillow's."""
    if reason := why_no_resize():
        pytest.skip(reason)

    def sharper(x: np.ndarray) -> np.ndarray:
        x = np.abs(x)
        inner, outer = (1.25 * x - 2.25) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.75
        return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))

    pixels = noise(64, 48)
    assert np.array_equal(resize(pixels, (50, 90), 3), _by_pillow(pixels, (50, 90), 3))
    monkeypatch.setitem(resize_module._FILTERS, 3, (sharper, 2.0))
    assert not np.array_equal(resize(pixels, (50, 90), 3), _by_pillow(pixels, (50, 90), 3))


def _config(model_type: str, **settings_: object) -> PreprocessConfig:
    raw = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "size": {"shortest_edge": 28}}
    return PreprocessConfig.from_hf({**raw, "crop_size": 28, **settings_}, model_type=model_type)


def _plans(width: int, height: int) -> list[tuple[TilePlan, PreprocessConfig]]:
    idefics = _config("idefics3", size={"longest_edge": 90}, max_image_size={"longest_edge": 32})
    llava = _config("llava")
    narrow = _config("llava", size={"shortest_edge": 20})
    square = _config("llava", do_pad=True, image_processor_type="LlavaImageProcessor")
    pinpoints = [[28 * rows, 28 * cols] for rows in range(1, 4) for cols in range(1, 4)]
    tiled = _config("llava_onevision", image_grid_pinpoints=pinpoints)
    return [
        (idefics3_plan(width, height, idefics, 4), idefics),
        *((llava_plan(width, height, config, 4), config) for config in (llava, narrow, square)),
        (llava_next_plan(width, height, tiled, 49, patches_per_side=7), tiled),
    ]


def _with_pillow_alone(pixels: Pixels, plan: TilePlan, config: PreprocessConfig) -> torch.Tensor:
    """What `preprocess` promises, step by step on whole pictures."""
    filter_ = Image.Resampling(config.resample)
    source = Image.fromarray(pixels)
    if plan.squared:
        side = max(source.size)
        square = Image.new("RGB", (side, side), config.mean_colour)
        square.paste(source, ((side - source.width) // 2, (side - source.height) // 2))
        source = square
    canvas = Image.fromarray(_by_pillow(np.asarray(source), plan.resized, filter_))
    if plan.offset is None:
        canvas = Image.fromarray(_by_pillow(np.asarray(canvas), plan.canvas, filter_))
    else:
        left, top = -plan.offset[0], -plan.offset[1]
        canvas = canvas.crop((left, top, left + plan.canvas[0], top + plan.canvas[1]))
    side = plan.tile_size
    boxes = [(side * col, side * row) for row in range(plan.rows) for col in range(plan.cols)]
    frames = [canvas.crop((x, y, x + side, y + side)) for x, y in boxes]
    whole = canvas if plan.offset is None else source
    frames.append(Image.fromarray(_by_pillow(np.asarray(whole), (side, side), filter_)) if boxes else canvas)
    levels = np.stack([np.asarray(frame) for frame in frames]).astype(np.float32)
    scale = (config.rescale_factor / np.asarray(config.std)).astype(np.float32)
    shift = (-np.asarray(config.mean) / np.asarray(config.std)).astype(np.float32)
    return torch.from_numpy((levels * scale + shift).transpose(0, 3, 1, 2))


def test_tiles_are_bit_for_bit_those_of_whole_pictures(way: str) -> None:
    """Guards what is not computed: a middle cut out, borders left black, a square's border, one frame or many."""
    for width, height in [(1, 1), (40, 30), (30, 40), (33, 31), (28, 28), (150, 20), (9, 120), (200, 199)]:
        pixels = noise(width, height)
        for plan, config in _plans(width, height):
            got = preprocess(load_image(pixels), plan, config).pixels
            assert torch.equal(got, _with_pillow_alone(pixels, plan, config)), (width, height, plan)
