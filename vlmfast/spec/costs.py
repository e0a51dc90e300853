"""What a decoder pass costs by its width, from times that a busy machine disturbs. No torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

_SAMPLES = 12
"""Step times kept for each width. Their median counts: steps that draft vary more than plain ones, for good reasons."""
_TRUSTED = 3
"""Samples of a width that outweigh a much lower guess: the first may have met a busy moment."""
_NEAR_GUESS = 1.25
"""A sample of at most so many times the guess is believed at once."""
_OUTDATED = 16
"""Samples of other widths after which one that contradicts newer ones is given up."""
_GUESSED_SLOPE = 0.08
"""Cost of one more token, of that of the first, until it is measured."""


class StepCosts:
    """Milliseconds of a decoder pass by its number of tokens.

    Args:
        num_plain: tokens of a pass without drafts. Of its times the lower quartile counts: drafting must beat plain
            steps at their best, for it must not lose where they are judged by a slow moment.
    """

    def __init__(self, num_plain: int = 0) -> None:
        self._num_plain = num_plain
        self._samples: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        self._widths: list[int] = []
        """Those with samples that are believed, ascending; only these are looked at."""
        self._last: dict[int, int] = {}
        """Which of all samples the last of a width was."""
        self._num_added = 0
        self._known: dict[int, float] = {}
        """Costs worked out since the last sample."""

    def add(self, num_tokens: int, ms: float) -> None:
        samples = self._samples.setdefault(num_tokens, deque(maxlen=_SAMPLES))
        samples.append(ms)
        typical_ms = typical(samples, 4 if num_tokens == self._num_plain else 2)
        if num_tokens not in self._typical:
            if self._widths and len(samples) < _TRUSTED and typical_ms > _NEAR_GUESS * self(num_tokens):
                return
            insort(self._widths, num_tokens)
        self._typical[num_tokens] = typical_ms
        self._last[num_tokens] = self._num_added = self._num_added + 1
        if len(samples) >= _TRUSTED:
            self._forget_outdated(num_tokens)
        self._known.clear()

    def _forget_outdated(self, num_tokens: int) -> None:
        """Wider passes that were cheaper, but long ago: the machine was faster then, or less busy."""
        for width in self._widths[bisect_left(self._widths, num_tokens + 1) :]:
            is_old = self._num_added - self._last[width] > _OUTDATED
            if is_old and self._typical[width] < self._typical[num_tokens]:
                self._widths.remove(width)
                del self._samples[width], self._typical[width], self._last[width]

    @property
    def widest(self) -> int:
        """The most tokens whose cost was measured."""
        return self._widths[-1]

    def num_samples(self, num_tokens: int) -> int:
        """Samples kept of a width."""
        return len(self._samples.get(num_tokens, ()))

    def __call__(self, num_tokens: int) -> float:
        """The cost, between measured widths by a straight line; never more than that of a wider pass.

        Raises:
            IndexError: nothing was measured yet.
        """
        found = self._known.get(num_tokens)
        if found is None:
            found = self._known[num_tokens] = self._cost(num_tokens)
        return found

    def _cost(self, num_tokens: int) -> float:
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


def typical(samples: Sequence[float], share: int = 2) -> float:
    """The median (the lower one of two), or with a share of 4 the lower quartile."""
    return sorted(samples)[(len(samples) - 1) // share]
