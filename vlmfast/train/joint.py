"""Training of tower, connector and decoder together on packed rows, at full resolution and at one frame a picture.

The residual stream runs in bf16, as it does at inference, over float32 weights.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from vlmfast.train.alignment import alignment_loss, cell_words
from vlmfast.train.attention import PackedAttention, fast_on_cpu
from vlmfast.train.dense import DenseHeads, dense_loss, normalised, picked
from vlmfast.train.features import Features, stored
from vlmfast.train.frames import GRID, Frames
from vlmfast.train.optimise import Optimiser, Schedule, load_state, save_state
from vlmfast.train.packing import IGNORED_TARGET, Batch, collate, pack
from vlmfast.train.parallel import my_part, rank
from vlmfast.train.scenes import stream
from vlmfast.train.tokens import PromptTokens
from vlmfast.train.vocabulary import NUMBER_WORDS, SHAPES, SIGN_WORDS, plural
from vlmfast_models.families.idefics3 import Idefics3

logger = logging.getLogger(__name__)

_LOG_EVERY = 50
_CHAT_SHARE = 0.2
_ALIGNMENT_WEIGHT = 0.5
_DENSE_WEIGHT = 0.5
_SLOW_WORDS = ("Yes", "No", "is", "are", *NUMBER_WORDS, *SHAPES, *map(plural, SHAPES), *SIGN_WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the stages learn from."""

    frames: Frames
    tokens: PromptTokens
    words: npt.NDArray[np.int16]
    """Alignment targets of all frames, [N, F, cells, words]."""
    weights: Tensor
    """How much each token of the vocabulary counts as a target, [V]."""
    global_share: float
    """Of the steps: pictures by their global frame alone, as a runtime that saves tokens shows them."""
    share: float
    """How often this lesson is taken, beside others."""
    features: Features | None = None
    """What the tower makes of the frames, where it does not learn: from `tower_features`."""

    @classmethod
    def prepare(
        cls,
        frames: Frames,
        tokens: PromptTokens,
        model: Idefics3,
        emphasis: float,
        *,
        global_share: float,
        share: float,
        features: Features | None = None,
    ) -> Lesson:
        """The lesson on these frames; words that decide an answer and are slow to learn count `emphasis` times."""
        words = cell_words(tokens, frames.labels, model.config.connector.scale_factor)
        weights = torch.ones(model.config.text.vocab_size)
        weights[[tokens.encode(f" {word}")[0] for word in _SLOW_WORDS]] = emphasis
        return cls(
            frames=frames,
            tokens=tokens,
            words=words,
            weights=weights,
            global_share=global_share,
            share=share,
            features=features,
        )


def train_joint(
    model: Idefics3,
    heads: DenseHeads,
    lessons: Sequence[Lesson],
    schedule: Schedule,
    state: Path,
    *,
    seed: int,
    resume: bool,
    device: torch.device,
    score: Callable[[], object],
    score_every_s: float = 400.0,
) -> None:
    """Trains `model` and `heads` in place, a batch of one lesson at a time.

    The heads read the tower's patches, as in dense pretraining. Where the lessons hold the tower's features, it and the
    heads stay as they are. State goes to the file `state` at every score; with
    `resume` it is read back from there.
    """
    modules = joint_modules(model, heads)
    fixed = {"vision", "heads"} if all(lesson.features is not None for lesson in lessons) else set()
    optimiser = Optimiser([module for name, module in modules.items() if name not in fixed], schedule)
    first = load_state(state, modules, optimiser) if resume and state.is_file() else 0
    started = scored = time.monotonic()
    for step in range(first, schedule.num_steps):
        shares = [lesson.share for lesson in lessons]
        lesson = stream("lesson", seed, step).choices(lessons, shares)[0]
        numbers = my_part(picked(seed, step, schedule.batch_size, len(lesson.frames.pixels)))
        with fast_on_cpu(device):
            answers, cells, patches = _losses(model, heads, lesson, numbers, (seed, step), device)
            optimiser.step(answers + _ALIGNMENT_WEIGHT * cells + _DENSE_WEIGHT * patches, step)
        if rank() == 0 and step % _LOG_EVERY == 0:
            rate = (step + 1 - first) * schedule.batch_size / (time.monotonic() - started)
            logger.info(
                "%s %d/%d answers %.3f, cells %.3f, patches %.3f, %.1f scenes/s",
                state.stem, step, schedule.num_steps, answers.item(), cells.item(), patches.item(), rate,
            )  # fmt: skip
        if rank() == 0 and time.monotonic() - scored > score_every_s:
            save_state(state, step + 1, modules, optimiser)
            logger.info("%s %d held-out: %s", state.stem, step, score())
            scored = time.monotonic()
    save_state(state, schedule.num_steps, modules, optimiser)
    if rank() == 0:
        logger.info("%s done, held-out: %s", state.stem, score())


