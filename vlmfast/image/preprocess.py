"""From pixels to the checkpoint's tiles, by the plan; the numbers are those of the checkpoint's own processor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vlmfast.types import ImageInput
from vlmfast_models.batch import PatchBatch
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan


def preprocess(image: ImageInput, plan: TilePlan, config: PreprocessConfig) -> PatchBatch:
    """Resizes, cuts and normalises a picture: tiles row by row, then the global frame, float32 [P, 3, side, side]."""
    filter_ = Image.Resampling(config.resample)
    source = Image.fromarray(image.pixels)
    if plan.squared:
        source = _on_square(source, config.mean_colour)
    canvas = _canvas(source, plan, filter_)
    side = plan.tile_size
    out = np.empty((plan.num_tiles, 3, side, side), np.float32)
    scale = (config.rescale_factor / np.asarray(config.std)).astype(np.float32)
    shift = (-np.asarray(config.mean) / np.asarray(config.std)).astype(np.float32)
    if plan.rows:
        pixels = np.asarray(canvas)
        for index in range(plan.rows * plan.cols):
            top, left = side * (index // plan.cols), side * (index % plan.cols)
            _normalise(pixels[top : top + side, left : left + side], scale, shift, out[index])
        # Whoever pads the canvas makes the global frame of the picture itself.
        canvas = (canvas if plan.offset is None else source).resize((side, side), filter_)
    _normalise(np.asarray(canvas), scale, shift, out[-1])
    return PatchBatch(pixels=torch.from_numpy(out), plan=plan)


def _canvas(source: Image.Image, plan: TilePlan, filter_: Image.Resampling) -> Image.Image:
    """The picture on the plan's canvas.

    A second resize (Idefics3) is kept apart on purpose: rounding to 8 bits between the two is what the checkpoint's
    processor does, and what the checkpoint was trained on.
    """
    if source.size != plan.resized:
        source = source.resize(plan.resized, filter_)
    if source.size == plan.canvas:
        return source
    if plan.offset is None:
        return source.resize(plan.canvas, filter_)
    left, top = -plan.offset[0], -plan.offset[1]
    return source.crop((left, top, left + plan.canvas[0], top + plan.canvas[1]))  # black outside the picture


def _on_square(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    side = max(picture.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def _normalise(
    pixels: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    shift: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
) -> None:
    """Writes pixels * scale + shift by channel, uint8 [S, S, 3] -> float32 [3, S, S].

    numpy takes strided bytes about twice as fast as torch does, and a plane at a time stays in the cache.
    """
    for channel, plane in enumerate(out):
        np.multiply(pixels[..., channel], scale[channel], out=plane, dtype=np.float32)
        plane += shift[channel]
