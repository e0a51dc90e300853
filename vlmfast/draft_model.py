"""Loads a smaller checkpoint to draft with, one that takes pictures or a text model; the tokenizer must be the same."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from vlmfast.caches import ModelCaches
from vlmfast.checkpoint import Checkpoint, is_text_checkpoint, read_checkpoint, read_text_checkpoint, resolve_folder
from vlmfast.errors import ConfigError, ModelNotFoundError
from vlmfast.kv import text_within_memory
from vlmfast.spec.model import Look, ModelDrafter
from vlmfast.types import ImageInput
from vlmfast.vision import VisionEncoder
from vlmfast_models.families import family
from vlmfast_models.geometry import TilePlan
from vlmfast_models.layers import prepare_for_inference
from vlmfast_models.text import TextModel
from vlmfast_models.weights import allocate, load_checkpoint


def load_draft_model(
    name_or_path: str | os.PathLike[str],
    target: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    max_tiles: int,
    caches: ModelCaches,
    target_model: Any,
    target_vision: VisionEncoder,
) -> ModelDrafter:
    """The drafter of a checkpoint, in the target's number format.

    A checkpoint with the target's own vision tower shares it: a picture goes through it once.

    Args:
        caches: the target's; pictures have keys of their own in them.

    Raises:
        ModelError: the checkpoint can not be used.
        ConfigError: it has another tokenizer (the first difference is named), or fewer embeddings than tokens.
    """
    try:
        folder = resolve_folder(name_or_path)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"draft {error}") from error
    checkpoint: Checkpoint | None = None
    if is_text_checkpoint(folder):
        text, tokenizer = read_text_checkpoint(folder)
    else:
        checkpoint = read_checkpoint(folder)
        text, tokenizer = checkpoint.config.text, checkpoint.tokenizer
    check_tokenizers(target.tokenizer, tokenizer, f"draft model {folder}")
    num_tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if text.vocab_size < num_tokens:
        raise ConfigError(
            f"draft model {folder} has {text.vocab_size} embeddings, but its tokenizer {num_tokens} tokens; "
            "give a checkpoint whose weights and tokenizer belong together"
        )
    text = text_within_memory(text, device, dtype)
    if checkpoint is not None:
        checkpoint = replace(checkpoint, config=replace(checkpoint.config, text=text))

    def network() -> Any:
        return TextModel(text) if checkpoint is None else family(checkpoint.config.model_type)(checkpoint.config)

    model: Any = allocate(network, device=device, dtype=dtype)
    load_checkpoint(model, folder)
    model.decoder.quantization = quantization
    shares_tower = checkpoint is not None and _same_tower(target, target_model, checkpoint, model, caches)
    if shares_tower:
        model.vision = target_model.vision
    prepare_for_inference(model)
    look = None
    if checkpoint is not None:
        vision = VisionEncoder(
            model,
            checkpoint.preprocess,
            device=device,
            dtype=dtype,
            max_tiles=max_tiles,
            fingerprint=caches.fingerprint_of(checkpoint, model) if caches.features is not None else "",
            cache=caches.features,
        )
        if shares_tower:
            vision.borrow_tower(target_vision)
        look = _look(model, checkpoint, vision)
    return ModelDrafter(
        model.decoder,
        text,
        vocab_size=target.config.text.vocab_size,
        device=device,
        dtype=dtype,
        ends=target.eos_token_ids,
        look=look,
    )


def _same_tower(target: Checkpoint, target_model: Any, checkpoint: Checkpoint, model: Any, caches: ModelCaches) -> bool:
    """Whether both make the same of one plan's frames, up to the connector."""
    if target.config.vision != checkpoint.config.vision or not target.preprocess.same_pixels(checkpoint.preprocess):
        return False
    return caches.tower_digest(target, target_model) == caches.tower_digest(checkpoint, model)


def check_tokenizers(target: Any, draft: Any, where: str) -> None:
    """Raises ConfigError where two tokenizers do not give every id the same token."""
    ours, theirs = ({number: token for token, number in one.get_vocab().items()} for one in (target, draft))
    for number in sorted(ours.keys() | theirs.keys()):
        one, two = ours.get(number), theirs.get(number)
        if one != two:
            names = [f"'{token}'" if token is not None else "missing" for token in (one, two)]
            raise ConfigError(
                f"{where} has another tokenizer: token {number} is {names[0]} to the target and {names[1]} to it; "
                "give one with the target's own tokenizer"
            )


def _look(model: Any, checkpoint: Checkpoint, vision: VisionEncoder) -> Look:
    image_token_id = checkpoint.config.image_token_id
    encode = lru_cache(maxsize=256)(partial(checkpoint.tokenizer.encode, add_special_tokens=False))

    def look(image: ImageInput, num_images: int, target: TilePlan) -> tuple[list[int], list[int], Tensor]:
        plan = vision.plan(image, num_images=num_images)
        ids = list(encode(model.placeholder(plan)))
        places = [at for at, token in enumerate(ids) if token == image_token_id]
        tokens = vision.global_frame(image, plan, target)
        if tokens is None:
            tokens = vision.features(image, plan).features.tokens
        assert len(places) == len(tokens), "placeholders and features disagree"
        return ids, places, tokens

    return look
