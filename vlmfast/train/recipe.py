"""The pocket's training to a checkpoint: frames, dense pretraining of the tower, joint training, cooling down, export.

Joint training runs at a constant rate, so that it may be ended anywhere; cooling lowers the rate to nearly nothing.
Each stage leaves a state file in the work folder; with `resume` a finished stage is read back and a broken-off one goes
on from its last save. Everything random is keyed by the recipe's seed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from vlmfast.errors import InputError
from vlmfast.train import shape
from vlmfast.train.dense import DenseHeads, pretrain
from vlmfast.train.easy_vqa import require_easy_vqa
from vlmfast.train.evaluate import evaluate
from vlmfast.train.export import write_pocket
from vlmfast.train.frames import Frames, open_frames
from vlmfast.train.initial import initialize_vision
from vlmfast.train.joint import Lesson, joint_modules, train_joint
from vlmfast.train.optimise import Schedule, load_state
from vlmfast.train.parallel import run_group
from vlmfast.train.scenes import CROWDED, POCKET, Split
from vlmfast.train.sources import EasySource, SceneSource, Source
from vlmfast.train.tally import Tally
from vlmfast.train.tokens import PromptTokens, special_ids, train_tokenizer
from vlmfast_models.config import ModelConfig, PreprocessConfig
from vlmfast_models.families.idefics3 import Idefics3
from vlmfast_models.layers import initialize
from vlmfast_models.weights import load_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How much of everything."""

    size: shape.Size
    dense: Schedule
    joint: Schedule
    cool: Schedule
    emphasis: float = 5.0
    """How many times the words that are slow to learn (shapes, sign texts, yes and no) count."""
    global_share: float = 0.5
    """Of the joint steps: pictures by their global frame alone."""
    dense_patches: int = 128
    """Of the 256 patches of a frame, those that dense pretraining looks at."""
    num_dense_frames: int = 8_000
    num_joint_frames: int = 16_000
    num_easy_frames: int = 4_000
    """Pictures of the training split of easy-VQA."""
    easy_share: float = 0.08
    """Of the joint steps."""
    num_held_out_frames: int = 256
    num_scored_scenes: int = 64
    """Scenes behind each accuracy in the log."""
    vocab_size: int = 2048
    tokenizer: Path | None = None
    """A tokenizer of another pocket to use; None makes one of `vocab_size` pieces."""
    seed: int = 0

    @property
    def global_only(self) -> bool:
        """Whether the model sees every picture as its global frame alone."""
        return self.size.longest_edge == shape.TILE_SIDE

    def one_frame(self) -> Recipe:
        """The recipe for a model that sees every picture as its global frame alone."""
        return replace(self, size=replace(self.size, longest_edge=shape.TILE_SIDE))

    def scaled(self, factor: float) -> Recipe:
        """The recipe with `factor` times as many steps in every stage, one at least."""

        def longer(schedule: Schedule) -> Schedule:
            return replace(schedule, num_steps=max(1, round(schedule.num_steps * factor)))

        return replace(self, dense=longer(self.dense), joint=longer(self.joint), cool=longer(self.cool))


LESSONS = replace(POCKET, page_share=0.2, sign_share=0.4)
"""The scored scenes with more to read, which is learnt most slowly."""

POCKET_RECIPE = Recipe(
    size=shape.POCKET_SIZE,
    dense=Schedule(num_steps=12_000, batch_size=32, learning_rate=8e-4, final_share=0.05),
    joint=Schedule(num_steps=24_000, batch_size=8, learning_rate=4e-4, final_share=1.0),
    cool=Schedule(num_steps=900, batch_size=8, learning_rate=4e-4, warmup_steps=0),
)


DRAFT_RECIPE = Recipe(
    size=shape.DRAFT_SIZE,
    dense=Schedule(num_steps=3000, batch_size=16, learning_rate=1e-3),
    joint=Schedule(num_steps=12_000, batch_size=16, learning_rate=8e-4, final_share=1.0),
    cool=Schedule(num_steps=1500, batch_size=16, learning_rate=8e-4, warmup_steps=0),
)
"""The same stages for a smaller model, which drafts for the pocket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where training happens."""

    folder: Path
    device: torch.device
    num_workers: int = 2
    """Processes that draw."""
    num_processes: int = 1
    """Processes that train, each with its share of every batch; of use on CPU, see `parallel`."""
    resume: bool = False
    anneal: bool = False
    """End the joint stage where it was last saved, and cool down from there."""


def train_pocket(recipe: Recipe, place: Workplace, out: Path, *, start: Path | None = None) -> Tally:
    """Runs the stages, writes the checkpoint to `out`, and returns its held-out accuracy on pocket scenes.

    Args:
        start: a pocket checkpoint to go on from, with its tokenizer, through the same stages.

    Raises:
        WeightsError: `start` is of another shape.
        InputError: easy-VQA is not installed, there is no training to end, `start` has no tokenizer, or there are more
            processes than pictures in a batch.
    """
    smallest = min(schedule.batch_size for schedule in (recipe.dense, recipe.joint, recipe.cool))
    if place.num_processes > smallest:
        raise InputError(f"{place.num_processes} processes can not share batches of {smallest}: use at most {smallest}")
    joint_state = place.folder / "joint.pt"
    if place.anneal and not joint_state.is_file():
        raise InputError(f"there is no training to end: {joint_state} is missing; train without --anneal first")
    if recipe.easy_share > 0:
        require_easy_vqa()  # hours before its pictures are wanted
    place.folder.mkdir(parents=True, exist_ok=True)
    given = recipe.tokenizer if start is None else start / "tokenizer.json"
    _write_tokenizer(recipe, place, given)
    model, heads, tokens = _networks(recipe, place, start)
    pictures = Pictures(recipe, place)
    pictures.draw()
    work = partial(_run_stages, recipe, place, start)
    if place.num_processes > 1:
        run_group(work, place.num_processes)
    else:
        work()
    load_state(place.folder / "cool.pt", joint_modules(model, heads))
    write_pocket(model, tokens.tokenizer, recipe.size, out)
    return _score(model, tokens, recipe, place, pictures.held_out())


