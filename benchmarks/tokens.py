"""Fewer visual tokens: what each method saves and what it costs in quality.

    python benchmarks/tokens.py [--quick] [--json] [--threads N]      speed, and the committed quality table
    python benchmarks/tokens.py --save           the same on all points, into assets/results/tokens.json
    python benchmarks/tokens.py --full [--questions N] [--methods NAME,NAME] [--fastv-layers 2,4,6] [--estimate]
                                                 answers held-out questions in every way, into the same file

Speed is ours against ours, bfloat16, batch 1 (see token_speed.py). `fastv50_prefill_x`: the decoder's pass over a
prompt with 576 visual tokens of a known picture (SmolVLM-256M's shape; five tiles with --quick), whole over FastV at
layer 2 with half of them; `llava_fastv50_prefill_x`: the same on LLaVA's shape. `tome_encoder_x`: the tower on one tile
of 1,024 patches, whole over ToMe merging 64 in each of 12 layers. `score_share`: FastV's ranking, of the prefill.
`*_points_lost` (off text) are read from assets/results/tokens.json, and null where that was made with other weights.

--full tells after one block how long it will take, and goes on where it was stopped: marks are kept below runs/.
--estimate stops there. Processes may share that folder, each with --methods of its own; a run of all then collects what
they found. --methods names rows to make (fastv@2, tome, scope, ...); rows of the file that were made with
the same weights and questions are kept. Then `python benchmarks/token_table.py` writes docs/tokens.md and the plot.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from side_by_side import Options, environment, parse_options, prepare

if TYPE_CHECKING:
    from vlmfast.vlm import VLM

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "assets" / "results" / "tokens.json"
_FULL_QUESTIONS = 5000
_TIMED = ("prefill_ms", "known_first_token_ms", "encoder_ms", "new_first_token_ms")


def main() -> None:
    """Runs the command line."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--full", action="store_true")
    own.add_argument("--save", action="store_true")
    own.add_argument("--estimate", action="store_true")
    own.add_argument("--questions", type=int, default=_FULL_QUESTIONS, metavar="N")
    own.add_argument("--methods", metavar="NAME,NAME")
    own.add_argument("--fastv-layers", default="2,4,6", metavar="L,L")
    own.add_argument("--checkpoint", type=Path, metavar="FOLDER")
    own.add_argument("--work", type=Path, metavar="FOLDER", default=_ROOT / "runs" / "tokens")
    asked, others = own.parse_known_args()
    options = parse_options("Fewer visual tokens: speed and quality.", others)
    prepare(options)
    from vlmfast.checkpoint import bundled_model

    folder = asked.checkpoint or options.pocket or bundled_model()
    if asked.full or asked.estimate:
        quality = _quality(folder, asked)
        if asked.full:
            save({"quality": quality})
        _report_quality(quality, options)
        return
    speed = _speed(options)
    if asked.save:
        save({"speed": speed})
    quality = committed(folder)
    _report_speed(speed, options)
    _report_quality(quality, options)
    if options.json:
        json.dump({**_headlines(speed), **lost(quality), **environment()}, sys.stdout)
        print()


