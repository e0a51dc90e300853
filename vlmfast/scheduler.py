"""Decides what one engine step computes, and is the only one to change sequences. No torch.

Sequences join and leave at every step. Those that decode come first, one token each; what is left of the step's token
budget goes to prompts in order of arrival, in chunks where a prompt is longer than what is left.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from vlmfast.cache.pages import PagePool
from vlmfast.options import Batching
from vlmfast.sequence import Sequence, Status


class Phase(Enum):
    """What a sequence's tokens are in a step."""

    PREFILL = "prefill"
    """Prompt tokens."""
    DECODE = "decode"
    """The token that was chosen in the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """The tokens start .. end - 1 of one sequence; `samples` says that the last one chooses the next token."""

    sequence: Sequence
    phase: Phase
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: which tokens of which sequences, and whose pictures must be encoded before."""

    scheduled: tuple[ScheduledSequence, ...]
    encode: tuple[Sequence, ...]


class Scheduler:
    """Holds the waiting and the running sequences and the page ids."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._pages = PagePool(batching.max_sequences)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self._waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """Admits what fits and returns the next step. Empty when there is no work."""
        budget = self._batching.max_step_tokens
        scheduled: list[ScheduledSequence] = []
        encode: list[Sequence] = []
        decoding = [sequence for sequence in self._running if sequence.num_computed >= sequence.num_prompt_tokens]
        for sequence in decoding[:budget]:
            scheduled.append(_slice(sequence, Phase.DECODE, sequence.num_tokens))
            budget -= 1
        self._admit()
        for sequence in self._running:
            if budget < 1 or sequence.num_computed >= sequence.num_prompt_tokens:
                continue
            if sequence.num_computed == 0 and sequence.request.images:
                encode.append(sequence)
            end = min(sequence.num_computed + budget, sequence.num_tokens)
            scheduled.append(_slice(sequence, Phase.PREFILL, end))
            budget -= end - sequence.num_computed
        return StepPlan(scheduled=tuple(scheduled), encode=tuple(encode))

    def advance(self, scheduled: ScheduledSequence, token_id: int | None) -> None:
        """Notes that a scheduled slice was computed and which token it chose, if it chose one."""
        sequence = scheduled.sequence
        if token_id is not None:
            sequence.output_ids.append(token_id)
        sequence.num_computed = scheduled.end

    def finish(self, sequence: Sequence) -> int | None:
        """Ends a sequence, finished or not, and frees its page; returns the page id it held."""
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        page_id, sequence.page_id = sequence.page_id, None
        if page_id is not None:
            self._pages.give_back(page_id)
        sequence.status = Status.FINISHED
        return page_id

    def check_integrity(self) -> None:
        """Every running sequence holds one page of its own; nothing else does."""
        self._pages.check_integrity()
        held = [sequence.page_id for sequence in self._running]
        assert None not in held and len(set(held)) == len(held)
        assert len(held) == self._pages.num_pages - self._pages.num_free
        assert all(sequence.page_id is None for sequence in self._waiting)

    def _admit(self) -> None:
        while self._waiting:
            page_id = self._pages.take()
            if page_id is None:
                return
            sequence = self._waiting.popleft()
            sequence.page_id = page_id
            sequence.status = Status.RUNNING
            self._running.append(sequence)


def _slice(sequence: Sequence, phase: Phase, end: int) -> ScheduledSequence:
    return ScheduledSequence(
        sequence=sequence,
        phase=phase,
        start=sequence.num_computed,
        end=end,
        samples=end == sequence.num_tokens,
    )
