"""From pixels to the checkpoint's tiles, by the plan; the numbers are those of the checkpoint's own processor."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vlmfast.image.resize import Pixels, resize
from vlmfast.types import ImageInput
from vlmfast_kernels.cpu.resize import resize_library
from vlmfast_models.batch import PatchBatch
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan

_Floats: TypeAlias = npt.NDArray[np.float32]


def preprocess(image: ImageInput, plan: TilePlan, config: PreprocessConfig) -> PatchBatch:
    """Resizes, cuts and normalises a picture: tiles row by row, then the global frame, float32 [P, 3, side, side]."""
    source = np.ascontiguousarray(image.pixels)
    if plan.squared:
        source = _on_square(source, config.mean_colour)
    canvas = _canvas(source, plan, config.resample)
    side = plan.tile_size
    out = np.empty((plan.num_tiles, 3, side, side), np.float32)
    levels = _levels(config)
    if plan.rows:
        for index in range(plan.rows * plan.cols):
            top, left = side * (index // plan.cols), side * (index % plan.cols)
            _normalise(canvas[top : top + side, left : left + side], levels, out[index])
        # Whoever pads the canvas makes the global frame of the picture itself.
        canvas = resize(canvas if plan.offset is None else source, (side, side), config.resample)
    _normalise(canvas, levels, out[-1])
    return PatchBatch(pixels=torch.from_numpy(out), plan=plan)


def _canvas(source: Pixels, plan: TilePlan, resample: int) -> Pixels:
    """The picture on the plan's canvas. Of what sticks out of it, nothing is computed.

    A second resize (Idefics3) is kept apart on purpose: rounding to 8 bits between the two is what the checkpoint's
    processor does, and what the checkpoint was trained on.
    """
    if plan.offset is None:
        return resize(resize(source, plan.resized, resample), plan.canvas, resample)
    # Left, top, right, bottom of the canvas as seen from the picture's corner, and of the part that both share.
    (width, height), (x, y) = plan.resized, plan.offset
    left, top, right, bottom = max(-x, 0), max(-y, 0), min(plan.canvas[0] - x, width), min(plan.canvas[1] - y, height)
    shown = resize(source, plan.resized, resample, (left, top, right, bottom))
    if (right - left, bottom - top) == plan.canvas:
        return shown
    canvas = np.zeros((plan.canvas[1], plan.canvas[0], 3), np.uint8)  # black outside the picture
    canvas[top + y : bottom + y, left + x : right + x] = shown
    return canvas


def _on_square(picture: Pixels, colour: tuple[int, ...]) -> Pixels:
    height, width = picture.shape[:2]
    side = max(width, height)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = colour
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = picture
    return square


def _levels(config: PreprocessConfig) -> _Floats:
    """What each of the 256 grey levels of a channel becomes: level * scale + shift, float32 [3, 256]."""
    scale = (config.rescale_factor / np.asarray(config.std)).astype(np.float32)
    shift = (-np.asarray(config.mean) / np.asarray(config.std)).astype(np.float32)
    return np.arange(256, dtype=np.float32) * scale[:, None] + shift[:, None]


def _normalise(pixels: Pixels, levels: _Floats, out: _Floats) -> None:
    """Writes levels[c, pixels[y, x, c]] to out[c, y, x]: uint8 [S, S, 3] -> float32 [3, S, S]."""
    library = resize_library()
    if library is None:
        for channel, plane in enumerate(out):
            np.take(levels[channel], pixels[..., channel], out=plane, mode="clip")
        return
    assert pixels.shape == (*out.shape[1:], 3) and out.flags.c_contiguous
    assert pixels.strides[2] == 1 and (pixels.strides[1] == 3 or len(pixels) == 1), pixels.strides
    library.vlmfast_look_up(pixels.ctypes.data, pixels.strides[0], len(pixels), levels.ctypes.data, out.ctypes.data)
