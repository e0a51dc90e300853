"""Prefixes computed before, reused: the same tokens as the naive loop in any order of requests, and less work.

Chance of a false alarm: as in test_equivalence.py, and a past that was computed in other pieces is rounded otherwise,
which matters where two logits are within 1e-5.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import build, check_idle, naive_answer, naive_logits, noise

from vlmfast import VLM, Answer, Batching, Caching, Sampling
from vlmfast.image.load import load_image
from vlmfast.prompt import Message
from vlmfast.sequence import Request

_NUM_TOKENS = 10
_GREEDY = Sampling(max_new_tokens=_NUM_TOKENS)
_A, _B = noise(61, 37), noise(61, 37, 5)
_PREFIX_ONLY = Caching(features_ram_bytes=0, features_disk_bytes=0)
QUESTIONS: list[tuple[list[Any], str]] = [
    ([_A], "What is in the picture?"),
    ([_A], "What is in the sky?"),
    ([_A], "How many?"),
    ([_B], "What is in the picture?"),
    ([_A, _B], "What is in the picture?"),
    ([_B, _A], "What is in the picture?"),
    ([_A, _A], "What is in the picture?"),
    ([], "What is in the picture?"),
    ([], "What is it?"),
]


@pytest.fixture(scope="module")
def expected(load_vlm: Callable[..., Any]) -> list[tuple[int, ...]]:
    """What the naive loop answers to each question."""
    loaded = load_vlm(caching=False)
    answers = [naive_answer(loaded, images, question, _NUM_TOKENS) for images, question in QUESTIONS]
    assert len(set(answers)) == len(QUESTIONS), "the questions should have different answers"
    return answers


def _prefixes(loaded: VLM) -> Any:
    return loaded._engine._scheduler._prefixes


def _ask(loaded: VLM, index: int) -> Answer:
    return loaded.describe(*QUESTIONS[index], sampling=_GREEDY)


@pytest.mark.parametrize(
    ("batching", "prefix_bytes"),
    [({}, 2**29), ({"max_step_tokens": 7}, 2**29), ({"max_sequences": 2, "max_step_tokens": 50}, 100_000)],
    ids=["whole", "chunks", "small cache"],
)
def test_any_order_equals_the_naive_loop(
    load_vlm: Callable[..., Any], expected: list[tuple[int, ...]], batching: dict[str, int], prefix_bytes: int
) -> None:
    """Guards exactness: repeated questions in random order, one by one and several at a time, with evictions."""
    caching = Caching(features_ram_bytes=0, features_disk_bytes=0, prefix_ram_bytes=prefix_bytes)
    loaded = load_vlm(batching=Batching(**batching), caching=caching)
    random_ = random.Random(3)
    num_cached = 0
    for _ in range(12):
        order = random_.choices(range(len(QUESTIONS)), k=random_.randint(1, 4))
        streams = [loaded.stream(*QUESTIONS[index], sampling=_GREEDY) for index in order]
        for index, stream in zip(order, streams, strict=True):
            answer = list(stream)[-1].answer
            assert answer.token_ids == expected[index]
            num_cached += answer.usage.cached_tokens
        check_idle(loaded)
    assert num_cached > 500
    assert (_prefixes(loaded).num_evictions > 0) == (prefix_bytes < 2**29)


def test_what_is_reused(load_vlm: Callable[..., Any], expected: list[tuple[int, ...]]) -> None:
    """Guards cases 4, 12 and 14: a question again costs its last token, another question its own words, another
    picture of the same size shares the words before it and nothing more."""
    loaded = load_vlm(caching=_PREFIX_ONLY)
    prompt, _ = build(loaded, *QUESTIONS[0])
    span = prompt.spans[0]
    first = _ask(loaded, 0)
    assert (first.usage.cached_tokens, first.usage.images_encoded, first.usage.images_from_prefix) == (0, 1, 0)
    again = _ask(loaded, 0)
    assert again.usage.cached_tokens == len(prompt.ids) - 1
    assert (again.usage.images_encoded, again.usage.images_from_prefix) == (0, 1)
    assert again.timings.encode_ms == 0
    other_question = _ask(loaded, 2)
    assert span.end <= other_question.usage.cached_tokens < len(prompt.ids) - 1
    other_picture = _ask(loaded, 3)
    assert (other_picture.usage.cached_tokens, other_picture.usage.images_encoded) == (span.start, 1)
    assert _ask(loaded, 0).usage.cached_tokens == len(prompt.ids) - 1
    two = _ask(loaded, 4)
    assert two.usage.cached_tokens == span.end
    assert (two.usage.images_encoded, two.usage.images_from_prefix, two.usage.num_images) == (1, 1, 2)
    assert [first.token_ids, again.token_ids, other_picture.token_ids, two.token_ids] == [
        expected[index] for index in (0, 0, 3, 4)
    ]


def test_a_known_picture_needs_no_pixels(load_vlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the point of it: neither preprocessing nor the tower runs for a picture in the known prefix."""
    loaded = load_vlm(caching=_PREFIX_ONLY)
    _ask(loaded, 0)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("encoded again")

    monkeypatch.setattr(loaded._vision, "features", fail)
    _ask(loaded, 1)
    with pytest.raises(AssertionError, match="encoded again"):
        _ask(loaded, 3)


