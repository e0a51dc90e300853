"""Pixels, grids and token ids against the family's own processor in transformers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from oracle import build, noise

from vlmfast.image.load import load_image
from vlmfast.image.preprocess import preprocess
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import idefics3_plan


def _grey_level(config: PreprocessConfig) -> float:
    """One of 256 levels after (x / 255 - mean) / std, in the channel where it is largest."""
    return 1 / 255 / min(config.std) + 1e-6


SIZES = [
    (1, 1), (2, 2), (1, 2), (3, 1), (500, 19), (19, 500), (1, 3000), (4097, 10), (332, 27), (5, 640), (640, 5),
    (30, 150), (150, 30), (31, 31), (32, 32), (33, 33), (64, 64), (65, 64), (64, 65), (63, 129), (90, 90), (91, 90),
    (36, 36), (56, 56), (52, 104), (104, 52), (112, 56), (150, 75), (75, 150), (100, 99), (99, 100), (101, 17),
    (17, 101), (128, 96), (96, 128), (200, 133), (133, 200), (640, 480), (480, 641), (199, 211), (7, 9), (9, 7),
    (13, 89), (89, 13), (57, 113), (113, 57), (41, 43), (255, 256), (257, 3), (2, 257),
]  # fmt: skip


@pytest.fixture(scope="module")
def reference_pixels() -> Any:
    """reference_pixels(twin, picture) -> float32 [P, 3, S, S], the global frame last, as transformers makes them."""

    def make(twin: Any, picture: np.ndarray) -> torch.Tensor:
        from PIL import Image

        processor = twin.theirs.image_processor
        pixels = processor([[Image.fromarray(picture)]], return_tensors="pt")["pixel_values"][0]
        if pixels.ndim == 3:
            pixels = pixels[None]
        return pixels.roll(-1, 0) if twin.ours.checkpoint.preprocess.pinpoints else pixels  # theirs begin with it

    return make


def test_pixels_and_grid_match_over_many_sizes(twin: Any, reference_pixels: Any) -> None:
    """Guards case 31 (transformers 38706, 47233): another grid, another resampling or another mean than trained on."""
    config = twin.ours.checkpoint.preprocess
    wrong = []
    for width, height in SIZES:
        picture = noise(width, height)
        image = load_image(picture)
        plan = twin.ours._vision.plan(image)
        ours = preprocess(image, plan, config).pixels
        theirs = reference_pixels(twin, picture)
        if ours.shape != theirs.shape:
            wrong.append(f"{width}x{height}: {list(ours.shape)}, theirs {list(theirs.shape)}")
        elif float((ours - theirs).abs().max()) > _grey_level(config):
            wrong.append(f"{width}x{height}: pixels differ by {float((ours - theirs).abs().max())}")
        assert plan.num_tiles == len(ours)
        assert plan.grid is not None or plan.n_tokens == len(ours) * plan.tokens_per_tile
    assert not wrong, "\n".join(wrong)


def test_another_resampling_filter_is_noticed(plain_twin: Any, reference_pixels: Any) -> None:
    """Negative control: the pixel test above would see bilinear instead of Lanczos, and a single resize."""
    picture = noise(133, 200)
    image = load_image(picture)
    plan = plain_twin.ours._vision.plan(image)
    theirs = reference_pixels(plain_twin, picture)
    grey = _grey_level(plain_twin.ours.checkpoint.preprocess)
    raw = {**_raw_preprocessor(plain_twin), "resample": 2}
    bilinear = preprocess(image, plan, PreprocessConfig.from_hf(raw)).pixels
    assert float((bilinear - theirs).abs().max()) > grey
    swapped = preprocess(image, plan, plain_twin.ours.checkpoint.preprocess).pixels.flip(0)
    assert float((swapped - theirs).abs().max()) > grey


def test_ids_match_the_processor_with_odd_sizes(twin: Any) -> None:
    """Guards placeholders: separators, row/column marks and counts, for grids of every shape the sizes lead to."""
    for (width, height), seed in zip(SIZES[::4], itertools.count()):
        picture = noise(width, height, seed)
        ids = build(twin.ours, [picture], "What is in the picture?")[0].ids
        assert list(ids) == twin.theirs.inputs([picture], "What is in the picture?")["input_ids"][0].tolist(), (
            width,
            height,
        )


@pytest.mark.parametrize("text", ["What?", " two  spaces\n\nand lines\t", "ümlaut 한국어 🎉", "a\u200db", "x" * 300])
@pytest.mark.parametrize("name", ["plain", "llava", "llava_next", "llava_onevision"])
def test_ids_of_text_match_the_processor(twin_of: Any, name: str, text: str) -> None:
    """Guards the piecewise tokenizing of prompts: cutting at pictures must not change the text's own tokens."""
    twin = twin_of(name)
    pictures = [noise(40, 30), noise(200, 50)]
    for images in ([], pictures[:1], pictures):
        ids = build(twin.ours, images, text)[0].ids
        assert list(ids) == twin.theirs.inputs(images, text)["input_ids"][0].tolist()


