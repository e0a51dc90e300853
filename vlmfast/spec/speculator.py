"""Drafts for all sequences of an engine: their drafters, the earlier answers, and the gate. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from vlmfast.spec.batch import Asked, BatchDrafter
from vlmfast.spec.gate import Gate
from vlmfast.spec.lookup import LookupDrafter
from vlmfast.spec.options import Speculation
from vlmfast.spec.suffix import AnswerMemory, SuffixDrafter, answer_row
from vlmfast.spec.tree import NO_DRAFT, Acceptance, Drafter, DraftTree

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Drafting:
    """One sequence's drafters and the context they see."""

    make: Callable[[], list[Drafter]]
    """Called when something is to be drafted: beside answers that drafting rests for, nothing is looked at."""
    drafters: list[Drafter] | None = None
    context: list[int]
    num_prompt: int
    offers: list[DraftTree] = field(default_factory=list)
    asks_model: bool = False
    read_ms: float = 0.0
    """What the gate was told that reading the prompt took the model."""


class Speculator:
    """What the runner drafts with. Not locked: the engine is its only user.

    Args:
        options: the memory's size, whether the gate adapts, and how to draft for requests that do not say.
        barriers: token ids that no draft holds: the placeholders of visual tokens.
        ends: token ids that end an answer.
        drafters: makes those of one sequence, instead of those that the options name.
        model: drafts for the sequences that ask for "model".
    """

    def __init__(
        self,
        options: Speculation,
        *,
        barriers: frozenset[int] = frozenset(),
        ends: frozenset[int] = frozenset(),
        drafters: Callable[[], list[Drafter]] | None = None,
        model: BatchDrafter | None = None,
    ) -> None:
        self._options = options
        self.gate = Gate(adaptive=options.adaptive)
        self._barriers, self._ends = barriers, ends
        self._memory = AnswerMemory(options.memory_tokens)
        self._drafters = drafters
        self._sequences: dict[int, _Drafting] = {}
        self._propose_ms = 0.0
        self._passes_ms = 0.0
        self._model = model

    def begin(
        self,
        seq_id: int,
        prompt_ids: Sequence[int],
        *,
        pictures: tuple[str, ...] = (),
        salt: str = "",
        options: Speculation | None = None,
        asked: Asked | None = None,
    ) -> None:
        """A new sequence, with the digests of its pictures; `asked` is for the model."""
        options = options or self._options
        asks_model = self._model is not None and asked is not None and options.uses("model")
        self._sequences[seq_id] = _Drafting(
            make=self._drafters or partial(self._standard, salt, pictures, len(prompt_ids), options),
            context=list(prompt_ids),
            num_prompt=len(prompt_ids),
            asks_model=asks_model,
        )
        if asks_model and self._model is not None and asked is not None:
            self._model.begin(seq_id, asked)

    def end(self, seq_id: int) -> None:
        """The sequence is over."""
        drafting = self._sequences.pop(seq_id, None)
        if drafting is not None:
            self._leave_model(seq_id, drafting)

    def remember(
        self,
        prompt_ids: Sequence[int],
        answer: Sequence[int],
        *,
        pictures: tuple[str, ...] = (),
        salt: str = "",
        options: Speculation | None = None,
    ) -> None:
        """Keeps a finished answer (its end token included, where the model ended it) to draft later ones from."""
        asked = options or self._options
        if self._options.memory_tokens and asked.memory_tokens and asked.uses("suffix"):
            self._memory.add(salt, pictures, answer_row(prompt_ids, answer, self._barriers))

    @property
    def is_resting(self) -> bool:
        """Nothing would be proposed now: a step is what it is without drafts."""
        return self.gate.is_resting

    def propose(self, wanted: Sequence[tuple[int, Sequence[int], int]]) -> list[DraftTree]:
        """A draft, or none, for each (seq_id, answer so far, most nodes) of a step."""
        self._propose_ms = self._passes_ms = 0.0
        if self.gate.rests(len(wanted)):
            return [NO_DRAFT] * len(wanted)
        begun_ms = sum(self._begin_drafting(seq_id) for seq_id, _, _ in wanted)
        started = time.perf_counter()
        offers = [self._offers(*one) for one in wanted]
        passed_ms = self._ask_model(wanted, offers)
        drafts = self.gate.choose(offers)
        self._propose_ms = (time.perf_counter() - started) * 1e3 - passed_ms
        self.gate.spent(begun_ms)
        return drafts

    def observe(self, seq_id: int, draft: DraftTree, acceptance: Acceptance) -> None:
        """Told what verification made of a draft that is not empty."""
        self.gate.observe(draft, acceptance)
        drafting = self._sequences[seq_id]
        for drafter, offer in zip(drafting.drafters or (), drafting.offers, strict=True):
            if offer.origin == draft.origin:
                drafter.observe(draft, acceptance)

    def mixed(self) -> None:
        """Told of any other step, in place of `timed`."""
        self.gate.mixed()

    def timed(self, *, num_sequences: int, num_drafted: int, num_chosen: int, step_ms: float) -> None:
        """Told the time of a step whose sequences all decoded and might have drafted, `propose` not included."""
        self.gate.timed(
            num_sequences=num_sequences,
            num_drafted=num_drafted,
            num_chosen=num_chosen,
            draft_ms=self._propose_ms,
            step_ms=step_ms,
            passes_ms=self._passes_ms,
        )

    def _begin_drafting(self, seq_id: int) -> float:
        """Makes a sequence's drafters, which read earlier answers, unless it has them. Returns the milliseconds."""
        drafting = self._sequences[seq_id]
        if drafting.drafters is not None:
            return 0.0
        started = time.perf_counter()
        try:
            drafting.drafters = drafting.make()
        except Exception:  # no answer needs a draft
            _log.warning("drafting failed; the answer is written without", exc_info=True)
            drafting.drafters = []
        return (time.perf_counter() - started) * 1e3

    def _offers(self, seq_id: int, answer: Sequence[int], budget: int) -> list[DraftTree]:
        drafting = self._sequences[seq_id]
        drafting.context += answer[len(drafting.context) - drafting.num_prompt :]
        try:
            drafting.offers = [drafter.propose(drafting.context, budget) for drafter in drafting.drafters or ()]
        except Exception:  # no answer needs a draft
            _log.warning("drafting failed; the answer is written without", exc_info=True)
            drafting.drafters, drafting.offers = [], []
        return drafting.offers

    def _ask_model(self, wanted: Sequence[tuple[int, Sequence[int], int]], offers: list[list[DraftTree]]) -> float:
        """Adds the model's drafts to the offers of those who ask for it, as long as pays. Returns the time it took."""
        asking = [index for index, (seq_id, _, _) in enumerate(wanted) if self._sequences[seq_id].asks_model]
        if self._model is None or not asking:
            return 0.0
        most = max(wanted[index][2] for index in asking)
        length = self.gate.chain_length(self._model.origin, len(wanted), most, self._model.chain_ms)
        if length < 1:
            return 0.0
        started = time.perf_counter()
        try:
            drafts = self._model.propose(
                [(seq_id, answer, min(budget, length)) for seq_id, answer, budget in (wanted[at] for at in asking)]
            )
        except Exception:  # no answer needs a draft
            _log.warning("the draft model failed; its answers are written without", exc_info=True)
            for index in asking:
                seq_id = wanted[index][0]
                self._leave_model(seq_id, self._sequences[seq_id])
            return (time.perf_counter() - started) * 1e3
        for index, draft in zip(asking, drafts, strict=True):
            offers[index] = [*offers[index], draft]
            drafting = self._sequences[wanted[index][0]]
            if drafting.read_ms == 0:
                drafting.read_ms = self._model.reading_ms(wanted[index][0])
                self.gate.advance(drafting.read_ms)
        self._passes_ms = self._model.chain_ms(max(map(len, drafts)))
        return (time.perf_counter() - started) * 1e3

    def _leave_model(self, seq_id: int, drafting: _Drafting) -> None:
        """The model drafts for the sequence no more: what was spent on reading its prompt can not be earned back."""
        if self._model is None or not drafting.asks_model:
            return
        drafting.asks_model = False
        self._model.end(seq_id)
        self.gate.repay(drafting.read_ms)

    def _standard(self, salt: str, pictures: tuple[str, ...], num_prompt: int, options: Speculation) -> list[Drafter]:
        made: list[Drafter] = []
        if options.uses("suffix"):
            sources = self._memory.sources(salt, pictures)
            made.append(SuffixDrafter(sources, num_prompt=num_prompt, barriers=self._barriers, ends=self._ends))
        if options.uses("lookup"):
            made.append(
                LookupDrafter(
                    min_ngram=options.min_ngram,
                    max_ngram=options.max_ngram,
                    barriers=self._barriers,
                    ends=self._ends,
                )
            )
        return made
