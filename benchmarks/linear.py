"""One linear layer of the decoder on the CPU: what each library's product, and the package's own, take over M tokens.

    python benchmarks/linear.py [--quick] [--json] [--markdown] [--inductor] [--cpu-time] [--threads N]

A pass multiplies M rows with each of `--copies` weights in turn (gate and up of SmolVLM-256M's shape, 3072 x 576), more
than a core's caches hold. Candidates run in turn in one process, their order swaps every round, so each finds the
caches filled by others; a time is the lower quartile of its rounds. Every candidate is checked against the float
product before the clock starts. M is 1 to 16 (decoding, batches, drafts), then 128 and 512 (prompts): the first are
bound by reading (GB/s of weights and scales), the last by arithmetic (GMAC/s).

`--inductor` adds torch.compile with freezing, which compiles for minutes. `--markdown` prints the table as docs/cpu.md
holds it. `--cpu-time` takes the CPU time of one thread instead of the wall clock: for a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from side_by_side import environment, parse_options, prepare

if TYPE_CHECKING:
    from linear_candidates import Candidate, Missing, Setup

SIZES = (1, 2, 4, 8, 16, 128, 512)
"""Tokens M."""
_QUICK_SIZES = (1, 4, 8, 128)
_PROMPT = 128
"""From so many rows on arithmetic is the bound, and a third of the rounds will do."""
_OUTPUTS, _INPUTS, _COPIES = 3072, 576, 30

Times = dict[str, dict[int, float]]
"""Milliseconds of a pass, by candidate and M."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--markdown", action="store_true")
    own.add_argument("--inductor", action="store_true")
    own.add_argument("--cpu-time", action="store_true")
    own.add_argument("--copies", type=int, default=_COPIES, metavar="N")
    own.add_argument("--shape", type=int, nargs=2, default=(_OUTPUTS, _INPUTS), metavar=("OUTPUTS", "INPUTS"))
    own.add_argument("--sizes", type=int, nargs="+", metavar="M")
    asked, rest = own.parse_known_args(arguments)
    more = "--markdown; --inductor; --cpu-time; --copies N; --shape OUTPUTS INPUTS; --sizes M M …"
    options = parse_options(f"One linear layer of the decoder on the CPU. Also: {more}", rest)
    prepare(options)
    from linear_candidates import Missing, Setup, candidates, cpu_features

    where = environment() | {"cpu_features": cpu_features(), "clock": "cpu" if asked.cpu_time else "wall"}
    if asked.cpu_time and where["threads"] > 1:
        own.error("--cpu-time needs --threads 1: it adds up the time of all threads")
    sizes = sorted({*(asked.sizes or (_QUICK_SIZES if options.quick else SIZES))})
    setup = Setup.random(asked.shape[0], asked.shape[1], asked.copies, sizes)
    every = list(candidates(setup, asked.inductor))
    present = [one for one in every if not isinstance(one, Missing)]
    clock = time.process_time if asked.cpu_time else time.perf_counter
    times = measure(present, setup, options.rounds or (6 if options.quick else 24), clock)
    head, rows, caption = _head(setup), [_row(one, times.get(one.key), setup) for one in every], _caption(setup, where)
    missing = {one.key: one for one in every if isinstance(one, Missing)}
    reasons = [f"- {one.title}: {one.reason}" for one in missing.values()]
    if asked.markdown:
        print("\n".join(_markdown(caption, head, rows, reasons)))
    else:
        shown = Table(*head)
        for row in rows:
            shown.add_row(*row)
        console = Console(stderr=options.json)
        console.print(shown)
        console.print("\n".join([caption, *reasons]), markup=False)
    if options.json:
        found = {one.key: _values(one, times[one.key]) for one in present} | dict.fromkeys(missing)
        notes = {"missing": {key: one.reason for key, one in missing.items()}} if missing else {}
        print(json.dumps({"shape": list(asked.shape), "copies": asked.copies, "candidates": found} | notes | where))


def measure(present: Sequence[Candidate], setup: Setup, rounds: int, clock: Callable[[], float]) -> Times:
    """Lower quartile of the rounds after a warm-up, for each candidate and M."""
    import torch

    times: Times = {one.key: {} for one in present}
    for size in setup.sizes:
        inputs = {one.key: one.prepare(setup.rows[:size]) for one in present}
        samples: dict[str, list[float]] = {one.key: [] for one in present}
        for turn in range(1 + max(2, rounds // 3 if size >= _PROMPT else rounds)):
            for one in present if turn % 2 == 0 else reversed(present):
                with torch.inference_mode():
                    started = clock()
                    one.run(inputs[one.key])
                    seconds = clock() - started
                samples[one.key].append(seconds * 1e3)
        for one in present:
            times[one.key][size] = statistics.quantiles(samples[one.key][1:], n=4, method="inclusive")[0]
    return times


def _caption(setup: Setup, where: dict[str, Any]) -> str:
    outputs, inputs = setup.weights[0].shape
    threads = f"{where['threads']} thread{'s' if where['threads'] > 1 else ''}"
    took = "CPU time" if where["clock"] == "cpu" else "wall clock"
    return (
        f"{where['cpu']} ({where['cpu_features']}), {threads}, load {where['load_average']}, torch {where['torch']}. "
        f"Milliseconds ({took}) for one pass of M tokens over {len(setup.weights)} weights of {outputs} x {inputs}, "
        f"lower quartile of alternating runs; in brackets GB/s read, from M = {_PROMPT} on GMAC/s."
    )


def _head(setup: Setup) -> list[str]:
    return ["", "MB read", *(f"M = {size}" for size in setup.sizes), "error", "same alone and in a batch"]


def _row(one: Candidate | Missing, took: dict[int, float] | None, setup: Setup) -> list[str]:
    from linear_candidates import Missing

    if took is None or isinstance(one, Missing):
        return [one.title, *["–"] * (len(setup.sizes) + 3)]
    macs = len(setup.weights) * setup.weights[0].numel()
    cells = []
    for size, milliseconds in took.items():
        rate = (macs * size if size >= _PROMPT else one.megabytes * 1e6) / milliseconds / 1e6
        cells.append(f"{_figures(milliseconds)} ({_figures(rate)})")
    alone = "yes" if one.row_alone else "no"
    return [one.title, _figures(one.megabytes), *cells, f"{one.error:.2g}", alone]


def _figures(value: float) -> str:
    """Three figures or fewer, never with an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _markdown(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], reasons: Sequence[str]) -> list[str]:
    rules = ["---", *["--:"] * (len(head) - 2), "---"]
    table = ["| " + " | ".join(row) + " |" for row in (head, rules, *rows)]
    return [caption, "", *table, *(["", "Not measured:", "", *reasons] if reasons else [])]


def _values(one: Candidate, took: dict[int, float]) -> dict[str, Any]:
    return {
        "ms": {str(size): round(milliseconds, 4) for size, milliseconds in took.items()},
        "gb_s": {str(size): round(one.megabytes / milliseconds, 2) for size, milliseconds in took.items()},
        "read_mb": round(one.megabytes, 2),
        "error": round(one.error, 5),
        "row_alone": one.row_alone,
    }


if __name__ == "__main__":
    main()