def joint_modules(model: Idefics3, heads: DenseHeads) -> dict[str, nn.Module]:
    """What learns, and what a state file of this stage holds."""
    return {"vision": model.vision, "connector": model.connector, "decoder": model.decoder, "heads": heads}


def merged(model: Idefics3, ids: Tensor, visual: Tensor) -> Tensor:
    """Embeddings [B, T, E] of ids [B, T], with the visual tokens [..., E] in order where image tokens stand."""
    embedded = model.decoder.embed(ids).to(torch.bfloat16)
    return embedded.masked_scatter((ids == model.config.image_token_id)[..., None], visual.to(torch.bfloat16))


def _losses(
    model: Idefics3,
    heads: DenseHeads,
    lesson: Lesson,
    numbers: npt.NDArray[np.int64],
    key: tuple[int, int],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of the answers, of the visual tokens against their cells' words, of the patches' labels."""
    frames = lesson.frames
    fine = stream("resolution", *key).random() >= lesson.global_share
    rng = stream("questions", *key, rank())
    shown = slice(0, None) if fine else slice(-1, None)
    batch = _rows(lesson, numbers, rng, fine)
    ids, positions, targets = (x.to(device) for x in (batch.ids, batch.positions, batch.targets))
    with torch.autocast(device.type, torch.bfloat16):
        if lesson.features is None:
            pixels = torch.from_numpy(frames.pixels[numbers, shown]).to(device)
            features = model.vision(normalised(pixels))  # [B * F, P, Ev]
        else:
            features = stored(lesson.features[numbers, shown]).flatten(0, 1).to(device)
        visual = model.connector(features)  # [B * F, N, E]
        attention = PackedAttention(batch.segments.to(device), torch.bfloat16)
        hidden = merged(model, ids, visual).flatten(0, 1)
        hidden = model.decoder.run(hidden, positions.flatten(), attention)
        wanted = targets.flatten() != IGNORED_TARGET
        answer_logits = model.decoder.logits(hidden[wanted])
        cell_logits = model.decoder.logits(visual.flatten(0, 1).to(torch.bfloat16))
    words = torch.from_numpy(lesson.words[numbers, shown].astype(np.int64)).flatten(0, 2).to(device)
    weights = lesson.weights.to(device)
    return (
        nnf.cross_entropy(answer_logits.float(), targets.flatten()[wanted], weights),
        alignment_loss(cell_logits, words, weights),
        _patch_loss(heads, lesson, features, numbers, shown),
    )


def _patch_loss(
    heads: DenseHeads, lesson: Lesson, features: Tensor, numbers: npt.NDArray[np.int64], shown: slice
) -> Tensor:
    if lesson.features is not None:
        return features.new_zeros(())
    labels = {
        name: torch.from_numpy(values[numbers, shown].astype(np.int64)).to(features.device)
        for name, values in lesson.frames.labels.items()
    }
    with torch.autocast(features.device.type, torch.bfloat16):
        return dense_loss(heads(features), labels)


def _rows(lesson: Lesson, numbers: npt.NDArray[np.int64], rng: random.Random, fine: bool) -> Batch:
    """Packed rows for these frames; the questions differ every time a frame comes up."""
    frames, tokens = lesson.frames, lesson.tokens
    opening = tokens.opening(frames.plan if fine else frames.global_plan)
    side = frames.pixels.shape[-2] * (GRID[1] if fine else 1)
    rows = []
    for number in numbers:
        questions = frames.source.questions(int(number), rng, side)
        rows.append(pack(tokens, opening, questions, chat=rng.random() < _CHAT_SHARE))
    return collate(rows, padding_id=tokens.token_id("<|endoftext|>"))
