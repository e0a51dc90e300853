"""Eight pictures at a time against one by one, and a captioning job beside transformers.

    python benchmarks/batch.py [--quick] [--json] [--threads N]

`pocket_batch8_x`, `shape256m_batch8_x`: decoded tokens a second with eight answers a step over one at a time, of known
pictures and prompts, so that nearly all of the time is decoding. `amdahl_share`: captions a second of new pictures, as
a share of what their encoding and prefill, taken alone, and the decode rate above allow. `vs_transformers_x`: captions
a second of new pictures over transformers' `generate` one by one (SmolVLM-256M's shape, one tile). Batched answers must
equal single ones before anything is timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from side_by_side import alternate, environment, parse_options, prepare

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast import VLM

BATCH = 8
NUM_TOKENS = 48
"""Tokens an answer."""


def main() -> None:
    """Runs the command line."""
    options = parse_options("Batches against single answers.")
    prepare(options)
    from contenders import smolvlm_checkpoint, variant

    from vlmfast.checkpoint import bundled_model

    rounds = options.rounds or (2 if options.quick else 5)
    shape = variant(smolvlm_checkpoint(options.cache), options.cache / "smolvlm-256m-512", longest_edge=512)
    pocket = variant(options.pocket or bundled_model(), options.cache / "pocket", longest_edge=256)
    values: dict[str, Any] = {}
    table = Table("", "single ms", "batch ms", "ratio")
    for key, folder in (("pocket", pocket), ("shape256m", shape)):
        single_ms, batch_ms = decode_times(folder, rounds)
        values[f"{key}_batch8_x"] = round(single_ms / batch_ms, 3)
        table.add_row(f"{key}, a token", f"{single_ms:.2f}", f"{batch_ms:.2f}", f"{single_ms / batch_ms:.2f}x")
        values[f"{key}_batch8_token_ms"] = round(batch_ms, 3)
    job_ms, bound_ms, theirs_ms = job_times(shape, values["shape256m_batch8_token_ms"], rounds)
    values |= {
        "amdahl_share": round(bound_ms / job_ms, 3),
        "vs_transformers_x": round(theirs_ms / job_ms, 3),
        "caption_ms": round(job_ms, 1),
        "caption_transformers_ms": round(theirs_ms, 1),
    }
    table.add_row("256M shape, a caption of a new picture", f"{theirs_ms:.0f} (transformers)", f"{job_ms:.0f}", "")
    Console(stderr=options.json).print(table)
    if options.json:
        print(json.dumps(values | environment()))


def decode_times(folder: Path, rounds: int) -> tuple[float, float]:
    """Milliseconds a token one by one and with `BATCH` answers in a step, of known pictures."""
    from contenders import fresh_picture

    pictures = [fresh_picture(2_000_000 + index) for index in range(BATCH)]
    single, batch = (loaded(folder, max_sequences=number, caching=True) for number in (1, BATCH))
    alone, together = captions(single, pictures), captions(batch, pictures)
    if alone != together:
        sys.exit("batched answers differ from single ones; nothing is timed")
    times = alternate(lambda _: clocked(batch, pictures), lambda _: clocked(single, pictures), rounds=rounds)
    per_token = BATCH * NUM_TOKENS
    return times[1].median / per_token, times[0].median / per_token


def job_times(folder: Path, token_ms: float, rounds: int) -> tuple[float, float, float]:
    """Milliseconds a caption of a new picture: ours in a batch, the bound, and transformers one by one."""
    from contenders import Transformers, fresh_picture

    theirs, ours = Transformers(folder), loaded(folder, max_sequences=BATCH, caching=False)
    job = alternate(
        lambda index: clocked(ours, [fresh_picture(BATCH * index + number) for number in range(BATCH)]) / BATCH,
        lambda index: theirs.run(fresh_picture(BATCH * index), NUM_TOKENS).total_ms,
        rounds=rounds,
    )
    one = loaded(folder, max_sequences=1, caching=False)
    first_token = [first_token_ms(one, fresh_picture(3_000_000 + index)) for index in range(rounds + 2)]
    bound = sorted(first_token)[len(first_token) // 2] + (NUM_TOKENS - 1) * token_ms
    return job[0].median, bound, job[1].median


def loaded(folder: Path, *, max_sequences: int, caching: bool) -> VLM:
    """A model that keeps everything in memory, or nothing at all; it never drafts."""
    from vlmfast import VLM, Caching
    from vlmfast.options import Batching

    return VLM.from_pretrained(
        folder,
        device="cpu",
        dtype="bfloat16",
        batching=Batching(max_sequences=max_sequences),
        caching=Caching(features_disk_bytes=0) if caching else False,
        speculation="off",
    )


def captions(vlm: VLM, pictures: Sequence[Image.Image]) -> list[tuple[int, ...]]:
    """Token ids of every answer."""
    from vlmfast import Answer, Sampling

    rows = list(vlm.caption(pictures, sampling=Sampling(max_new_tokens=NUM_TOKENS)))
    return [row.token_ids for row in rows if isinstance(row, Answer)]


def clocked(vlm: VLM, pictures: Sequence[Image.Image]) -> float:
    """Milliseconds for all of them."""
    started = time.perf_counter()
    answered = captions(vlm, pictures)
    assert len(answered) == len(pictures) and all(len(ids) == NUM_TOKENS for ids in answered)
    return (time.perf_counter() - started) * 1e3


def first_token_ms(vlm: VLM, picture: Image.Image) -> float:
    """Encoding and prefill of a new picture, alone."""
    from vlmfast import Sampling

    return vlm.describe(picture, "Describe the picture.", sampling=Sampling(max_new_tokens=1)).timings.first_token_ms


if __name__ == "__main__":
    main()
