"""Prompt-agnostic reduction of a picture's visual tokens, cut from whole features: pure functions of these alone.

Every method keeps the prompt's order and never writes to what it is given. What each does is in the docstring of its
function; all of them need no training. Similarity is the cosine of tokens in the decoder's width, in float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TypeAlias

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast.options import Reduce
from vlmfast.prune.counts import num_kept, run_counts
from vlmfast_kernels.ops.merge import bipartite_match, merge_tokens, merged_sizes

DROPPED = -1

_CONTEXT_SHARE = 10 / 64
"""Of what "saliency" keeps, the share that holds merged context (VisionZip: 54 dominant and 10 contextual of 64)."""
_MUCH_ALIKE = 0.015
"""Cosine distance below which "auto" takes a token to say what another one says already. docs/tokens.md has what
it keeps on the bundled model; of towers that put things farther apart it keeps more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """What is left of a picture, in prompt order."""

    tokens: Tensor
    """[M, E], in the dtype of the features."""
    source: Tensor
    """int64 [N]: which of the M tokens each original one went into; `DROPPED` if into none."""

    def places(self) -> list[int]:
        """Where each of the M tokens stood among the N: the middle of those that went into it, rounded."""
        used = (self.source != DROPPED).nonzero()[:, 0]
        totals = used.new_zeros(2, len(self.tokens)).index_add_(
            1, self.source[used], torch.stack((used, torch.ones_like(used)))
        )
        return [round(total / count) for total, count in totals.T.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Picture:
    """What a method sees of a picture."""

    tokens: Tensor
    """[N, E]"""
    saliency: Tensor
    """float32 [N]"""
    runs: tuple[int, ...]
    counts: tuple[int, ...]
    seed: int

    def similarity(self) -> Tensor:
        """Cosine of every two tokens, float32 [N, N]."""
        unit = nnf.normalize(self.tokens.float(), dim=-1)
        return unit @ unit.T

    def spans(self) -> list[tuple[int, int, int]]:
        """(start, end, tokens to keep) of each run."""
        spans, start = [], 0
        for run, count in zip(self.runs, self.counts, strict=True):
            spans.append((start, start + run, count))
            start += run
        return spans


_Method: TypeAlias = Callable[[_Picture], Reduction]


def reduce_tokens(
    tokens: Tensor, saliency: Tensor | None, runs: Sequence[int], reduce: Reduce, counts: Sequence[int] | None = None
) -> Reduction:
    """Cuts the visual tokens [N, E] of one picture down.

    Args:
        saliency: float32 [N], the attention each token received in the tower; "saliency" and "scope" need it.
        runs: lengths of the runs of tokens that the prompt separates, N in all.
        counts: tokens to keep of each run; None asks `counts_of`.
    """
    assert sum(runs) == len(tokens)
    runs = tuple(runs)
    counts = tuple(counts) if counts is not None else counts_of(tokens, runs, reduce)
    if counts == runs:
        return Reduction(tokens=tokens, source=torch.arange(len(tokens), device=tokens.device))
    assert saliency is not None or reduce.method not in ("saliency", "scope"), "features without saliency"
    picture = _Picture(
        tokens=tokens,
        saliency=tokens.new_ones(len(tokens), dtype=torch.float32) if saliency is None else saliency,
        runs=runs,
        counts=counts,
        seed=reduce.seed,
    )
    return _METHODS[reduce.method](picture)


def counts_of(tokens: Tensor, runs: tuple[int, ...], reduce: Reduce) -> tuple[int, ...]:
    """Tokens to keep of each run: from the sizes alone, unless the picture itself decides (keep="auto")."""
    return auto_counts(tokens, runs, reduce.floor) if reduce.keep == "auto" else run_counts(runs, reduce)


def auto_counts(tokens: Tensor, runs: tuple[int, ...], floor: float) -> tuple[int, ...]:
    """As many tokens of each run as it takes until every other one is much like one of them, and at least `floor`.

    Tokens are taken as by "diversity", the farthest first, until none is farther than a cosine distance of 0.015 from
    its nearest: of a page much is taken, a plain wall is taken once.
    """
    picture = _Picture(tokens=tokens, saliency=tokens[:, 0], runs=runs, counts=runs, seed=0)
    chosen = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    chosen[_farthest_first(picture, stop_below=_MUCH_ALIKE)] = True
    taken = [int(chosen[start:end].sum()) for start, end, _ in picture.spans()]
    return tuple(max(num_kept(floor, run), count) for run, count in zip(runs, taken, strict=True))


def _keep(picture: _Picture, places: Tensor) -> Reduction:
    """The tokens at `places` as they are; the others are dropped."""
    places = places.sort().values
    source = torch.full((len(picture.tokens),), DROPPED, device=places.device)
    source[places] = torch.arange(len(places), device=places.device)
    return Reduction(tokens=picture.tokens[places], source=source)


def _top(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` largest, of equals the first."""
    return scores.sort(descending=True, stable=True).indices[:count]


def _saliency(picture: _Picture) -> Reduction:
    """The tokens that the tower looks at most, and the rest merged into a few (VisionZip: Yang et al., 2412.04467).

    Of each run's count, 54/64 are its most salient tokens. The others gather around evenly spaced ones of them, each
    around the most similar, and every group becomes its mean.
    """
    num_out = sum(picture.counts)
    owner = torch.full((len(picture.tokens),), DROPPED, device=picture.tokens.device)  # a token that names its output
    for start, end, count in picture.spans():
        num_context = min(round(count * _CONTEXT_SHARE), end - start - count)
        dominant = start + _top(picture.saliency[start:end], count - num_context)
        owner[dominant] = dominant
        if not num_context:
            continue
        rest = (owner[start:end] == DROPPED).nonzero()[:, 0] + start
        targets = rest[torch.arange(num_context, device=rest.device) * len(rest) // num_context]
        unit = nnf.normalize(picture.tokens[start:end].float(), dim=-1)
        nearest = (unit[rest - start] @ unit[targets - start].T).argmax(-1)
        owner[rest] = targets[nearest]
        owner[targets] = targets
    names, places = owner.unique(return_inverse=True)  # sorted
    if names[0] == DROPPED:  # runs without context drop their rest
        names, places = names[1:], places - 1
    assert len(names) == num_out
    groups = places.clamp(min=0)[None]
    sizes = (places >= 0).float()[None]
    merged = merge_tokens.reference(picture.tokens[None], sizes, groups, num_out)[0]
    return Reduction(tokens=merged, source=places)


def _diversity(picture: _Picture) -> Reduction:
    """Tokens that are far from each other: the smallest distance between two of them is large.

    Greedy max-min selection (DivPrune: Alvar et al., arXiv 2503.02175): first the token farthest from its nearest, then
    again and again the one farthest from those taken.
    """
    return _keep(picture, _farthest_first(picture))


def _farthest_first(picture: _Picture, stop_below: float = float("-inf")) -> Tensor:
    """Places in the order that max-min selection takes them, until the counts are full or all others are nearer."""
    distance = 1 - picture.similarity()
    open_ = _Quota(picture)
    nearest = distance.clone().fill_diagonal_(float("inf")).amin(-1)  # to any other, for the first choice
    taken: list[int] = []
    while open_:
        place = int(open_.best(nearest))
        if taken and nearest[place] < stop_below:
            break
        nearest = distance[place].clone() if not taken else torch.minimum(nearest, distance[place])
        taken.append(place)
        open_.take(place)
    return torch.tensor(taken, device=distance.device)


def _scope(picture: _Picture) -> Reduction:
    """Tokens that are salient and stand for many that none taken before stands for (SCOPE: arXiv 2510.24214).

    Greedy: a token's worth is its saliency times what it adds to the coverage, the sum over all tokens of their largest
    similarity to one that is taken.
    """
    similarity = picture.similarity()
    covered = similarity.new_zeros(len(similarity))
    quota = _Quota(picture)
    taken: list[int] = []
    while quota:
        gain = (similarity - covered).clamp_(min=0).sum(-1)
        place = int(quota.best(gain * picture.saliency))
        covered = torch.maximum(covered, similarity[place])
        taken.append(place)
        quota.take(place)
    return _keep(picture, torch.tensor(taken, device=similarity.device))


class _Quota:
    """What each run may still give to a selection over the whole picture; true until all are full."""

    def __init__(self, picture: _Picture) -> None:
        self._left = list(picture.counts)
        self._spans = picture.spans()
        self._run_of = [run for run, length in enumerate(picture.runs) for _ in range(length)]
        self._closed = torch.zeros(len(picture.tokens), dtype=torch.bool, device=picture.tokens.device)
        for run in range(len(self._left)):
            self._close_if_full(run)

    def __bool__(self) -> bool:
        return any(self._left)

    def best(self, scores: Tensor) -> Tensor:
        """The place with the largest score that may be taken, of equals the first."""
        return scores.masked_fill(self._closed, float("-inf")).argmax()

    def take(self, place: int) -> None:
        self._closed[place] = True
        run = self._run_of[place]
        self._left[run] -= 1
        self._close_if_full(run)

    def _close_if_full(self, run: int) -> None:
        if not self._left[run]:
            start, end, _ = self._spans[run]
            self._closed[start:end] = True


def _merge(picture: _Picture) -> Reduction:
    """Similar tokens merged, weighted by how many they stand for: ToMe's matching, round after round, run by run."""
    parts, sources, num_out = [], [], 0
    for start, end, count in picture.spans():
        tokens = picture.tokens[None, start:end]
        sizes = torch.ones(1, end - start, device=tokens.device)
        source = torch.arange(end - start, device=tokens.device)[None]
        while tokens.shape[1] > count:
            left = max(count, tokens.shape[1] - tokens.shape[1] // 2)
            step = bipartite_match(tokens, tokens.shape[1] - left)
            tokens, sizes = merge_tokens.reference(tokens, sizes, step, left), merged_sizes(sizes, step, left)
            source = step.gather(1, source)
        parts.append(tokens[0])
        sources.append(source[0] + num_out)
        num_out += count
    return Reduction(tokens=torch.cat(parts), source=torch.cat(sources))


def _pool(picture: _Picture) -> Reduction:
    """Means over a coarser grid of each frame: the plain way, blind to what is in the picture."""
    parts, sources, num_out = [], [], 0
    for start, end, count in picture.spans():
        side, coarse = isqrt(end - start), isqrt(count)
        grid = picture.tokens[start:end].float().view(side, side, -1).permute(2, 0, 1)
        pooled = nnf.adaptive_avg_pool2d(grid, coarse)
        parts.append(pooled.flatten(1).T.to(picture.tokens.dtype))
        cell = torch.arange(side, device=grid.device) * coarse // side
        sources.append((cell[:, None] * coarse + cell[None]).flatten() + num_out)
        num_out += count
    return Reduction(tokens=torch.cat(parts), source=torch.cat(sources))


def _random(picture: _Picture) -> Reduction:
    """Any tokens: other ones for other pictures, the same ones for the same picture and seed."""
    content = zlib.crc32(picture.tokens.detach().float().cpu().numpy().tobytes())
    generator = torch.Generator().manual_seed(picture.seed ^ content)
    places = [start + torch.randperm(end - start, generator=generator)[:count] for start, end, count in picture.spans()]
    return _keep(picture, torch.cat(places).to(picture.tokens.device))


_METHODS: dict[str, _Method] = {
    "saliency": _saliency,
    "diversity": _diversity,
    "scope": _scope,
    "merge": _merge,
    "pool": _pool,
    "random": _random,
}