class _SizesOnly(transformers.Idefics3ImageProcessorPil):
    """The reference processor with pixels left out: resizing returns an empty view of the new size."""

    def resize(self, image: np.ndarray, size: Any, resample: Any = None, **kwargs: Any) -> np.ndarray:
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

        height, width = size.height, size.width
        if size.longest_edge:
            height, width = get_resize_output_image_size(image, resolution_max_side=size.longest_edge)
        return np.broadcast_to(np.uint8(0), (3, height, width))


def _their_grid(width: int, height: int, longest: int, tile: int) -> tuple[int, int, int]:
    from transformers.image_utils import SizeDict

    processor = _SizesOnly()
    image = processor.resize(np.broadcast_to(np.uint8(0), (3, height, width)), SizeDict(longest_edge=longest))
    image = processor.resize_for_vision_encoder(image, tile)
    frames, rows, cols = processor.split_images(image, {"longest_edge": tile})
    return len(frames), rows, cols


_EDGES = [
    (2048, 512),
    (1536, 512),
    (1456, 364),
    (64, 32),
    (90, 32),
    (1000, 384),
    (364, 364),
    (5000, 512),
    (91, 32),
    (511, 512),
]


def _many_sizes() -> list[tuple[int, int]]:
    generator = np.random.default_rng(7)
    random = np.exp(generator.uniform(0, np.log(5000), (300, 2))).astype(int)
    edges = [
        (side + dx, side + dy) for side in (32, 64, 364, 512, 2048, 4096) for dx in (-1, 0, 1) for dy in (-1, 0, 1)
    ]
    return [*SIZES, *edges, *((int(width), int(height)) for width, height in random)]


@pytest.mark.parametrize(("longest", "tile"), _EDGES)
def test_plans_match_the_processor_over_many_sizes(longest: int, tile: int) -> None:
    """Guards the resize and split rule, for SmolVLM's and Idefics3's own sizes, and edges that are no whole tiles."""
    config = PreprocessConfig.from_hf({"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}})
    processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": tile}
    )
    sizes = _many_sizes()
    assert len(sizes) >= 300
    for width, height in sizes:
        plan = idefics3_plan(width, height, config, 64)
        ours = (plan.num_tiles, plan.rows, plan.cols)
        assert ours == _their_grid(width, height, longest, tile), (width, height)
        if longest % tile == 0 and longest <= 4096:  # elsewhere their counter disagrees with their own pixels
            patches, rows, cols = processor.get_number_of_image_patches(height, width)
            assert ours == (max(patches, 1), rows, cols), (width, height)


def _raw_preprocessor(twin: Any) -> dict[str, Any]:
    import json

    return json.loads((twin.theirs.folder / "processor_config.json").read_text())["image_processor"]
