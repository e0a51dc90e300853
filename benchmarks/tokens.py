"""Fewer visual tokens: what each method saves and what it costs in quality.

    python benchmarks/tokens.py [--quick] [--json] [--threads N]      speed, and the committed quality table
    python benchmarks/tokens.py --full [--scenes N] [--fastv-layers 2,4]   answers every scene in every way (hours)

Speed is ours against ours, on the shape of SmolVLM-256M, bfloat16, batch 1. `fastv50_prefill_x`: the decoder's pass
over a prompt with 576 visual tokens (nine tiles; five with --quick) of a known picture, whole over FastV at layer 2
with half of them; `fastv50_first_token_x`: the first token of a new picture, where the encoder dominates.
`tome_encoder_x`: the tower on one tile of 1,024 patches, whole over ToMe merging 56 in each of 12 layers.
Quality (`*_points_lost`: off text, on the bundled model) is read from assets/results/tokens.json, which --full writes;
--quick also answers a few scenes, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from side_by_side import Options, Summary, alternate, environment, parse_options, prepare

if TYPE_CHECKING:
    from vlmfast import Vision
    from vlmfast.types import Answer
    from vlmfast.vlm import VLM

_RESULTS = Path(__file__).resolve().parents[1] / "assets" / "results" / "tokens.json"
_QUESTION = "What is in the picture?"
_FASTV_LAYER, _TOME_R = 2, 56
_QUICK_SCENES, _FULL_SCENES = 3, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A ratio with what it came from, in milliseconds."""

    key: str
    title: str
    reduced: Summary
    whole: Summary

    @property
    def ratio(self) -> float:
        return self.whole.median / self.reduced.median


