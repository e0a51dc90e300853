"""Counts of right answers for each kind of question, with 95 % Wilson intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vlmfast.train.answers import is_right
from vlmfast.train.questions import KINDS, Question

_Z = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Some right out of some asked."""

    num_right: int
    num_asked: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_asked if self.num_asked else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy (Wilson, 1927)."""
        n, p = self.num_asked, self.accuracy
        if n == 0:
            return 0.0, 1.0
        centre = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A share for each kind that was asked, in the order of `KINDS`."""

    shares: dict[str, Share]

    @classmethod
    def of(cls, answered: Iterable[tuple[Question, str]]) -> Tally:
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for question, text in answered:
            counts[question.kind][0] += is_right(question.kind, question.expect, text)
            counts[question.kind][1] += 1
        return cls(
            shares={
                kind: Share(num_right=counts[kind][0], num_asked=counts[kind][1]) for kind in KINDS if kind in counts
            }
        )

    def to_json(self) -> dict[str, Any]:
        return {
            kind: {
                "right": share.num_right,
                "asked": share.num_asked,
                "accuracy": round(share.accuracy, 4),
                "low": round(share.interval[0], 4),
                "high": round(share.interval[1], 4),
            }
            for kind, share in self.shares.items()
        }

    def __str__(self) -> str:
        return ", ".join(f"{kind} {share.accuracy:.1%}" for kind, share in self.shares.items())
