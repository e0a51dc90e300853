"""What number formats cost: answers about held-out scenes in every dtype, beside those of float32.

    python benchmarks/quality.py [--quick] [--json] [--questions N] [--checkpoint FOLDER]
    python benchmarks/quality.py --full       1,500 questions, written to assets/results/dtypes.json

All dtypes answer the same questions about the same pictures, so differences are paired (see `paired.Loss`), and text
has a line of its own. Also the share of answers that are the same, letter for letter: it moves long before accuracy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from side_by_side import environment, parse_options, prepare

if TYPE_CHECKING:
    from held_out import HeldOut

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "assets" / "results" / "dtypes.json"
_QUICK_QUESTIONS, _QUESTIONS, _FULL_QUESTIONS = 60, 400, 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A number format of the decoder, and one of the vision tower."""

    dtype: str
    vision_dtype: str = "auto"

    @property
    def name(self) -> str:
        return self.dtype if self.vision_dtype == "auto" else f"{self.dtype}, vision {self.vision_dtype}"


WHOLE = Way(dtype="float32")
WAYS = (
    Way(dtype="bfloat16"),
    Way(dtype="int8"),
    Way(dtype="int4"),
    Way(dtype="float32", vision_dtype="int8"),
    Way(dtype="int8", vision_dtype="int8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one way answered, question by question."""

    texts: tuple[str, ...]
    right: tuple[bool, ...]


def main() -> None:
    """Runs the command line."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--full", action="store_true")
    own.add_argument("--questions", type=int, metavar="N")
    own.add_argument("--checkpoint", type=Path, metavar="FOLDER")
    asked, others = own.parse_known_args()
    options = parse_options("What number formats cost in accuracy.", others)
    prepare(options)
    from paired import stamp

    from vlmfast.checkpoint import bundled_model

    folder = asked.checkpoint or options.pocket or bundled_model()
    count = _QUICK_QUESTIONS if options.quick else _FULL_QUESTIONS if asked.full else _QUESTIONS
    made = stamp(folder)  # of the weights as they are now, not when the run is done
    result: dict[str, Any] = {**made, "machine": environment(), **measure(folder, asked.questions or count)}
    Console(stderr=options.json).print(_table(result))
    for name, reason in result["missing"].items():
        Console(stderr=options.json).print(f"{name}: left out: {reason}")
    if asked.full and not options.quick:
        _RESULTS.parent.mkdir(exist_ok=True)
        _RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))


def measure(folder: Path, num_questions: int, ways: Sequence[Way] = WAYS) -> dict[str, Any]:
    """A row for each way, float32's first; `missing` says why a way is not there."""
    from held_out import HeldOut

    from vlmfast.errors import DeviceError

    vlm = _load(folder, WHOLE)
    held_out = HeldOut(vlm, num_questions)
    whole = ask(vlm, held_out)
    rows, missing = [row(WHOLE.name, held_out.kinds, whole, whole)], {}
    for way in ways:
        try:
            told = ask(_load(folder, way), held_out)
        except DeviceError as error:
            missing[way.name] = str(error)
            continue
        rows.append(row(way.name, held_out.kinds, whole, told))
        print(f"{way.name}: {rows[-1]['identical']:.1%} of the answers are float32's", file=sys.stderr)
    return {"questions": len(held_out.kinds), "rows": rows, "missing": missing}


def _load(folder: Path, way: Way) -> Any:
    """The model in a dtype; of pictures and prefixes it keeps what it makes itself, in memory."""
    from held_out import BLOCK_PICTURES

    from vlmfast.options import Batching, Caching
    from vlmfast.vlm import VLM

    return VLM.from_pretrained(
        folder,
        device="cpu",
        dtype=way.dtype,
        vision_dtype=way.vision_dtype,
        batching=Batching(max_sequences=BLOCK_PICTURES, max_step_tokens=8192),
        caching=Caching(features_disk_bytes=0, weights_disk_bytes=0, prefix_ram_bytes=2**29),
        speculation="off",
    )


def ask(vlm: Any, held_out: HeldOut) -> Told:
    """Asks every question, block by block, and marks the answers."""
    from held_out import answer_all

    from vlmfast.train.answers import is_right

    texts: list[str] = []
    right: list[bool] = []
    for block in held_out.blocks:
        for asked, answer in zip(block, answer_all(vlm, block, None), strict=True):
            texts.append(answer.text)
            right.append(is_right(asked.question.kind, asked.question.expect, answer.text))
    return Told(texts=tuple(texts), right=tuple(right))


def row(name: str, kinds: Sequence[str], whole: Told, told: Told) -> dict[str, Any]:
    """A way's losses against the whole run by kind, on text and on all else, and its share of identical answers."""
    from paired import losses

    same = [one == other for one, other in zip(whole.texts, told.texts, strict=True)]
    return {
        "dtype": name,
        "identical": round(sum(same) / max(len(same), 1), 4),
        **{group: loss.numbers() for group, loss in losses(kinds, whole.right, told.right).items()},
    }


def _table(result: dict[str, Any]) -> Table:
    """A line for each kind: accuracy in each dtype, and the change against float32 with its 95 % interval."""
    rows = result["rows"]
    table = Table(title=f"{result['questions']} questions")
    for name in ("asked about", "asked", *(one["dtype"] for one in rows)):
        table.add_column(name)
    table.add_row("same answer", "", *(f"{one['identical']:.1%}" for one in rows))
    for kind in [name for name, value in rows[0].items() if isinstance(value, dict)]:
        cells = [
            f"{one[kind]['accuracy']:.1%}"
            + (f" ({0 - one[kind]['points_lost']:+.1f} ± {one[kind]['half_width']:.1f})" if one is not rows[0] else "")
            for one in rows
        ]
        table.add_row(kind, str(rows[0][kind]["asked"]), *cells)
    return table


if __name__ == "__main__":
    main()
