"""What fewer visual tokens cost: accuracy on held-out scenes against the whole run, question by question.

Every method answers the same questions about the same pictures, so differences are paired: a method's loss is the mean
of (whole right - method right), with the 95 % interval of that mean.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmfast.options import REDUCERS, FastV, Reduce, Sampling, ToMe, Vision
from vlmfast.train.answers import is_right
from vlmfast.train.score import answered
from vlmfast.vlm import VLM

SHARES = (0.75, 0.5, 0.25, 0.1)
"""Of the visual tokens (with ToMe: of the tower's patches that reach its last layer)."""
_TEXT_KINDS = frozenset({"sign", "page"})
_SEED = 20_260
_ANSWER_TOKENS = 64
_Z = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to keep a share of the tokens."""

    name: str
    keep: float
    vision: Vision


def methods(num_tower_layers: int, fastv_layers: Sequence[int], shares: Sequence[float] = SHARES) -> list[Method]:
    """Every method at every share; random controls beside them."""
    found: list[Method] = []
    for keep in shares:
        found += [
            Method(name=f"fastv@{layer}", keep=keep, vision=Vision(fastv=FastV(layer=layer, keep=keep)))
            for layer in fastv_layers
        ]
        control = FastV(layer=fastv_layers[0], keep=keep, rank="random")
        found.append(Method(name=f"fastv random@{fastv_layers[0]}", keep=keep, vision=Vision(fastv=control)))
        found += [Method(name=name, keep=keep, vision=Vision(reduce=Reduce(name, keep=keep))) for name in REDUCERS]
        share = 1 - keep ** (1 / num_tower_layers)  # of the patches of each layer
        if share <= 0.5:
            found.append(Method(name="tome", keep=keep, vision=Vision(tome=ToMe(r=share))))
    return [
        *found,
        Method(name="diversity auto", keep=math.nan, vision=Vision(reduce=Reduce("diversity", keep="auto"))),
    ]


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


def measure(vlm: VLM, chosen: Sequence[Method], num_scenes: int) -> list[dict[str, Any]]:
    """A row of results for each method: its losses by kind, on text, and on all else."""
    sampling = Sampling(max_new_tokens=_ANSWER_TOKENS)
    texts: list[list[str]] = [[] for _ in chosen]
    kept: list[list[float]] = [[] for _ in chosen]
    tokens: list[list[int]] = [[] for _ in chosen]

    def ask(picture: Any, prompt: str) -> str:
        whole = vlm.describe(picture, prompt, sampling=sampling)
        for method, told, shares, counts in zip(chosen, texts, kept, tokens, strict=True):
            answer = vlm.describe(picture, prompt, sampling=sampling, vision=method.vision)
            told.append(answer.text)
            shares.append(answer.usage.visual_tokens_after / answer.usage.visual_tokens_before)
            counts.append(answer.usage.visual_tokens_after)
        return whole.text

    asked = list(answered(ask, _SEED, num_scenes))
    whole = [is_right(question.kind, question.expect, text) for question, text in asked]
    kinds = [question.kind for question, _ in asked]
    rows = []
    for method, told, shares, counts in zip(chosen, texts, kept, tokens, strict=True):
        right = [
            is_right(question.kind, question.expect, text) for (question, _), text in zip(asked, told, strict=True)
        ]
        rows.append(
            {
                "method": method.name,
                "keep": None if math.isnan(method.keep) else method.keep,
                "visual_tokens": round(sum(counts) / max(len(counts), 1), 1),
                "decoder_share": round(sum(shares) / max(len(shares), 1), 4),
                **{name: _numbers(Loss.of(*pair)) for name, pair in _split(kinds, whole, right).items()},
            }
        )
    return rows


def _split(
    kinds: Sequence[str], whole: Sequence[bool], right: Sequence[bool]
) -> Mapping[str, tuple[list[bool], list[bool]]]:
    """The paired answers of each kind, of the kinds that read text, and of all others."""

    def of(chosen: Iterable[str]) -> tuple[list[bool], list[bool]]:
        wanted = set(chosen)
        picked = [(one, other) for kind, one, other in zip(kinds, whole, right, strict=True) if kind in wanted]
        return [one for one, _ in picked], [other for _, other in picked]

    present = sorted(set(kinds))
    groups = {"off_text": [kind for kind in present if kind not in _TEXT_KINDS], "text": _TEXT_KINDS}
    return {**{name: of(members) for name, members in groups.items()}, **{kind: of([kind]) for kind in present}}


def _numbers(loss: Loss) -> dict[str, float]:
    return {
        "points_lost": round(loss.points, 2),
        "half_width": round(loss.half_width, 2),
        "accuracy": round(loss.accuracy, 4),
        "asked": loss.num_asked,
    }


def stamp(folder: Path) -> dict[str, Any]:
    """What the figures belong to: the commit and the weights."""
    weights = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(file.read_bytes())
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return {"commit": head.stdout.strip(), "weights_sha256": weights.hexdigest()}


def points_lost(rows: Iterable[Mapping[str, Any]], method: str, keep: float) -> float | None:
    """Points that a method loses off text, of a table's rows; None if it is not there."""
    for row in rows:
        if row["method"] == method and row["keep"] == keep:
            return float(row["off_text"]["points_lost"])
    return None