def test_a_second_request_joins_while_the_first_answers(
    load_vlm: Callable[..., Any], expected: list[tuple[int, ...]]
) -> None:
    """Guards two people asking about one picture: what is computed is known as soon as the prompt is through."""
    loaded = load_vlm(caching=_PREFIX_ONLY)
    first = loaded.stream(*QUESTIONS[0], sampling=_GREEDY)
    next(first)
    second = _ask(loaded, 1)
    assert second.usage.images_from_prefix == 1 and second.token_ids == expected[1]
    assert list(first)[-1].answer.token_ids == expected[0]
    check_idle(loaded)


def test_an_answer_is_known_to_what_continues_it(load_vlm: Callable[..., Any]) -> None:
    """Guards follow-up turns: the tokens of the answer, too, are not computed again."""
    loaded = load_vlm(caching=_PREFIX_ONLY)
    question = Message(role="user", text="What is it?", images=(load_image(_A),))
    one = loaded.describe(_A, "What is it?", sampling=_GREEDY)
    messages = [
        question,
        Message(role="assistant", text=one.text, token_ids=one.token_ids),
        Message(role="user", text="And?"),
    ]
    two = list(loaded.answer_messages(messages, sampling=_GREEDY))[-1].answer
    # The last token of an answer cut by its length was never put through the decoder.
    assert two.usage.cached_tokens == one.usage.prompt_tokens + len(one.token_ids) - 1
    fresh = list(load_vlm(caching=False).answer_messages(messages, sampling=_GREEDY))[-1].answer
    assert two.token_ids == fresh.token_ids and fresh.usage.cached_tokens == 0


def test_off_means_absent(load_vlm: Callable[..., Any], expected: list[tuple[int, ...]]) -> None:
    """Guards invariant 11: without a budget there is no tree at all."""
    for caching in (False, Caching(prefix_ram_bytes=0)):
        loaded = load_vlm(caching=caching)
        assert _prefixes(loaded) is None
        for _ in range(2):
            answer = _ask(loaded, 0)
            assert answer.token_ids == expected[0] and answer.usage.cached_tokens == 0


def test_other_salts_share_nothing(load_vlm: Callable[..., Any]) -> None:
    """Guards tenants: the same prompt under another salt is computed anew; under the same it is found."""
    loaded = load_vlm(caching=_PREFIX_ONLY)
    images = (load_image(_A),)
    prompt = loaded.build_prompt([Message(role="user", text="What is it?", images=images)])

    def cached(salt: str) -> int:
        request = Request(prompt=prompt, images=images, sampling=_GREEDY, salt=salt)
        engine = loaded._engine
        answer = list(engine.stream(engine.submit(request, started=0.0, image_ms=0.0)))[-1].answer
        return int(answer.usage.cached_tokens)

    assert [cached(salt) for salt in ("one", "two", "one")] == [0, 0, len(prompt.ids) - 1]


def test_memory_is_bounded(load_vlm: Callable[..., Any]) -> None:
    """Guards case 16 (vllm 15294) and case 8 (vllm 33110): many pictures in a small cache, and one that never fits."""
    limit = 200_000
    loaded = load_vlm(caching=Caching(features_ram_bytes=0, features_disk_bytes=0, prefix_ram_bytes=limit))
    short = Sampling(max_new_tokens=2)
    for index in range(40):
        loaded.describe(noise(20 + index, 30), "What?", sampling=short)
        assert _prefixes(loaded).num_bytes <= limit
    assert _prefixes(loaded).num_evictions > 5
    kept = _prefixes(loaded).num_bytes
    loaded.describe([noise(64, 64, seed) for seed in range(4)], "What?", sampling=short)
    assert _prefixes(loaded).num_bytes == kept, "what can not fit empties nothing"
    check_idle(loaded)


