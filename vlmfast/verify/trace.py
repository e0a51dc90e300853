"""Our run of one question, kept layer by layer: the product's own prompt, pixels, networks, cache and engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmfast.image.preprocess import preprocess
from vlmfast.kv import SequenceKV
from vlmfast.options import Batching, Sampling
from vlmfast.prompt import Message, Prompt
from vlmfast.spec.attention import BatchAttention
from vlmfast.types import FinishReason, ImageInput
from vlmfast.verify.taps import FEATURES, LOGITS, TEXT, decoder_layer, vision_taps
from vlmfast.vision import VisionEncoder
from vlmfast.vlm import VLM


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One question to compare on."""

    name: str
    images: tuple[ImageInput, ...]
    question: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """What our run of a case computed."""

    case: Case
    prompt: Prompt
    pixels: tuple[Tensor, ...]
    """float32 [P, C, S, S] of each picture."""
    activations: dict[str, Tensor]
    """Stage name -> activations, in the order of the computation; under the names of `taps`."""
    image_token_id: int
    """The token that stands for a visual one."""
    answer: tuple[int, ...]
    """Greedy tokens, the end token not included."""
    stopped: bool
    """An end token ended the answer."""


@torch.inference_mode()
def trace(vlm: VLM, case: Case, *, max_new_tokens: int, progress: Callable[[int, int], None]) -> Trace:
    """Runs a case through the engine for its answer, then through our networks, decoder layer by decoder layer.

    Raises:
        InputError: the checkpoint's chat template or context has no room for the case.
    """
    model = vlm.model
    message = Message(role="user", text=case.question, images=case.images)
    prompt = vlm.build_prompt([message])
    # The engine first: it refuses a prompt that is too long.
    num_steps, answer = max_new_tokens + model.config.text.num_layers, None
    for step, chunk in enumerate(vlm.answer_messages([message], sampling=Sampling(max_new_tokens=max_new_tokens))):
        answer = chunk.answer
        progress(min(step, max_new_tokens), num_steps)
    assert answer is not None
    pixels = tuple(
        preprocess(image, span.plan, vlm.checkpoint.preprocess).pixels
        for image, span in zip(case.images, prompt.spans, strict=True)
    )
    # An encoder of its own: no cache stands between the pictures and the tower.
    encoder = VisionEncoder(
        model, vlm.checkpoint.preprocess, device=vlm.device, dtype=vlm.dtype, max_tiles=Batching().max_encode_tiles
    )
    groups: dict[str, list[Tensor]] = defaultdict(list)
    with vision_taps(model.vision, model.connector, lambda name, seen: groups[name].append(_kept(seen))):
        features = [
            encoder.encode(image, span.plan).tokens for image, span in zip(case.images, prompt.spans, strict=True)
        ]
    activations = {name: torch.cat(parts) for name, parts in groups.items()}  # the tower runs a few tiles at a time
    ids = torch.tensor(prompt.ids, device=vlm.device)
    visual_rows = ids == model.config.image_token_id
    hidden = model.decoder.embed(ids)  # [T, E]
    if features:
        hidden[visual_rows] = torch.cat(features)
        activations[FEATURES] = _kept(hidden[visual_rows])
    activations[TEXT] = _kept(hidden[~visual_rows])
    positions = torch.arange(len(ids), device=vlm.device)
    kv = SequenceKV(model.config.text, len(ids), vlm.device, vlm.dtype)
    attention = BatchAttention([(0, len(ids), kv)], vlm.device, vlm.dtype)
    for layer in range(model.config.text.num_layers):
        hidden = model.decoder.run(hidden, positions, attention, layer, layer + 1)
        activations[decoder_layer(layer)] = _kept(hidden)
        progress(max_new_tokens + layer + 1, num_steps)
    activations[LOGITS] = _kept(model.decoder.logits(hidden))  # [T, V]
    return Trace(
        case=case,
        prompt=prompt,
        pixels=pixels,
        activations=activations,
        image_token_id=model.config.image_token_id,
        answer=answer.token_ids,
        stopped=answer.finish_reason is FinishReason.STOP,
    )


def _kept(seen: Tensor) -> Tensor:
    """A copy in main memory: layers may write over their input, and a GPU must hold transformers' networks next."""
    return seen.to("cpu", copy=True)
