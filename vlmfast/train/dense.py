"""Dense pretraining of the vision tower: every patch says which thing, colour, character and sign word covers it.

Four linear heads read the patch features; whatever they can read, the connector, a linear map as well, can pass on to
the decoder. They go on reading while everything is trained together, and are thrown away afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from vlmfast.train.attention import fast_on_cpu
from vlmfast.train.frames import IGNORED, LABELS, Frames, num_classes
from vlmfast.train.optimise import Optimiser, Schedule, load_state, save_state
from vlmfast.train.parallel import my_part, rank
from vlmfast_models.vit import VisionTransformer

logger = logging.getLogger(__name__)

_WEIGHTS = {"thing": 1.0, "colour": 0.3, "character": 2.0, "word": 0.5}
_BACKGROUND = {"thing": 0.4, "character": 0.15}
"""What a patch of class 0, nothing or a gap between characters, counts: there are far more of them."""
_BEARING_FIRST = 0.7
"""What a thing or letter adds to a patch's chance, a number below 1."""
_LOG_EVERY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePart:
    """Frames to learn on, beside others."""

    frames: Frames
    """One frame a picture."""
    numbers: npt.NDArray[np.int64]
    """Those of them that are taken."""
    share: float
    """How many of a batch are from here, relative to the other parts."""

    @classmethod
    def whole(cls, frames: Frames, share: float) -> DensePart:
        """Every frame of the pictures."""
        single = frames.single()
        return cls(frames=single, numbers=np.arange(len(single.pixels)), share=share)

    @classmethod
    def lettered(cls, frames: Frames, share: float) -> DensePart:
        """Those frames of the pictures that bear letters."""
        single = frames.single()
        characters = single.labels["character"]
        bearing = ((characters > 0) & (characters < IGNORED)).any(axis=tuple(range(1, characters.ndim)))
        return cls(frames=single, numbers=np.flatnonzero(bearing), share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseScore:
    """Share of held-out patches told right, for each label; those of nothing and between characters left out."""

    accuracy: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.1%}" for name, value in self.accuracy.items())


