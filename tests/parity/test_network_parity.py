"""Features, logits and greedy tokens against transformers' Idefics3 on the same random folder, float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import FullAttention, build, features_of, merged_embeddings, model_of, naive_logits, noise

from vlmfast import Sampling
from vlmfast.kv import SequenceKV
from vlmfast.runner import BatchAttention
from vlmfast_models.vit import position_ids

_ATOL = 1e-4
PICTURES = {
    "no picture": [],
    "one picture": [noise(61, 37)],
    "three pictures": [noise(61, 37), noise(19, 90), noise(33, 33)],
}
_QUESTION = "What is in the picture? Is it a red circle?"


def _cached_logits(vlm: Any, ids: list[int], features: torch.Tensor | None, cuts: list[int]) -> torch.Tensor:
    """Logits [T, V] through the product's cache and attention, in chunks that end at `cuts`."""
    decoder = model_of(vlm).decoder
    kv = SequenceKV(decoder.config, len(ids), vlm.device, vlm.dtype)
    embeddings = merged_embeddings(vlm, ids, features)
    out = []
    with torch.inference_mode():
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            attention = BatchAttention([(0, end - start, kv)], vlm.device, vlm.dtype)
            out.append(decoder.logits(decoder.run(embeddings[start:end], torch.arange(start, end), attention)))
    return torch.cat(out)


@pytest.mark.parametrize("pictures", PICTURES)
def test_features_and_logits_match(twin: Any, pictures: str) -> None:
    """Guards tower, connector, decoder and cache numerically: every visual token and every prompt position."""
    images = PICTURES[pictures]
    inputs = twin.theirs.inputs(images, _QUESTION)
    prompt, loaded = build(twin.ours, images, _QUESTION)
    assert list(prompt.ids) == inputs["input_ids"][0].tolist()
    features = None
    if images:
        features = features_of(twin.ours, loaded, prompt)
        theirs = twin.theirs.features(inputs)
        assert len(features) == prompt.num_visual_tokens
        torch.testing.assert_close(features, theirs, atol=_ATOL, rtol=0)
    theirs = twin.theirs.logits(inputs)
    ids = list(prompt.ids)
    torch.testing.assert_close(_cached_logits(twin.ours, ids, features, []), theirs, atol=_ATOL, rtol=0)
    cuts = [1, 8, len(ids) - 1]
    torch.testing.assert_close(_cached_logits(twin.ours, ids, features, cuts), theirs, atol=_ATOL, rtol=0)
    torch.testing.assert_close(naive_logits(twin.ours, ids, features), theirs, atol=_ATOL, rtol=0)


@pytest.mark.parametrize("pictures", PICTURES)
def test_64_greedy_tokens_match(twin: Any, pictures: str) -> None:
    """Guards the whole way from picture to token. Chance of a false alarm: two logits within 1e-5 of each other."""
    images = PICTURES[pictures]
    for question in (_QUESTION, "a?"):
        answer = twin.ours.describe(images, question, sampling=Sampling(max_new_tokens=64))
        assert answer.token_ids == twin.theirs.answer(twin.theirs.inputs(images, question), 64)
        assert answer.usage.num_images == len(images)


def test_answers_vary(twin: Any) -> None:
    """Guards the tests above: on a checkpoint that always says the same token, equal tokens would prove nothing."""
    answer = twin.ours.describe(PICTURES["one picture"], _QUESTION, sampling=Sampling(max_new_tokens=64))
    other = twin.ours.describe([noise(61, 38, 5)], _QUESTION, sampling=Sampling(max_new_tokens=64))
    assert len(set(answer.token_ids)) > 5
    assert answer.token_ids != other.token_ids


@contextmanager
def _shifted(weight: torch.Tensor, row: int) -> Iterator[None]:
    """A weight with one row changed, for the time of a test."""
    with torch.no_grad():
        before = weight[row].clone()
        weight[row] += torch.linspace(-1, 1, weight[row].numel()).view_as(weight[row]) if weight.ndim > 1 else 0.5
    try:
        yield
    finally:
        with torch.no_grad():
            weight[row] = before


