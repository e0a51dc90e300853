"""Computes engine steps: owns the networks, the key/value pages and the samplers. Changes no sequence."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmfast.kv import KVPages, KVSegment, SequenceKV
from vlmfast.planner import whole_positions
from vlmfast.prune.fastv import Span, kept_places, run_pruned
from vlmfast.sample import Sampler, likeliest
from vlmfast.scheduler import Phase, ScheduledSequence, StepPlan
from vlmfast.sequence import Sequence
from vlmfast.spec.attention import BatchAttention, TreeAttention, row_parents
from vlmfast.spec.batch import Asked
from vlmfast.spec.speculator import Speculator
from vlmfast.spec.tree import NO_DRAFT, DraftTree
from vlmfast.spec.verify import verify
from vlmfast.types import FeatureSource
from vlmfast.vision import VisionEncoder
from vlmfast_models.batch import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step found out."""

    tokens: dict[int, tuple[int, ...]]
    """seq_id -> the tokens that slices which sample gave: those accepted of a draft, and one chosen after them."""
    num_drafted: dict[int, int]
    """seq_id -> tokens that were drafted and verified; nothing of sequences without a draft."""
    encode_ms: dict[int, float]
    """seq_id -> time in preprocessing and the vision tower, or in finding what they gave before."""
    sources: dict[int, list[FeatureSource]]
    """seq_id -> where the features of its pictures came from; nothing of those in its known prefix."""
    failed: dict[int, Exception]
    """seq_id -> what went wrong with its pictures; it took no part in the decoder pass."""
    forward_ms: float
    """Decoder pass and sampling."""
    kept: dict[int, tuple[int, ...]]
    """seq_id -> prompt positions of the visual tokens that reach the last layer, for prompts pruned in this step."""


@dataclass(slots=True, kw_only=True)
class _SequenceState:
    """What the runner keeps of a sequence between steps."""

    kv: SequenceKV
    sampler: Sampler
    visual_positions: list[int]
    """Prompt positions of the visual tokens behind the known prefix, ascending."""
    visual_tokens: Tensor | None = None
    """[N, E] of these, held until the prompt is computed."""
    positions: list[int] | None = None
    """Of the prompt's tokens, where visual tokens were cut from it; None: their places."""
    kept: tuple[int, ...] | None = None
    """Prompt positions of the visual tokens that reach the last layer; None where the prompt is not pruned."""


