"""Training of connector and decoder on packed rows, with the tower frozen (its features cached) or learning along.

The residual stream runs in bf16, as it does at inference, over float32 weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from vlmfast.train.alignment import alignment_loss, cell_words
from vlmfast.train.attention import PackedAttention, fast_on_cpu
from vlmfast.train.dense import normalised, picked
from vlmfast.train.frames import Frames
from vlmfast.train.optimise import Optimiser, Schedule, load_state, save_state
from vlmfast.train.packing import IGNORED_TARGET, Batch, collate, pack, questions_for_row
from vlmfast.train.scenes import stream
from vlmfast.train.tokens import PromptTokens
from vlmfast.train.vocabulary import SHAPES, SIGN_WORDS, plural
from vlmfast_models.families.idefics3 import Idefics3

logger = logging.getLogger(__name__)

_LOG_EVERY = 50
_CHAT_SHARE = 0.2
_ALIGNMENT_WEIGHT = 0.5
_SLOW_WORDS = ("Yes", "No", *SHAPES, *map(plural, SHAPES), *SIGN_WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the stages learn from."""

    frames: Frames
    tokens: PromptTokens
    words: npt.NDArray[np.int16]
    """Alignment targets of all frames, [N, cells, words]."""
    weights: Tensor
    """How much each token of the vocabulary counts as a target, [V]."""
    features: npt.NDArray[np.float16] | None
    """Cached tower features [N, patches, Ev]; None to run (and train) the tower."""

    @classmethod
    def prepare(
        cls,
        frames: Frames,
        tokens: PromptTokens,
        model: Idefics3,
        features: npt.NDArray[np.float16] | None,
        emphasis: float = 1.0,
    ) -> Lesson:
        """The lesson on these frames; words that decide an answer and are slow to learn count `emphasis` times."""
        words = cell_words(tokens, frames.labels, model.config.connector.scale_factor)
        weights = torch.ones(model.config.text.vocab_size)
        weights[[tokens.encode(f" {word}")[0] for word in _SLOW_WORDS]] = emphasis
        return cls(frames=frames, tokens=tokens, words=words, weights=weights, features=features)


def train_language(
    model: Idefics3,
    lesson: Lesson,
    schedule: Schedule,
    state: Path,
    *,
    seed: int,
    resume: bool,
    device: torch.device,
    score: Callable[[], object],
    score_every_s: float = 300.0,
) -> None:
    """Trains `model` in place: connector and decoder, and the tower too where no features are cached.

    State goes to the file `state` at every score; with `resume` it is read back from there.
    """
    modules: dict[str, nn.Module] = {"connector": model.connector, "decoder": model.decoder}
    if lesson.features is None:
        modules["vision"] = model.vision
    optimiser = Optimiser(modules.values(), schedule)
    first = load_state(state, modules, optimiser) if resume and state.is_file() else 0
    started = scored = time.monotonic()
    for step in range(first, schedule.num_steps):
        numbers = picked(seed, step, schedule.batch_size, len(lesson.frames.pixels))
        with fast_on_cpu(device):
            answer_loss, cell_loss = _losses(model, lesson, numbers, (seed, step), device)
            optimiser.step(answer_loss + _ALIGNMENT_WEIGHT * cell_loss, step)
        if step % _LOG_EVERY == 0:
            rate = (step + 1 - first) * schedule.batch_size / (time.monotonic() - started)
            logger.info(
                "%s %d/%d loss %.3f, cells %.3f, %.0f scenes/s",
                state.stem, step, schedule.num_steps, answer_loss.item(), cell_loss.item(), rate,
            )  # fmt: skip
        if time.monotonic() - scored > score_every_s:
            save_state(state, step + 1, modules, optimiser)
            logger.info("%s %d held-out: %s", state.stem, step, score())
            scored = time.monotonic()
    save_state(state, schedule.num_steps, modules, optimiser)
    logger.info("%s done, held-out: %s", state.stem, score())


@torch.inference_mode()
def cache_features(model: Idefics3, frames: Frames, path: Path, device: torch.device) -> npt.NDArray[np.float16]:
    """Tower features of all frames as a memory-mapped array at `path`, computed unless they lie there."""
    if not path.is_file():
        vision = model.config.vision
        shape = (len(frames.pixels), vision.patches_per_side**2, vision.hidden_size)
        partial = path.with_suffix(".partial")
        features = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float16, shape=shape)
        for start in range(0, len(features), 64):
            pixels = torch.from_numpy(np.array(frames.pixels[start : start + 64])).to(device)
            with torch.autocast(device.type, torch.bfloat16), fast_on_cpu(device):
                features[start : start + 64] = model.vision(normalised(pixels)).half().cpu().numpy()
        features.flush()
        partial.rename(path)
    opened: npt.NDArray[np.float16] = np.load(path, mmap_mode="r")
    return opened


def merged(model: Idefics3, ids: Tensor, visual: Tensor) -> Tensor:
    """Embeddings [B, T, E] of ids [B, T], with each row's visual tokens [B, N, E] where the image token stands."""
    embedded = model.decoder.embed(ids).to(torch.bfloat16)
    return embedded.masked_scatter((ids == model.config.image_token_id)[..., None], visual.to(torch.bfloat16))


def _losses(
    model: Idefics3, lesson: Lesson, numbers: npt.NDArray[np.int64], key: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the answers, and of the visual tokens against the words for their cells."""
    batch = _rows(lesson, numbers, key)
    ids, positions, targets = (x.to(device) for x in (batch.ids, batch.positions, batch.targets))
    with torch.autocast(device.type, torch.bfloat16):
        visual = model.connector(_features(model, lesson, numbers, device))  # [B, N, E]
        attention = PackedAttention(batch.segments.to(device), torch.bfloat16)
        hidden = merged(model, ids, visual).flatten(0, 1)
        hidden = model.decoder.run(hidden, positions.flatten(), attention)
        wanted = targets.flatten() != IGNORED_TARGET
        answer_logits = model.decoder.logits(hidden[wanted])
        cell_logits = model.decoder.logits(visual.flatten(0, 1).to(torch.bfloat16))
    words = torch.from_numpy(lesson.words[numbers].astype(np.int64)).flatten(0, 1).to(device)
    weights = lesson.weights.to(device)
    answer_loss = nnf.cross_entropy(answer_logits.float(), targets.flatten()[wanted], weights)
    return answer_loss, alignment_loss(cell_logits, words, weights)


def _features(model: Idefics3, lesson: Lesson, numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    if lesson.features is not None:
        return torch.from_numpy(lesson.features[numbers]).to(device, torch.bfloat16)
    pixels = torch.from_numpy(lesson.frames.pixels[numbers]).to(device)
    features: Tensor = model.vision(normalised(pixels))
    return features


def _rows(lesson: Lesson, numbers: npt.NDArray[np.int64], key: tuple[int, int]) -> Batch:
    """Packed rows for these frames; the questions differ every time a frame comes up."""
    rng = stream("questions", *key)
    rows = [
        pack(
            lesson.tokens,
            questions_for_row(lesson.frames.members.scene(int(number)), rng),
            chat=rng.random() < _CHAT_SHARE,
        )
        for number in numbers
    ]
    return collate(rows, padding_id=lesson.tokens.token_id("<|endoftext|>"))
