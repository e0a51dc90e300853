"""What goes wrong with pictures and prompts in one family goes wrong in all: cases.md 23, 25, 26, 30, 32-34, each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import build, features_of, noise
from PIL import Image

from vlmfast import Sampling
from vlmfast.errors import GeometryError
from vlmfast.image.load import load_image
from vlmfast.image.preprocess import preprocess
from vlmfast.prompt import Message
from vlmfast.testing import TINY_SHAPES

_GREEDY = Sampling(max_new_tokens=4)
_ONE, _TWO = noise(61, 37), noise(61, 37, 9)


@pytest.fixture(scope="module", params=sorted(TINY_SHAPES))
def family(request: pytest.FixtureRequest, checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any]) -> Any:
    """A tiny model of every family in turn."""
    return load_vlm(checkpoint_of(TINY_SHAPES[request.param]))


def _tiles(family: Any, picture: Any) -> torch.Tensor:
    """What the tower gets of a picture, as grey levels, float32 [P, 3, side, side]."""
    image, config = load_image(picture), family.checkpoint.preprocess
    pixels = preprocess(image, family._vision.plan(image), config).pixels
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
    return (pixels * std + mean) / config.rescale_factor


def test_grey_and_colour_in_one_request(family: Any) -> None:
    """Guards case 23 (sglang 28828): a grey picture has three equal channels, and stands beside one in colour."""
    grey = Image.fromarray(_ONE).convert("L")
    levels = _tiles(family, grey).round()
    assert levels.shape[1] == 3 and torch.equal(levels[:, 0], levels[:, 1]) and torch.equal(levels[:, 0], levels[:, 2])
    mixed = family.describe([grey, _TWO], "Which?", sampling=_GREEDY)
    same = family.describe([np.repeat(np.asarray(grey)[..., None], 3, 2), _TWO], "Which?", sampling=_GREEDY)
    assert mixed.usage.num_images == 2 and mixed.token_ids == same.token_ids


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (500, 19), (332, 27), (27, 332)], ids=str)
def test_odd_sizes_are_answered(family: Any, size: tuple[int, int]) -> None:
    """Guards case 25 (vllm 21109, 13655, 9141, ollama 11297)."""
    assert family.describe(noise(*size), "What?", sampling=Sampling(max_new_tokens=1)).usage.visual_tokens > 0


@pytest.mark.parametrize("size", [(1, 200_000), (200_000, 1)], ids=str)
@pytest.mark.parametrize("num_images", [1, 2])
def test_extreme_ratios_are_answered_or_refused_at_once(family: Any, size: tuple[int, int], num_images: int) -> None:
    """Guards case 26 (oMLX 3529): a ratio beyond the family's rule is an error before anything is streamed, and no
    ratio is one beyond the memory."""
    pictures = [np.zeros((size[1], size[0], 3), np.uint8), _ONE][:num_images]
    refused = {"llava": True, "llava_onevision": num_images > 1}.get(family.checkpoint.config.model_type, False)
    if refused:
        with pytest.raises(GeometryError, match=f"{size[0]}x{size[1]} pixels"):
            family.stream(pictures, "What?", sampling=_GREEDY)
    else:
        assert family.describe(pictures, "What?", sampling=Sampling(max_new_tokens=1)).usage.visual_tokens > 0


def test_a_picture_of_the_right_size_is_not_resampled(family: Any) -> None:
    """Guards case 30 (sglang 12390): no resize by a second rule before or after the family's own."""
    config = family.checkpoint.preprocess
    side = config.tile_size
    width, height = config.pinpoints[-1] if config.pinpoints else (side, side)
    if config.longest_edge:
        width, height = config.longest_edge, config.longest_edge // side * side
    picture = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    tiles = _tiles(family, picture)
    frames = tiles[:-1] if len(tiles) > 1 else tiles  # the global frame of many is smaller than the picture
    cut = [picture[y : y + side, x : x + side] for y in range(0, height, side) for x in range(0, width, side)]
    assert width % side == height % side == 0 and len(frames) == len(cut)
    assert np.array_equal(frames.round().permute(0, 2, 3, 1).numpy(), np.stack(cut))


def test_order_of_pictures_is_kept(family: Any) -> None:
    """Guards case 32 (InternVL 1065, vllm 15564): text-picture-text-picture; swapped pictures swap their features."""
    one, two = load_image(_ONE), load_image(_TWO)
    decode = family.checkpoint.tokenizer.decode
    prompts = [
        family.build_prompt([Message.mixed("user", ["first", *pair[:1], "then", *pair[1:], "which?"])])
        for pair in ((one, two), (two, one))
    ]
    for prompt, pair in zip(prompts, ((one, two), (two, one)), strict=True):
        assert [span.digest for span in prompt.spans] == [image.digest for image in pair]
    first, second = prompts[0].spans
    assert "first" in decode(list(prompts[0].ids[: first.start]))
    assert decode(list(prompts[0].ids[first.end : second.start])).strip() == "then"
    assert "which?" in decode(list(prompts[0].ids[second.end :]))
    assert prompts[0].ids == prompts[1].ids  # of one size: only the features tell them apart
    features, swapped = (
        features_of(family, pair, prompt) for pair, prompt in zip(((one, two), (two, one)), prompts, strict=True)
    )
    half = first.plan.n_tokens
    assert torch.equal(features[:half], swapped[half:]) and torch.equal(features[half:], swapped[:half])
    assert not torch.equal(features[:half], features[half:])


@pytest.mark.parametrize("text", ["<image>", "{eos}", "a<image><image>{eos}b {bos}", "＜image＞"])
@pytest.mark.parametrize("num_images", [0, 1])
def test_a_typed_placeholder_stays_text(family: Any, text: str, num_images: int) -> None:
    """Guards case 33 (dots.ocr 126)."""
    tokenizer = family.checkpoint.tokenizer
    text = text.format(eos=tokenizer.eos_token, bos=tokenizer.bos_token or "")
    special = {*tokenizer.all_special_ids, family.checkpoint.config.image_token_id}
    images = [_ONE][:num_images]
    plain, prompt = (build(family, images, typed)[0] for typed in ("x", f"x{text}"))
    assert [token for token in prompt.ids if token in special] == [token for token in plain.ids if token in special]
    assert prompt.num_visual_tokens == plain.num_visual_tokens
    behind = prompt.spans[0].end if images else 0
    assert f"x{text}" in tokenizer.decode(list(prompt.ids[behind:]), clean_up_tokenization_spaces=False)
    assert family.describe(images, text, sampling=_GREEDY).usage.num_images == num_images


def test_a_turn_without_a_picture(family: Any) -> None:
    """Guards case 34 (sglang 5248): a text-only turn works, also behind one with a picture. (A checkpoint of text alone
    is no family: tests/cpu/test_checkpoint_errors.py.)"""
    alone = family.describe(None, "Why?", sampling=_GREEDY)
    assert alone.usage.num_images == alone.usage.visual_tokens == 0
    chat = family.chat(_ONE)
    assert chat.ask("What?", sampling=_GREEDY).usage.num_images == 1
    assert chat.ask("And why?", sampling=_GREEDY).usage.num_images == 1  # the first turn's