@pytest.mark.parametrize(
    "name",
    [
        "vision.position_embed.weight",
        "vision.patch_embed.bias",
        "vision.layers.0.qkv.bias",
        "vision.layers.1.fc2.weight",
        "vision.norm.weight",
        "connector.proj.weight",
        "decoder.embed_tokens.weight",
        "decoder.layers.0.qkv.weight",
        "decoder.layers.2.down.weight",
        "decoder.layers.1.attn_norm.weight",
        "decoder.norm.weight",
        "decoder.head.weight",
    ],
)
def test_every_kind_of_weight_is_used(plain_twin: Any, name: str) -> None:
    """Negative control: one row of a weight changed must move the logits far beyond the tolerance of parity."""
    vlm = plain_twin.ours
    prompt, loaded = build(vlm, PICTURES["one picture"], _QUESTION)
    ids = list(prompt.ids)
    before = naive_logits(vlm, ids, features_of(vlm, loaded, prompt))
    weight = dict(model_of(vlm).named_parameters())[name]
    row = ids[-1] if "embed_tokens" in name else 5
    with _shifted(weight, row):
        after = naive_logits(vlm, ids, features_of(vlm, loaded, prompt))
    assert float((after - before).abs().max()) > 10 * _ATOL
    again = naive_logits(vlm, ids, features_of(vlm, loaded, prompt))
    assert torch.equal(again, before)


def test_mask_and_positions_are_used(plain_twin: Any) -> None:
    """Negative control: one mask bit, or two positions exchanged, must move the logits."""
    vlm = plain_twin.ours
    decoder = model_of(vlm).decoder
    ids = list(build(vlm, [], _QUESTION)[0].ids)
    before = naive_logits(vlm, ids, None)
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    mask[-1, 3] = False
    assert float((naive_logits(vlm, ids, None, FullAttention(mask)) - before)[-1].abs().max()) > 10 * _ATOL
    positions = torch.arange(len(ids))
    positions[[4, 9]] = positions[[9, 4]]
    with torch.inference_mode():
        moved = decoder.logits(decoder.run(merged_embeddings(vlm, ids, None), positions, FullAttention()))
    assert float((moved - before)[-1].abs().max()) > 10 * _ATOL


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_segments_equal_one_run_bit_for_bit(plain_twin: Any, cut: int) -> None:
    """Guards the segment boundary that taps and pruning will sit at."""
    vlm = plain_twin.ours
    decoder = model_of(vlm).decoder
    ids = list(build(vlm, [], _QUESTION)[0].ids)
    embeddings, positions = merged_embeddings(vlm, ids, None), torch.arange(len(ids))

    def attention() -> BatchAttention:
        kv = SequenceKV(decoder.config, len(ids), vlm.device, vlm.dtype)
        return BatchAttention([(0, len(ids), kv)], vlm.device, vlm.dtype)

    with torch.inference_mode():
        whole = decoder.run(embeddings, positions, attention())
        shared = attention()
        lower = decoder.run(embeddings, positions, shared, 0, cut)
        upper = decoder.run(lower, positions, shared, cut)
    assert torch.equal(whole, upper)
    assert cut in (0, 3) or not torch.equal(lower, whole)


_ODD_SIDES = (19, 25, 38, 43)
"""Where float32 rounding puts some patches into their neighbour's bucket."""


@pytest.mark.parametrize("side", [1, 2, 7, 8, 14, 16, *_ODD_SIDES, 23, 26, 27, 32, 52, 64, 70])
def test_position_ids_match(side: int) -> None:
    """Guards the float32 buckets of SigLIP positions: for some sides rounding moves patches to their neighbour."""
    import transformers
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    config = transformers.Idefics3VisionConfig(image_size=side * 2, patch_size=2, hidden_size=4, num_attention_heads=1)
    theirs = Idefics3VisionEmbeddings(config)
    seen: list[torch.Tensor] = []
    theirs.position_embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.inference_mode():
        theirs(torch.zeros(1, 3, side * 2, side * 2), torch.ones(1, side, side, dtype=torch.bool))
    assert torch.equal(position_ids(side, side, side), seen[0][0])


@pytest.mark.parametrize("side", _ODD_SIDES)
def test_the_bucket_quirk_is_covered(side: int) -> None:
    """Guards the choice of sides above: here a plain 0, 1, 2, ... table would be wrong."""
    assert not torch.equal(position_ids(side, side, side), torch.arange(side**2))
