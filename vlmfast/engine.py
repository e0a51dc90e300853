"""The engine: requests in, chunks of text out, one step at a time. Synchronous; a lock lets threads share it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vlmfast.compose import names_of
from vlmfast.errors import ContextLengthError, InterruptedAnswerError
from vlmfast.runner import Runner, StepFacts
from vlmfast.scheduler import Phase, ScheduledSequence, Scheduler
from vlmfast.sequence import Request, Sequence, Status
from vlmfast.text import TextStream
from vlmfast.types import Answer, Chunk, FeatureSource, FinishReason, Timings, Usage

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Job:
    """What the engine keeps of a request besides its sequence: text so far, clocks, and chunks not yet fetched."""

    sequence: Sequence
    text: TextStream
    started: float
    image_ms: float
    load_ms: float
    encode_ms: float = 0.0
    sources: Counter[FeatureSource] = field(default_factory=Counter)
    kept: tuple[int, ...] | None = None
    prefill_ms: float = 0.0
    first_token_ms: float = 0.0
    decode_ms: float = 0.0
    num_decoded: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    ready: deque[Chunk] = field(default_factory=deque)
    error: Exception | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer is there to be fetched."""
        return bool(self.ready) and self.ready[-1].answer is not None


class AnswerStream(Iterator[Chunk]):
    """The chunks of one request. Closed or dropped before its end, it cancels the request."""

    def __init__(self, engine: Engine, seq_id: int) -> None:
        self._engine = engine
        self._seq_id: int | None = seq_id

    def __next__(self) -> Chunk:
        if self._seq_id is None:
            raise StopIteration
        try:
            chunk = self._engine.next_chunk(self._seq_id)
        except BaseException:  # Ctrl-C inside a step must free the request, too
            self.close()
            raise
        if chunk.answer is not None:
            self.close()
        return chunk

    def close(self) -> None:
        """Cancels what is left of the request; does nothing after its end."""
        if self._seq_id is not None:
            self._engine.cancel(self._seq_id)
            self._seq_id = None

    def __del__(self) -> None:
        if self._seq_id is not None:
            self._engine.abandon(self._seq_id)


