"""How much to draft: measured acceptance against measured cost, down to nothing. No torch.

A step over n tokens takes c(n). With B sequences and drafts whose nodes are accepted with probabilities g, it gives
B + sum(g) tokens in c(B + K) instead of B in c(B). Nodes are added from the likeliest down while that rate grows, so
drafts shrink where they fail, where passes get dearer with their width, and as the batch grows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vlmfast.spec.tree import NO_DRAFT, ROOT, Acceptance, DraftTree

_FIRST_GUESS = 0.6
"""Acceptance of a first node of an unknown origin."""
_GUESS_WEIGHT = 2.0
"""How many trials a guess counts as."""
_MEMORY = 64.0
"""Trials that an estimate remembers: it follows when the kind of text changes."""
_SAMPLES = 12
"""Step times kept for each width. Their lower quartile counts: what else the machine does only ever adds."""
_TRUSTED = 3
"""Samples of a width that outweigh a much lower guess: the first may have met a busy moment."""
_NEAR_GUESS = 1.25
"""A sample of at most so many times the guess is believed at once."""
_GUESSED_SLOPE = 0.08
"""Cost of one more token, of that of the first, until it is measured."""
_MARGIN = 1.02
"""A draft must promise this much more than a plain step."""
_MAX_LOSS = 0.02
"""Share of the time that drafting may have cost so far."""
_FREE_STEPS = 2.0
"""Plain steps' worth of time that drafting may cost before it has earned anything."""
_CREDIT_STEPS = 8.0
"""Plain steps' worth of earlier gains that may be lost again: a job that turns bad can not spend all that was won."""
_EXPLORE_EVERY = 32
"""In one of so many steps whose drafts promise too little, one is tried after all: texts change."""
_EXPLORE_NODES = 4
_LIKELY = 0.5
"""One in so many drafts takes every node this likely, whatever it seems to cost: costs change, too."""
_PLAIN_EVERY = 128
"""One in so many steps is plain, to measure c(B) anew."""
_FORGET = 0.999
"""What is left of the account after each step."""


class StepCosts:
    """Milliseconds of a decoder pass by its number of tokens."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        self._widths: list[int] = []
        """Those with samples that are believed, ascending; only these are looked at."""

    def add(self, num_tokens: int, ms: float) -> None:
        samples = self._samples.setdefault(num_tokens, deque(maxlen=_SAMPLES))
        samples.append(ms)
        typical = _typical(samples)
        if num_tokens not in self._typical:
            if self._widths and len(samples) < _TRUSTED and typical > _NEAR_GUESS * self(num_tokens):
                return
            insort(self._widths, num_tokens)
        self._typical[num_tokens] = typical

    @property
    def known(self) -> bool:
        return bool(self._widths)

    @property
    def widest(self) -> int:
        """The most tokens whose cost was measured."""
        return self._widths[-1]

    def __call__(self, num_tokens: int) -> float:
        """The cost, between measured widths by a straight line; never more than that of a wider pass.

        Raises:
            IndexError: nothing was measured yet.
        """
        at = bisect_left(self._widths, num_tokens)
        ceiling = min((self._typical[width] for width in self._widths[at:]), default=float("inf"))
        if at < len(self._widths) and self._widths[at] == num_tokens:
            return ceiling
        if 0 < at < len(self._widths):
            return min(ceiling, self._line(self._widths[at - 1], self._widths[at], num_tokens))
        if at and len(self._widths) > 1 and self(self._widths[0]) < self._typical[self._widths[-1]]:
            return self._line(self._widths[0], self._widths[-1], num_tokens)
        nearest = self._widths[-1 if at else 0]
        slope = (1 + _GUESSED_SLOPE * (num_tokens - 1)) / (1 + _GUESSED_SLOPE * (nearest - 1))
        return min(ceiling, self._typical[nearest] * slope)

    def _line(self, low: int, high: int, num_tokens: int) -> float:
        """The straight line through the costs of two widths."""
        part = (num_tokens - low) / (high - low)
        return self._typical[low] * (1 - part) + self._typical[high] * part


@dataclass(slots=True)
class _Trials:
    """How often a node of one kind was accepted, of those whose parent was."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: bool) -> None:
        if self.tried >= _MEMORY:
            self.accepted /= 2
            self.tried /= 2
        self.accepted += accepted
        self.tried += 1

    def estimate(self, guess: float) -> float:
        return (self.accepted + guess * _GUESS_WEIGHT) / (self.tried + _GUESS_WEIGHT)


