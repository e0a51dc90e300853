"""FastV: visual tokens that a question hardly looks at are left out of the later decoder layers.

Ranked in the pass that computes the prompt, by one row of attention computed beside it: the query of one token over the
keys that the layer has left. It sees only what stands before it, so what is kept of a picture follows from the prompt
up to the end of the picture's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vlmfast.prune.counts import num_kept
from vlmfast.prune.plan import Pruning
from vlmfast_kernels.ops.score import attention_row
from vlmfast_models.decoder import Attention

Span = tuple[int, int]
"""Rows start .. end - 1 of a pass that belong to one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrunePlan:
    """What one step kept of one turn."""

    layer: int
    """The first layer that runs without the others."""
    kept: tuple[int, ...]
    """Places in the prompt, ascending."""
    scores: Tensor
    """float32, of the turn's visual tokens that were left before this step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrunedPass:
    """The last layer's rows, and which rows of the pass they are."""

    hidden: Tensor
    """[T', E]"""
    rows: Tensor
    """int64 [T'], ascending"""
    plans: Mapping[int, tuple[PrunePlan, ...]]
    """By sequence (index of its span): what was kept, step after step, turn after turn."""


class LayeredDecoder(Protocol):
    """A decoder that runs in segments (`vlmfast_models.decoder.Decoder`)."""

    def run(
        self, hidden: Tensor, positions: Tensor, attention: Attention, first_layer: int, last_layer: int | None
    ) -> Tensor: ...

    def query(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor: ...


def top_places(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` largest scores, ascending; of equals the first."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def run_pruned(
    decoder: LayeredDecoder,
    hidden: Tensor,
    positions: Tensor,
    spans: Sequence[Span],
    prunings: Mapping[int, Pruning],
    attention_of: Callable[[Sequence[Span]], Attention],
    keys_of: Callable[[int, int], Tensor],
    num_layers: int,
) -> PrunedPass:
    """All layers over the rows of a pass, fewer of them from each pruning step on.

    Args:
        hidden: [T, E], the embeddings of all sequences.
        positions: int64 [T].
        spans: the sequences' rows, in order.
        prunings: index of a span -> its pruning. Such a span holds its whole prompt: no key stands before its rows.
        attention_of: the attention of the sequences over these rows; called anew where rows have gone.
        keys_of: keys_of(index, layer), the keys [G, S, D] that a sequence has in a layer that has run.
    """
    score = attention_row.resolve(hidden.device, hidden.dtype)
    rows = torch.arange(len(hidden), device=hidden.device)
    starts = [start for start, _ in spans]
    steps = {index: pruning.active_steps(num_layers) for index, pruning in prunings.items()}
    boundaries = sorted({layer for active in steps.values() for layer in active})
    plans: dict[int, tuple[PrunePlan, ...]] = dict.fromkeys(prunings, ())
    first_layer = 0
    for boundary in boundaries:
        due = [index for index in prunings if boundary in steps[index]]
        now = _spans_of(rows, spans)
        ranking = {
            (index, turn): int(torch.searchsorted(rows, starts[index] + turn.rank_at))
            for index in due
            for turn in prunings[index].turns
        }
        if first_layer < boundary - 1:
            hidden = decoder.run(hidden, positions, attention_of(now), first_layer, boundary - 1)
        queries = {
            row: decoder.query(boundary - 1, hidden[row : row + 1], positions[row : row + 1])[0]
            for row in ranking.values()
        }
        hidden = decoder.run(hidden, positions, attention_of(now), boundary - 1, boundary)
        stays = torch.ones(len(rows), dtype=torch.bool, device=hidden.device)
        for (index, turn), row in ranking.items():
            visual = torch.tensor(turn.visual, device=hidden.device) + starts[index]
            visual = visual[torch.isin(visual, rows)]  # what earlier steps left
            places = torch.searchsorted(rows, visual)
            pruning = prunings[index]
            start = now[index][0]
            keys = keys_of(index, boundary - 1)[:, : row + 1 - start]  # those that the ranking token sees
            scores = score(queries[row], keys.to(queries[row].dtype))[places - start]
            if pruning.rank == "random":
                generator = torch.Generator().manual_seed(turn.seed + boundary)
                scores = torch.rand(len(places), generator=generator).to(hidden.device)
            kept = top_places(scores, num_kept(steps[index][boundary], len(turn.visual)))
            stays[places] = False
            stays[places[kept]] = True
            plan = PrunePlan(layer=boundary, kept=tuple((visual[kept] - starts[index]).tolist()), scores=scores)
            plans[index] = (*plans[index], plan)
        hidden, positions, rows = hidden[stays], positions[stays], rows[stays]
        first_layer = boundary
    hidden = decoder.run(hidden, positions, attention_of(_spans_of(rows, spans)), first_layer, None)
    return PrunedPass(hidden=hidden, rows=rows, plans=plans)


def kept_places(pruning: Pruning, plans: Sequence[PrunePlan]) -> tuple[int, ...]:
    """Places in the prompt, ascending, of the visual tokens that reach the last layer."""
    last = max((plan.layer for plan in plans), default=None)
    if last is None:
        return tuple(place for turn in pruning.turns for place in turn.visual)
    return tuple(place for plan in plans if plan.layer == last for place in plan.kept)


def _spans_of(rows: Tensor, spans: Sequence[Span]) -> list[Span]:
    """Where the sequences' rows stand among those that are left."""
    edges = torch.tensor([edge for span in spans for edge in span], device=rows.device)
    found = torch.searchsorted(rows, edges).tolist()
    return list(zip(found[::2], found[1::2], strict=True))
