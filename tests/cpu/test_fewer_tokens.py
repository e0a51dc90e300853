"""Answers on fewer visual tokens: exact at the edges, and in between equal to a plain run of the same reduced model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import FullAttention, build, check_idle, features_of, merged_embeddings, model_of, naive_answer, noise
from torch import Tensor

from vlmfast import VLM, Batching, FastV, Reduce, Sampling, ToMe, Vision
from vlmfast.errors import InputError, OptionError
from vlmfast.options import REDUCERS
from vlmfast.prune.reducers import reduce_tokens
from vlmfast.testing import TINY_SHAPES

_NUM_TOKENS = 12
_GREEDY = Sampling(max_new_tokens=_NUM_TOKENS)
_PICTURE, _OTHER = noise(64, 61), noise(33, 64, 1)
_QUESTION = "What is in the picture?"


@pytest.fixture(scope="module")
def plain(load_vlm: Callable[..., Any]) -> Any:
    return load_vlm(caching=False)


@pytest.mark.parametrize(
    "vision",
    [
        Vision(),
        Vision(tome=ToMe(r=0)),
        Vision(tome=ToMe(r=(0, 0))),
        *(Vision(reduce=Reduce(method, keep=1.0)) for method in REDUCERS),
        *(Vision(reduce=Reduce(method, keep=10_000)) for method in REDUCERS),
        Vision(fastv=FastV(keep=1.0)),
        Vision(fastv=FastV(layer=3, keep=0.1)),
        Vision(fastv=FastV(layer=1, keep=10_000)),
    ],
    ids=str,
)
def test_nothing_to_leave_out_is_off(plain: Any, vision: Vision) -> None:
    """Guards case 46: r = 0, keep = 1 and layer = L answer as the plain run does, from the same features."""
    expected = naive_answer(plain, [_PICTURE], _QUESTION, _NUM_TOKENS)
    answer = plain.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=vision)
    assert answer.token_ids == expected
    usage = answer.usage
    assert usage.visual_tokens_before == usage.visual_tokens == usage.visual_tokens_after == 80
    image = plain.load_images(_PICTURE)[0]
    plan = plain._vision.plan(image)
    found = plain._vision.features(image, plan, vision)
    assert torch.equal(found.features.tokens, plain._vision.encode(image, plan).tokens)
    check_idle(plain)


def test_it_is_lossy_otherwise(plain: Any) -> None:
    """Negative control of the test above, and of the ones below."""
    whole = plain.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids
    for vision in (
        Vision(tome=ToMe(r=0.3)),
        *(Vision(reduce=Reduce(method, keep=0.25)) for method in REDUCERS),
        Vision(fastv=FastV(layer=1, keep=0.1)),
    ):
        assert plain.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=vision).token_ids != whole


class _HiddenFrom(FullAttention):
    """Full attention in which no other token sees the hidden places from a layer on."""

    def __init__(self, hidden: dict[int, set[int]]) -> None:
        super().__init__()
        self._hidden = hidden

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(len(query), len(query), dtype=torch.bool).tril()
        for first, places in self._hidden.items():
            if layer >= first:
                mask[:, sorted(places)] = False
        return FullAttention(mask | torch.eye(len(query), dtype=torch.bool)).attend(layer, query, key, value)


def _naive_tokens(
    vlm: Any, ids: list[int], features: Tensor, attention: Any, num_tokens: int, positions: list[int] | None = None
) -> tuple[int, ...]:
    """Greedy tokens, each from a full pass over all before it."""
    decoder, start = model_of(vlm).decoder, len(ids)
    places = positions or list(range(start))
    with torch.inference_mode():
        for _ in range(num_tokens):
            row = torch.tensor([*places, *range(places[-1] + 1, places[-1] + 1 + len(ids) - start)])
            hidden = decoder.run(merged_embeddings(vlm, ids, features), row, attention)
            token = int(decoder.logits(hidden[-1:])[0].argmax())
            if token in vlm.checkpoint.eos_token_ids:
                break
            ids = [*ids, token]
    return tuple(ids[start:])


@pytest.mark.parametrize("images", [[_PICTURE], [_OTHER, _PICTURE]], ids=["one", "two"])
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("rank", ["attention", "random"])
def test_pruned_prefill_and_cached_decode_equal_an_uncached_forward(
    plain: Any, images: list[Any], layer: int, rank: Any
) -> None:
    """Guards positions and lengths of layers: every token from a pass over all before it, with the same kept set."""
    answer = plain.describe(
        images, _QUESTION, sampling=_GREEDY, vision=Vision(fastv=FastV(layer=layer, keep=0.2, rank=rank))
    )
    prompt, loaded = build(plain, images, _QUESTION)
    image_id = plain.checkpoint.config.image_token_id
    visual = {place for place, token in enumerate(prompt.ids) if token == image_id}
    assert answer.kept_places is not None and set(answer.kept_places) < visual
    assert len(answer.kept_places) == answer.usage.visual_tokens_after == round(0.2 * len(visual))
    features = features_of(plain, loaded, prompt)
    hidden = {layer: visual - set(answer.kept_places)}
    assert answer.token_ids == _naive_tokens(plain, list(prompt.ids), features, _HiddenFrom(hidden), _NUM_TOKENS)
    check_idle(plain)


@pytest.mark.parametrize("images", [[_PICTURE], [_OTHER, _PICTURE]], ids=["one", "two"])
def test_a_schedule_equals_an_uncached_forward(plain: Any, images: list[Any]) -> None:
    """Guards several steps: each hides its tokens from its layer on, and decoding sees every layer as it was left."""
    first = FastV(layer=1, keep=0.5)
    wider = plain.describe(images, _QUESTION, sampling=_GREEDY, vision=Vision(fastv=first)).kept_places
    steps = FastV(layer=1, keep=0.5, then=((2, 0.1),))
    answer = plain.describe(images, _QUESTION, sampling=_GREEDY, vision=Vision(fastv=steps))
    prompt, loaded = build(plain, images, _QUESTION)
    visual = {place for place, token in enumerate(prompt.ids) if token == plain.checkpoint.config.image_token_id}
    assert answer.kept_places is not None and set(answer.kept_places) < set(wider) < visual
    assert len(answer.kept_places) == round(0.1 * len(visual))
    features = features_of(plain, loaded, prompt)
    hidden = {1: visual - set(wider), 2: visual - set(answer.kept_places)}
    assert answer.token_ids == _naive_tokens(plain, list(prompt.ids), features, _HiddenFrom(hidden), _NUM_TOKENS)
    late = {2: visual - set(answer.kept_places)}
    control = _naive_tokens(plain, list(prompt.ids), features, _HiddenFrom(late), _NUM_TOKENS)
    assert answer.token_ids != control, "control: the first step alone makes a difference"


@pytest.mark.parametrize("method", REDUCERS)
def test_a_reduced_prompt_is_a_shorter_prompt(plain: Any, method: str) -> None:
    """Guards placeholders and positions: separators stay, and the answer is the plain one to the reduced tokens, each
    where it stood in the whole prompt."""
    reduce = Reduce(method, keep=0.25)
    prompt, loaded = build(plain, [_PICTURE], _QUESTION)
    whole = plain._vision.encode(loaded[0], prompt.spans[0].plan, scored=True)
    reduction = reduce_tokens(whole.tokens, whole.saliency, (16,) * 5, reduce)
    tokens = reduction.tokens
    answer = plain.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=Vision(reduce=reduce))
    message = [*_messages(plain, [_PICTURE], _QUESTION)]
    short = plain.build_prompt(message, Vision(reduce=reduce))
    image_id = plain.checkpoint.config.image_token_id
    assert [token for token in short.ids if token != image_id] == [token for token in prompt.ids if token != image_id]
    assert short.ids.count(image_id) == len(tokens) == answer.usage.visual_tokens == 20
    assert answer.usage.visual_tokens_before == 80 and answer.usage.prompt_tokens == len(prompt.ids) - 60
    frames = "".join("x" if token == image_id else " " for token in short.ids).split()
    assert frames == ["xxxx"] * 5
    visual = [place for place, token in enumerate(prompt.ids) if token == image_id]
    others = iter(place for place, token in enumerate(prompt.ids) if token != image_id)
    left = iter(reduction.places())
    positions = [visual[next(left)] if token == image_id else next(others) for token in short.ids]
    expected = _naive_tokens(plain, list(short.ids), tokens, FullAttention(), _NUM_TOKENS, positions)
    assert answer.token_ids == expected
    closed = _naive_tokens(plain, list(short.ids), tokens, FullAttention(), _NUM_TOKENS)
    assert closed != expected, "control: without the gaps the answer is another"


def _messages(vlm: Any, images: list[Any], question: str) -> list[Any]:
    from vlmfast.prompt import Message

    return [Message(role="user", text=question, images=vlm.load_images(images))]


def test_auto_keeps_more_of_a_busy_picture(plain: Any) -> None:
    """Guards keep="auto": what was kept is in the usage, less of a blank picture, and twice is the same."""
    vision = Vision(reduce=Reduce("diversity", keep="auto", floor=0.25))
    blank = plain.describe(noise(64, 64) * 0 + 128, _QUESTION, sampling=_GREEDY, vision=vision)
    busy = plain.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=vision)
    assert busy.usage.visual_tokens > blank.usage.visual_tokens >= 20
    again = plain.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=vision)
    assert (again.token_ids, again.usage.visual_tokens) == (busy.token_ids, busy.usage.visual_tokens)


@pytest.mark.parametrize("model_type", sorted(TINY_SHAPES))
def test_every_family(load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Path], model_type: str) -> None:
    """Guards class tokens, line breaks and several feature layers: each method runs, and off is off."""
    vlm = load_vlm(checkpoint_of(TINY_SHAPES[model_type]), caching=False)
    whole = vlm.describe(_PICTURE, _QUESTION, sampling=_GREEDY)
    before = whole.usage.visual_tokens
    for vision in (
        Vision(tome=ToMe(r=0.2)),
        Vision(fastv=FastV(layer=1, keep=0.25)),
        *(Vision(reduce=Reduce(method, keep=0.25)) for method in REDUCERS if method != "pool"),
    ):
        usage = vlm.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=vision).usage
        assert usage.visual_tokens_before == before
        assert usage.visual_tokens_after == (before if vision.tome else round(before * 0.25))
    pooled = Vision(reduce=Reduce("pool", keep=0.25))
    if vlm._vision.plan(vlm.load_images(_PICTURE)[0]).grid is None:
        assert vlm.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=pooled).usage.visual_tokens < before
    else:
        with pytest.raises(OptionError, match="pool"):
            vlm.describe(_PICTURE, _QUESTION, vision=pooled)
    assert vlm.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids == whole.token_ids
    check_idle(vlm)


def test_what_a_model_can_not_do_is_refused_before_anything_is_computed(plain: Any) -> None:
    """Guards case 46: errors name the option, the value and the limit, and leave nothing behind."""
    for vision, match in (
        (Vision(fastv=FastV(layer=4)), r"layer=4, the decoder has 3 layers"),
        (Vision(fastv=FastV(layer=2, then=((9, 0.1),))), r"layer=9, the decoder has 3"),
        (Vision(tome=ToMe(r=33)), r"r=33 of 64 patches"),
        (Vision(tome=ToMe(r=(1, 1, 1))), r"3 values; give 2 at most"),
    ):
        with pytest.raises(OptionError, match=match):
            plain.describe(_PICTURE, _QUESTION, vision=vision)
    check_idle(plain)


def test_a_prompt_too_long_for_one_pass_is_refused(load_vlm: Callable[..., Any]) -> None:
    """Guards chunked prefill: the ranking row and the pictures must be in one pass."""
    vlm: VLM = load_vlm(caching=False, batching=Batching(max_step_tokens=50))
    with pytest.raises(InputError, match=r"one pass.*max_step_tokens is 50"):
        vlm.describe(_PICTURE, _QUESTION, vision=Vision(fastv=FastV(layer=1)))
    short = Vision(fastv=FastV(layer=1, keep=0.5), reduce=Reduce("scope", keep=0.1))
    assert vlm.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=short).usage.visual_tokens_after == 4
    check_idle(vlm)


def test_text_alone_is_untouched(plain: Any) -> None:
    vision = Vision(tome=ToMe(), reduce=Reduce("scope"), fastv=FastV(layer=1))
    alone = plain.describe(None, _QUESTION, sampling=_GREEDY)
    assert plain.describe(None, _QUESTION, sampling=_GREEDY, vision=vision).token_ids == alone.token_ids


@pytest.mark.parametrize("at", [1, 2])
def test_a_failed_pass_leaves_the_page_usable(plain: Any, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Guards an interrupt inside a pruned pass: layers are unequally long then, and the same plan runs again."""
    vision = Vision(fastv=FastV(layer=1, keep=0.25))
    expected = plain.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=vision)
    decoder = model_of(plain).decoder
    run, calls = decoder.run, []

    def interrupted(*arguments: Any) -> Tensor:
        calls.append(arguments)
        if len(calls) == at:
            raise KeyboardInterrupt
        return run(*arguments)

    stream = plain._engine.stream(
        plain._engine.submit(_request(plain, vision), started=0.0, image_ms=0.0),
    )
    monkeypatch.setattr(decoder, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plain._engine.step()
    monkeypatch.setattr(decoder, "run", run)
    assert list(stream)[-1].answer.token_ids == expected.token_ids
    check_idle(plain)


def _request(vlm: Any, vision: Vision) -> Any:
    from vlmfast.sequence import Request

    messages = _messages(vlm, [_PICTURE], _QUESTION)
    prompt = vlm.build_prompt(messages, vision)
    return Request(
        prompt=prompt,
        images=messages[0].images,
        sampling=_GREEDY,
        vision=vision,
        pruning=vlm._planner.pruning(messages, vision, prompt),
    )
