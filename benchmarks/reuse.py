"""First token of a known picture against a new one: features from disk and from memory, and a follow-up in a chat.

    python benchmarks/reuse.py [--quick] [--json] [--threads N]

The clock is `Answer.timings.first_token_ms`, weights loaded, batch 1, bfloat16, a fresh picture every round:

    new        a picture never seen; with all caches on, so that keeping it is part of the time
    disk hit   the same picture, another question, in a VLM that has nothing in memory, as after a restart
    ram hit    the same picture, another question, features in memory, no known prefix
    follow-up  a second question in a chat about it: only its own tokens are computed
    bound      the decoder alone over as many new tokens behind a past of equal length

Ratios (five tiles; `_1_tile` with one): `disk_hit_x`, `ram_hit_x`, `follow_up_x` are new / hit, `follow_up_vs_bound_x`
is follow-up / bound, `miss_cost_pct` is what keeping a new picture adds to encoding it, `new_vs_transformers_x` is
transformers' first token of the new picture over ours. `hash_12_mp_ms` hashes a picture of 12 megapixels.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from side_by_side import Options, Summary, environment, parse_options, prepare

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.vlm import VLM

_QUESTIONS = ("What is in the picture?", "Which colours are there?", "Is it day or night?")
_VERIFY_PICTURE = 1_000_000
_ANSWER_TOKENS = 8
_VERIFY_TOKENS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """One network with several memories."""

    plain: VLM
    """Keeps nothing."""
    full: VLM
    """Keeps everything, features on disk too."""
    disk: VLM
    """Has the disk of `full` and nothing in memory."""
    ram: VLM
    """Keeps features in memory only."""


@dataclass(slots=True)
class Times:
    """Milliseconds of each round, by row."""

    rows: dict[str, list[float]] = field(default_factory=dict)

    def add(self, row: str, value: float) -> None:
        self.rows.setdefault(row, []).append(value)

    def median(self, row: str) -> float:
        return statistics.median(self.rows[row])


def main() -> None:
    """Runs the command line."""
    options = parse_options("First token of a known picture against a new one.")
    prepare(options)
    values: dict[str, Any] = {}
    for suffix, edge, rounds, quick_rounds in (("", 1024, 7, 3), ("_1_tile", 512, 9, 0)):
        num_rounds = options.rounds or (quick_rounds if options.quick else rounds)
        if quick_rounds or not options.quick:
            values |= {f"{key}{suffix}": value for key, value in _measure(options, edge, num_rounds).items()}
    values["hash_12_mp_ms"] = round(_hash_ms(), 2)
    if options.json:
        print(json.dumps(values | environment()))


def _measure(options: Options, edge: int, rounds: int) -> dict[str, Any]:
    from contenders import Transformers, fresh_picture, smolvlm_checkpoint, variant

    folder = variant(smolvlm_checkpoint(options.cache), options.cache / f"smolvlm-256m-{edge}", longest_edge=edge)
    with tempfile.TemporaryDirectory() as cache:
        sides = _contenders(folder, Path(cache), "bfloat16")
        check = _verify(sides, fresh_picture(_VERIFY_PICTURE), exact=False)
        if not options.quick:
            exact = _contenders(folder, Path(cache) / "float32", "float32")
            check += f"; float32: {_verify(exact, fresh_picture(_VERIFY_PICTURE), exact=True)}"
            del exact
        times = Times()
        for index in range(rounds + 1):
            _round(sides, fresh_picture(index), times if index else Times(), swap=index % 2 == 1)
    theirs = Transformers(folder)
    for index in range(1 if options.quick else rounds):
        times.add("transformers, new", theirs.run(fresh_picture(2000 + index), 1).first_token_ms)
    return _report(times, f"SmolVLM-256M shape, {edge} px", check, options)


def _contenders(folder: Path, cache: Path, dtype: str) -> Contenders:
    from vlmfast.options import Batching, Caching, Limits
    from vlmfast.spec.options import Speculation
    from vlmfast.vlm import VLM

    plain = VLM.from_pretrained(folder, device="cpu", dtype=dtype, caching=False)

    def keeping(caching: Caching) -> VLM:
        return VLM(
            plain.checkpoint,
            plain.model,
            device=plain.device,
            dtype=plain.dtype,
            limits=Limits(),
            batching=Batching(),
            caching=caching,
            speculation=Speculation(drafter="off"),
        )

    return Contenders(
        plain=plain,
        full=keeping(Caching(folder=cache)),
        disk=keeping(Caching(folder=cache, features_ram_bytes=0, prefix_ram_bytes=0)),
        ram=keeping(Caching(features_disk_bytes=0, prefix_ram_bytes=0)),
    )


def _round(sides: Contenders, picture: Image.Image, times: Times, *, swap: bool) -> None:
    from vlmfast.options import Sampling

    one = Sampling(max_new_tokens=1)
    news = [("new, nothing kept", sides.plain), ("new", sides.full)]
    for row, vlm in reversed(news) if swap else news:
        answer = vlm.describe(picture, _QUESTIONS[0], sampling=one)
        times.add(row, answer.timings.first_token_ms)
        times.add(f"{row}: encode", answer.timings.image_ms + answer.timings.encode_ms)
    answer = sides.disk.describe(picture, _QUESTIONS[1], sampling=one)
    assert answer.usage.images_from_disk == 1, "the picture should have come from disk"
    times.add("disk hit", answer.timings.first_token_ms)
    sides.ram.describe(picture, _QUESTIONS[0], sampling=one)
    answer = sides.ram.describe(picture, _QUESTIONS[2], sampling=one)
    assert answer.usage.images_from_ram == 1, "the picture should have come from memory"
    times.add("ram hit", answer.timings.first_token_ms)
    chat = sides.full.chat(picture)
    chat.ask(_QUESTIONS[0], sampling=Sampling(max_new_tokens=_ANSWER_TOKENS))
    answer = chat.ask(_QUESTIONS[1], sampling=one)
    assert answer.usage.images_from_prefix == 1, "the picture should have been in the known prefix"
    times.add("follow-up", answer.timings.first_token_ms)
    num_new = answer.usage.prompt_tokens - answer.usage.cached_tokens
    times.add("bound", _bound_ms(sides.plain, answer.usage.cached_tokens, num_new))


def _bound_ms(vlm: VLM, num_past: int, num_new: int) -> float:
    """The decoder, its head and the choice over `num_new` tokens behind `num_past`, nothing else in the clock."""
    import torch

    from vlmfast.kv import SequenceKV
    from vlmfast.runner import BatchAttention

    decoder = vlm.model.decoder
    with torch.inference_mode():
        kv = SequenceKV(vlm.checkpoint.config.text, num_past + num_new, vlm.device, vlm.dtype)
        attention = BatchAttention([(0, num_new, kv)], vlm.device, vlm.dtype)
        fill = BatchAttention([(0, num_past, kv)], vlm.device, vlm.dtype)
        ids = torch.randint(5, 500, (num_past + num_new,))
        positions = torch.arange(num_past + num_new)
        decoder.run(decoder.embed(ids[:num_past]), positions[:num_past], fill)
        started = time.perf_counter()
        hidden = decoder.run(decoder.embed(ids[num_past:]), positions[num_past:], attention)
        int(decoder.logits(hidden[-1:]).argmax())
        return (time.perf_counter() - started) * 1e3


def _verify(sides: Contenders, picture: Image.Image, *, exact: bool) -> str:
    """Says that hits answer as the plain run does. Features are the same bits, so hits on them give the same tokens in
    any dtype; a follow-up computes its past in other pieces, so its tokens are compared in float32 (`exact`)."""
    from vlmfast.options import Sampling
    from vlmfast.prompt import Message

    sampling = Sampling(max_new_tokens=_VERIFY_TOKENS)
    expected = sides.plain.describe(picture, _QUESTIONS[0], sampling=sampling).token_ids
    for name, vlm in (("new", sides.full), ("disk hit", sides.disk), ("miss", sides.ram), ("ram hit", sides.ram)):
        if vlm.describe(picture, _QUESTIONS[0], sampling=sampling).token_ids != expected:
            raise SystemExit(f"{name}: another answer than without caches; nothing is timed")
    if not exact:
        return f"{_VERIFY_TOKENS} tokens equal"
    chat = sides.full.chat(picture)
    chat.ask(_QUESTIONS[0], sampling=sampling)
    messages = [*chat.messages, Message(role="user", text=_QUESTIONS[1])]
    plain = list(sides.plain.answer_messages(messages, sampling=sampling))[-1].answer
    assert plain is not None
    if chat.ask(_QUESTIONS[1], sampling=sampling).token_ids != plain.token_ids:
        raise SystemExit("follow-up: another answer than without caches; nothing is timed")
    return f"{_VERIFY_TOKENS} tokens equal, follow-up too"


def _hash_ms() -> float:
    """Median of five: the digest of 4000 x 3000 pixels in memory."""
    import numpy as np

    from vlmfast.image.load import load_image

    pixels = np.random.default_rng(0).integers(0, 256, (3000, 4000, 3), np.uint8)
    samples = []
    for index in range(5):
        pixels[0, 0, 0] = index
        started = time.perf_counter()
        load_image(pixels)
        samples.append((time.perf_counter() - started) * 1e3)
    return statistics.median(samples)


def _report(times: Times, title: str, check: str, options: Options) -> dict[str, Any]:
    """Prints the table (to stderr with --json) and returns the values of the JSON object."""
    new = times.median("new")
    added = [
        kept - plain
        for kept, plain in zip(times.rows["new: encode"], times.rows["new, nothing kept: encode"], strict=True)
    ]
    values: dict[str, Any] = {
        "disk_hit_x": new / times.median("disk hit"),
        "ram_hit_x": new / times.median("ram hit"),
        "follow_up_x": new / times.median("follow-up"),
        "follow_up_vs_bound_x": times.median("follow-up") / times.median("bound"),
        "miss_cost_pct": 100 * statistics.median(added) / times.median("new, nothing kept: encode"),
        "new_vs_transformers_x": times.median("transformers, new") / new,
    }
    console = Console(stderr=options.json, file=None if options.json else sys.stdout)
    table = Table("", "ms, median (min .. max)", "rounds")
    for row, samples in times.rows.items():
        one = Summary.of(samples)
        table.add_row(row, f"{one.median:.1f} ({one.min:.1f} .. {one.max:.1f})", str(one.num_samples))
    console.print(title, table, f"checked before timing: {check}", sep="\n")
    console.print(", ".join(f"{key} {value:.2f}" for key, value in values.items()))
    medians = {
        f"{row.replace(', ', '_').replace(': ', '_').replace(' ', '_').replace('-', '_')}_ms": round(
            times.median(row), 3
        )
        for row in times.rows
    }
    return {key: round(value, 3) for key, value in values.items()} | medians | {"check": check}


if __name__ == "__main__":
    main()
