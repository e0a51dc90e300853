"""How much was right for each kind of question, with 95 % intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vlmfast.train.answers import credit, is_right
from vlmfast.train.questions import KINDS, Question

CREDITED = {"caption": "things F1", "page": "words"}
"""Kinds whose answers can be partly right, and what their credit counts."""

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
class Mean:
    """Mean credit, 0 to 1, with its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, credits: Iterable[tuple[float, int]]) -> Mean:
        """Of (credit, weight) pairs; the error is that of a ratio of two sums (Cochran 1977, section 6.3)."""
        pairs = list(credits)
        weight = sum(weight for _, weight in pairs)
        value = sum(credit * weight for credit, weight in pairs) / weight if weight else math.nan
        if len(pairs) < 2:
            return cls(value=value, error=math.inf)
        spread = sum((weight * (credit - value)) ** 2 for credit, weight in pairs)
        return cls(value=value, error=math.sqrt(spread * len(pairs) / (len(pairs) - 1)) / weight)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval by the normal approximation: for many answers, not for a handful."""
        return max(0.0, self.value - _Z * self.error), min(1.0, self.value + _Z * self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A share for each kind that was asked, in the order of `KINDS`; and the mean credit of kinds that have one."""

    shares: dict[str, Share]
    credits: dict[str, Mean] = field(default_factory=dict)

    @classmethod
    def of(cls, answered: Iterable[tuple[Question, str]]) -> Tally:
        right: defaultdict[str, list[bool]] = defaultdict(list)
        credits: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for question, text in answered:
            right[question.kind].append(is_right(question.kind, question.expect, text))
            if question.kind in CREDITED:
                part = credit(question.kind, question.expect, text)
                credits[_credited(question)].append((part, len(question.expect.get("words", " "))))
        kinds = [*(kind for kind in KINDS if kind in right), *sorted(right.keys() - set(KINDS))]
        return cls(
            shares={kind: Share(num_right=sum(right[kind]), num_asked=len(right[kind])) for kind in kinds},
            credits={kind: Mean.of(credits[kind]) for kind in kinds if kind in credits},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            kind: {
                "right": share.num_right,
                "asked": share.num_asked,
                "accuracy": round(share.accuracy, 4),
                "low": round(share.interval[0], 4),
                "high": round(share.interval[1], 4),
                **self._credit_json(kind),
            }
            for kind, share in self.shares.items()
        }

    def __str__(self) -> str:
        parts = [f"{kind} {share.accuracy:.1%}" for kind, share in self.shares.items()]
        parts += [f"{kind} {CREDITED[kind]} {mean.value:.1%}" for kind, mean in self.credits.items()]
        return ", ".join(parts)

    def _credit_json(self, kind: str) -> dict[str, Any]:
        if kind not in self.credits:
            return {}
        mean = self.credits[kind]
        low, high = (round(edge, 4) for edge in mean.interval)
        return {"credit": {"counts": CREDITED[kind], "mean": round(mean.value, 4), "low": low, "high": high}}


def _credited(question: Question) -> str:
    """The kind under which the credit counts: a caption of a page is a reading of it."""
    return "page" if "words" in question.expect else question.kind
