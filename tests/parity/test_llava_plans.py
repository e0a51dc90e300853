"""Sizes, grids and token counts of the LLaVA families against transformers' processors, over many sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import ChannelDimension
from transformers.models.llava_next.modeling_llava_next import unpad_image

from vlmfast_models.config import PreprocessConfig
from vlmfast_models.errors import GeometryError
from vlmfast_models.geometry import llava_next_plan, llava_plan

_PROCESSORS = {
    "llava_next": transformers.LlavaNextProcessor,
    "llava_onevision": transformers.LlavaOnevisionProcessor,
}
_NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_ONEVISION = [[384 * rows, 384 * cols] for rows in range(1, 7) for cols in range(1, 7)]


def _sizes() -> list[tuple[int, int]]:
    generator = np.random.default_rng(11)
    random = np.exp(generator.uniform(0, np.log(6000), (300, 2))).astype(int)
    near = [(side + dx, side + dy) for side in (336, 384, 672, 1152) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
    odd = [(1, 1), (1, 2), (2, 1), (1, 3000), (3000, 1), (7, 3001), (20_000, 30), (30, 20_000), (500, 19), (332, 27)]
    rounding = [(55, 88), (176, 55), (110, 352), (198, 176), (861, 328)]  # 24 patches come out as 23.999999999
    return [*odd, *near, *rounding, *((int(width), int(height)) for width, height in random)]


def _config(model_type: str, side: int, **settings: Any) -> PreprocessConfig:
    raw = {"size": {"shortest_edge": side}, "crop_size": side, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return PreprocessConfig.from_hf({**raw, **settings}, model_type=model_type)


def _empty(width: int, height: int) -> np.ndarray:
    """A picture of this size without memory, [3, H, W]."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


@pytest.mark.parametrize(
    ("model_type", "side", "patches", "pinpoints", "most"),
    [
        ("llava_next", 336, 24, _NEXT, None),
        ("llava_next", 336, 24, [[336, 336], [1344, 336], [336, 1344], [2016, 672]], None),
        ("llava_onevision", 384, 27, _ONEVISION, 9),
        ("llava_onevision", 384, 27, _ONEVISION, 1),
        ("llava_onevision", 28, 7, [[28 * rows, 28 * cols] for rows in range(1, 4) for cols in range(1, 4)], 3),
    ],
)
def test_next_plans_match(
    model_type: str, side: int, patches: int, pinpoints: list[list[int]], most: int | None
) -> None:
    """Guards canvas, fit, unpadding, pooling and the count of tokens, one picture at a time."""
    config = _config(model_type, side, image_grid_pinpoints=pinpoints)
    processor = object.__new__(_PROCESSORS[model_type])
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
    processor.patch_size, processor.num_additional_image_tokens = side // patches, 0
    processor.num_image_tokens, processor.vision_aspect_ratio = patches**2, f"anyres_max_{most}"
    wrong = []
    for width, height in _sizes():
        plan = llava_next_plan(width, height, config, patches**2, patches_per_side=patches, max_grid_tiles=most)
        best = select_best_resolution((height, width), pinpoints)
        fitted = get_patch_output_size(_empty(width, height), best, input_data_format=ChannelDimension.FIRST)
        tokens = processor._get_number_of_features(height, width, side, side)
        if (plan.canvas[::-1], plan.resized[::-1], plan.n_tokens) != (tuple(best), fitted, tokens):
            wrong.append(f"{width}x{height}: {plan}, theirs {best} {fitted} {tokens}")
        # A grid that numbers its own patches: what is left of it says which ones are kept.
        grid = np.arange(plan.rows * plan.cols * patches**2).reshape(1, plan.rows * patches, plan.cols * patches)
        left, top, right, bottom = plan.kept or (0, 0, 0, 0)
        if not np.array_equal(grid[:, top:bottom, left:right], unpad_image(grid, (height, width))):
            wrong.append(f"{width}x{height}: keeps {plan.kept}")
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.parametrize(("shortest", "crop"), [(336, 336), (224, 336), (30, 28), (29, 28)])
def test_llava_plans_match(shortest: int, crop: int) -> None:
    """Guards the resize by the shortest edge and the cut of the middle."""
    config = _config("llava", crop, size={"shortest_edge": shortest})
    for width, height in _sizes():
        if max(width, height) / min(width, height) > 500:
            continue
        plan = llava_plan(width, height, config, 576)
        theirs = get_resize_output_image_size(
            _empty(width, height), shortest, default_to_square=False, input_data_format=ChannelDimension.FIRST
        )
        assert plan.resized[::-1] == theirs and plan.canvas == (crop, crop) and plan.n_tokens == 576, (width, height)


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_extreme_ratios_are_refused_or_planned(size: tuple[int, int]) -> None:
    """Guards case 26 (oMLX 3529): what would fill the memory is refused from its size, the rest is small."""
    with pytest.raises(GeometryError, match=r"60000.*too long and narrow.*cut it into parts"):
        llava_plan(*size, _config("llava", 336), 576)
    with pytest.raises(GeometryError, match="puts it on a square"):
        llava_plan(*size, _config("llava", 336, do_pad=True, image_processor_type="LlavaImageProcessor"), 576)
    config = _config("llava_onevision", 384, image_grid_pinpoints=_ONEVISION)
    plan = llava_next_plan(*size, config, 729, patches_per_side=27, max_grid_tiles=9)
    assert plan.resized[0] * plan.resized[1] <= 2304**2 and plan.n_tokens <= 729 + 9 * 900
    with pytest.raises(GeometryError, match="puts it on a square"):
        llava_next_plan(*size, config, 729, patches_per_side=27, max_grid_tiles=9, num_images=2)


@pytest.mark.parametrize(("width", "height"), [(0, 1), (1, 0), (-1, 5)])
def test_sides_below_one_are_refused(width: int, height: int) -> None:
    """Guards sizes that no picture has, in both rules."""
    config = _config("llava_next", 336, image_grid_pinpoints=_NEXT)
    with pytest.raises(GeometryError, match=f"{width}x{height}"):
        llava_plan(width, height, _config("llava", 336), 576)
    with pytest.raises(GeometryError, match=f"{width}x{height}"):
        llava_next_plan(width, height, config, 576, patches_per_side=24)
