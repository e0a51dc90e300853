"""`--show-tokens`: the frames that the model sees, with what became of each visual token drawn over them.

Kept as it was: untouched. Merged with others: tinted, each group in a colour; ToMe's groups are of the tower's patches,
which are smaller than tokens, and a reducer's are drawn over them. Left out: darkened.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

from vlmfast.errors import OptionError
from vlmfast.options import Vision

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.types import Answer, ImageInput
    from vlmfast.vlm import VLM
    from vlmfast_models.geometry import TilePlan

_LEFT_OUT = -1
_GAP = 8
_GOLDEN = 0.618033988749895


def draw_tokens(vlm: VLM, images: Sequence[Any], prompt: str, vision: Vision, answer: Answer) -> Image.Image:
    """One picture of all frames, tiles in their places and each picture's global frame beside them.

    Raises:
        OptionError: the model does not lay out a picture's tokens frame by frame.
    """
    from PIL import Image

    from vlmfast.prompt import Message

    loaded = vlm.load_images(list(images))
    built = vlm.build_prompt([Message(role="user", text=prompt, images=loaded)], vision)
    image_token_id = vlm.checkpoint.config.image_token_id
    panels: list[Image.Image] = []
    for image, span in zip(loaded, built.spans, strict=True):
        places = [at for at in range(span.start, span.end) if built.ids[at] == image_token_id]
        reached = set(places if answer.kept_places is None else answer.kept_places)
        features = vlm._vision.features(image, span.plan, vision).features
        source = vlm._vision.reduced(features, vision, span.counts).source.tolist()
        groups = [one if one != _LEFT_OUT and places[one] in reached else _LEFT_OUT for one in source]
        patches = _patch_groups(vlm, image, span.plan, vision)
        frames = _frames(vlm, image, span.plan)
        if patches is not None:
            frames = [_drawn(frame, tile, Counter(tile)) for frame, tile in zip(frames, patches, strict=True)]
        panels += _panels(frames, span.plan, groups)
    width = sum(panel.width for panel in panels) + _GAP * (len(panels) - 1)
    sheet = Image.new("RGB", (width, max(panel.height for panel in panels)), "white")
    left = 0
    for panel in panels:
        sheet.paste(panel, (left, 0))
        left += panel.width + _GAP
    return sheet


def _patch_groups(vlm: VLM, image: ImageInput, plan: TilePlan, vision: Vision) -> list[list[int]] | None:
    """Of each frame's patches, the groups that ToMe merges; None without it."""
    import torch

    from vlmfast.image.preprocess import preprocess
    from vlmfast.prune.counts import merge_schedule

    config = vlm.checkpoint.config.vision
    merges = merge_schedule(vision.tome, config.num_run_layers, config.num_positions, int(config.class_token))
    if not merges:
        return None
    pixels = preprocess(image, plan, vlm.checkpoint.preprocess).pixels.to(vlm.device, vlm.dtype)
    with torch.inference_mode():
        groups: list[list[int]] = vlm.model.vision.merge_groups(pixels, merges).tolist()
    return groups


def _frames(vlm: VLM, image: ImageInput, plan: TilePlan) -> list[Image.Image]:
    """The frames as the tower gets them, back in colours."""
    import numpy as np
    from PIL import Image

    from vlmfast.image.preprocess import preprocess

    config = vlm.checkpoint.preprocess
    mean, std = (np.array(values)[:, None, None] for values in (config.mean, config.std))
    pixels = preprocess(image, plan, config).pixels.float().numpy() * std + mean
    colours = (pixels * 255).round().clip(0, 255).astype(np.uint8)
    return [Image.fromarray(frame.transpose(1, 2, 0)) for frame in colours]


def _panels(frames: Sequence[Image.Image], plan: TilePlan, groups: Sequence[int]) -> list[Image.Image]:
    """The tiles put together, and the global frame."""
    from PIL import Image

    if plan.grid is not None:
        raise OptionError("--show-tokens draws frames of tokens; this model lays a picture's tokens out as one grid")
    sizes = Counter(groups)
    count = plan.tokens_per_tile
    if isqrt(count) ** 2 != count:
        raise OptionError(f"--show-tokens draws squares of tokens; a frame of this model has {count}")
    drawn = [_drawn(frame, groups[index * count : (index + 1) * count], sizes) for index, frame in enumerate(frames)]
    *tiles, whole = drawn
    if not tiles:
        return [whole]
    side = plan.tile_size
    canvas = Image.new("RGB", (plan.cols * side, plan.rows * side))
    for index, tile in enumerate(tiles):
        canvas.paste(tile, (index % plan.cols * side, index // plan.cols * side))
    return [canvas, whole]


def _drawn(frame: Image.Image, groups: Sequence[int], sizes: Counter[int]) -> Image.Image:
    """A frame with a square for each token, or patch, that is not as it was."""
    from PIL import Image

    across = isqrt(len(groups))
    overlay = Image.new("RGBA", (across, across))
    overlay.putdata([_colour(group, sizes[group]) for group in groups])
    overlay = overlay.resize(frame.size, Image.Resampling.NEAREST)
    return Image.alpha_composite(frame.convert("RGBA"), overlay).convert("RGB")


def _colour(group: int, size: int) -> tuple[int, int, int, int]:
    if group == _LEFT_OUT:
        return 0, 0, 0, 200
    if size == 1:
        return 0, 0, 0, 0
    red, green, blue = colorsys.hsv_to_rgb(group * _GOLDEN % 1.0, 0.9, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255), 110
