"""Pages, sequences and the scheduler under random orders of operations, with their integrity checked after each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlmfast.cache.pages import PagePool
from vlmfast.cache.prefix import PrefixCache
from vlmfast.options import Batching, Sampling
from vlmfast.prompt import Prompt
from vlmfast.scheduler import Phase, Scheduler
from vlmfast.sequence import Request, Sequence, Status


def _sequence(seq_id: int, num_prompt: int, num_images: int = 0) -> Sequence:
    request = Request(
        prompt=Prompt(ids=tuple(range(num_prompt)), spans=()),
        images=(object(),) * num_images,  # type: ignore[arg-type]
        sampling=Sampling(),
    )
    return Sequence(seq_id=seq_id, request=request, max_tokens=num_prompt + 50)


# --- pages ---


@given(operations=st.lists(st.integers(-4, 4), max_size=60), num_pages=st.integers(0, 5))
def test_pages_are_free_or_held(operations: list[int], num_pages: int) -> None:
    """Guards the pool: a page is never handed out twice, and none is lost. Above 0 takes, else gives one back."""
    pool, held = PagePool(num_pages), []
    for operation in operations:
        if operation > 0:
            page = pool.take()
            assert (page is None) == (len(held) == num_pages)
            if page is not None:
                assert page not in held and 0 <= page < num_pages
                held.append(page)
        elif held:
            pool.give_back(held.pop(operation % len(held)))
        pool.check_integrity()
        assert pool.num_free == num_pages - len(held)


@pytest.mark.parametrize("page", [0, 7, -1])
def test_a_page_that_is_not_held_can_not_be_given_back(page: int) -> None:
    """Guards against giving back twice, which would hand one page to two sequences."""
    with pytest.raises(AssertionError, match="not held"):
        PagePool(2).give_back(page)


def test_the_warm_page_comes_first() -> None:
    """Guards reuse: the page last given back is the next one out."""
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    pool.give_back(pages[1])
    pool.give_back(pages[2])
    assert pool.take() == pages[2]


# --- sequences ---


@given(num_prompt=st.integers(1, 9), num_output=st.integers(0, 9), data=st.data())
def test_tokens_are_a_slice_of_prompt_and_output(num_prompt: int, num_output: int, data: st.DataObject) -> None:
    """Guards slices that begin or end in the prompt, in the output, or across."""
    sequence = _sequence(0, num_prompt)
    sequence.output_ids = list(range(100, 100 + num_output))
    everything = [*range(num_prompt), *sequence.output_ids]
    start = data.draw(st.integers(0, len(everything)))
    end = data.draw(st.integers(start, len(everything)))
    assert sequence.tokens(start, end) == everything[start:end]
    assert sequence.num_tokens == len(everything) and sequence.num_prompt_tokens == num_prompt


# --- the scheduler ---


class SchedulerMachine(RuleBasedStateMachine):
    """An engine without arithmetic: adds, steps, finishes and cancels at random."""

    def __init__(self) -> None:
        super().__init__()
        self.batching = Batching(max_sequences=3, max_step_tokens=5)
        self.scheduler = Scheduler(self.batching, self.prefixes())
        self.alive: dict[int, Sequence] = {}
        self.encoded: set[int] = set()
        self.next_id = 0

    def prefixes(self) -> PrefixCache | None:
        return None

    @rule(num_prompt=st.integers(1, 12), num_images=st.integers(0, 2))
    def add(self, num_prompt: int, num_images: int) -> None:
        sequence = _sequence(self.next_id, num_prompt, num_images)
        self.next_id += 1
        self.scheduler.add(sequence)
        self.alive[sequence.seq_id] = sequence

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        for item in plan.scheduled:
            sequence = item.sequence
            before = sequence.num_tokens
            token = 7 if item.samples else None
            self.scheduler.advance(item, token)
            assert sequence.num_computed == item.end
            assert sequence.num_tokens == before + (1 if item.samples else 0)
            if item.samples:
                self.scheduler.remember(sequence, lambda start, end: _Segment(end - start))
            if item.samples and data.draw(st.integers(0, 3)) == 0:
                self.end(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        self.end(sequence)
        assert self.scheduler.finish(sequence) is None, "finishing twice does nothing"

    def end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        assert sequence.status is Status.FINISHED and sequence.page_id is None
        del self.alive[sequence.seq_id]

    def check_plan(self, plan: Any) -> None:
        ids = [item.sequence.seq_id for item in plan.scheduled]
        assert len(set(ids)) == len(ids) and set(ids) <= set(self.alive)
        assert sum(item.end - item.start for item in plan.scheduled) <= self.batching.max_step_tokens
        assert len(ids) <= self.batching.max_sequences
        assert bool(ids) == bool(self.alive), "a step makes progress while there is work"
        phases = [item.phase for item in plan.scheduled]
        assert phases == sorted(phases, key=[Phase.DECODE, Phase.PREFILL].index), "answers before prompts"
        for item in plan.scheduled:
            assert item.start == item.sequence.num_computed < item.end <= item.sequence.num_tokens
            assert item.samples == (item.end == item.sequence.num_tokens)
            assert item.sequence.page_id is not None
            if item.phase is Phase.DECODE:
                assert item.end - item.start == 1 and item.samples
        for sequence in plan.encode:
            assert sequence.seq_id in ids and sequence.request.images
            assert sequence.seq_id not in self.encoded, "pictures are encoded once"
            self.encoded.add(sequence.seq_id)
        for item in plan.scheduled:
            if item.sequence.request.images:
                assert item.sequence.seq_id in self.encoded, "pictures are encoded before their tokens are computed"

    @invariant()
    def whole(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.has_work == bool(self.alive)
        running = [one for one in self.alive.values() if one.status is Status.RUNNING]
        assert self.scheduler.num_free_pages == self.batching.max_sequences - len(running)


TestScheduler = SchedulerMachine.TestCase


class _Segment:
    def __init__(self, num_tokens: int) -> None:
        self.num_bytes = num_tokens

    def split(self, at: int) -> tuple[_Segment, _Segment]:
        return _Segment(at), _Segment(self.num_bytes - at)


class PrefixMachine(SchedulerMachine):
    """The same with known prefixes: every prompt here begins as the longer ones do."""

    def prefixes(self) -> PrefixCache | None:
        return PrefixCache(30, bytes_per_token=1)

    @invariant()
    def starts_behind_its_prefix(self) -> None:
        for sequence in self.alive.values():
            assert sequence.num_cached < sequence.num_prompt_tokens, "one prompt token is always computed"
            assert sequence.num_cached <= sequence.num_computed


TestPrefixes = PrefixMachine.TestCase


def test_a_prompt_starts_behind_what_is_known() -> None:
    """Guards reuse in the plan: what is computed starts where the known prefix ends, in the step after the prompt."""
    scheduler = Scheduler(Batching(max_step_tokens=4), PrefixCache(100, bytes_per_token=1))
    copied: list[tuple[int, int]] = []

    def copy(start: int, end: int) -> _Segment:
        copied.append((start, end))
        return _Segment(end - start)

    starts = []
    for num_prompt in (6, 6, 8):
        sequence = _sequence(0, num_prompt)
        scheduler.add(sequence)
        while sequence.num_computed < num_prompt:
            (item,) = scheduler.schedule().scheduled
            starts.append(item.start)
            scheduler.advance(item, 7 if item.samples else None)
        scheduler.remember(sequence, copy)
        scheduler.finish(sequence)
    assert starts == [0, 4, 5, 6]
    assert copied == [(0, 6), (6, 8)]
    scheduler.check_integrity()


def test_arrivals_are_admitted_in_order() -> None:
    """Guards fairness: whoever waits longest gets the page that becomes free."""
    scheduler = Scheduler(Batching(max_sequences=2, max_step_tokens=100))
    sequences = [_sequence(index, 3) for index in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [item.sequence.seq_id for item in scheduler.schedule().scheduled] == [0, 1]
    scheduler.finish(sequences[1])
    for item in scheduler.schedule().scheduled:
        scheduler.advance(item, 5)
    assert [one.status for one in sequences] == [Status.RUNNING, Status.FINISHED, Status.RUNNING, Status.WAITING]


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 7])
def test_everybody_finishes(max_step_tokens: int) -> None:
    """Guards case 9 (vllm 31857): many waiting requests and a small budget; all are answered in bounded steps."""
    scheduler = Scheduler(Batching(max_sequences=4, max_step_tokens=max_step_tokens))
    sequences = [_sequence(index, 5, num_images=1) for index in range(12)]
    for sequence in sequences:
        scheduler.add(sequence)
    total = sum(one.num_prompt_tokens + 3 for one in sequences)
    for _ in range(total):
        plan = scheduler.schedule()
        assert sum(item.end - item.start for item in plan.scheduled) <= max_step_tokens
        for item in plan.scheduled:
            scheduler.advance(item, 9 if item.samples else None)
            if len(item.sequence.output_ids) == 4:
                scheduler.finish(item.sequence)
        scheduler.check_integrity()
    assert not scheduler.has_work and scheduler.num_free_pages == 4


def test_an_empty_step() -> None:
    """Guards a step without work: nothing is planned."""
    plan = Scheduler(Batching()).schedule()
    assert plan.scheduled == () and plan.encode == ()
