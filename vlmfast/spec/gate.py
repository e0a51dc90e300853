"""How much to draft: measured acceptance against measured cost, down to nothing. No torch.

A step over n tokens takes c(n), measured for each number of sequences apart. With B sequences and drafts whose nodes
are accepted with probabilities g, it gives B + sum(g) tokens in c(B + K) instead of B in c(B). Nodes are added from the
likeliest down while that rate grows, so drafts shrink where they fail, where passes get dearer with their width, and as
the batch grows.

Where drafting has lost time it rests: steps are then what they are without it, nothing is proposed or looked at. Each
rest in a row is twice as long for the same loss, so that a text that can not be drafted costs less and less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from vlmfast.spec.costs import StepCosts, typical
from vlmfast.spec.tree import NO_DRAFT, ROOT, Acceptance, DraftTree

_FIRST_GUESS = 0.6
"""Acceptance of a first node of an unknown origin."""
_GUESS_WEIGHT = 2.0
"""How many trials a guess counts as."""
_MEMORY = 64.0
"""Trials that an estimate remembers: it follows when the kind of text changes."""
_RESTED_MEMORY = 1.0
"""Trials that it remembers over a rest: what was learnt of another text must not outweigh what comes."""
_MARGIN = 0.01
"""Drafts must promise this much more than a plain step, and as much again for each sequence: not all that proposing
costs shows in the times that are known here."""
_HOPELESS = 0.02
"""Nodes that are accepted no more often than this are not looked at."""
_SAMPLES = 12
"""Draft times kept. As with step times, their median counts."""
_SLOWEST = 1.5
"""A step that drafts counts as at most so many typical ones of its width."""
_DEAREST = 4.0
"""A proposal counts as at most so many typical ones."""
_PLAIN_SAMPLES = 6
"""Plain steps of so many sequences that are timed one after the other, in a rest, before anything is drafted for them.
Between drafts they would be slower than without any: caches and threads have been at something else."""
_TIME_EVERY = 16
"""Of the plain steps of further rests, one in so many is timed."""
_COLD_STEPS = 3
"""Steps after one that read a prompt are slow: the weights have left the caches."""
_ALWAYS_COLD = 48
"""After so many of them in a row there are no others: their times count then, and nothing waits for better ones."""
_FREE_STEPS = 0.6
"""Plain steps' worth of time that drafting may lose before it rests."""
_CREDIT_STEPS = 12.0
"""Plain steps' worth of earlier gains that may be lost again: a job that turns bad can not spend all that was won."""
_EARNED_STEPS = 3.0
"""Plain steps' worth of gains that make a rest short again."""
_FIRST_SHARE = 0.04
"""A first rest is so long that the loss is this share of it; half of it after each rest that gained nothing since."""
_LEAST_SHARE = 0.01
_MAX_REST = 4096
"""Longest rest, in steps."""
_EXPLORE_EVERY = 32
"""Of drafts that promise too little, the first after a rest is tried, and then one in so many: texts change."""
_EXPLORE_NODES = 2
_LIKELY = 0.5
"""One in so many drafts takes every node this likely, whatever it seems to cost: costs change, too."""
_PLAIN_EVERY = 256
"""After so many proposals without a rest plain steps are timed anew."""


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

    def fade(self) -> None:
        """Counts for little from here on."""
        if self.tried > _RESTED_MEMORY:
            self.accepted *= _RESTED_MEMORY / self.tried
            self.tried = _RESTED_MEMORY

    def estimate(self, guess: float) -> float:
        return (self.accepted + guess * _GUESS_WEIGHT) / (self.tried + _GUESS_WEIGHT)


