"""What the scripts measure on: a random SmolVLM-256M with one tile and with five, and the bundled model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from contenders import BF16_TOLERANCE, Ours, Transformers, fresh_picture, smolvlm_checkpoint, variant, verify
from PIL import Image
from side_by_side import Comparison, Options, alternate, report

from vlmfast.checkpoint import bundled_model
from vlmfast.errors import ModelNotFoundError

_VERIFY_PICTURE = 1_000_000
"""Index of the picture of the checks; timed pictures have lower ones."""
_VERIFY_TOKENS = 24
_QUICK_VERIFY_TOKENS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint and kind of picture."""

    prefix: str
    """Put before the metric's name in the JSON key."""
    suffix: str
    """Put behind the metric's name."""
    title: str
    rounds: int
    quick_rounds: int
    """0 leaves the case out of a quick run."""
    longest_edge: int
    """Picture size that the checkpoint's preprocessing is set to."""
    pocket: bool = False

    def key(self, metric: str) -> str:
        """Name of the ratio."""
        return f"{self.prefix}{metric}{self.suffix}_x"


def one_tile(rounds: int, quick_rounds: int) -> Case:
    """The headline: a 640x480 picture becomes one 512 px frame, 64 visual tokens."""
    return Case(
        prefix="",
        suffix="",
        title="SmolVLM-256M shape, 1 tile",
        rounds=rounds,
        quick_rounds=quick_rounds,
        longest_edge=512,
    )


def five_tiles(rounds: int, quick_rounds: int) -> Case:
    """The picture becomes 2 x 2 tiles and the global frame, 320 visual tokens."""
    return Case(
        prefix="",
        suffix="_5_tiles",
        title="SmolVLM-256M shape, 5 tiles",
        rounds=rounds,
        quick_rounds=quick_rounds,
        longest_edge=1024,
    )


def pocket(rounds: int, quick_rounds: int) -> Case:
    """The model that comes with vlmfast, at one frame."""
    return Case(
        prefix="pocket_",
        suffix="",
        title="pocket model, one frame",
        rounds=rounds,
        quick_rounds=quick_rounds,
        longest_edge=256,
        pocket=True,
    )


Sample = Callable[[Ours | Transformers, Image.Image], float]
"""Milliseconds of a contender on a picture."""


def run_cases(cases: Sequence[Case], metric: str, sample: Sample, options: Options) -> None:
    """Verifies and times each case, then prints the report."""
    comparisons: list[Comparison] = []
    missing: list[tuple[str, str]] = []
    for case in cases:
        rounds = options.rounds or (case.quick_rounds if options.quick else case.rounds)
        if options.quick and not case.quick_rounds:
            continue
        folder = _folder(case, options)
        if folder is None:
            missing.append((case.key(metric), "pocket missing: no assets/vlmfast_pocket/config.json, no --pocket"))
        else:
            comparisons.append(_compare(case, folder, metric, sample, rounds, exact_too=not options.quick))
    report(comparisons, missing, options)


def _compare(case: Case, folder: Path, metric: str, sample: Sample, rounds: int, *, exact_too: bool) -> Comparison:
    picture = fresh_picture(_VERIFY_PICTURE)
    num_tokens = _VERIFY_TOKENS if exact_too else _QUICK_VERIFY_TOKENS
    checks = []
    if exact_too:
        exact = verify(Ours(folder, torch.float32), Transformers(folder, torch.float32), picture, num_tokens, 0.0)
        checks.append(f"float32: {exact}")
    ours, theirs = Ours(folder), Transformers(folder)
    checks.append(f"bfloat16: {verify(ours, theirs, picture, num_tokens, BF16_TOLERANCE)}")
    times = alternate(
        lambda index: sample(ours, fresh_picture(index)),
        lambda index: sample(theirs, fresh_picture(index)),
        rounds=rounds,
        warmups=1 if rounds > 2 else 0,  # the check was a warm-up, too
    )
    return Comparison(key=case.key(metric), title=case.title, ours=times[0], theirs=times[1], check="; ".join(checks))


def _folder(case: Case, options: Options) -> Path | None:
    """The checkpoint of a case, made ready below the cache; None where the pocket model is absent."""
    edge = case.longest_edge
    if not case.pocket:
        return variant(smolvlm_checkpoint(options.cache), options.cache / f"smolvlm-256m-{edge}", longest_edge=edge)
    try:
        folder = options.pocket or bundled_model()
    except ModelNotFoundError:
        return None
    return variant(folder, options.cache / "pocket", longest_edge=edge) if (folder / "config.json").is_file() else None
