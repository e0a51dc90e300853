"""Paired comparisons: what a method loses against another run of the same questions, and what figures belong to.

Both runs answer the same questions about the same pictures, so the loss is the mean of (whole right - method right),
with the 95 % interval of that mean.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT_KINDS = frozenset({"sign", "page"})
"""Questions whose answer is read off the picture."""
_Z = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Points (100 = every answer) that a method loses on some questions, and half of the interval's width."""

    points: float
    half_width: float
    accuracy: float
    num_asked: int

    @classmethod
    def of(cls, whole: Sequence[bool], method: Sequence[bool]) -> Loss:
        """Paired over the same questions."""
        differences = [int(one) - int(other) for one, other in zip(whole, method, strict=True)]
        count = len(differences)
        mean = sum(differences) / max(count, 1)
        variance = sum((value - mean) ** 2 for value in differences) / max(count - 1, 1)
        return cls(
            points=100 * mean,
            half_width=100 * _Z * math.sqrt(variance / max(count, 1)),
            accuracy=sum(method) / max(count, 1),
            num_asked=count,
        )

    def numbers(self) -> dict[str, float]:
        """Rounded, as result files hold them."""
        return {
            "points_lost": round(self.points, 2),
            "half_width": round(self.half_width, 2),
            "accuracy": round(self.accuracy, 4),
            "asked": self.num_asked,
        }


def losses(kinds: Sequence[str], whole: Sequence[bool], right: Sequence[bool]) -> dict[str, Loss]:
    """The paired loss of each kind, of the kinds that read text ("text"), and of all others ("off_text")."""

    def of(chosen: Iterable[str]) -> Loss:
        wanted = set(chosen)
        picked = [(one, other) for kind, one, other in zip(kinds, whole, right, strict=True) if kind in wanted]
        return Loss.of([one for one, _ in picked], [other for _, other in picked])

    present = sorted(set(kinds))
    groups: Mapping[str, Iterable[str]] = {
        "off_text": [kind for kind in present if kind not in TEXT_KINDS],
        "text": TEXT_KINDS,
    }
    return {**{name: of(members) for name, members in groups.items()}, **{kind: of([kind]) for kind in present}}


def stamp(folder: Path) -> dict[str, Any]:
    """What the figures belong to: the commit and the weights."""
    weights = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(file.read_bytes())
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return {"commit": head.stdout.strip(), "weights_sha256": weights.hexdigest()}
