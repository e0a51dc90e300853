"""Two tensors against each other, and the report of all such comparisons: values only, no network is known here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SMALL_ROW = 1e-2
"""Rows with an RMS below this share of the whole tensor's are measured against that: their own says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One comparison on the way from picture to token."""

    name: str
    """For example "pixels", "vision layer 3", "logits"."""
    kind: str
    """What belongs together in a table: the name without the number of the layer."""
    parted: bool
    """The difference is beyond the tolerance, or there is nothing to compare with."""
    max_abs: float | None = None
    """Largest absolute difference; None where values are not numbers (token ids) or shapes differ."""
    relative: float | None = None
    """Largest difference in units of the tolerance: RMS of the row, for pixels grey levels of 255."""
    tolerance: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "verdict": "parts" if self.parted else "same",
            "max_abs": self.max_abs,
            "relative": self.relative,
            "tolerance": self.tolerance,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """The stages of one question, in the order of the computation."""

    name: str
    num_prompt_tokens: int = 0
    num_visual_tokens: int = 0
    num_answer_tokens: int = 0
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not compared, and why."""

    @property
    def parting(self) -> Stage | None:
        """The first stage that parts."""
        return next((stage for stage in self.stages if stage.parted), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "prompt_tokens": self.num_prompt_tokens,
            "visual_tokens": self.num_visual_tokens,
            "answer_tokens": self.num_answer_tokens,
            "parts_at": self.parting.name if self.parting else None,
            "notes": list(self.notes),
            "stages": [stage.to_dict() for stage in self.stages],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found."""

    model: str
    reference: str
    dtype: str
    device: str
    versions: dict[str, str]
    cases: tuple[CaseReport, ...]
    """At least one of them has stages; one without is explained by its notes."""

    @property
    def passed(self) -> bool:
        """Nothing parts."""
        return all(case.parting is None for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "reference": self.reference,
            "dtype": self.dtype,
            "device": self.device,
            "versions": self.versions,
            "passed": self.passed,
            "cases": [case.to_dict() for case in self.cases],
        }


def compare_rows(name: str, kind: str, ours: Tensor, theirs: Tensor, tolerance: float) -> Stage:
    """Compares activations [..., E]: each difference relative to the RMS of its row of `theirs`, [E].

    A row's rounding errors grow with the row itself, and the rows of a decoder differ a hundredfold in size (the first
    token's, above all), so one scale for all of them would hide what happens to the small ones.
    """
    if ours.numel() != theirs.numel() or ours.shape[-1] != theirs.shape[-1]:
        return _other_shape(name, kind, ours, theirs, tolerance)
    ours, theirs = ours.reshape(-1, ours.shape[-1]).float(), theirs.reshape(-1, theirs.shape[-1]).float()  # [R, E]
    square = theirs.square().mean(-1)
    rms = square.clamp(min=float(square.mean()) * _SMALL_ROW**2).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    largest = (ours - theirs).abs().amax(-1)
    return _judged(name, kind, largest, largest / rms, tolerance, "row")


def compare_pixels(ours: Tensor, theirs: Tensor, grey_level: float, tolerance: float) -> Stage:
    """Compares normalised tiles [P, C, S, S] in grey levels of 255; `grey_level` is the size of one of them."""
    if ours.shape != theirs.shape:
        return _other_shape("pixels", "pixels", ours, theirs, tolerance)
    largest = (ours.float() - theirs.float()).abs().flatten(1).amax(-1)
    return _judged("pixels", "pixels", largest, largest / grey_level, tolerance, "tile")


def compare_ids(ours: Sequence[int], theirs: Sequence[int]) -> Stage:
    """Compares the token ids of a prompt, exactly."""
    note = ""
    if list(ours) != list(theirs):
        pairs = zip(ours, theirs, strict=False)
        at = next((at for at, (our, their) in enumerate(pairs) if our != their), min(len(ours), len(theirs)))
        note = f"ours {len(ours)} tokens, theirs {len(theirs)}; from token {at} on ours are "
        note += f"{list(ours[at : at + 4])}, theirs {list(theirs[at : at + 4])}"
    return Stage(name="prompt ids", kind="prompt ids", parted=bool(note), note=note)


def compare_choices(
    answer: Sequence[int], logits: Tensor, end_tokens: frozenset[int], *, stopped: bool, tolerance: float
) -> Stage:
    """Whether each token of our greedy answer is the likeliest by their logits, given the ones before it.

    By induction that is the same as equal greedy answers, and it goes on beyond a tie: two logits that lie within both
    sides' tolerance of each other, where either may win.

    Args:
        answer: our tokens, the end token not included.
        logits: theirs, [len(answer), V], and a row more if `stopped`: row i chooses the i-th token, that one the end.
        end_tokens: the tokens that end an answer of theirs.
        stopped: an end token ended ours.
        tolerance: of logits, relative to their RMS.
    """
    name, num_ties, worst, allowed_gap = "greedy tokens", 0, 0.0, 2 * tolerance
    for step, row in enumerate(logits.float()[: len(answer) + stopped]):
        ours = [answer[step]] if step < len(answer) else sorted(end_tokens)
        gap = float(row.max() - row[ours].max()) if ours else float("inf")
        relative = gap / max(float(row.square().mean().sqrt()), torch.finfo(torch.float32).tiny)
        note = ""
        if not relative <= allowed_gap:
            note = f"token {step} is {ours[0] if step < len(answer) else 'the end'} here, {int(row.argmax())} there"
        elif step < len(answer) and answer[step] in end_tokens:
            note = f"token {step} is {answer[step]}, which ends their answer but not ours"
        if note:
            return Stage(
                name=name, kind=name, parted=True, max_abs=gap, relative=relative, tolerance=allowed_gap, note=note
            )
        worst = max(worst, relative)
        num_ties += gap > 0.0
    note = f"{num_ties} ties among {len(answer)} tokens" if num_ties else ""
    return Stage(name=name, kind=name, parted=False, relative=worst, tolerance=allowed_gap, note=note)


def _judged(name: str, kind: str, largest: Tensor, relative: Tensor, tolerance: float, unit: str) -> Stage:
    """The verdict over rows or tiles; a value that is not finite parts."""
    if relative.numel() == 0:
        return Stage(name=name, kind=kind, parted=False, max_abs=0.0, relative=0.0, tolerance=tolerance)
    worst = int(relative.nan_to_num(nan=torch.inf).argmax())
    parted = not float(relative[worst]) <= tolerance
    num_parted = int((~(relative <= tolerance)).sum())
    where = f"{num_parted} of {len(relative)} {unit}s part, {unit} {worst} most" if parted else ""
    return Stage(
        name=name,
        kind=kind,
        parted=parted,
        max_abs=float(largest.max()),
        relative=float(relative[worst]),
        tolerance=tolerance,
        note=where,
    )


def _other_shape(name: str, kind: str, ours: Tensor, theirs: Tensor, tolerance: float) -> Stage:
    note = f"ours is {list(ours.shape)}, theirs {list(theirs.shape)}"
    return Stage(name=name, kind=kind, parted=True, tolerance=tolerance, note=note)
