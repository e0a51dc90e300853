"""The oracle of the equivalence tests: answers without cache, pages, chunks or batches, and looks inside a VLM.

The naive loop computes the whole sequence anew for each token with plain softmax attention.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmfast.image.load import load_image
from vlmfast.prompt import Message, Prompt
from vlmfast.types import ImageInput


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    """A picture of smooth noise, uint8 [H, W, 3]: no two tiles and no two pictures of it look alike."""
    generator = np.random.default_rng(seed + 1000 * width + height)
    coarse = generator.integers(0, 256, (max(height // 5, 2), max(width // 5, 2), 3), dtype=np.uint8)
    from PIL import Image

    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def model_of(vlm: Any) -> Any:
    """The networks of a VLM."""
    return vlm.model


def build(vlm: Any, images: list[Any], question: str) -> tuple[Prompt, tuple[ImageInput, ...]]:
    """The prompt of one question, and its decoded pictures."""
    loaded = tuple(load_image(image) for image in images)
    return vlm.build_prompt([Message(role="user", text=question, images=loaded)]), loaded


class FullAttention:
    """Plain causal attention over the tokens of one pass, without a cache; `mask` replaces the causal one."""

    def __init__(self, mask: Tensor | None = None) -> None:
        self._mask = mask

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_tokens, num_heads, dim = query.shape
        repeat = num_heads // key.shape[1]
        keys = torch.stack([key[:, head // repeat] for head in range(num_heads)], 1)
        values = torch.stack([value[:, head // repeat] for head in range(num_heads)], 1)
        scores = torch.einsum("thd,shd->hts", query, keys) / dim**0.5
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril() if self._mask is None else self._mask
        weights = scores.masked_fill(~mask.to(query.device), float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values)


@torch.inference_mode()
def features_of(vlm: Any, images: tuple[ImageInput, ...], prompt: Prompt) -> Tensor:
    """Visual tokens of all pictures of a prompt, [N, E]."""
    parts = [vlm._vision.encode(image, span.plan).tokens for image, span in zip(images, prompt.spans, strict=True)]
    return torch.cat(parts)


@torch.inference_mode()
def merged_embeddings(vlm: Any, ids: list[int], features: Tensor | None) -> Tensor:
    """Token embeddings with the visual tokens at the image placeholders."""
    model = model_of(vlm)
    row = torch.tensor(ids, device=vlm.device)
    embeddings = model.decoder.embed(row)
    if features is not None:
        embeddings[row == model.config.image_token_id] = features
    return embeddings


@torch.inference_mode()
def naive_logits(vlm: Any, ids: list[int], features: Tensor | None, attention: Any = None) -> Tensor:
    """Logits [T, V] of a whole sequence in one pass without a cache."""
    decoder = model_of(vlm).decoder
    embeddings = merged_embeddings(vlm, ids, features)
    positions = torch.arange(len(ids), device=vlm.device)
    return decoder.logits(decoder.run(embeddings, positions, attention or FullAttention()))


def naive_answer(vlm: Any, images: list[Any], question: str, num_tokens: int) -> tuple[int, ...]:
    """Greedy tokens of an answer, the end token not included, each from a full pass over all before it."""
    prompt, loaded = build(vlm, images, question)
    features = features_of(vlm, loaded, prompt) if loaded else None
    ids = list(prompt.ids)
    for _ in range(num_tokens):
        token = int(naive_logits(vlm, ids, features)[-1].argmax())
        if token in vlm.checkpoint.eos_token_ids:
            break
        ids.append(token)
    return tuple(ids[len(prompt.ids) :])


def check_idle(vlm: Any) -> None:
    """Nothing is left of any request: no page, no runner state, no job."""
    gc.collect()
    engine = vlm._engine
    engine.step()  # carries out what destructors asked for
    engine._scheduler.check_integrity()
    assert engine.num_requests == 0
    assert engine._scheduler.num_free_pages == vlm._batching.max_sequences
    assert not engine._scheduler.has_work
    assert engine._runner.num_states == 0
