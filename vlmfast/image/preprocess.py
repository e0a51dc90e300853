"""From pixels to the checkpoint's tiles, by the plan; the numbers are those of the checkpoint's own processor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from vlmfast.types import ImageInput
from vlmfast_models.batch import PatchBatch
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan


def preprocess(image: ImageInput, plan: TilePlan, config: PreprocessConfig) -> PatchBatch:
    """Resizes, cuts and normalises a picture: tiles row by row, then the global frame, float32 [P, 3, side, side].

    The two resizes (to the longest edge, then to whole tiles) are kept apart on purpose: rounding to 8 bits between
    them is what the checkpoint's processor does, and what the checkpoint was trained on.
    """
    filter_ = Image.Resampling(config.resample)
    picture = Image.fromarray(image.pixels)
    for size in (plan.resized, plan.canvas):
        if picture.size != size:
            picture = picture.resize(size, filter_)
    side = plan.tile_size
    frame = picture if picture.size == (side, side) else picture.resize((side, side), filter_)
    frames = np.empty((plan.num_tiles, side, side, 3), np.uint8)
    if plan.rows:
        grid = np.asarray(picture).reshape(plan.rows, side, plan.cols, side, 3)
        frames[:-1] = grid.swapaxes(1, 2).reshape(-1, side, side, 3)
    frames[-1] = np.asarray(frame)
    return PatchBatch(pixels=_normalise(frames, config), plan=plan)


def _normalise(frames: npt.NDArray[np.uint8], config: PreprocessConfig) -> Tensor:
    """(x * rescale - mean) / std by channel, [P, S, S, 3] uint8 -> float32 [P, 3, S, S]."""
    mean, std = np.asarray(config.mean, np.float64), np.asarray(config.std, np.float64)
    scale = torch.from_numpy((config.rescale_factor / std).astype(np.float32)).view(3, 1, 1)
    shift = torch.from_numpy((-mean / std).astype(np.float32)).view(3, 1, 1)
    planes = torch.from_numpy(frames).permute(0, 3, 1, 2)
    return planes.to(torch.float32, memory_format=torch.contiguous_format).mul_(scale).add_(shift)
