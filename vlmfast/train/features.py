"""What the tower makes of frames, computed once: connector and decoder can then learn alone, which costs far less.

A file of bf16 numbers beside the frames, made anew when tower or frames have changed.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from vlmfast.image.identity import digest_of
from vlmfast.train.attention import fast_on_cpu
from vlmfast.train.dense import normalised
from vlmfast.train.frames import Frames
from vlmfast.train.parallel import rank, size
from vlmfast_models.vit import VisionTransformer

logger = logging.getLogger(__name__)

Features = npt.NDArray[np.uint16]
"""Patch features [N, F, P, E] of frames; the bits of bf16 numbers, which numpy has no type for."""

_BATCH = 16
_LOG_EVERY_S = 30.0


def stored(part: Features) -> Tensor:
    """Some of the stored numbers as bf16."""
    return torch.from_numpy(np.array(part)).view(torch.bfloat16)  # a copy: the file may be written anew


@torch.inference_mode()
def tower_features(vision: VisionTransformer, frames: Frames, device: torch.device) -> Features:
    """The tower's features of all frames, from their folder; else computed into it, each process its share."""
    file, stamp = frames.folder / "features.npy", frames.folder / "features.key"
    weights = (part for name, value in vision.state_dict().items() for part in (name, value.cpu().numpy().tobytes()))
    key = digest_of(frames.source.describe(), repr(frames.pixels.shape), *weights)
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == key):
        stamp.unlink(missing_ok=True)  # a run broken off leaves a file of nobody
        _compute(vision, frames, file, device)
        if rank() == 0:
            stamp.write_text(key, encoding="utf-8")
    return np.load(file, mmap_mode="r")


def _compute(vision: VisionTransformer, frames: Frames, file: Path, device: torch.device) -> None:
    count, per_picture, side = frames.pixels.shape[:3]
    patches = (side // vision.config.patch_size) ** 2
    if rank() == 0:
        shape = (count, per_picture, patches, vision.config.hidden_size)
        np.lib.format.open_memmap(file, mode="w+", dtype=np.uint16, shape=shape)
    _wait()
    array = np.load(file, mmap_mode="r+")
    logged = time.monotonic()
    for start in range(rank() * _BATCH, count, size() * _BATCH):
        pixels = torch.from_numpy(np.array(frames.pixels[start : start + _BATCH])).to(device)
        with torch.autocast(device.type, torch.bfloat16), fast_on_cpu(device):
            features = vision(normalised(pixels)).to(torch.bfloat16).cpu()  # [B * F, P, E]
        array[start : start + _BATCH] = features.view(-1, *array.shape[1:]).view(torch.uint16).numpy()
        if rank() == 0 and time.monotonic() - logged > _LOG_EVERY_S:
            logger.info("features of %d/%d pictures", start, count)
            logged = time.monotonic()
    array.flush()
    _wait()


def _wait() -> None:
    if size() > 1:
        dist.barrier()
