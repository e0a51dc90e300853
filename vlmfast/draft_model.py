"""Loads a smaller checkpoint to draft with, one that takes pictures or a text model; the tokenizer must be the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vlmfast.cache.features import FeatureCache
from vlmfast.checkpoint import Checkpoint, is_text_checkpoint, read_checkpoint, read_text_checkpoint, resolve_folder
from vlmfast.errors import ConfigError, ModelNotFoundError
from vlmfast.kv import text_within_memory
from vlmfast.spec.model import Look, ModelDrafter
from vlmfast.types import ImageInput
from vlmfast.vision import VisionEncoder
from vlmfast_models.families import family
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
    features: FeatureCache | None,
    fingerprint_of: Callable[[Checkpoint, Any], str],
) -> ModelDrafter:
    """The drafter of a checkpoint, in the target's number format.

    Args:
        features: the target's cache; pictures have keys of their own in it.
        fingerprint_of: names what features depend on, of a checkpoint and its networks.

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
    prepare_for_inference(model)
    look = None
    if checkpoint is not None:
        vision = VisionEncoder(
            model,
            checkpoint.preprocess,
            device=device,
            dtype=dtype,
            max_tiles=max_tiles,
            fingerprint=fingerprint_of(checkpoint, model) if features is not None else "",
            cache=features,
        )
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
    tokenizer, image_token_id = checkpoint.tokenizer, checkpoint.config.image_token_id

    def look(image: ImageInput, num_images: int) -> tuple[list[int], list[int], Tensor]:
        plan = vision.plan(image, num_images=num_images)
        ids = list(tokenizer.encode(model.placeholder(plan), add_special_tokens=False))
        places = [at for at, token in enumerate(ids) if token == image_token_id]
        tokens = vision.features(image, plan).features.tokens
        assert len(places) == len(tokens), "placeholders and features disagree"
        return ids, places, tokens

    return look
