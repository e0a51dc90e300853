"""The ladder of equal answers, greedy and float32, token for token.

naive loop == engine == chunked prefill == batched in any order == interleaved streams == threads.
Chance of a false alarm: a batch changes the order of float sums, which matters where two logits are within 1e-5.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import check_idle, naive_answer, noise

from vlmfast import VLM, Answer, Batching, Sampling

_NUM_TOKENS = 24
_GREEDY = Sampling(max_new_tokens=_NUM_TOKENS)
QUESTIONS: list[tuple[list[Any], str]] = [
    ([noise(61, 37)], "What is in the picture?"),
    ([], "Is there a red circle?"),
    ([noise(20, 90)], "a"),
    ([noise(33, 33, 1), noise(64, 64, 2)], "What is in the picture? There is a red circle. The quick brown fox."),
    ([noise(100, 12)], "How many dogs?"),
    ([noise(1, 1)], "What colour?"),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture(scope="module")
def expected(load_vlm: Callable[..., Any], device: str) -> list[tuple[int, ...]]:
    """What the naive loop answers to each question."""
    loaded = load_vlm(device=device)
    answers = [naive_answer(loaded, images, question, _NUM_TOKENS) for images, question in QUESTIONS]
    assert len(set(answers)) == len(QUESTIONS), "the questions should have different answers"
    assert all(len(set(answer)) > 3 for answer in answers), "answers should vary from token to token"
    return answers


def _all_at_once(loaded: VLM, order: list[int]) -> dict[int, Answer]:
    """Every question asked before the first step, so that they run as one batch."""
    streams = {index: loaded.stream(*QUESTIONS[index], sampling=_GREEDY) for index in order}
    return {index: list(stream)[-1].answer for index, stream in streams.items()}


def test_engine_equals_the_naive_loop(
    load_vlm: Callable[..., Any], device: str, expected: list[tuple[int, ...]]
) -> None:
    """Guards the cache and the whole runner: one request at a time."""
    loaded = load_vlm(device=device)
    for (images, question), tokens in zip(QUESTIONS, expected, strict=True):
        assert loaded.describe(images, question, sampling=_GREEDY).token_ids == tokens
    check_idle(loaded)


@pytest.mark.parametrize(
    "options",
    [
        {"max_step_tokens": 7},
        {"max_step_tokens": 1},
        {"max_step_tokens": 64},
        {"max_encode_tiles": 1},
        {"max_sequences": 1},
    ],
    ids=str,
)
def test_chunks_equal_one_pass(
    load_vlm: Callable[..., Any], device: str, expected: list[tuple[int, ...]], options: dict[str, int]
) -> None:
    """Guards prompts computed in chunks that end anywhere, inside a picture too, and tiles encoded in groups."""
    loaded = load_vlm(device=device, batching=Batching(**options))
    for (images, question), tokens in zip(QUESTIONS, expected, strict=True):
        assert loaded.describe(images, question, sampling=_GREEDY).token_ids == tokens
    check_idle(loaded)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_sequences": 2}, {"max_step_tokens": 7}, {"max_step_tokens": 3, "max_sequences": 6}],
    ids=str,
)
def test_batches_in_any_order_equal_alone(
    load_vlm: Callable[..., Any], device: str, expected: list[tuple[int, ...]], options: dict[str, int]
) -> None:
    """Guards case 35 (lmms-eval 648): pictures of several sizes with several prompts together, in any order."""
    loaded = load_vlm(device=device, batching=Batching(**options))
    orders = [list(range(len(QUESTIONS))) for _ in range(3)]
    random.Random(4).shuffle(orders[1])
    orders[2].reverse()
    for order in orders:
        answers = _all_at_once(loaded, order)
        assert [answers[index].token_ids for index in range(len(QUESTIONS))] == expected
        check_idle(loaded)


def test_interleaved_streams_equal_alone(
    load_vlm: Callable[..., Any], device: str, expected: list[tuple[int, ...]]
) -> None:
    """Guards two readers that take turns, the second joining midway."""
    loaded = load_vlm(device=device)
    first = loaded.stream(*QUESTIONS[0], sampling=_GREEDY)
    chunks = {0: [next(first), next(first)], 3: []}
    second = loaded.stream(*QUESTIONS[3], sampling=_GREEDY)
    streams = {0: first, 3: second}
    while streams:
        for index, stream in list(streams.items()):
            chunks[index].append(next(stream))
            if chunks[index][-1].answer is not None:
                del streams[index]
    for index, parts in chunks.items():
        assert parts[-1].answer.token_ids == expected[index]
        assert "".join(part.text for part in parts) == parts[-1].answer.text


def test_threads_equal_alone(load_vlm: Callable[..., Any], device: str, expected: list[tuple[int, ...]]) -> None:
    """Guards a VLM shared by threads that ask at the same time."""
    loaded = load_vlm(device=device, batching=Batching(max_sequences=3))
    got: dict[tuple[int, int], tuple[int, ...]] = {}
    failed: list[BaseException] = []

    def ask(worker: int) -> None:
        try:
            for index in random.Random(worker).sample(range(len(QUESTIONS)), len(QUESTIONS)):
                got[worker, index] = loaded.describe(*QUESTIONS[index], sampling=_GREEDY).token_ids
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(got) == 4 * len(QUESTIONS)
    assert all(tokens == expected[index] for (_, index), tokens in got.items())
    check_idle(loaded)


def test_the_oracle_sees_the_picture(
    load_vlm: Callable[..., Any], device: str, expected: list[tuple[int, ...]]
) -> None:
    """Negative control: another picture, the pictures in another order, or another question change the answer."""
    loaded = load_vlm(device=device)
    images, question = QUESTIONS[3]
    others = [([noise(61, 38)], QUESTIONS[0][1]), (images[::-1], question), (images, question + "?"), ([], question)]
    answers = [loaded.describe(*other, sampling=_GREEDY).token_ids for other in others]
    assert answers[0] != expected[0]
    assert all(answer != expected[3] for answer in answers[1:])


def test_bfloat16_differs_only_where_logits_are_close(load_vlm: Callable[..., Any], device: str) -> None:
    """Guards the packed bf16 path: its first other token may fall only where the top two logits are nearly equal.

    The gap is measured in float32 on the tokens that both chose; bf16 keeps 8 bits of logits of about 10.
    """
    from oracle import build, features_of, naive_logits

    exact, packed = load_vlm(device=device), load_vlm(device=device, dtype="bfloat16")
    for images, question in QUESTIONS:
        one = exact.describe(images, question, sampling=_GREEDY).token_ids
        two = packed.describe(images, question, sampling=_GREEDY).token_ids
        same = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        if same == len(one) == len(two):
            continue
        prompt, loaded = build(exact, images, question)
        features = features_of(exact, loaded, prompt) if loaded else None
        logits = naive_logits(exact, [*prompt.ids, *one[:same]], features)[-1]
        top = logits.topk(2).values
        assert float(top[0] - top[1]) < 0.05 * float(logits.abs().max())
