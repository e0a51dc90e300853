"""Computes engine steps: owns the networks, the key/value pages and the samplers. Changes no sequence."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmfast.kv import KVPages, SequenceKV
from vlmfast.sample import Sampler
from vlmfast.scheduler import ScheduledSequence, StepPlan
from vlmfast.sequence import Sequence
from vlmfast.vision import VisionEncoder
from vlmfast_kernels.ops.attention import attend
from vlmfast_models.batch import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step found out."""

    tokens: dict[int, int]
    """seq_id -> the token chosen, for slices that sample."""
    encode_ms: dict[int, float]
    """seq_id -> time in preprocessing and the vision tower."""
    failed: dict[int, Exception]
    """seq_id -> what went wrong with its pictures; it took no part in the decoder pass."""
    forward_ms: float
    """Decoder pass and sampling."""


@dataclass(slots=True, kw_only=True)
class _SequenceState:
    """What the runner keeps of a sequence between steps."""

    kv: SequenceKV
    sampler: Sampler
    visual_positions: list[int]
    """Prompt positions of visual tokens, ascending."""
    visual_tokens: Tensor | None = None
    """[N, E], held until the prompt is computed."""


class BatchAttention:
    """Attention of a ragged batch: each sequence's rows over its own page."""

    def __init__(self, parts: list[tuple[int, int, SequenceKV]], device: torch.device, dtype: torch.dtype) -> None:
        self._parts = parts
        self._attend = attend.resolve(device, dtype)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `vlmfast_models.decoder.Attention`."""
        if len(self._parts) == 1:
            return self._attend(query, *self._parts[0][2].append(layer, key, value))
        mixed = [
            self._attend(query[start:end], *kv.append(layer, key[start:end], value[start:end]))
            for start, end, kv in self._parts
        ]
        return torch.cat(mixed)


class Runner:
    """Runs step plans on one device."""

    def __init__(
        self, model: Any, vision: VisionEncoder, *, device: torch.device, dtype: torch.dtype, capacity: int
    ) -> None:
        self._model = model
        self._vision = vision
        self._device = device
        self._dtype = dtype
        self._pages = KVPages(model.config.text, capacity, device, dtype)
        self._states: dict[int, _SequenceState] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepFacts:
        """Encodes the pictures that the step needs, then one decoder pass over all scheduled tokens.

        A sequence whose pictures fail is left out. If the pass itself fails or is interrupted, it has not happened:
        every page is as before, and the same plan may be run again.
        """
        encode_ms: dict[int, float] = {}
        failed: dict[int, Exception] = {}
        for scheduled in plan.scheduled:
            if scheduled.sequence.seq_id not in self._states:
                self._states[scheduled.sequence.seq_id] = self._begin(scheduled.sequence)
            # A step that was computed but never applied (Ctrl-C in between) is computed again from here.
            self._states[scheduled.sequence.seq_id].kv.truncate(scheduled.start)
        for sequence in plan.encode:
            try:
                encode_ms[sequence.seq_id] = self._encode(sequence)
            except Exception as error:  # the boundary of one request: the others of the step are not harmed
                failed[sequence.seq_id] = error
        started = time.perf_counter()
        tokens, unsampled = self._decode(tuple(item for item in plan.scheduled if item.sequence.seq_id not in failed))
        failed |= unsampled
        forward_ms = (time.perf_counter() - started) * 1e3
        return StepFacts(tokens=tokens, encode_ms=encode_ms, failed=failed, forward_ms=forward_ms)

    def _decode(self, scheduled: tuple[ScheduledSequence, ...]) -> tuple[dict[int, int], dict[int, Exception]]:
        """Runs the decoder over the scheduled tokens: the chosen tokens by seq_id, and what kept one from a choice."""
        tokens: dict[int, int] = {}
        failed: dict[int, Exception] = {}
        if not scheduled:
            return tokens, failed
        try:
            logits = self._forward(self._batch(scheduled))
            sampling = [item.sequence.seq_id for item in scheduled if item.samples]
            for seq_id, row in zip(sampling, logits, strict=True):
                try:
                    tokens[seq_id] = self._states[seq_id].sampler.choose(row)
                except Exception as error:  # the boundary of one request
                    failed[seq_id] = error
        except BaseException:  # Ctrl-C, too, after which the other requests of the step go on
            for item in scheduled:
                self._states[item.sequence.seq_id].kv.truncate(item.start)
            raise
        for item in scheduled:
            if item.end >= item.sequence.num_prompt_tokens:
                self._states[item.sequence.seq_id].visual_tokens = None
        return tokens, failed

    def release(self, seq_id: int) -> None:
        """Drops what is kept of a sequence; its page is overwritten by the next holder."""
        self._states.pop(seq_id, None)

    @property
    def num_states(self) -> int:
        """Sequences that something is kept of."""
        return len(self._states)

    def _begin(self, sequence: Sequence) -> _SequenceState:
        assert sequence.page_id is not None
        kv = self._pages.page(sequence.page_id)
        kv.truncate(0)
        ids = sequence.request.prompt.ids
        image_token_id = self._model.config.image_token_id
        return _SequenceState(
            kv=kv,
            sampler=Sampler(
                sequence.request.sampling, torch.tensor(ids, device=self._device), self._model.config.text.vocab_size
            ),
            visual_positions=[position for position, token in enumerate(ids) if token == image_token_id],
        )

    def _encode(self, sequence: Sequence) -> float:
        started = time.perf_counter()
        request = sequence.request
        features = [
            self._vision.encode(image, span.plan).tokens
            for image, span in zip(request.images, request.prompt.spans, strict=True)
        ]
        state = self._states[sequence.seq_id]
        state.visual_tokens = torch.cat(features)
        assert len(state.visual_tokens) == len(state.visual_positions), "placeholders and features disagree"
        return (time.perf_counter() - started) * 1e3

    def _batch(self, scheduled: tuple[ScheduledSequence, ...]) -> ForwardBatch:
        ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        parts: list[tuple[int, int, SequenceKV]] = []
        for item in scheduled:
            row = len(ids)
            ids += item.sequence.tokens(item.start, item.end)
            positions += range(item.start, item.end)
            parts.append((row, len(ids), self._states[item.sequence.seq_id].kv))
            if item.samples:
                logit_rows.append(len(ids) - 1)
        embeddings = self._model.decoder.embed(torch.tensor(ids, device=self._device))
        for item, (row, _, _) in zip(scheduled, parts, strict=True):
            self._place_visual_tokens(embeddings, row, item)
        return ForwardBatch(
            embeddings=embeddings,
            positions=torch.tensor(positions, device=self._device),
            attention=BatchAttention(parts, self._device, self._dtype),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=self._device),
        )

    def _place_visual_tokens(self, embeddings: Tensor, row: int, item: ScheduledSequence) -> None:
        """Overwrites the rows of visual placeholders of a slice that begins at `row`."""
        state = self._states[item.sequence.seq_id]
        if state.visual_tokens is None:
            return
        first = bisect_left(state.visual_positions, item.start)
        last = bisect_left(state.visual_positions, item.end)
        if first < last:
            rows = torch.tensor(state.visual_positions[first:last], device=self._device) + (row - item.start)
            embeddings[rows] = state.visual_tokens[first:last]

    def _forward(self, batch: ForwardBatch) -> Tensor:
        decoder = self._model.decoder
        hidden = decoder.run(batch.embeddings, batch.positions, batch.attention)
        if batch.logit_rows.numel() == 0:
            return hidden.new_empty(0, self._model.config.text.vocab_size)
        return decoder.logits(hidden[batch.logit_rows])  # [R, V]