@dataclass(slots=True)
class _Account:
    """Time that drafting has taken, against what the same tokens would have taken without."""

    ms: float = 0.0
    loss_ms: float = 0.0

    def add(self, plain_ms: float, ms: float, credit_ms: float) -> None:
        self.ms = self.ms * _FORGET + ms
        self.loss_ms = max(self.loss_ms * _FORGET + ms - plain_ms, -credit_ms)


class Gate:
    """Chooses drafts; its statistics outlive the requests. Not locked: the engine is its only user.

    Args:
        adaptive: False takes every draft whole, whatever it costs.
    """

    def __init__(self, *, adaptive: bool = True) -> None:
        self._adaptive = adaptive
        self._trials: dict[tuple[str, int, int], _Trials] = {}
        self._costs = StepCosts()
        self._draft_ms: deque[float] = deque(maxlen=_SAMPLES)
        self._account = _Account()
        self._num_promising = 0
        self._num_unpromising = 0
        self._explored: dict[str, int] = {}
        self._steps_since_plain = 0

    @property
    def is_resting(self) -> bool:
        """Drafting has cost too much: not even proposals are worth their time. Plain steps end it."""
        if not self._adaptive or not self._costs.known:
            return False
        return self._account.loss_ms > self._allowed_ms

    @property
    def _allowed_ms(self) -> float:
        return _MAX_LOSS * self._account.ms + _FREE_STEPS * self._costs(1)

    def choose(self, offers: Sequence[Sequence[DraftTree]]) -> list[DraftTree]:
        """Of the drafts offered for each sequence of a step, the one to verify, cut to what pays; or `NO_DRAFT`."""
        if not self._adaptive:
            return [max(drafts, key=len, default=NO_DRAFT) for drafts in offers]
        if self.is_resting or not self._costs.known or self._due_plain():
            return [NO_DRAFT] * len(offers)
        gains = [
            max(((self.gains(tree), tree) for tree in drafts), key=lambda offer: sum(offer[0]), default=([], NO_DRAFT))
            for drafts in offers
        ]
        kept = self._fill([found for found, _ in gains])
        if not any(kept):
            return self._explore([tree for _, tree in gains])
        self._num_promising += 1
        if self._num_promising % _EXPLORE_EVERY == 0:
            likely = [sum(gain > _LIKELY for gain in found) for found, _ in gains]
            kept = likely if sum(likely) <= self._most_nodes(len(offers)) else kept
        return [tree.first(number) for (_, tree), number in zip(gains, kept, strict=True)]

    def gains(self, tree: DraftTree) -> list[float]:
        """For each node the probability that it is accepted, by experience; never more than that of a node before."""
        places = _places(tree)
        levels = [_FIRST_GUESS]  # an unknown depth is guessed from the one before
        for depth in range(1, max((depth for depth, _, _ in places), default=0) + 1):
            trials = self._trials.get((tree.origin, depth, 0))
            levels.append(trials.estimate(levels[-1]) if trials else levels[-1])
        reached: list[float] = []
        found: list[float] = []
        for depth, rank, parent in places:
            trials = self._trials.get((tree.origin, depth, rank)) if rank else None
            chance = trials.estimate(levels[depth - 1]) if trials else levels[depth]
            reached.append(chance if parent == ROOT else chance * reached[parent])
            found.append(min(reached[-1], found[-1]) if found else reached[-1])
        return found

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learns from a verified draft."""
        accepted = {ROOT, *acceptance.path}
        for node, (depth, rank, parent) in enumerate(_places(tree)):
            if parent in accepted:
                self._trials.setdefault((tree.origin, depth, rank), _Trials()).add(node in accepted)

    def timed(self, *, num_sequences: int, num_drafted: int, num_chosen: int, draft_ms: float, step_ms: float) -> None:
        """Learns from a step that decoded for some sequences and did nothing else.

        Args:
            num_chosen: tokens that the step gave, at least one a sequence.
            draft_ms: time that proposing and choosing took; 0 where it was left out.
        """
        self._costs.add(num_sequences + num_drafted, step_ms)
        plain_ms = self._costs(num_sequences) * num_chosen / num_sequences
        # Not this step's own times: a busy machine is not the draft's fault.
        ms = self._costs(num_sequences + num_drafted)
        if draft_ms > 0:
            self._draft_ms.append(draft_ms)
            ms += _typical(self._draft_ms)
        self._account.add(plain_ms, ms, _CREDIT_STEPS * self._costs(1))
        self._steps_since_plain = self._steps_since_plain + 1 if num_drafted else 0

    def acceptance(self) -> dict[str, list[float]]:
        """By origin, the measured acceptance of a chain's first, second, ... node."""
        table: dict[str, list[float]] = {}
        for (origin, _, rank), trials in sorted(self._trials.items()):
            if rank == 0:
                table.setdefault(origin, []).append(trials.accepted / trials.tried)
        return table

    def _most_nodes(self, num_sequences: int) -> int:
        """No pass is more than twice as wide as one that was measured: a costly surprise stays small."""
        return max(2 * self._costs.widest - num_sequences, 1)

    def _due_plain(self) -> bool:
        return self._steps_since_plain >= _PLAIN_EVERY

    def _fill(self, gains: Sequence[list[float]]) -> list[int]:
        """How many nodes of each sequence's draft make the step's rate highest."""
        num_sequences = len(gains)
        nodes = sorted(((-gain, index) for index, found in enumerate(gains) for gain in found))
        best_rate = _MARGIN * num_sequences / self._costs(num_sequences)
        best, tokens = 0, float(num_sequences)
        for number, (gain, _) in enumerate(nodes[: self._most_nodes(num_sequences)], 1):
            tokens -= gain
            rate = tokens / self._costs(num_sequences + number)
            if rate > best_rate:
                best, best_rate = number, rate
        kept = [0] * num_sequences
        for _, index in nodes[:best]:
            kept[index] += 1
        return kept

    def _explore(self, trees: list[DraftTree]) -> list[DraftTree]:
        """Now and then, a short draft of the origin that has waited longest, where the account allows it."""
        chosen = [NO_DRAFT] * len(trees)
        waiting = [index for index, tree in enumerate(trees) if len(tree)]
        if not waiting:
            return chosen
        self._num_unpromising += 1
        num_nodes = min(_EXPLORE_NODES, self._most_nodes(len(trees)))
        extra_ms = self._costs(len(trees) + num_nodes) - self._costs(len(trees))
        if self._num_unpromising % _EXPLORE_EVERY == 0 and self._account.loss_ms + extra_ms < self._allowed_ms / 2:
            index = min(waiting, key=lambda one: self._explored.get(trees[one].origin, 0))
            self._explored[trees[index].origin] = self._num_unpromising
            chosen[index] = trees[index].first(num_nodes)
        return chosen


def _typical(samples: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(samples)[(len(samples) - 1) // 4]


def _places(tree: DraftTree) -> list[tuple[int, int, int]]:
    """For each node its depth, its rank among its siblings, and its parent."""
    ranks: dict[int, int] = {}
    places = []
    for depth, parent in zip(tree.depths, tree.parents, strict=True):
        places.append((depth, ranks.setdefault(parent, 0), parent))
        ranks[parent] += 1
    return places
