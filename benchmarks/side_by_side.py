"""Times two contenders side by side: alternating runs in one process, medians, ratios, one JSON object.

Knows nothing of models and imports no torch, so that `prepare` can set OpenMP's environment before torch starts.
A ratio is theirs / ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WAIT_POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Times of one contender, in the unit of the samples."""

    min: float
    median: float
    max: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summary of at least one sample."""
        return cls(min=min(samples), median=statistics.median(samples), max=max(samples), num_samples=len(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row of a report: what was measured, and both contenders' times in milliseconds."""

    key: str
    """Name of the ratio in the JSON object, for example "decode_x"."""
    title: str
    ours: Summary
    theirs: Summary
    check: str
    """What was verified before the clock started."""

    @property
    def ratio(self) -> float:
        """Median of theirs over median of ours."""
        return self.theirs.median / self.ours.median

    def to_dict(self) -> dict[str, Any]:
        """The ratio under its key, and the times beside it."""
        stem = self.key.removesuffix("_x")
        values: dict[str, Any] = {self.key: round(self.ratio, 3)}
        for name, summary in (("ours", self.ours), ("theirs", self.theirs)):
            for statistic in ("min", "median", "max"):
                values[f"{stem}_{name}_{statistic}_ms"] = round(getattr(summary, statistic), 3)
        return values | {f"{stem}_rounds": self.ours.num_samples, f"{stem}_check": self.check}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line that all scripts share."""

    quick: bool
    json: bool
    threads: int | None
    rounds: int | None
    wait_policy: str | None
    cache: Path
    pocket: Path | None
    draft_model: Path | None = None


def parse_options(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer rounds, no float32 check")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--threads", type=int, metavar="N", help="torch threads, both sides (default: torch's)")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds a measurement")
    parser.add_argument(
        "--wait-policy",
        choices=("active", "passive"),
        help=f"sets {WAIT_POLICY}, both sides (default: as the environment has it)",
    )
    root = Path(__file__).resolve().parents[1]
    parser.add_argument(
        "--cache", type=Path, default=root / "runs" / "bench", help="folder for random checkpoints (about 650 MB)"
    )
    parser.add_argument("--pocket", type=Path, metavar="FOLDER", help="stand-in for the bundled model")
    parser.add_argument(
        "--draft-model", type=Path, metavar="FOLDER", help="smaller checkpoint to draft with (speculate.py only)"
    )
    return Options(**vars(parser.parse_args(arguments)))


def prepare(options: Options) -> None:
    """Sets up the process: OpenMP's wait policy first, then torch's threads. Call before anything imports torch."""
    if options.wait_policy is not None:
        os.environ[WAIT_POLICY] = options.wait_policy.upper()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def alternate(
    ours: Callable[[int], float], theirs: Callable[[int], float], *, rounds: int, warmups: int = 1, first: int = 0
) -> tuple[Summary, Summary]:
    """Times of `ours(i)` and `theirs(i)`, i = first, first + 1, …: warm-up rounds discarded, order swapped every round.

    Both get the same index in a round, so a slow spell of the machine or a dear picture meets both.
    """
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(warmups + rounds):
        order = ((0, ours), (1, theirs)) if turn % 2 == 0 else ((1, theirs), (0, ours))
        for side, contender in order:
            sample = contender(first + turn)
            if turn >= warmups:
                samples[side].append(sample)
    return Summary.of(samples[0]), Summary.of(samples[1])


def environment() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    import torch
    import transformers

    return {
        "threads": torch.get_num_threads(),
        "dtype": "bfloat16",
        "omp_wait_policy": os.environ.get(WAIT_POLICY, "default"),
        "load_average": round(os.getloadavg()[0], 2),
        "cpu": _cpu_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def report(
    comparisons: Sequence[Comparison],
    missing: Sequence[tuple[str, str]],
    options: Options,
    more: dict[str, Any] | None = None,
) -> None:
    """Prints the table (to stderr with `--json`), then the JSON object if asked for.

    Args:
        missing: (key, reason) of ratios that could not be measured; null in the object.
        more: further values of the object.
    """
    where = environment()
    console = Console(stderr=options.json)
    table = Table("", "ours ms", "transformers ms", "ratio")
    for row in comparisons:
        table.add_row(row.title, _spread(row.ours), _spread(row.theirs), f"{row.ratio:.2f}x")
    console.print(table, "median (min .. max); ratio of medians, above 1 ours is faster", _headline(where), sep="\n")
    for row in comparisons:
        console.print(f"{row.title}, checked before timing: {row.check}")
    for key, reason in missing:
        console.print(f"{key}: {reason}")
    if options.json:
        values = dict(more or {})
        for row in comparisons:
            values |= row.to_dict()
        notes = {"missing": dict(missing)} if missing else {}
        print(json.dumps(values | {key: None for key, _ in missing} | notes | where))


def _headline(where: dict[str, Any]) -> str:
    return (
        f"{where['cpu']}, {where['threads']} threads, {where['dtype']}, OpenMP wait policy {where['omp_wait_policy']}, "
        f"load {where['load_average']}, torch {where['torch']}, transformers {where['transformers']}"
    )


def _spread(summary: Summary) -> str:
    return f"{summary.median:.1f} ({summary.min:.1f} .. {summary.max:.1f})"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