# --- what must not be remembered ---


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_cancelled_half_way_is_not_known(
    load_vlm: Callable[..., Any], expected: list[tuple[int, ...]], num_steps: int
) -> None:
    loaded = load_vlm(batching=Batching(max_step_tokens=20), caching=_PREFIX_ONLY)
    stream = loaded.stream(*QUESTIONS[0], sampling=_GREEDY)
    for _ in range(num_steps):
        loaded._engine.step()
    stream.close()
    assert _prefixes(loaded).num_bytes == 0
    assert _ask(loaded, 0).token_ids == expected[0]
    check_idle(loaded)


def test_a_prompt_whose_scores_are_not_finite_is_not_known(
    load_vlm: Callable[..., Any], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against poisoned keys and values: the request that made them failed, nobody else may meet them."""
    loaded = load_vlm(caching=_PREFIX_ONLY)
    runner = loaded._engine._runner
    forward = runner._forward
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_forward", lambda *step: forward(*step) * float("nan"))
        with pytest.raises(Exception, match="not numbers"):
            _ask(loaded, 0)
    assert _prefixes(loaded).num_bytes == 0
    assert _ask(loaded, 0).token_ids == expected[0]


@pytest.mark.parametrize("where", ["begin", "forward", "remember"])
def test_an_interrupt_leaves_a_sound_cache(
    load_vlm: Callable[..., Any], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Guards Ctrl-C while a known prefix is copied in, in the pass behind it, or while a new one is copied out."""
    loaded = load_vlm(caching=_PREFIX_ONLY)
    _ask(loaded, 0)
    neighbour = loaded.stream(*QUESTIONS[2], sampling=_GREEDY)
    mine = loaded.stream(*QUESTIONS[1], sampling=_GREEDY)
    runner = loaded._engine._runner
    name = {"begin": "_begin", "forward": "_forward", "remember": "copy_out"}[where]

    def interrupted(*args: Any) -> Any:
        if where == "begin":
            loaded._engine._runner._pages.page(0).truncate(0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(mine)
    assert list(neighbour)[-1].answer.token_ids == expected[2]
    assert [_ask(loaded, index).token_ids for index in (1, 0)] == [expected[1], expected[0]]
    check_idle(loaded)


def test_what_can_not_be_kept_harms_no_answer(
    load_vlm: Callable[..., Any], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a machine without memory to spare: the answer comes, the prefix is not known, the cache is sound."""
    loaded = load_vlm(caching=_PREFIX_ONLY)

    def fail(*args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(loaded._engine._runner, "copy_out", fail)
        assert _ask(loaded, 0).token_ids == expected[0]
    assert _prefixes(loaded).num_bytes == 0
    check_idle(loaded)


# --- rounding ---


def test_bfloat16_differs_only_where_logits_are_close(load_vlm: Callable[..., Any]) -> None:
    """A past computed in other pieces is rounded otherwise: the first other token may fall only where the top two
    logits are nearly equal, measured in float32 on the tokens that both chose."""
    from oracle import features_of

    exact, reused = load_vlm(caching=False), load_vlm(dtype="bfloat16", caching=_PREFIX_ONLY)
    plain = load_vlm(dtype="bfloat16", caching=False)
    for _ in range(2):
        for images, question in QUESTIONS:
            one = plain.describe(images, question, sampling=_GREEDY).token_ids
            two = reused.describe(images, question, sampling=_GREEDY).token_ids
            same = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
            if same is None:
                assert one == two
                continue
            prompt, loaded = build(exact, images, question)
            features = features_of(exact, loaded, prompt) if loaded else None
            logits = naive_logits(exact, [*prompt.ids, *one[:same]], features)[-1]
            top = logits.topk(2).values
            assert float(top[0] - top[1]) < 0.05 * float(logits.abs().max())
    assert _prefixes(reused).num_cached_tokens > 500


def test_a_hit_gives_the_same_scores(load_vlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what token equality may hide: the scores behind a known prefix are those of a fresh run within 1e-4."""
    rows: dict[str, list[torch.Tensor]] = {}
    for name, caching in (("fresh", Caching.off()), ("reused", _PREFIX_ONLY)):
        loaded = load_vlm(caching=caching, speculation="off")
        for index in (0, 3):
            _ask(loaded, index)
        runner = loaded._engine._runner
        forward, seen = runner._forward, rows.setdefault(name, [])

        def noting(*step: Any, forward: Any = forward, seen: Any = seen) -> Any:
            logits = forward(*step)
            seen.append(logits.clone())
            return logits

        monkeypatch.setattr(runner, "_forward", noting)
        _ask(loaded, 4)
    torch.testing.assert_close(torch.cat(rows["fresh"]), torch.cat(rows["reused"]), atol=1e-4, rtol=1e-4)
