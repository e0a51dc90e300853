"""Resolution by need: which plan a picture gets, and that its score sees text and not noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from vlmfast.errors import OptionError
from vlmfast.image.complexity import detail_lost
from vlmfast.image.load import load_image
from vlmfast.image.resolution import LOSS_ALLOWED, choose_plan
from vlmfast.options import Resolution, Vision
from vlmfast.train.render import render
from vlmfast.train.scenes import PAGES, POCKET, Split, Style, sample_scene
from vlmfast.train.shape import POCKET_SIZE, preprocessor_config
from vlmfast.vlm import VLM
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.families.idefics3 import Idefics3
from vlmfast_models.families.llava import Llava
from vlmfast_models.families.llava_next import LlavaNext
from vlmfast_models.geometry import TilePlan, idefics3_plan

TILE = 128


def preprocess_config(longest: int = 4 * TILE) -> PreprocessConfig:
    return PreprocessConfig.from_hf(
        {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": TILE}, "image_mean": [0.5] * 3,
         "image_std": [0.5] * 3, "resample": 1, "do_image_splitting": True, "rescale_factor": 1 / 255},
        model_type="idefics3",
    )  # fmt: skip


def plans_of(width: int, height: int) -> list[TilePlan]:
    return [idefics3_plan(width, height, level, 16) for level in Idefics3.levels(preprocess_config())]


def plain(side: int = 512) -> Image.Image:
    picture = Image.new("RGB", (4 * side, 4 * side), (40, 90, 200))
    ImageDraw.Draw(picture).ellipse((side, side, 2 * side, 2 * side), fill=(230, 200, 40))
    return picture.resize((side, side), Image.Resampling.LANCZOS)


def small_text(side: int = 512) -> Image.Image:
    picture = Image.new("RGB", (side, side), (250, 250, 250))
    ImageDraw.Draw(picture).text(
        (60, 200), "Terms and conditions apply to all", font=ImageFont.load_default(14), fill=0
    )
    return picture


def test_levels_rise_to_the_checkpoints_own() -> None:
    config = preprocess_config()
    assert Idefics3.levels(config)[-1] == config
    assert [plan.num_tiles for plan in plans_of(500, 500)] == [1, 5, 10, 17]
    assert Llava.levels(config) == (config,)


def test_pinpoints_of_few_tiles_come_first() -> None:
    sizes = ((336, 672), (672, 336), (672, 672), (1008, 336))
    levels = LlavaNext.levels(replace(preprocess_config(), pinpoints=sizes))
    assert [level.pinpoints for level in levels] == [sizes[:2], (*sizes[:2], sizes[3]), sizes]


@pytest.mark.parametrize(
    ("resolution", "num_tiles"), [("low", 1), ("high", 17), (1, 1), (4, 1), (5, 5), (16, 10), (17, 17), (99, 17)]
)
def test_the_callers_word_holds(resolution: Resolution, num_tiles: int) -> None:
    assert choose_plan(load_image(plain()), plans_of(512, 512), resolution).num_tiles == num_tiles


def test_max_pixels_bounds_the_canvas() -> None:
    image, plans = load_image(plain()), plans_of(512, 512)
    assert choose_plan(image, plans, "high", (2 * TILE) ** 2).canvas == (2 * TILE, 2 * TILE)
    with pytest.raises(OptionError, match=r"max_pixels is 100; .*128x128"):
        choose_plan(image, plans, "high", 100)


def test_text_keeps_its_tiles_and_a_plain_scene_does_not() -> None:
    full = plans_of(512, 512)[-1]
    assert choose_plan(load_image(small_text()), plans_of(512, 512), "auto") == full
    assert choose_plan(load_image(plain()), plans_of(512, 512), "auto").num_tiles <= 5


def test_print_of_every_size_keeps_its_tiles_and_most_scenes_do_not() -> None:
    """Guards the limit itself, on what text and things look like in the scenes; twins share a layout, so one of two."""
    levels = Idefics3.levels(PreprocessConfig.from_hf(preprocessor_config(POCKET_SIZE)))

    def share_whole(style: Style, count: int) -> float:
        whole = []
        for number in range(count):
            image = load_image(render(sample_scene(7, 2 * number, split=Split.TRAIN, style=style)).picture)
            plans = [idefics3_plan(image.width, image.height, level, 64) for level in levels]
            whole.append(choose_plan(image, plans, "auto") == plans[-1])
        return sum(whole) / len(whole)

    things = replace(POCKET, page_share=0.0)
    assert share_whole(PAGES, 60) >= 0.9
    assert share_whole(replace(things, sign_share=1.0), 30) >= 0.95
    assert share_whole(replace(things, sign_share=0.0), 60) <= 0.4


def test_a_corner_of_text_on_a_large_plain_page_is_enough() -> None:
    page = Image.new("RGB", (512, 512), "white")
    ImageDraw.Draw(page).text((400, 480), "p. 12, note 3", font=ImageFont.load_default(12), fill=0)
    assert choose_plan(load_image(page), plans_of(512, 512), "auto").num_tiles > 5


def test_noise_is_not_detail() -> None:
    noise = np.random.default_rng(0).normal(128, 8, (512, 512, 3)).clip(0, 255).astype(np.uint8)
    assert detail_lost(noise, (512, 512), [(256, 256)])[0] < LOSS_ALLOWED


def test_what_the_picture_never_had_is_not_lost() -> None:
    """A small picture scaled up holds no detail that a plan of its own size would lose."""
    small = small_text(128)
    assert choose_plan(load_image(small), plans_of(128, 128), "auto").num_tiles == 1
    assert detail_lost(np.asarray(small), (512, 512), [(128, 128), (512, 512)]) == [0.0, 0.0]


def test_loss_falls_with_size() -> None:
    losses = detail_lost(np.asarray(small_text()), (512, 512), [(128, 128), (256, 256), (384, 384), (512, 512)])
    assert losses == sorted(losses, reverse=True) and losses[0] > 0.5 and losses[-1] == 0.0


@pytest.mark.parametrize("value", ["huge", 0, -1, 2.5, True])
def test_other_resolutions_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match="resolution must be"):
        Vision(resolution=value)  # type: ignore[arg-type]


def test_answers_tell_the_tiles_that_were_used(tmp_path: object) -> None:
    """Through the whole runtime: fewer tiles, other features, and the explicit choice equals what "auto" picks."""
    from vlmfast.testing import TINY_SHAPES, random_checkpoint

    folder = random_checkpoint(tmp_path, TINY_SHAPES["idefics3"])  # type: ignore[arg-type]
    vlm = VLM.from_pretrained(folder, dtype="float32")
    low = vlm.describe(plain(), "What?", vision=Vision(resolution="low"))
    high = vlm.describe(plain(), "What?")
    assert low.usage.num_tiles == 1 < high.usage.num_tiles
    assert low.usage.visual_tokens < high.usage.visual_tokens
    auto = vlm.describe(plain(), "What?", vision=Vision(resolution="auto"))
    named = vlm.describe(plain(), "What?", vision=Vision(resolution=auto.usage.num_tiles))
    assert auto.token_ids == named.token_ids and auto.usage.num_tiles < high.usage.num_tiles