class Runner:
    """Runs step plans on one device."""

    def __init__(
        self,
        model: Any,
        vision: VisionEncoder,
        speculator: Speculator,
        *,
        device: torch.device,
        dtype: torch.dtype,
        capacity: int,
    ) -> None:
        self._model = model
        self._vision = vision
        self._speculator = speculator
        self._device = device
        self._dtype = dtype
        self._pages = KVPages(model.config.text, capacity, device, dtype)
        self._states: dict[int, _SequenceState] = {}

    @property
    def weights(self) -> str:
        """Number format of the decoder's weights."""
        return self._model.decoder.quantization or str(self._dtype).removeprefix("torch.")

    @property
    def vision_weights(self) -> str:
        """Number format of the vision tower's weights; its first and last parts are never quantised."""
        return "int8" if self._model.vision.int8 else str(self._dtype).removeprefix("torch.")

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepFacts:
        """Encodes the pictures that the step needs, then one decoder pass over all scheduled tokens.

        A sequence whose pictures fail is left out. If the pass itself fails or is interrupted, or its facts are lost,
        it has not happened: the same plan may be run again, and gives the same.
        """
        encode_ms: dict[int, float] = {}
        sources: dict[int, list[FeatureSource]] = {}
        failed: dict[int, Exception] = {}
        for scheduled in plan.scheduled:
            if scheduled.sequence.seq_id not in self._states:
                self._states[scheduled.sequence.seq_id] = self._begin(scheduled.sequence)
            # A step that was computed but never applied (Ctrl-C in between) is computed again from here.
            state = self._states[scheduled.sequence.seq_id]
            state.kv.truncate(scheduled.start)
            if scheduled.start >= scheduled.sequence.num_prompt_tokens:
                state.visual_tokens = None  # the prompt was not only computed, it was applied
            if scheduled.samples:
                state.sampler.begin(scheduled.end)
        for sequence in plan.encode:
            try:
                started = time.perf_counter()
                sources[sequence.seq_id] = self._encode(sequence)
                encode_ms[sequence.seq_id] = (time.perf_counter() - started) * 1e3
            except Exception as error:  # the boundary of one request: the others of the step are not harmed
                failed[sequence.seq_id] = error
        started = time.perf_counter()
        healthy = tuple(item for item in plan.scheduled if item.sequence.seq_id not in failed)
        drafts = self._draft(healthy)
        tokens, unsampled = self._decode(healthy, drafts)
        failed |= unsampled
        forward_ms = (time.perf_counter() - started) * 1e3
        kept = {item.sequence.seq_id: self._states[item.sequence.seq_id].kept for item in plan.scheduled}
        return StepFacts(
            tokens=tokens,
            num_drafted={seq_id: len(draft) for seq_id, draft in drafts.items()},
            encode_ms=encode_ms,
            sources=sources,
            failed=failed,
            forward_ms=forward_ms,
            kept={seq_id: places for seq_id, places in kept.items() if places is not None},
        )

    def _draft(self, scheduled: tuple[ScheduledSequence, ...]) -> dict[int, DraftTree]:
        """seq_id -> what is tried after the last token of those that may draft; empty drafts are left out.

        Nothing beside a prompt that is pruned: that pass leaves rows out, and knows no trees.
        """
        if self._speculator.is_resting or any(
            item.phase is Phase.PREFILL and item.sequence.request.pruning is not None for item in scheduled
        ):
            return {}
        wanted = [
            (item.sequence.seq_id, item.sequence.output_ids, item.draft_budget)
            for item in scheduled
            if item.draft_budget > 0
        ]
        if not wanted:
            return {}
        drafts = self._speculator.propose(wanted)
        return {seq_id: draft for (seq_id, _, _), draft in zip(wanted, drafts, strict=True) if len(draft)}

    def _decode(
        self, scheduled: tuple[ScheduledSequence, ...], drafts: dict[int, DraftTree]
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, Exception]]:
        """Runs the decoder over scheduled and drafted tokens: by seq_id what was chosen, and what kept one from it."""
        tokens: dict[int, tuple[int, ...]] = {}
        failed: dict[int, Exception] = {}
        if not scheduled:
            return tokens, failed
        started = time.perf_counter()
        try:
            logits = self._forward(self._batch(scheduled, drafts), scheduled)  # [R, V]
            best = likeliest(logits)
            row = 0
            for item in scheduled:
                if not item.samples:
                    continue
                seq_id = item.sequence.seq_id
                draft = drafts.get(seq_id, NO_DRAFT)
                try:
                    tokens[seq_id] = self._choose(seq_id, draft, logits, best, row)
                except Exception as error:  # the boundary of one request
                    failed[seq_id] = error
                row += 1 + len(draft)
        except BaseException:  # Ctrl-C, too, after which the other requests of the step go on
            for item in scheduled:
                self._states[item.sequence.seq_id].kv.truncate(item.start)
            raise
        if all(item.draft_budget > 0 for item in scheduled) and not failed:
            self._speculator.timed(
                num_sequences=len(scheduled),
                num_drafted=sum(map(len, drafts.values())),
                num_chosen=sum(map(len, tokens.values())),
                step_ms=(time.perf_counter() - started) * 1e3,
            )
        else:
            self._speculator.mixed()
        return tokens, failed

    def _choose(self, seq_id: int, draft: DraftTree, logits: Tensor, best: list[int], row: int) -> tuple[int, ...]:
        """The tokens that a sequence's 1 + K rows of the logits [R, V], from `row` on, give it.

        Of the draft, its page keeps the accepted path.
        """
        state, end = self._states[seq_id], row + 1 + len(draft)
        if not len(draft):
            return (state.sampler.choose(logits[row], best[row]),)
        acceptance = verify(draft, logits[row:end], state.sampler, best[row:end])
        state.kv.compact(len(draft), acceptance.path)
        self._speculator.observe(seq_id, draft, acceptance)
        return (*(draft.tokens[node] for node in acceptance.path), acceptance.token)

    def release(self, seq_id: int) -> None:
        """Drops what is kept of a sequence; its page is overwritten by the next holder."""
        self._states.pop(seq_id, None)
        self._speculator.end(seq_id)

    def learn(self, sequence: Sequence, end: tuple[int, ...]) -> None:
        """Keeps a finished answer, and the token that ended it if one did, to draft later ones from."""
        request = sequence.request
        if request.speculation.is_on:
            self._speculator.remember(
                request.prompt.ids,
                (*sequence.output_ids, *end),
                pictures=_digests(sequence),
                salt=request.salt,
                options=request.speculation,
            )

    @torch.inference_mode()
    def copy_out(self, seq_id: int, start: int, end: int) -> KVSegment:
        """The keys and values of the computed tokens start .. end - 1 of a sequence."""
        return self._states[seq_id].kv.copy_out(start, end)

    @property
    def num_states(self) -> int:
        """Sequences that something is kept of."""
        return len(self._states)

    def _begin(self, sequence: Sequence) -> _SequenceState:
        assert sequence.page_id is not None
        kv = self._pages.page(sequence.page_id)
        kv.truncate(0)
        if sequence.prefix is not None:
            for segment, num_tokens in sequence.prefix.segments:
                kv.load(segment, num_tokens)
        prompt = sequence.request.prompt
        ids = prompt.ids
        image_token_id = self._model.config.image_token_id
        if sequence.request.speculation.is_on:
            self._speculator.begin(
                sequence.seq_id,
                ids,
                pictures=_digests(sequence),
                salt=sequence.request.salt,
                options=sequence.request.speculation,
                asked=Asked(
                    prompt_ids=ids,
                    images=sequence.request.images,
                    places=tuple((span.start, span.end) for span in prompt.spans),
                    plans=tuple(span.plan for span in prompt.spans),
                    sampling=sequence.request.sampling,
                    max_tokens=sequence.max_tokens,
                ),
            )
        return _SequenceState(
            kv=kv,
            sampler=Sampler(
                sequence.request.sampling, torch.tensor(ids, device=self._device), self._model.config.text.vocab_size
            ),
            # Of the spans alone: an answer of an earlier turn may hold an image token that no picture belongs to.
            visual_positions=[
                position
                for span in prompt.spans[sequence.first_new_image :]
                for position in range(span.start, span.end)
                if ids[position] == image_token_id
            ],
        )

    def _encode(self, sequence: Sequence) -> list[FeatureSource]:
        """Gets the features of the pictures behind the known prefix, and says where each picture's came from."""
        request, first = sequence.request, sequence.first_new_image
        plans = [span.plan for span in request.prompt.spans[first:]]
        found = self._vision.features_of(request.images[first:], plans, request.vision)
        state = self._states[sequence.seq_id]
        cut = [
            self._vision.reduced(item.features, request.vision, span.counts)
            for item, span in zip(found, request.prompt.spans[first:], strict=True)
        ]
        state.visual_tokens = torch.cat([reduction.tokens for reduction in cut])
        if request.prompt.num_skipped:
            places = [*(None for _ in range(first)), *(reduction.places() for reduction in cut)]
            state.positions = whole_positions(request.prompt, places, self._model.config.image_token_id)
        assert len(state.visual_tokens) == len(state.visual_positions), "placeholders and features disagree"
        return [item.source for item in found]

    def _batch(self, scheduled: tuple[ScheduledSequence, ...], drafts: dict[int, DraftTree]) -> ForwardBatch:
        ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        parts: list[tuple[int, int, SequenceKV]] = []
        parents: list[tuple[int, ...]] = []
        branches = not all(draft.is_chain for draft in drafts.values())
        for item in scheduled:
            row = len(ids)
            draft = drafts.get(item.sequence.seq_id, NO_DRAFT)
            ids += item.sequence.tokens(item.start, item.end)
            ids += draft.tokens
            skipped = item.sequence.request.prompt.num_skipped
            known = self._states[item.sequence.seq_id].positions if skipped else None
            known = [] if known is None else known[item.start : item.end]
            positions += [*known, *range(item.start + len(known) + skipped, item.end + skipped)]
            positions += [item.end - 1 + skipped + depth for depth in draft.depths]
            parts.append((row, len(ids), self._states[item.sequence.seq_id].kv))
            if branches:
                parents.append(row_parents(item.end - item.start, draft))
            if item.samples:
                logit_rows += range(len(ids) - 1 - len(draft), len(ids))
        embeddings = self._model.decoder.embed(torch.tensor(ids, device=self._device))
        for item, (row, _, _) in zip(scheduled, parts, strict=True):
            self._place_visual_tokens(embeddings, row, item)
        return ForwardBatch(
            embeddings=embeddings,
            positions=torch.tensor(positions, device=self._device),
            attention=(
                TreeAttention(parts, parents, self._device, self._dtype)
                if branches
                else BatchAttention(parts, self._device, self._dtype)
            ),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=self._device),
        )

    def _place_visual_tokens(self, embeddings: Tensor, row: int, item: ScheduledSequence) -> None:
        """Overwrites the rows of visual placeholders of a slice that begins at `row`."""
        state = self._states[item.sequence.seq_id]
        first = bisect_left(state.visual_positions, item.start)
        last = bisect_left(state.visual_positions, item.end)
        if first < last:
            assert state.visual_tokens is not None, "a prompt's pictures are encoded before its visual tokens are due"
            rows = torch.tensor(state.visual_positions[first:last], device=self._device) + (row - item.start)
            embeddings[rows] = state.visual_tokens[first:last]

    def _forward(self, batch: ForwardBatch, scheduled: tuple[ScheduledSequence, ...]) -> Tensor:
        decoder, rows = self._model.decoder, batch.logit_rows
        if any(item.phase is Phase.PREFILL and item.sequence.request.pruning is not None for item in scheduled):
            hidden, rows = self._forward_pruned(batch, scheduled)
        else:
            hidden = decoder.run(batch.embeddings, batch.positions, batch.attention)
        if rows.numel() == 0:
            return hidden.new_empty(0, self._model.config.text.vocab_size)
        return decoder.logits(hidden[rows])  # [R, V]

    def _forward_pruned(self, batch: ForwardBatch, scheduled: tuple[ScheduledSequence, ...]) -> tuple[Tensor, Tensor]:
        """Hidden states of the rows that reach the last layer, and which of them logits are wanted of."""
        assert isinstance(batch.attention, BatchAttention)
        pages = [page for _, _, page in batch.attention.causal_pages]
        prunings = {
            index: item.sequence.request.pruning
            for index, item in enumerate(scheduled)
            if item.phase is Phase.PREFILL and item.sequence.request.pruning is not None
        }

        def attention_of(spans: SequenceOf[Span]) -> BatchAttention:
            parts = [(start, end, page) for (start, end), page in zip(spans, pages, strict=True)]
            return BatchAttention(parts, self._device, self._dtype)

        result = run_pruned(
            self._model.decoder,
            batch.embeddings,
            batch.positions,
            [(start, end) for start, end, _ in batch.attention.causal_pages],
            prunings,
            attention_of,
            lambda index, layer: pages[index].keys(layer),
            self._model.config.text.num_layers,
        )
        for index, pruning in prunings.items():
            pages[index].settle(scheduled[index].end)
            self._states[scheduled[index].sequence.seq_id].kept = kept_places(pruning, result.plans[index])
        return result.hidden, torch.searchsorted(result.rows, batch.logit_rows)


def _digests(sequence: Sequence) -> tuple[str, ...]:
    return tuple(span.digest for span in sequence.request.prompt.spans)