class Pictures:
    """The pictures of a recipe, drawn into the work folder when first asked for."""

    def __init__(self, recipe: Recipe, place: Workplace) -> None:
        self.recipe, self.place = recipe, place
        self.preprocessing = PreprocessConfig.from_hf(shape.preprocessor_config(shape.POCKET_SIZE))

    def draw(self) -> None:
        """Draws all of them."""
        for frames in (self.crowded, self.held_out_crowded, self.scenes, self.held_out):
            frames()
        if self.recipe.easy_share > 0:
            self.easy()

    def crowded(self) -> Frames:
        count = self.recipe.num_dense_frames
        return self._open("crowded", SceneSource(split=Split.TRAIN, seed=1, count=count, style=CROWDED, step=2))

    def held_out_crowded(self) -> Frames:
        count = self.recipe.num_held_out_frames
        source = SceneSource(split=Split.HELD_OUT, seed=1, count=count, style=CROWDED, step=2)
        return self._open("held-out-crowded", source)

    def scenes(self) -> Frames:
        count = self.recipe.num_joint_frames
        return self._open("pocket", SceneSource(split=Split.TRAIN, seed=2, count=count, style=LESSONS))

    def held_out(self) -> Frames:
        count = self.recipe.num_held_out_frames
        return self._open("held-out-pocket", SceneSource(split=Split.HELD_OUT, seed=2, count=count, style=POCKET))

    def easy(self) -> Frames:
        return self._open("easy", EasySource(split=Split.TRAIN, count=self.recipe.num_easy_frames))

    def _open(self, name: str, source: Source) -> Frames:
        folder = self.place.folder / "frames" / name
        return open_frames(folder, source, self.preprocessing, shape.PATCH_SIZE, workers=self.place.num_workers)


def _run_stages(recipe: Recipe, place: Workplace, start: Path | None) -> None:
    """All training, alone or as one of several processes; the result is the state file of the last stage."""
    model, heads, tokens = _networks(recipe, place, start)
    pictures = Pictures(recipe, place)
    pretrain(
        model.vision,
        heads,
        pictures.crowded().single(),
        pictures.held_out_crowded().single(),
        recipe.dense,
        place.folder,
        num_shown=recipe.dense_patches,
        seed=recipe.seed,
        resume=place.resume,
        device=place.device,
    )

    def lesson(frames: Frames, share: float) -> Lesson:
        global_share = 1.0 if recipe.global_only else recipe.global_share
        return Lesson.prepare(frames, tokens, model, recipe.emphasis, global_share=global_share, share=share)

    lessons = [lesson(pictures.scenes(), 1 - recipe.easy_share)]
    if recipe.easy_share > 0:
        lessons.append(lesson(pictures.easy(), recipe.easy_share))
    held_out = pictures.held_out().first(recipe.num_scored_scenes)
    for number, (name, schedule) in enumerate({"joint": recipe.joint, "cool": recipe.cool}.items()):
        state = place.folder / f"{name}.pt"
        if name == "joint" and place.anneal:
            load_state(state, joint_modules(model, heads))
            continue
        train_joint(
            model,
            heads,
            lessons,
            schedule,
            state,
            seed=recipe.seed + number,
            resume=place.resume,
            device=place.device,
            score=partial(_score, model, tokens, recipe, place, held_out),
        )


def _networks(recipe: Recipe, place: Workplace, start: Path | None) -> tuple[Idefics3, DenseHeads, PromptTokens]:
    """The networks as training begins, and the tokenizer of the work folder."""
    tokenizer = Tokenizer.from_file(str(place.folder / "tokenizer.json"))
    model = new_pocket(tokenizer, recipe.seed, recipe.size).to(place.device)
    if start is not None:
        load_checkpoint(model, start)
    heads = DenseHeads(model.config.vision.hidden_size).to(place.device)
    return model, heads, PromptTokens(tokenizer=tokenizer)


def _score(model: Idefics3, tokens: PromptTokens, recipe: Recipe, place: Workplace, held_out: Frames) -> Tally:
    return evaluate(model, tokens, held_out, place.device, count=len(held_out.pixels), global_only=recipe.global_only)


def new_pocket(tokenizer: Tokenizer, seed: int, size: shape.Size = shape.POCKET_SIZE) -> Idefics3:
    """An untrained pocket, float32."""
    config = ModelConfig.from_hf(shape.model_config(size, tokenizer.get_vocab_size(), special_ids(tokenizer)))
    model = Idefics3(config)
    initialize(model, seed=seed)
    initialize_vision(model.vision, seed=seed)
    return model


def _write_tokenizer(recipe: Recipe, place: Workplace, given: Path | None) -> None:
    """Puts the tokenizer into the work folder: the given one, or a new one unless one is there to go on with."""
    path = place.folder / "tokenizer.json"
    if given is not None:
        if not given.is_file():
            raise InputError(f"{given} is missing: a pocket to go on from has its tokenizer beside it")
        path.write_bytes(given.read_bytes())  # which may be the same file
    elif not (place.resume and path.is_file()):
        train_tokenizer(recipe.vocab_size).save(str(path))