class Gate:
    """Chooses drafts; its statistics outlive the requests. Not locked: the engine is its only user.

    Args:
        adaptive: False takes every draft whole, whatever it costs.
    """

    def __init__(self, *, adaptive: bool = True) -> None:
        self._adaptive = adaptive
        self._trials: dict[tuple[str, int, int], _Trials] = {}
        self._chains: dict[str, list[float]] = {}
        """By origin, the gains of its longest chain since something was learnt."""
        self._alike: dict[str, _Trials] = {}
        """First nodes of all origins of one certainty: the guess for an origin that is new."""
        self._costs: dict[int, StepCosts] = {}
        """By the number of sequences: a token of a draft costs less than one of another sequence."""
        self._step_ms = 0.0
        """A plain step, of as many sequences as the last that was timed."""
        self._draft_samples: deque[float] = deque(maxlen=_SAMPLES)
        self._draft_ms = 0.0
        """Typical time of proposing for one sequence."""
        self._loss_ms = 0.0
        """Time that drafting has taken since the last rest, beyond what the same tokens would have taken without."""
        self._advanced_ms = 0.0
        """Of it, what running sequences may still earn back."""
        self._share = _FIRST_SHARE
        self._rest = 0
        self._untimed = 0
        self._num_to_time = 0
        """Plain steps to come that are timed whatever is known."""
        self._num_promising = self._num_unpromising = 0
        self._explored: dict[str, int] = {}
        self._steps_since_rest = 0
        self._num_sequences = 0
        self._cold = self._cold_in_a_row = 0
        self._held = 0
        """Slow steps less others, of late."""

    @property
    def is_resting(self) -> bool:
        """Drafting has cost too much: not even proposals are worth their time. So many plain steps end it."""
        return self._rest > 0

    def rests(self, num_sequences: int) -> bool:
        """Whether nothing need be proposed for so many: it is a rest, or one begins in which plain steps are timed."""
        # What drafts cost several sequences in slow steps is never learnt, and first words are the least sure.
        is_earning = self._loss_ms < self._advanced_ms and num_sequences == self._num_sequences
        is_early = num_sequences > 1 and self._cold > 0 and self._held < _ALWAYS_COLD and not is_earning
        return self._adaptive and (self.is_resting or self._begins_spell(num_sequences) or is_early)

    def choose(self, offers: Sequence[Sequence[DraftTree]]) -> list[DraftTree]:
        """Of the drafts offered for each sequence of a step, the one to verify, cut to what pays; or `NO_DRAFT`."""
        if not self._adaptive:
            return [max(drafts, key=len, default=NO_DRAFT) for drafts in offers]
        if not any(map(any, offers)) or self.rests(len(offers)):
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
        if tree.is_chain:
            known = self._chains.get(tree.origin, [])
            if len(known) < len(tree):
                known = self._chains[tree.origin] = list(accumulate(self._levels(tree.origin, len(tree))[1:], mul))
            return known[: len(tree)]
        places = tree.places
        levels = self._levels(tree.origin, max(depth for depth, _, _ in places))
        reached: list[float] = []
        found: list[float] = []
        for depth, rank, parent in places:
            trials = self._trials.get((tree.origin, depth, rank)) if rank else None
            chance = trials.estimate(levels[depth - 1]) if trials else levels[depth]
            reached.append(chance if parent == ROOT else chance * reached[parent])
            found.append(min(reached[-1], found[-1]) if found else reached[-1])
        return found

    def chain_length(self, origin: str, num_sequences: int, most: int, chain_ms: Callable[[int], float]) -> int:
        """How many tokens are worth drafting for each sequence of a step, where so many cost `chain_ms` themselves.

        0 for nothing; what a network would draft can not be cut afterwards without having paid for it.
        """
        if not self._adaptive:
            return most
        if most < 1 or self.rests(num_sequences):
            return 0
        most = min(most, max(self._most_nodes(num_sequences) // num_sequences, 1))
        if chain_ms(1) == 0:
            return min(_EXPLORE_NODES, most)
        tokens, costs = float(num_sequences), self._costs[num_sequences]
        best, best_rate = 0, self._least_rate(num_sequences)
        for length, gain in enumerate(self.gains(DraftTree.chain([0] * most, origin=origin)), 1):
            tokens += gain * num_sequences
            rate = tokens / (costs(num_sequences * (1 + length)) + chain_ms(length))
            if rate > best_rate:
                best, best_rate = length, rate
        if best == 0:
            self._num_unpromising += 1
            return min(_EXPLORE_NODES, most) if self._num_unpromising % _EXPLORE_EVERY == 0 else 0
        self._num_promising += 1
        return min(best + 1, most) if self._num_promising % _EXPLORE_EVERY == 0 else best

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learns from a verified draft."""
        self._chains.clear()
        if tree.is_chain:
            for node in range(min(len(acceptance.path) + 1, len(tree))):
                self._learn(tree.origin, node + 1, 0, node < len(acceptance.path))
            return
        accepted = {ROOT, *acceptance.path}
        for node, (depth, rank, parent) in enumerate(tree.places):
            if parent in accepted:
                self._learn(tree.origin, depth, rank, node in accepted)

    def timed(
        self,
        *,
        num_sequences: int,
        num_drafted: int,
        num_chosen: int,
        draft_ms: float,
        step_ms: float,
        passes_ms: float = 0.0,
    ) -> None:
        """Learns from a step in which every sequence might have drafted; of others `mixed` is told.

        Args:
            num_chosen: tokens that the step gave, at least one a sequence.
            draft_ms: time that proposing and choosing took; 0 where it was left out.
            passes_ms: typical time of what a network computed to propose, which `draft_ms` does not hold.
        """
        is_warm = self._is_warm()
        if num_sequences != self._num_sequences:  # what one answer at a time has gained is not for eight to lose
            self._num_sequences = num_sequences
            self._loss_ms = max(self._loss_ms, self._advanced_ms)
        if self._rest:
            if is_warm:
                self._clock_plain(num_sequences, step_ms)
            self._pass_rest()
            return
        if draft_ms > 0 and self._adaptive:
            self._steps_since_rest += 1
            if self._draft_ms == 0 or self._steps_since_rest > 1:  # the first after a rest reads what it has missed
                self._draft_samples.append(draft_ms / num_sequences)
                self._draft_ms = typical(self._draft_samples)
            # Their own times, within reason: a first proposal looks at the whole prompt.
            self._loss_ms += min(draft_ms, _DEAREST * self._draft_ms * num_sequences) + passes_ms
        if num_drafted:
            costs = self._costs.setdefault(num_sequences, StepCosts(num_sequences))
            if is_warm or not self._adaptive:
                costs.add(num_sequences + num_drafted, step_ms)
            # Its own time, within reason: a moment in which the machine is busy is not the draft's fault.
            typical_ms = costs(num_sequences + num_drafted)
            plain_ms = costs(num_sequences) * num_chosen / num_sequences
            self._loss_ms += (min(step_ms, _SLOWEST * typical_ms) if is_warm else typical_ms) - plain_ms
        self._settle()

    def mixed(self) -> None:
        """A step passed whose time tells nothing: a prompt was read, or not all of its sequences may draft."""
        self._cold = _COLD_STEPS
        self._held = min(self._held + 1, _ALWAYS_COLD)
        self._pass_rest()

    def spent(self, ms: float) -> None:
        """Time went into reading what drafts are made from. After a rest there is much of it, and it serves many."""
        self._loss_ms += min(ms, _DEAREST * self._draft_ms)

    def advance(self, ms: float) -> None:
        """Time was spent on a sequence before it can earn any: it may be earned back until `repay`."""
        self._loss_ms += ms
        self._advanced_ms += ms

    def repay(self, ms: float) -> None:
        """The sequence that `ms` were spent on has ended."""
        self._advanced_ms -= ms
        self._settle()

    def acceptance(self) -> dict[str, list[float]]:
        """By origin, the measured acceptance of a chain's first, second, ... node."""
        table: dict[str, list[float]] = {}
        for (origin, _, rank), trials in sorted(self._trials.items()):
            if rank == 0:
                table.setdefault(origin, []).append(trials.accepted / trials.tried)
        return table

    def _learn(self, origin: str, depth: int, rank: int, accepted: bool) -> None:
        """Of a node whose parent was accepted."""
        self._trials.setdefault((origin, depth, rank), _Trials()).add(accepted)
        if depth == 1 and rank == 0:
            self._alike.setdefault(_certainty(origin), _Trials()).add(accepted)

    def _levels(self, origin: str, depth: int) -> list[float]:
        """The chance of a first child, if its parent was accepted, at depths from 0 (for new origins) to `depth`."""
        alike = self._alike.get(_certainty(origin))
        levels = [alike.estimate(_FIRST_GUESS) if alike else _FIRST_GUESS]
        for level in range(1, depth + 1):
            # An unknown depth is guessed from the one before.
            trials = self._trials.get((origin, level, 0))
            levels.append(trials.estimate(levels[-1]) if trials else levels[-1])
        return levels

    def _least_rate(self, num_sequences: int) -> float:
        """Tokens a millisecond that a step must promise for a draft."""
        return (1 + _MARGIN * (1 + num_sequences)) * num_sequences / self._costs[num_sequences](num_sequences)

    def _most_nodes(self, num_sequences: int) -> int:
        """No pass is more than twice as wide as one that was measured: a costly surprise stays small."""
        return max(2 * self._costs[num_sequences].widest - num_sequences, 1)

    def _begins_spell(self, num_sequences: int) -> bool:
        """Takes a rest, from this step on, where the time of plain ones must be known or known anew."""
        known = self._costs.get(num_sequences, StepCosts(num_sequences)).num_samples(num_sequences)
        if known < _PLAIN_SAMPLES or self._steps_since_rest >= _PLAIN_EVERY:
            self._rest = _PLAIN_SAMPLES + self._cold
            self._num_to_time = _PLAIN_SAMPLES
        return self.is_resting

    def _pass_rest(self) -> None:
        """A step less of a rest, if it is one."""
        if self._rest:
            self._rest -= 1
            self._steps_since_rest = 0

    def _is_warm(self) -> bool:
        """Whether the time of the step that is reported tells what such steps take."""
        if self._cold == 0:
            self._cold_in_a_row = 0
            self._held = max(self._held - 1, 0)
            return True
        self._cold -= 1
        self._held = min(self._held + 1, _ALWAYS_COLD)
        self._cold_in_a_row += 1
        return self._cold_in_a_row > _ALWAYS_COLD

    def _fill(self, gains: Sequence[list[float]]) -> list[int]:
        """How many nodes of each sequence's draft make the step's rate highest."""
        num_sequences = len(gains)
        nodes = sorted([(-gain, index) for index, found in enumerate(gains) for gain in found if gain > _HOPELESS])
        costs, best_rate = self._costs[num_sequences], self._least_rate(num_sequences)
        best, tokens = 0, float(num_sequences)
        for number, (gain, _) in enumerate(nodes[: self._most_nodes(num_sequences)], 1):
            tokens -= gain
            rate = tokens / costs(num_sequences + number)
            if rate > best_rate:
                best, best_rate = number, rate
        kept = [0] * num_sequences
        for _, index in nodes[:best]:
            kept[index] += 1
        return kept

    def _explore(self, trees: list[DraftTree]) -> list[DraftTree]:
        """Now and then, a short draft of the origin that has waited longest."""
        chosen = [NO_DRAFT] * len(trees)
        waiting = [index for index, tree in enumerate(trees) if len(tree)]
        if not waiting:
            return chosen
        self._num_unpromising += 1
        if self._num_unpromising % _EXPLORE_EVERY == 0:
            index = min(waiting, key=lambda one: self._explored.get(trees[one].origin, 0))
            self._explored[trees[index].origin] = self._num_unpromising
            chosen[index] = trees[index].first(min(_EXPLORE_NODES, self._most_nodes(len(trees))))
        return chosen

    def _clock_plain(self, num_sequences: int, step_ms: float) -> None:
        """Takes the time of some of the plain steps."""
        costs = self._costs.setdefault(num_sequences, StepCosts(num_sequences))
        self._untimed += 1
        is_known = costs.num_samples(num_sequences) >= _PLAIN_SAMPLES
        if is_known and self._num_to_time == 0 and self._untimed < _TIME_EVERY:
            return
        self._untimed = 0
        self._num_to_time = max(self._num_to_time - 1, 0)
        costs.add(num_sequences, step_ms)
        self._step_ms = costs(num_sequences)

    def _settle(self) -> None:
        """Looks at what drafting has cost: a rest after a loss, and short ones again after a gain."""
        if not self._adaptive or self._step_ms == 0.0:
            return
        step_ms, lost_ms = self._step_ms, self._loss_ms - self._advanced_ms
        if self._loss_ms < -_EARNED_STEPS * step_ms:
            self._share = _FIRST_SHARE
            self._loss_ms = max(self._loss_ms, -_CREDIT_STEPS * step_ms)
        elif lost_ms > _FREE_STEPS * step_ms:
            self._rest = max(min(round(lost_ms / step_ms / self._share), _MAX_REST), 1)
            self._share = max(self._share / 2, _LEAST_SHARE)
            self._loss_ms = self._advanced_ms
            self._num_unpromising = -1  # the first one after it is tried
            for trials in (*self._trials.values(), *self._alike.values()):
                trials.fade()
            self._chains.clear()


def _certainty(origin: str) -> str:
    """How sure a drafter was, of an origin "name/certainty"."""
    return origin.rpartition("/")[2]
