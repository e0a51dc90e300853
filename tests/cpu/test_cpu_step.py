"""The compiled step, int8, int4 in a whole VLM: batches, drafts, prefixes change no token; refusals name the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import build, check_idle, features_of, naive_logits, noise

from vlmfast import Sampling
from vlmfast.device import resolve_dtype
from vlmfast.errors import DeviceError, ModelError
from vlmfast_kernels.cpu.library import OFF_SWITCH, why_not_compiled

_REASON = why_not_compiled(torch.device("cpu"), torch.bfloat16)
needs_step = pytest.mark.skipif(bool(_REASON), reason=_REASON or "compiled here")

_PICTURES = [noise(90, 60), noise(40, 40, 1), noise(64, 128, 2)]
_SHORT = Sampling(max_new_tokens=12)


@needs_step
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_batches_and_prefixes_change_no_token(load_vlm: Callable[..., Any], dtype: str) -> None:
    """Guards invariant 1 in the fast dtypes, where the step makes it bit for bit: together, alone, from a prefix."""
    vlm = load_vlm(dtype=dtype)
    assert "decoder: compiled step" in vlm.explain()
    alone = [vlm.describe(picture, "What?", sampling=_SHORT).token_ids for picture in _PICTURES]
    assert len(set(alone)) > 1  # the pictures matter
    again = [vlm.describe(picture, "What?", sampling=_SHORT) for picture in _PICTURES]
    together = [answer.token_ids for answer in vlm.caption(_PICTURES, "What?", sampling=_SHORT)]
    fresh = load_vlm(dtype=dtype, caching=False)
    assert [answer.token_ids for answer in again] == together == alone
    assert [answer.token_ids for answer in fresh.caption(_PICTURES, "What?", sampling=_SHORT)] == alone
    assert all(answer.usage.cached_tokens > 0 for answer in again)
    check_idle(vlm)


@needs_step
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_departs_only_where_logits_are_close(
    load_vlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Guards int8 against the exact model, and int4, by which random weights lose much, against torch's layers on the
    same rounded weights: a token that differs is within 8 % of the best logit there."""
    quantised = load_vlm(dtype=dtype, caching=False)
    monkeypatch.setenv(OFF_SWITCH, "0")
    exact = load_vlm(dtype="float32" if dtype == "int8" else dtype, caching=False)
    prompt, loaded = build(exact, [_PICTURES[0]], "What?")
    features = features_of(exact, loaded, prompt)
    answer = quantised.describe(_PICTURES[0], "What?", sampling=_SHORT)
    logits = naive_logits(exact, [*prompt.ids, *answer.token_ids], features)[len(prompt.ids) - 1 : -1].float()
    best = logits.amax(-1)
    chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert ((best - chosen) / best.abs()).max() < 0.08
    assert float(logits.gather(1, logits.topk(20).indices[:, -1:]).sub(best[:, None]).abs().min()) > 0.0  # control


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_without_the_step(load_vlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Guards machines without a compiler: int8 and int4 answer there, too, and `explain` says at what cost."""
    monkeypatch.setenv(OFF_SWITCH, "0")
    vlm = load_vlm(dtype=dtype, caching=False)
    assert "without gain" in vlm.explain()
    assert vlm.describe(_PICTURES[0], "What?", sampling=_SHORT).token_ids


def test_usage_tells_the_weights(load_vlm: Callable[..., Any]) -> None:
    """Guards that a lossy answer says so."""
    for dtype in ("int8", "int4"):
        assert load_vlm(dtype=dtype, caching=False).describe(None, "Hello?").usage.weights == dtype
    assert load_vlm(caching=False).describe(None, "Hello?").usage.weights == "float32"


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_is_for_the_cpu(dtype: str) -> None:
    """Guards the dtype's name: what it means on the CPU, a clear refusal elsewhere, and a hint for what is unknown."""
    assert resolve_dtype(dtype, "float32", torch.device("cpu")) is resolve_dtype(
        "auto", "bfloat16", torch.device("cpu")
    )
    with pytest.raises(DeviceError, match=rf"{dtype}.*CPU only.*use bfloat16"):
        resolve_dtype(dtype, "bfloat16", torch.device("cuda"))
    with pytest.raises(DeviceError, match=dtype):
        resolve_dtype("int3", "bfloat16", torch.device("cpu"))


@needs_step
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_damaged_model_is_refused_when_quantised_too(load_vlm: Callable[..., Any], dtype: str) -> None:
    """Guards against bytes that turn infinity into an answer."""
    vlm = load_vlm(dtype=dtype, caching=False)
    with torch.no_grad():
        vlm.model.decoder.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not numbers"):
        vlm.describe(_PICTURES[0], "What?", sampling=_SHORT)
    check_idle(vlm)