def save(part: dict[str, Any]) -> None:
    """Replaces a part of the committed results."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**known, **part}, indent=1) + "\n", encoding="utf-8")


def committed(folder: Path) -> dict[str, Any]:
    """The quality part of the committed results if these weights made it; empty otherwise."""
    from paired import stamp

    if not RESULTS.is_file():
        return {}
    quality: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")).get("quality", {})
    return quality if quality.get("weights_sha256") == stamp(folder)["weights_sha256"] else {}


def lost(quality: dict[str, Any]) -> dict[str, Any]:
    """The headline losses of a quality table, with a note where there is none of these weights."""
    from token_quality import TOME_HEADLINE, points_lost

    rows, layer = quality.get("rows", []), quality.get("fastv_layers", [2])[0]
    found: dict[str, Any] = {
        "fastv50_points_lost": points_lost(rows, f"fastv@{layer}", 0.5),
        "fastv25_points_lost": points_lost(rows, f"fastv@{layer}", 0.25),
        "random25_points_lost": points_lost(rows, f"fastv random@{layer}", 0.25),
        "tome_points_lost": points_lost(rows, "tome", TOME_HEADLINE),
        "fastv_layer": layer,
    }
    if not rows:
        found["note"] = "no full run of these weights in assets/results/tokens.json; make it with --full"
    return found


def _quality(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    import held_out
    import token_quality
    from paired import stamp

    layers = [int(layer) for layer in asked.fastv_layers.split(",")]
    vlm = held_out.load(folder)
    chosen = token_quality.methods(vlm.checkpoint.config, layers)
    if asked.methods:
        names = asked.methods.split(",")
        known = sorted({method.name for method in chosen})
        unknown = [name for name in names if name not in known]
        if unknown:
            sys.exit(f"no method {', '.join(unknown)}; there are {', '.join(known)}")
        chosen = [method for method in chosen if method.name in names]
    made = stamp(folder)
    questions = held_out.HeldOut(vlm, asked.questions)
    work = held_out.WorkFile(asked.work / "answers.jsonl")
    rows = token_quality.measure(
        vlm, chosen, questions, work, made["weights_sha256"], only_estimate=asked.estimate and not asked.full
    )
    named = held_out.names_digest(questions)
    quality = {**made, "questions": len(questions.kinds), "questions_id": named, "fastv_layers": layers}
    kept = committed(folder) if asked.methods else {}
    if kept.get("questions_id") == named:
        new = {(row["method"], row["keep"]) for row in rows}
        rows = [*(row for row in kept["rows"] if (row["method"], row["keep"]) not in new), *rows]
        rows.sort(key=lambda row: row["method"] != "whole")
    return {**quality, "rows": rows}


def _speed(options: Options) -> dict[str, Any]:
    import token_speed
    from contenders import fresh_picture
    from paired import stamp

    rounds = options.rounds or (2 if options.quick else 7)
    ways = token_speed.ways(token_speed.TOME_R)
    edge, size = (1024, (1024, 1024)) if options.quick else (2048, (1280, 640))
    if options.quick:
        ways = [way for way in ways if way.name in ("whole", "fastv 0.5")]
    speed: dict[str, Any] = {"commit": stamp(options.cache)["commit"], "machine": environment(), "rounds": rounds}
    vlm = token_speed.loaded(token_speed.tiled_checkpoint(options.cache, edge))
    speed["shape256m"] = token_speed.table(vlm, ways, size, rounds=rounds, new_rounds=0 if options.quick else 3)
    speed["score"] = token_speed.score_share(vlm, fresh_picture(0, size), rounds=rounds)
    speed["tome_encoder"] = _one_tile_encoder(
        token_speed.loaded(token_speed.tiled_checkpoint(options.cache, 512)), 3 * rounds
    )
    if not options.quick:
        ways = [way for way in token_speed.ways(0) if "tome" not in way.name]
        ways.append(token_speed.Way(name="tome r=32", vision=_tome(32)))
        llava = token_speed.loaded(token_speed.llava_checkpoint(options.cache))
        speed["llava"] = token_speed.table(llava, ways, (640, 480), rounds=rounds, new_rounds=3)
        speed["llava_score"] = token_speed.score_share(llava, fresh_picture(0), rounds=rounds)
    return speed


def _tome(r: int) -> Any:
    from vlmfast import ToMe, Vision

    return Vision(tome=ToMe(r=r))


def _one_tile_encoder(vlm: VLM, rounds: int) -> list[dict[str, float]]:
    """The tower on one tile, whole and merging more and more; a new picture each time."""
    import token_speed
    from contenders import fresh_picture

    merging = [token_speed.Way(name=str(r), vision=_tome(r)) for r in token_speed.ENCODER_RS]
    ways = [token_speed.WHOLE, *merging]

    def encode_ms(way: token_speed.Way, turn: int) -> float:
        picture = fresh_picture(len(ways) * turn + ways.index(way))
        return token_speed.answer(vlm, picture, way.vision).timings.encode_ms

    found = token_speed.medians(encode_ms, ways, rounds)
    whole = found["whole"]
    return [
        {
            "r": int(way.name),
            "rounds": rounds,
            "whole_ms": round(whole, 2),
            "tome_ms": round(found[way.name], 2),
            "encoder_x": round(whole / found[way.name], 3),
        }
        for way in merging
    ]


def _headlines(speed: dict[str, Any]) -> dict[str, Any]:
    def ratio(shape: str, way: str, name: str) -> float | None:
        return next((row.get(name) for row in speed.get(shape, []) if row["way"] == way), None)

    return {
        "fastv50_prefill_x": ratio("shape256m", "fastv 0.5", "prefill_x"),
        "fastv50_first_token_x": ratio("shape256m", "fastv 0.5", "new_first_token_x"),
        "llava_fastv50_prefill_x": ratio("llava", "fastv 0.5", "prefill_x"),
        "llava_fastv50_first_token_x": ratio("llava", "fastv 0.5", "new_first_token_x"),
        "tome_encoder_x": speed["tome_encoder"][1]["encoder_x"],
        "score_share": speed["score"]["score_share"],
    }


def _report_speed(speed: dict[str, Any], options: Options) -> None:
    console = Console(stderr=options.json)
    for shape in ("shape256m", "llava"):
        if not speed.get(shape):
            continue
        table = Table(
            "", *(name.removesuffix("_ms").replace("_", " ") for name in _TIMED), "GFLOP", "KV MB", title=shape
        )
        for row in speed[shape]:
            cells = [f"{row[name]:.0f} ({row[name[:-3] + '_x']:.2f}x)" if name in row else "" for name in _TIMED]
            table.add_row(row["way"], *cells, f"{row['prefill_gflop']:.0f}", f"{row['kv_bytes'] / 1e6:.1f}")
        console.print(table)
    for one in speed["tome_encoder"]:
        console.print(f"encoder, one tile, ToMe r={one['r']}: {one['encoder_x']:.2f}x")
    console.print(f"FastV's ranking: {speed['score']['score_share']:.2%} of the prefill")


def _report_quality(quality: dict[str, Any], options: Options) -> None:
    console = Console(stderr=options.json)
    rows = quality.get("rows", [])
    if not rows:
        return
    table = Table(
        "method", "keep", "prefill FLOPs", "points lost off text", "on text", title=f"{quality['questions']} questions"
    )
    for row in rows:
        losses = [f"{row[name]['points_lost']:+.1f} ± {row[name]['half_width']:.1f}" for name in ("off_text", "text")]
        keep = row["keep"] if row["keep"] is not None else f"{row['decoder_share']:.2f}"
        table.add_row(row["method"], str(keep), f"{row['prefill_flops_x']:.2f}x", *losses)
    console.print(table)


if __name__ == "__main__":
    main()
