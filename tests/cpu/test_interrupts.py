"""Ctrl-C between a step's arithmetic and what is made of it: no other answer is changed, and nothing wrong is kept.

Interrupts are raised where a real one could strike, at chosen steps, so that the tests repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from oracle import check_idle, noise

from vlmfast import Sampling
from vlmfast.errors import InterruptedAnswerError, VLMFastError
from vlmfast.options import Batching

A, B = ("One?", noise(40, 30, 1)), ("And what lies there, in front of it?", noise(30, 50, 2))
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=8),
    "seeded": Sampling(max_new_tokens=8, temperature=1.0, seed=3),
    "penalty": Sampling(max_new_tokens=8, repetition_penalty=1.5),
}


@pytest.fixture
def loaded(load_vlm: Callable[..., Any]) -> Any:
    """A model whose prompts take several steps."""
    return load_vlm(batching=Batching(max_step_tokens=24))


@pytest.fixture(scope="module")
def expected(load_vlm: Callable[..., Any]) -> dict[str, tuple[int, ...]]:
    plain = load_vlm(caching=False)
    return {name: plain.describe(B[1], B[0], sampling=sampling).token_ids for name, sampling in SAMPLINGS.items()}


def interrupted(function: Callable[..., Any], at: int, *, after: bool) -> Callable[..., Any]:
    """The function, whose call number `at` is interrupted, before it begins or when it has ended."""
    calls = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at and not after:
            raise KeyboardInterrupt
        result = function(*args, **kwargs)
        if calls[0] == at:
            raise KeyboardInterrupt
        return result

    return call


def both(loaded: Any, sampling: Sampling) -> tuple[Iterator[Any], Iterator[Any]]:
    return (loaded.stream(A[1], A[0], sampling=sampling), loaded.stream(B[1], B[0], sampling=sampling))


def rest_of(stream: Iterator[Any]) -> tuple[int, ...]:
    answer = list(stream)[-1].answer
    assert answer is not None
    return tuple(answer.token_ids)


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 8])
def test_a_step_whose_facts_are_lost_is_run_again(
    loaded: Any, expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, kind: str, at: int
) -> None:
    """Guards the other answer and the prefix cache: pictures placed again, draws taken back, nothing wrong known."""
    first, second = both(loaded, SAMPLINGS[kind])
    runner = loaded._engine._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", interrupted(runner.run, at, after=True))
        with pytest.raises(KeyboardInterrupt):
            rest_of(first)
    assert rest_of(second) == expected[kind]
    assert loaded.describe(B[1], B[0], sampling=SAMPLINGS[kind]).token_ids == expected[kind]
    check_idle(loaded)


@pytest.mark.parametrize("name", ["_receive", "_take", "_complete"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 9])
def test_an_answer_that_is_half_extended_ends_and_the_other_goes_on(
    loaded: Any, expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, name: str, after: bool, at: int
) -> None:
    """Guards against tokens of one answer in another: each is whole and right, or an error."""
    streams = dict(zip("ab", both(loaded, SAMPLINGS["greedy"]), strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(loaded._engine, name, interrupted(getattr(loaded._engine, name), at, after=after))
        for stream in streams.values():
            try:
                rest_of(stream)
            except KeyboardInterrupt:
                break
            except InterruptedAnswerError:
                continue
    with contextlib.suppress(IndexError, InterruptedAnswerError):  # it had been read, or was the interrupted one
        assert rest_of(streams["b"]) == expected["greedy"]
    assert loaded.describe(B[1], B[0], sampling=SAMPLINGS["greedy"]).token_ids == expected["greedy"]
    check_idle(loaded)


def test_a_fault_in_one_answers_text_is_its_own(
    loaded: Any, expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards item failures beyond the decoder pass: what A's stream raises never reaches B's."""
    first, second = both(loaded, SAMPLINGS["greedy"])
    text = next(iter(loaded._engine._jobs.values())).text
    push = type(text).push

    def broken(self: Any, token_id: int) -> str:
        if self is text:
            raise VLMFastError("no text")
        return push(self, token_id)

    monkeypatch.setattr(type(text), "push", broken)
    assert rest_of(second) == expected["greedy"]
    with pytest.raises(VLMFastError, match="no text"):
        rest_of(first)
    check_idle(loaded)
