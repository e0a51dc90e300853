"""Resolution by need: visual tokens and accuracy of `resolution="auto"` and "low" beside full resolution.

    python benchmarks/resolution.py [--quick] [--json] [--questions N] [--checkpoint FOLDER] [--work FOLDER]
    python benchmarks/resolution.py --full       1,500 questions, written to assets/results/resolution.json

Every question about held-out scenes is asked at all resolutions; differences are paired, text has a line of its own. A
run that was stopped goes on where it was: answers are kept below runs/.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from side_by_side import parse_options, prepare

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "assets" / "results" / "resolution.json"
_QUICK_QUESTIONS, _FULL_QUESTIONS = 150, 1500


def main() -> None:
    """Runs the command line."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--full", action="store_true")
    own.add_argument("--questions", type=int, metavar="N")
    own.add_argument("--checkpoint", type=Path, metavar="FOLDER")
    own.add_argument("--work", type=Path, metavar="FOLDER", default=_ROOT / "runs" / "resolution")
    asked, others = own.parse_known_args()
    options = parse_options("Resolution by need: tokens saved and accuracy.", others)
    prepare(options)
    import held_out
    import token_quality
    from paired import stamp

    from vlmfast import Vision
    from vlmfast.checkpoint import bundled_model

    folder = asked.checkpoint or options.pocket or bundled_model()
    vlm = held_out.load(folder)
    chosen = [
        token_quality.Method(name=name, keep=math.nan, vision=Vision(resolution=name)) for name in ("auto", "low")
    ]
    made = stamp(folder)
    questions = held_out.HeldOut(vlm, asked.questions or (_QUICK_QUESTIONS if options.quick else _FULL_QUESTIONS))
    work = held_out.WorkFile(asked.work / "answers.jsonl")
    rows = token_quality.measure(vlm, chosen, questions, work, made["weights_sha256"])
    whole = rows[0]["visual_tokens"]
    for row in rows:
        row["method"] = "high" if row["method"] == "whole" else row["method"]
        row["tokens_saved"] = round(1 - row["visual_tokens"] / whole, 4)
    Console(stderr=options.json).print(_table(rows, len(questions.kinds)))
    result = {**made, "questions": len(questions.kinds), "rows": rows}
    if asked.full:
        _RESULTS.parent.mkdir(exist_ok=True)
        _RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))


def _table(rows: list[dict[str, Any]], num_questions: int) -> Table:
    """A line for each kind: accuracy at each resolution, and the change against the highest with its 95 % interval."""
    table = Table(title=f"{num_questions} questions")
    for name in ("asked about", "asked", *(row["method"] for row in rows)):
        table.add_column(name)
    table.add_row(
        "visual tokens", "", *(f"{row['visual_tokens']:.0f} ({row['tokens_saved']:.0%} saved)" for row in rows)
    )
    for kind in [name for name, value in rows[0].items() if isinstance(value, dict) and "points_lost" in value]:
        cells = [
            f"{row[kind]['accuracy']:.1%} ({0 - row[kind]['points_lost']:+.1f} ± {row[kind]['half_width']:.1f})"
            for row in rows
        ]
        table.add_row(kind, str(rows[0][kind]["asked"]), *cells)
    return table


if __name__ == "__main__":
    main()
