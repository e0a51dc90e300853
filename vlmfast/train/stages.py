"""The pocket's training to a checkpoint: frames, dense pretraining of the tower, the decoder on what the tower then
sees, everything together, cooling down, export.

Joint training runs at a constant rate, so that it may be ended anywhere; cooling lowers the rate to nearly nothing.
Each stage leaves a state file in the work folder; with `resume` a finished stage is read back and a broken-off one goes
on from its last save. A recipe may leave stages out. Everything random is keyed by the recipe's seed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from vlmfast.errors import InputError
from vlmfast.train import shape
from vlmfast.train.dense import DenseHeads, pretrain
from vlmfast.train.easy_vqa import require_easy_vqa
from vlmfast.train.evaluate import evaluate
from vlmfast.train.export import write_pocket
from vlmfast.train.features import tower_features
from vlmfast.train.frames import Frames
from vlmfast.train.initial import initialize_vision
from vlmfast.train.joint import Lesson, joint_modules, train_joint
from vlmfast.train.optimise import load_state
from vlmfast.train.parallel import run_group
from vlmfast.train.pictures import Pictures
from vlmfast.train.recipe import Recipe, Workplace
from vlmfast.train.tally import Tally
from vlmfast.train.tokens import PromptTokens, special_ids, train_tokenizer
from vlmfast_models.config import ModelConfig
from vlmfast_models.families.idefics3 import Idefics3
from vlmfast_models.layers import initialize
from vlmfast_models.weights import load_checkpoint


def train_pocket(recipe: Recipe, place: Workplace, out: Path, *, start: Path | None = None) -> Tally:
    """Runs the recipe's stages, writes the checkpoint to `out`, and returns its held-out accuracy on pocket scenes.

    Args:
        start: a pocket checkpoint to go on from, with its tokenizer, through the same stages.

    Raises:
        WeightsError: `start` is of another shape.
        InputError: easy-VQA is not installed, there is no training to end, `start` has no tokenizer, the recipe's tower
            is of another shape, or there are more processes than pictures in a batch.
    """
    smallest = min(schedule.batch_size for schedule in recipe.stages.values())
    if place.num_processes > smallest:
        raise InputError(f"{place.num_processes} processes can not share batches of {smallest}: use at most {smallest}")
    joint_state = place.folder / "joint.pt"
    if place.anneal and not joint_state.is_file():
        raise InputError(f"there is no training to end: {joint_state} is missing; train without --anneal first")
    if max(recipe.easy.share, recipe.easy.dense_share) > 0:
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
    load_state(place.folder / f"{[*recipe.stages][-1]}.pt", joint_modules(model, heads))
    write_pocket(model, tokens.tokenizer, recipe.size, out)
    return _score(model, tokens, recipe, place, pictures.held_out())


def _run_stages(recipe: Recipe, place: Workplace, start: Path | None) -> None:
    """All training, alone or as one of several processes; the result is the state file of the last stage."""
    model, heads, tokens = _networks(recipe, place, start)
    pictures = Pictures(recipe, place)
    held_out = pictures.held_out().first(recipe.num_scored_scenes)
    for number, (name, schedule) in enumerate(recipe.stages.items()):
        if name == "dense":
            pretrain(
                model.vision,
                heads,
                pictures.dense_parts(),
                pictures.held_out_crowded().single(),
                schedule,
                place.folder,
                num_shown=recipe.dense_patches,
                seed=recipe.seed,
                resume=place.resume,
                device=place.device,
            )
            continue
        state = place.folder / f"{name}.pt"
        if name == "joint" and place.anneal:
            load_state(state, joint_modules(model, heads))
            continue
        train_joint(
            model,
            heads,
            _lessons(recipe, place, pictures, model, tokens, fixed_tower=name == "decoder"),
            schedule,
            state,
            seed=recipe.seed + number,
            resume=place.resume,
            device=place.device,
            score=partial(_score, model, tokens, recipe, place, held_out),
        )


def _lessons(
    recipe: Recipe, place: Workplace, pictures: Pictures, model: Idefics3, tokens: PromptTokens, *, fixed_tower: bool
) -> list[Lesson]:
    """What a stage learns from; with `fixed_tower` the tower's features are part of it."""
    return [
        Lesson.prepare(
            frames,
            tokens,
            model,
            recipe.emphasis,
            global_share=1.0 if recipe.global_only else portion.global_share,
            share=portion.share,
            features=tower_features(model.vision, frames, place.device) if fixed_tower else None,
        )
        for portion, drawn in pictures.lessons()
        for frames in [drawn.whole() if recipe.global_only else drawn]
    ]


def _networks(recipe: Recipe, place: Workplace, start: Path | None) -> tuple[Idefics3, DenseHeads, PromptTokens]:
    """The networks as training begins, and the tokenizer of the work folder."""
    tokenizer = Tokenizer.from_file(str(place.folder / "tokenizer.json"))
    model = new_pocket(tokenizer, recipe.seed, recipe.size).to(place.device)
    if start is not None:
        load_checkpoint(model, start)
    if recipe.tower is not None:
        _take_tower(model, recipe.tower)
    heads = DenseHeads(model.config.vision.hidden_size).to(place.device)
    return model, heads, PromptTokens(tokenizer=tokenizer)


def _take_tower(model: Idefics3, folder: Path) -> None:
    """Gives the model the tower of the pocket in `folder`. Mutates it."""
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    if config.vision != model.config.vision:
        raise InputError(f"{folder}: its tower is of another shape than the one to train on")
    pocket = Idefics3(config)
    load_checkpoint(pocket, folder)
    model.vision.load_state_dict(pocket.vision.state_dict())


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
