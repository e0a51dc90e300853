"""Decides what one engine step computes, and is the only one to change sequences. No torch.

Sequences join and leave at every step. Those that decode come first, one token each; what is left of the step's token
budget goes to prompts in order of arrival, in chunks where a prompt is longer than what is left. The rest is drafts'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from vlmfast.cache.pages import PagePool
from vlmfast.cache.prefix import PrefixCache, Segment
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
    draft_budget: int = 0
    """Most tokens that may be drafted after them, and verified in the same pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: which tokens of which sequences, and whose pictures must be encoded before."""

    scheduled: tuple[ScheduledSequence, ...]
    encode: tuple[Sequence, ...]


class Scheduler:
    """Holds the waiting and the running sequences, the page ids, and what prefixes are known (None: none ever)."""

    def __init__(self, batching: Batching, prefixes: PrefixCache | None = None) -> None:
        self._batching = batching
        self._prefixes = prefixes
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
        decoding = decoding[:budget]
        budget -= len(decoding)
        self._admit()
        for sequence in self._running:
            if budget < 1 or sequence.num_computed >= sequence.num_prompt_tokens:
                continue
            whole = sequence.request.pruning is not None
            if whole and sequence.num_tokens > budget and scheduled:
                continue  # for a step that has room for all of it
            self._recall(sequence)
            if sequence.num_computed == sequence.num_cached and sequence.first_new_image < len(sequence.request.images):
                encode.append(sequence)
            end = sequence.num_tokens if whole else min(sequence.num_computed + budget, sequence.num_tokens)
            scheduled.append(_slice(sequence, Phase.PREFILL, end))
            budget -= end - sequence.num_computed
        decodes: list[ScheduledSequence] = []
        for sequence in decoding:
            draft_budget = min(sequence.max_draft_tokens, budget)
            decodes.append(_slice(sequence, Phase.DECODE, sequence.num_tokens, draft_budget))
            budget -= draft_budget
        return StepPlan(scheduled=(*decodes, *scheduled), encode=tuple(encode))

    def advance(self, scheduled: ScheduledSequence, token_id: int | None, num_accepted: int = 0) -> None:
        """Notes that a scheduled slice was computed and which token it chose, if it chose one.

        With a draft it is called for each token that came of it, in order, `num_accepted` counting from 0.
        """
        sequence = scheduled.sequence
        if token_id is not None:
            sequence.output_ids.append(token_id)
        sequence.num_computed = scheduled.end + num_accepted
        if sequence.prefix is not None:
            sequence.prefix.segments.clear()  # they lie in the page now

    def remember(self, sequence: Sequence, copy: Callable[[int, int], Segment]) -> None:
        """Makes the computed tokens of a running sequence known to those that come later.

        copy(start, end) gives the keys and values of its tokens start .. end - 1; it is called for new ones only.
        """
        if self._prefixes is not None and sequence.prefix is not None:
            units = sequence.units(sequence.num_computed)
            self._prefixes.insert(sequence.prefix, units, copy, sequence.request.salt)

    def persist(self, sequence: Sequence, copy: Callable[[int, int], Segment]) -> None:
        """As `remember`, for later processes; of the prompt's pictures and what stands before them."""
        if self._prefixes is not None and sequence.request.pruning is None:
            self._prefixes.persist(sequence.units(sequence.num_prompt_tokens), copy)

    def finish(self, sequence: Sequence) -> int | None:
        """Ends a sequence, finished or not, and frees its page; returns the page id it held."""
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        page_id, sequence.page_id = sequence.page_id, None
        if self._prefixes is not None and sequence.prefix is not None:
            self._prefixes.release(sequence.prefix)
        sequence.prefix = None
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
        assert all(sequence.page_id is None and sequence.prefix is None for sequence in self._waiting)
        if self._prefixes is not None:
            self._prefixes.check_integrity()
            assert self._prefixes.num_pins == sum(sequence.prefix is not None for sequence in self._running)

    def _recall(self, sequence: Sequence) -> None:
        """Lets a sequence that has not begun start behind its known prefix. One prompt token is always computed."""
        if self._prefixes is None or sequence.prefix is not None or sequence.request.pruning is not None:
            return
        units = sequence.units(sequence.num_prompt_tokens - 1)
        sequence.prefix = self._prefixes.match(units, sequence.request.salt)
        sequence.num_computed = sequence.num_cached = sequence.prefix.num_tokens

    def _admit(self) -> None:
        while self._waiting:
            page_id = self._pages.take()
            if page_id is None:
                return
            sequence = self._waiting.popleft()
            sequence.page_id = page_id
            sequence.status = Status.RUNNING
            self._running.append(sequence)


def _slice(sequence: Sequence, phase: Phase, end: int, draft_budget: int = 0) -> ScheduledSequence:
    return ScheduledSequence(
        sequence=sequence,
        phase=phase,
        start=sequence.num_computed,
        end=end,
        samples=end == sequence.num_tokens,
        draft_budget=draft_budget,
    )