def main() -> None:
    """Runs the command line."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--full", action="store_true")
    own.add_argument("--scenes", type=int, metavar="N")
    own.add_argument("--fastv-layers", default=str(_FASTV_LAYER), metavar="L,L")
    asked, others = own.parse_known_args()
    options = parse_options("Fewer visual tokens: speed and quality.", others)
    prepare(options)
    layers = [int(layer) for layer in asked.fastv_layers.split(",")]
    if asked.full:
        table = _quality(options, asked.scenes or _FULL_SCENES, layers)
        _RESULTS.parent.mkdir(exist_ok=True)
        _RESULTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    elif asked.scenes or options.quick:
        table = _quality(options, asked.scenes or _QUICK_SCENES, layers)
    else:
        table = _committed()
    timings = [] if asked.full else _timings(options)
    _report(timings, table, options)


def _committed() -> dict[str, Any]:
    return json.loads(_RESULTS.read_text(encoding="utf-8")) if _RESULTS.is_file() else {}


def _timings(options: Options) -> list[Timing]:
    from contenders import fresh_picture, smolvlm_checkpoint, variant

    from vlmfast import VLM, FastV, ToMe, Vision
    from vlmfast.options import Caching

    rounds = options.rounds or (2 if options.quick else 9)
    edge, size = (1024, (1024, 1024)) if options.quick else (2048, (1280, 640))
    checkpoint = smolvlm_checkpoint(options.cache)
    known = Caching(features_disk_bytes=0, prefix_ram_bytes=0)
    tiled = variant(checkpoint, options.cache / f"smolvlm-256m-{edge}", longest_edge=edge)
    vlm = VLM.from_pretrained(tiled, device="cpu", dtype="bfloat16", caching=known)
    fastv = Vision(fastv=FastV(layer=_FASTV_LAYER, keep=0.5))
    picture = fresh_picture(0, size)
    _verify(vlm, picture, fastv)
    tokens = f"{_ask(vlm, picture, None).usage.visual_tokens} visual tokens"
    timings = [
        _timing(
            "fastv50_prefill_x",
            f"prefill, {tokens}, FastV 50 %",
            lambda vision, index: _ask(vlm, picture, vision).timings.prefill_ms,
            fastv,
            rounds,
        )
    ]
    if not options.quick:
        fresh = VLM.from_pretrained(tiled, device="cpu", dtype="bfloat16", caching=False)
        timings.append(
            _timing(
                "fastv50_first_token_x",
                f"first token of a new picture, {tokens}, FastV 50 %",
                lambda vision, index: _ask(fresh, fresh_picture(index, size), vision).timings.first_token_ms,
                fastv,
                3,
            )
        )
    one = variant(checkpoint, options.cache / "smolvlm-256m-512", longest_edge=512)
    tower = VLM.from_pretrained(one, device="cpu", dtype="bfloat16", caching=False)
    tome = Vision(tome=ToMe(r=_TOME_R))
    timings.append(
        _timing(
            "tome_encoder_x",
            f"encoder, one tile, ToMe r={_TOME_R}",
            lambda vision, index: _ask(tower, fresh_picture(index), vision).timings.encode_ms,
            tome,
            rounds,
        )
    )
    return timings


def _timing(key: str, title: str, sample: Callable[[Vision | None, int], float], vision: Vision, rounds: int) -> Timing:
    reduced, whole = alternate(
        lambda index: sample(vision, index), lambda index: sample(None, index), rounds=rounds, first=1
    )
    return Timing(key=key, title=title, reduced=reduced, whole=whole)


def _ask(vlm: VLM, picture: Any, vision: Vision | None, num_tokens: int = 1) -> Answer:
    from vlmfast import Sampling

    return vlm.describe(picture, _QUESTION, sampling=Sampling(max_new_tokens=num_tokens), vision=vision)


def _verify(vlm: VLM, picture: Any, fastv: Vision) -> None:
    """Half of the tokens reach the last layer, and keeping all is the plain run."""
    from vlmfast import FastV, Vision

    usage = _ask(vlm, picture, fastv).usage
    assert usage.visual_tokens_after == round(usage.visual_tokens / 2)
    whole = _ask(vlm, picture, Vision(fastv=FastV(layer=_FASTV_LAYER, keep=1.0)), 8)
    assert whole.token_ids == _ask(vlm, picture, None, 8).token_ids


def _quality(options: Options, num_scenes: int, fastv_layers: list[int]) -> dict[str, Any]:
    import token_quality

    from vlmfast import VLM
    from vlmfast.checkpoint import bundled_model
    from vlmfast.options import Caching

    folder = options.pocket or bundled_model()
    vlm = VLM.from_pretrained(folder, device="cpu", caching=Caching(features_disk_bytes=0, prefix_ram_bytes=0))
    shares = (0.5,) if options.quick else token_quality.SHARES
    chosen = token_quality.methods(vlm.checkpoint.config.vision.num_run_layers, fastv_layers, shares)
    rows = token_quality.measure(vlm, chosen, num_scenes)
    return {**token_quality.stamp(folder), "scenes": num_scenes, "fastv_layers": fastv_layers, "rows": rows}


def _report(timings: list[Timing], quality: dict[str, Any], options: Options) -> None:
    from token_quality import points_lost

    console = Console(stderr=options.json)
    if timings:
        table = Table("", "whole ms", "reduced ms", "ratio")
        for row in timings:
            table.add_row(row.title, f"{row.whole.median:.1f}", f"{row.reduced.median:.1f}", f"{row.ratio:.2f}x")
        console.print(table)
    rows = quality.get("rows", [])
    if rows:
        table = Table("method", "keep", "points lost off text", "on text", title=f"{quality['scenes']} scenes")
        for row in rows:
            lost = [f"{row[name]['points_lost']:+.1f} ± {row[name]['half_width']:.1f}" for name in ("off_text", "text")]
            table.add_row(row["method"], str(row["keep"] or f"{row['decoder_share']:.2f}"), *lost)
        console.print(table)
    if options.json:
        committed = _committed()
        rows, layer = committed.get("rows", []), committed.get("fastv_layers", [_FASTV_LAYER])[0]
        lost = {
            "fastv50_points_lost": points_lost(rows, f"fastv@{layer}", 0.5),
            "fastv25_points_lost": points_lost(rows, f"fastv@{layer}", 0.25),
            "random25_points_lost": points_lost(rows, f"fastv random@{layer}", 0.25),
            "tome_points_lost": points_lost(rows, "tome", 0.5),
        }
        values: dict[str, Any] = {row.key: round(row.ratio, 3) for row in timings}
        json.dump({**values, **lost, "fastv_layer": layer, **environment()}, sys.stdout)
        print()


if __name__ == "__main__":
    main()