class Engine:
    """Runs many requests together. Each is fetched by its own `stream`; whoever fetches drives the steps of all."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        max_context: int,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_context = max_context
        self._jobs: dict[int, _Job] = {}
        self._ids = itertools.count()
        self._abandoned: deque[int] = deque()
        self._unapplied: deque[tuple[ScheduledSequence, StepFacts]] = deque()
        self._lock = threading.RLock()

    def submit(self, request: Request, *, started: float, image_ms: float, load_ms: float = 0.0) -> int:
        """Queues a request and returns its id for `stream` or `cancel`.

        Args:
            started: `time.perf_counter()` when the caller asked; first-token time counts from there.
            image_ms: time already spent on loading pictures.
            load_ms: time spent on loading the model for this request.

        Raises:
            ContextLengthError: the prompt leaves no room for a token of answer (or `request.room` of them).
        """
        num_prompt = len(request.prompt.ids)
        max_tokens = self._max_context - request.prompt.num_skipped
        if num_prompt + request.room > max_tokens:
            raise ContextLengthError(_no_room(request, self._max_context))
        sequence = Sequence(
            seq_id=next(self._ids),
            request=request,
            max_tokens=min(num_prompt + request.sampling.max_new_tokens, max_tokens),
        )
        text = TextStream(self._tokenizer, request.sampling.stop)
        with self._lock:
            self._jobs[sequence.seq_id] = _Job(
                sequence=sequence, text=text, started=started, image_ms=image_ms, load_ms=load_ms
            )
            self._scheduler.add(sequence)
        return sequence.seq_id

    def stream(self, seq_id: int) -> AnswerStream:
        """Chunks of one request; the last carries the answer."""
        return AnswerStream(self, seq_id)

    def next_chunk(self, seq_id: int) -> Chunk:
        """The next chunk of a request, stepping the engine until there is one.

        Raises:
            Exception: whatever made the request's step fail.
        """
        with self._lock:
            job = self._jobs[seq_id]
            while not job.ready and job.error is None:
                self.step()
            if job.error is not None:
                raise job.error
            return job.ready.popleft()

    def abandon(self, seq_id: int) -> None:
        """Cancels at the next step. Safe in a destructor, which may run at any point of any thread."""
        self._abandoned.append(seq_id)

    def cancel(self, seq_id: int) -> None:
        """Ends a request at once and frees all that it held; does nothing if it has ended."""
        with self._lock:
            job = self._jobs.pop(seq_id, None)
            if job is not None:
                self._retire(job.sequence)

    def step(self) -> None:
        """One decoder pass over whatever is due."""
        while self._abandoned:
            self.cancel(self._abandoned.popleft())
        if not self._unapplied:
            self._compute()
        while self._unapplied:
            scheduled, facts = self._unapplied.popleft()
            job = self._jobs.get(scheduled.sequence.seq_id)
            if job is None or job.sequence.status is Status.FINISHED:  # cancelled since
                continue
            sequence, num_computed = job.sequence, job.sequence.num_computed
            try:
                self._apply(job, scheduled, facts)
            except Exception as error:  # the boundary of one request
                self._fail(job, error)
            except BaseException:  # Ctrl-C, which ends at most the answer that it hit
                if sequence.num_computed == num_computed:  # nothing was applied yet
                    self._unapplied.appendleft((scheduled, facts))
                elif not job.is_complete:
                    self._fail(job, InterruptedAnswerError("an interrupt hit this answer while it grew; ask again"))
                else:
                    self._retire(sequence)
                raise
            if scheduled.phase is Phase.PREFILL and scheduled.samples and sequence.status is Status.RUNNING:
                # Before the answer is complete: another request about the picture may come meanwhile.
                self._remember(sequence, self._scheduler.remember)

    def _compute(self) -> None:
        """Plans and runs a step. What it found is applied request by request, also after an interrupt in between."""
        plan = self._scheduler.schedule()
        try:
            facts = self._runner.run(plan)
        except Exception as error:
            # The boundary of a batch: those in it hear of it through their stream, the engine goes on.
            for scheduled in plan.scheduled:
                self._fail(self._jobs[scheduled.sequence.seq_id], error)
            return
        self._unapplied.extend((scheduled, facts) for scheduled in plan.scheduled)

    @property
    def num_requests(self) -> int:
        """Requests that have not been fetched to their end."""
        return len(self._jobs)

    def _apply(self, job: _Job, scheduled: ScheduledSequence, facts: StepFacts) -> None:
        seq_id = scheduled.sequence.seq_id
        if seq_id in facts.failed:
            self._fail(job, facts.failed[seq_id])
            return
        job.encode_ms += facts.encode_ms.get(seq_id, 0.0)
        job.sources.update(facts.sources.get(seq_id, ()))
        job.kept = facts.kept.get(seq_id)
        if scheduled.phase is Phase.PREFILL:
            job.prefill_ms += facts.forward_ms
        else:
            job.decode_ms += facts.forward_ms
        tokens = facts.tokens.get(seq_id, ())
        if not tokens:
            self._scheduler.advance(scheduled, None)
            return
        job.num_drafted += facts.num_drafted.get(seq_id, 0)
        self._take(job, scheduled, tokens)

    def _take(self, job: _Job, scheduled: ScheduledSequence, tokens: tuple[int, ...]) -> None:
        """Takes the tokens of a step in order: those accepted from its draft, and the one chosen after them.

        What follows the token that ends the answer is dropped.
        """
        sequence = scheduled.sequence
        for num_accepted, token_id in enumerate(tokens):
            self._scheduler.advance(scheduled, None if token_id in self._eos_token_ids else token_id, num_accepted)
            if scheduled.phase is Phase.PREFILL:
                job.first_token_ms = (time.perf_counter() - job.started) * 1e3
            else:
                job.num_decoded += 1
            job.num_accepted += num_accepted > 0
            self._receive(job, token_id)
            if sequence.status is Status.FINISHED:
                return

    def _receive(self, job: _Job, token_id: int) -> None:
        """Takes a chosen token: text to hand out, and the end if it is one."""
        sequence = job.sequence
        if token_id in self._eos_token_ids:
            self._complete(job, FinishReason.STOP, end=(token_id,))
            return
        text = job.text.push(token_id)
        if job.text.stopped:
            job.ready.append(Chunk(text=text))
            self._complete(job, FinishReason.STOP)
        elif sequence.num_tokens >= sequence.max_tokens:
            job.ready.append(Chunk(text=text))
            self._complete(job, FinishReason.LENGTH)
        elif text:
            job.ready.append(Chunk(text=text))

    def _complete(self, job: _Job, reason: FinishReason, end: tuple[int, ...] = ()) -> None:
        """Ends a request with its answer; `end` is the token by which the model ended it."""
        rest = job.text.finish()
        sequence, prompt = job.sequence, job.sequence.request.prompt
        answer = Answer(
            text=job.text.text,
            finish_reason=reason,
            token_ids=tuple(sequence.output_ids),
            kept_places=job.kept,
            usage=Usage(
                weights=self._runner.weights,
                vision_weights=self._runner.vision_weights,
                fewer_tokens=names_of(sequence.request.vision),
                prompt_tokens=len(prompt.ids),
                cached_tokens=sequence.num_cached,
                visual_tokens=prompt.num_visual_tokens,
                visual_tokens_before=sum(span.plan.n_tokens for span in prompt.spans),
                visual_tokens_after=prompt.num_visual_tokens if job.kept is None else len(job.kept),
                completion_tokens=len(sequence.output_ids),
                draft_tokens=job.num_drafted,
                accepted_tokens=job.num_accepted,
                num_images=len(prompt.spans),
                num_tiles=sum(span.plan.num_tiles for span in prompt.spans),
                images_encoded=job.sources[FeatureSource.ENCODER],
                images_from_ram=job.sources[FeatureSource.RAM],
                images_from_disk=job.sources[FeatureSource.DISK],
                images_from_prefix=sequence.first_new_image,
            ),
            timings=Timings(
                load_ms=job.load_ms,
                image_ms=job.image_ms,
                encode_ms=job.encode_ms,
                prefill_ms=job.prefill_ms,
                first_token_ms=job.first_token_ms,
                decode_ms=job.decode_ms,
                token_ms=job.decode_ms / max(job.num_decoded, 1),
                total_ms=(time.perf_counter() - job.started) * 1e3,
            ),
        )
        job.ready.append(Chunk(text=rest, answer=answer))
        self._learn(sequence, end)
        self._remember(sequence, self._scheduler.remember)
        self._remember(sequence, self._scheduler.persist)
        self._retire(sequence)

    def _learn(self, sequence: Sequence, end: tuple[int, ...]) -> None:
        """Lets drafters know an answer. That they can not take it costs no answer."""
        try:
            self._runner.learn(sequence, end)
        except Exception:
            _log.warning("an answer could not be kept to draft from", exc_info=True)

    def _remember(self, sequence: Sequence, keep: Callable[[Sequence, Callable[[int, int], Any]], None]) -> None:
        """Keeps what was computed of a sequence. That it can not be kept costs later requests time, and no answer."""
        try:
            keep(sequence, partial(self._runner.copy_out, sequence.seq_id))
        except Exception:
            _log.warning("keys and values could not be kept", exc_info=True)

    def _fail(self, job: _Job, error: Exception) -> None:
        """Ends a request; its stream raises the error."""
        job.error = error
        self._retire(job.sequence)

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        self._runner.release(sequence.seq_id)


def _no_room(request: Request, max_context: int) -> str:
    """Why a prompt is refused. Visual tokens that a reducer left out keep their places."""
    spans, skipped = request.prompt.spans, request.prompt.num_skipped
    visual = sum(span.plan.n_tokens for span in spans)
    left_out = f"; {skipped} of these are left out, but keep their places" if skipped else ""
    remedy = "shorten the text"
    if spans:
        remedy += ', give fewer pictures, or see them with fewer tiles (Vision(resolution="low"), --resolution low)'
    return (
        f"the prompt has {len(request.prompt.ids) + skipped} tokens ({visual} of them visual{left_out}) and needs room "
        f"for {request.room} of an answer, the model's context is {max_context}; {remedy}"
    )