class DenseHeads(nn.Module):
    """One linear classifier for each label: patch features [P, N, E] -> logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(width, classes) for name, classes in num_classes().items()})

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {name: head(features) for name, head in self.heads.items()}


def pretrain(
    vision: VisionTransformer,
    heads: DenseHeads,
    train: Sequence[DensePart],
    held_out: Frames,
    schedule: Schedule,
    folder: Path,
    *,
    num_shown: int,
    seed: int,
    resume: bool,
    device: torch.device,
    score_every_s: float = 240.0,
) -> None:
    """Trains `vision` and `heads` in place and logs their held-out score. State goes to `folder`/dense.pt.

    The tower sees `num_shown` patches of each frame, those that bear something first: what it costs falls faster than
    what it learns (after masked training, He et al., arXiv 2111.06377; Li et al., arXiv 2212.00794). Scores see all.
    """
    modules: dict[str, nn.Module] = {"vision": vision, "heads": heads}
    optimiser = Optimiser(modules.values(), schedule)
    state = folder / "dense.pt"
    first = load_state(state, modules, optimiser) if resume and state.is_file() else 0
    started = scored = time.monotonic()
    for step in range(first, schedule.num_steps):
        batch = _mixed_batch(train, seed, step, schedule.batch_size, device)
        chosen = shown_patches(batch[1], num_shown, torch.Generator().manual_seed(seed * 1_000_003 + step))
        with fast_on_cpu(device):
            loss = _loss(vision, heads, *batch, chosen)
            optimiser.step(loss, step)
        if rank() == 0 and step % _LOG_EVERY == 0:
            rate = (step + 1 - first) * schedule.batch_size / (time.monotonic() - started)
            logger.info("dense %d/%d loss %.3f, %.0f scenes/s", step, schedule.num_steps, loss.item(), rate)
        if rank() == 0 and time.monotonic() - scored > score_every_s:
            logger.info("dense %d held-out: %s", step, score(vision, heads, held_out, device))
            save_state(state, step + 1, modules, optimiser)
            scored = time.monotonic()
    save_state(state, schedule.num_steps, modules, optimiser)
    if rank() == 0:
        logger.info("dense done, held-out: %s", score(vision, heads, held_out, device))


def normalised(pixels: Tensor) -> Tensor:
    """uint8 frames [..., side, side, 3] as the tower wants them: float [P, 3, side, side] in -1 .. 1."""
    return pixels.flatten(0, -4).permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1.0


@torch.inference_mode()
def score(
    vision: nn.Module, heads: nn.Module, frames: Frames, device: torch.device, batch_size: int = 64
) -> DenseScore:
    """Accuracy of each head over all frames."""
    right = dict.fromkeys(LABELS, 0)
    total = dict.fromkeys(LABELS, 0)
    for start in range(0, len(frames.pixels), batch_size):
        pixels, labels = _batch(frames, np.arange(start, min(start + batch_size, len(frames.pixels))), device)
        with _autocast(device), fast_on_cpu(device):
            logits = heads(vision(normalised(pixels)))
        for name in LABELS:
            counted = labels[name] != IGNORED
            if name in _BACKGROUND:
                counted &= labels[name] != 0
            right[name] += int((logits[name].argmax(-1).view_as(counted) == labels[name])[counted].sum())
            total[name] += int(counted.sum())
    return DenseScore(accuracy={name: right[name] / max(1, total[name]) for name in LABELS})


def shown_patches(labels: Mapping[str, Tensor], count: int, generator: torch.Generator) -> Tensor:
    """Numbers of `count` patches of each frame in rising order, int64 [P, count], of labels [P, N].

    Mostly those of things and letters, then background; chance is stronger than the rule now and then, so that a gap
    in the background says little.
    """
    things, characters = labels["thing"], labels["character"]
    bearing = ((things > 0) & (things < IGNORED)) | ((characters > 0) & (characters < IGNORED))
    worth = torch.rand(bearing.shape, generator=generator).to(bearing.device) + _BEARING_FIRST * bearing
    return worth.topk(min(count, worth.shape[1]), 1).indices.sort(1).values


def _loss(
    vision: VisionTransformer, heads: nn.Module, pixels: Tensor, labels: dict[str, Tensor], chosen: Tensor
) -> Tensor:
    """The dense loss on the `chosen` patches [P, M] of each frame, which are all that the tower sees."""
    with _autocast(pixels.device):
        x = vision.embed(normalised(pixels))
        x = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        for layer in vision.layers:
            x, _ = layer(x)
        assert vision.norm is not None
        logits = heads(vision.norm(x))
    return dense_loss(logits, {name: values.gather(1, chosen) for name, values in labels.items()})


def dense_loss(logits: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> Tensor:
    """Weighed sum of each head's mean cross-entropy: logits [P, N, classes], labels int64 of P * N."""
    losses = []
    for name, weight in _WEIGHTS.items():
        targets = labels[name].flatten()
        if (targets != IGNORED).any():
            scores = logits[name].flatten(0, 1).float()
            counts = scores.new_ones(scores.shape[-1])
            counts[0] = _BACKGROUND.get(name, 1.0)
            losses.append(weight * nnf.cross_entropy(scores, targets, counts, ignore_index=IGNORED))
    return torch.stack(losses).sum() if losses else next(iter(logits.values())).new_zeros(())


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16)


def picked(seed: int, step: int, batch_size: int, count: int) -> np.ndarray:
    """Frame numbers of a step: a pass without repetition over all frames, reshuffled every epoch."""
    start = step * batch_size
    numbers = []
    for position in range(start, start + batch_size):
        epoch, offset = divmod(position, count)
        numbers.append(int(_order(seed, epoch, count)[offset]))
    return np.array(sorted(numbers), dtype=np.int64)


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def _mixed_batch(
    parts: Sequence[DensePart], seed: int, step: int, batch_size: int, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """This process's frames of a step: of each part its share of the batch, the first parts rounded up."""
    wholes = np.cumsum([part.share for part in parts])
    ends = np.ceil(wholes / wholes[-1] * batch_size - 1e-9).astype(int).tolist()
    chosen = [
        (index, part.numbers[picked(seed, step, end - start, len(part.numbers))])
        for index, (part, start, end) in enumerate(zip(parts, [0, *ends], ends, strict=False))
    ]
    rows = my_part(np.concatenate([np.stack([np.full_like(numbers, at), numbers], 1) for at, numbers in chosen]))
    batches = [_batch(part.frames, rows[rows[:, 0] == at, 1], device) for at, part in enumerate(parts)]
    pixels, labels = zip(*batches, strict=True)
    return torch.cat(pixels), {name: torch.cat([one[name] for one in labels]) for name in LABELS}


def _batch(frames: Frames, numbers: np.ndarray, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    pixels = torch.from_numpy(frames.pixels[numbers]).to(device)
    labels = {
        name: torch.from_numpy(frames.labels[name][numbers].astype(np.int64)).flatten(1).to(device) for name in LABELS
    }
    return pixels, labels
