"""The pocket's training from nothing to a checkpoint: tokenizer, frames, dense, language, joint,
focus, export.

Each stage leaves a state file in the work folder; with `resume` a finished stage is read back and a broken-off one goes
on from its last save. Everything random is keyed by the recipe's seed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from vlmfast.train import shape
from vlmfast.train.dense import pretrain
from vlmfast.train.evaluate import evaluate
from vlmfast.train.export import write_pocket
from vlmfast.train.frames import Frames, FrameSet, open_frames
from vlmfast.train.initial import initialize_vision
from vlmfast.train.language import Lesson, cache_features, train_language
from vlmfast.train.optimise import Schedule
from vlmfast.train.scenes import CROWDED, POCKET, Split
from vlmfast.train.tally import Tally
from vlmfast.train.tokens import PromptTokens, special_ids, train_tokenizer
from vlmfast_models.config import ModelConfig, PreprocessConfig
from vlmfast_models.families.idefics3 import Idefics3
from vlmfast_models.layers import initialize

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How much of everything."""

    dense: Schedule
    language: Schedule
    joint: Schedule
    focus: Schedule
    emphasis: float = 5.0
    """How many times the words that are slow to learn (shapes, sign texts, yes and no) count in the last stage."""
    num_dense_frames: int = 24_000
    num_joint_frames: int = 24_000
    num_language_frames: int = 6_000
    """The part of the joint stage's frames whose features are cached while the tower is frozen."""
    num_held_out_frames: int = 512
    num_scored_scenes: int = 48
    """Scenes behind each accuracy in the log."""
    vocab_size: int = 2048
    seed: int = 0

    def scaled(self, factor: float) -> Recipe:
        """The recipe with `factor` times as many steps in every stage, one at least."""

        def longer(schedule: Schedule) -> Schedule:
            return replace(schedule, num_steps=max(1, round(schedule.num_steps * factor)))

        stages = (longer(schedule) for schedule in (self.dense, self.language, self.joint, self.focus))
        dense, language, joint, focus = stages
        return replace(self, dense=dense, language=language, joint=joint, focus=focus)


FIRST_POCKET = Recipe(
    dense=Schedule(num_steps=2150, batch_size=16, learning_rate=1e-3),
    language=Schedule(num_steps=1200, batch_size=8, learning_rate=8e-4),
    joint=Schedule(num_steps=2162, batch_size=8, learning_rate=5e-4),
    focus=Schedule(num_steps=1100, batch_size=8, learning_rate=4e-4, warmup_steps=40),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where training happens."""

    folder: Path
    device: torch.device
    num_workers: int = 2
    resume: bool = False


def train_pocket(recipe: Recipe, place: Workplace, out: Path) -> Tally:
    """Runs every stage, writes the checkpoint to `out`, and returns its held-out accuracy on pocket scenes."""
    place.folder.mkdir(parents=True, exist_ok=True)
    features_path = place.folder / "features.npy"
    if not place.resume:
        features_path.unlink(missing_ok=True)  # they belong to the tower of an earlier training
    tokenizer = _tokenizer(recipe, place)
    preprocess = PreprocessConfig.from_hf(shape.preprocessor_config())
    model = new_pocket(tokenizer, recipe.seed).to(place.device)
    tokens = PromptTokens(tokenizer=tokenizer, num_visual=model.config.tokens_per_tile)

    def frames(name: str, members: FrameSet) -> Frames:
        folder = place.folder / "frames" / name
        return open_frames(folder, members, preprocess, shape.PATCH_SIZE, workers=place.num_workers)

    def held_out(style_name: str) -> Frames:
        style, step, seed = (CROWDED, 2, 1) if style_name == "crowded" else (POCKET, 1, 2)
        members = FrameSet(split=Split.HELD_OUT, seed=seed, count=recipe.num_held_out_frames, style=style, step=step)
        return frames(f"held-out-{style_name}", members)

    crowded = FrameSet(split=Split.TRAIN, seed=1, count=recipe.num_dense_frames, style=CROWDED, step=2)
    pretrain(
        model.vision,
        frames("crowded", crowded),
        held_out("crowded"),
        recipe.dense,
        place.folder,
        seed=recipe.seed,
        resume=place.resume,
        device=place.device,
    )
    joint_frames = frames("pocket", FrameSet(split=Split.TRAIN, seed=2, count=recipe.num_joint_frames, style=POCKET))
    scored = held_out("pocket")

    def score(count: int = recipe.num_scored_scenes) -> Tally:
        return evaluate(model, tokens, scored, place.device, count=count)

    stages = {"language": recipe.language, "joint": recipe.joint, "focus": recipe.focus}
    for number, (name, schedule) in enumerate(stages.items()):
        frozen = name == "language"
        lesson_frames = joint_frames.first(recipe.num_language_frames) if frozen else joint_frames
        features = cache_features(model, lesson_frames, features_path, place.device) if frozen else None
        emphasis = recipe.emphasis if name == "focus" else 1.0
        train_language(
            model,
            Lesson.prepare(lesson_frames, tokens, model, features, emphasis),
            schedule,
            place.folder / f"{name}.pt",
            seed=recipe.seed + number,
            resume=place.resume,
            device=place.device,
            score=score,
        )
        write_pocket(model, tokenizer, out)
    return score(len(scored.pixels) // 2)


def new_pocket(tokenizer: Tokenizer, seed: int) -> Idefics3:
    """An untrained pocket, float32."""
    config = ModelConfig.from_hf(shape.model_config(tokenizer.get_vocab_size(), special_ids(tokenizer)))
    model = Idefics3(config)
    initialize(model, seed=seed)
    initialize_vision(model.vision, seed=seed)
    return model


def _tokenizer(recipe: Recipe, place: Workplace) -> Tokenizer:
    """The work folder's tokenizer, made there first if it has none or a fresh start is wanted."""
    path = place.folder / "tokenizer.json"
    if not (place.resume and path.is_file()):
        train_tokenizer(recipe.vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))
