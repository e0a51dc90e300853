"""How fast fewer visual tokens are: each way of answering beside the whole run, in turns, as medians and ratios.

On random checkpoints of two shapes: SmolVLM-256M's with nine tiles (576 visual tokens, a heavy tower), and one in the
manner of LLaVA-1.5 (576 visual tokens of a 24 x 24 grid, a heavy decoder).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contenders import fresh_picture, smolvlm_checkpoint, variant
from token_costs import decoder_flops, kv_bytes, layer_lengths

from vlmfast.options import Caching, FastV, Reduce, Sampling, ToMe, Vision
from vlmfast.prune.counts import num_kept
from vlmfast.prune.fastv import top_places
from vlmfast.testing import Shape, random_checkpoint
from vlmfast.types import Answer
from vlmfast.vlm import VLM
from vlmfast_kernels.ops.score import attention_row

QUESTION = "What is in the picture?"
FASTV_LAYER, TOME_R = 2, 56
ENCODER_RS = (56, 64, 76)
"""Merges in each of 12 layers that are timed on one tile of 1,024 patches; the middle one is the headline."""
LLAVA = Shape(
    model_type="llava",
    image_size=336,
    patch_size=14,
    vision={"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8},
    text={
        "hidden_size": 1024,
        "intermediate_size": 2752,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 2048,
    },
    vocab_size=8192,
    initializer_range=0.02,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of answering to be timed; `vision` None is the whole run."""

    name: str
    vision: Vision | None


WHOLE = Way(name="whole", vision=None)


def ways(tome_r: int) -> list[Way]:
    """FastV and a reducer at the shares of the quality table, and ToMe. Every reducer leaves the
    decoder the same work; this one is the plainest."""
    shares = (0.75, 0.5, 0.25, 0.1)
    return [
        WHOLE,
        *(Way(name=f"fastv {keep:g}", vision=Vision(fastv=FastV(layer=FASTV_LAYER, keep=keep))) for keep in shares),
        *(Way(name=f"reduce {keep:g}", vision=Vision(reduce=Reduce("random", keep=keep))) for keep in shares),
        Way(name=f"tome r={tome_r}", vision=Vision(tome=ToMe(r=tome_r))),
    ]


def llava_checkpoint(cache: Path) -> Path:
    """A random bfloat16 checkpoint of `LLAVA`'s shape below `cache`, made on first use."""
    folder = cache / "llava-576-random"
    if not (folder / "chat_template.jinja").is_file():  # the file that is written last
        random_checkpoint(folder, LLAVA, dtype=torch.bfloat16)
    return variant(folder, cache / "llava-576")


def tiled_checkpoint(cache: Path, longest_edge: int) -> Path:
    """SmolVLM-256M's shape, pictures sized so."""
    return variant(smolvlm_checkpoint(cache), cache / f"smolvlm-256m-{longest_edge}", longest_edge=longest_edge)


def loaded(folder: Path) -> VLM:
    """Keeps features in memory and no prefixes: a known picture costs its prefill, a new one all."""
    return VLM.from_pretrained(
        folder,
        device="cpu",
        dtype="bfloat16",
        caching=Caching(features_disk_bytes=0, prefix_ram_bytes=0),
        speculation="off",
    )


def answer(vlm: VLM, picture: Any, vision: Vision | None, num_tokens: int = 1) -> Answer:
    return vlm.describe(picture, QUESTION, sampling=Sampling(max_new_tokens=num_tokens), vision=vision)


def check(vlm: VLM, picture: Any) -> None:
    """Half of the tokens reach the last layer, and keeping all is the plain run."""
    half = answer(vlm, picture, Vision(fastv=FastV(layer=FASTV_LAYER, keep=0.5))).usage
    assert half.visual_tokens_after == round(half.visual_tokens / 2)
    whole = answer(vlm, picture, Vision(fastv=FastV(layer=FASTV_LAYER, keep=1.0)), 8)
    assert whole.token_ids == answer(vlm, picture, None, 8).token_ids


def medians(sample: Callable[[Way, int], float], chosen: Sequence[Way], rounds: int) -> dict[str, float]:
    """The median of `sample(way, round)` for each way: a warm-up, then rounds of all ways, another first each time."""
    samples: dict[str, list[float]] = {way.name: [] for way in chosen}
    for turn in range(rounds + 1):
        start = turn % len(chosen)
        for way in [*chosen[start:], *chosen[:start]]:
            value = sample(way, turn)
            if turn:
                samples[way.name].append(value)
    return {name: statistics.median(values) for name, values in samples.items()}


def table(
    vlm: VLM, chosen: Sequence[Way], size: tuple[int, int], *, rounds: int, new_rounds: int
) -> list[dict[str, Any]]:
    """A row for each way: prefill and first token of a known picture, encoder and first token of a new one, in
    milliseconds and as ratios to the whole run; arithmetic of the prefill, bytes of keys and values, peak memory."""
    known = fresh_picture(0, size)
    check(vlm, known)
    clocks: dict[str, dict[str, float]] = {}
    found: dict[tuple[str, int], Answer] = {}

    def known_prefill(way: Way, turn: int) -> float:
        found[way.name, turn] = answer(vlm, known, way.vision)
        return found[way.name, turn].timings.prefill_ms

    for way in chosen:
        answer(vlm, known, way.vision)  # its features are known from here on
    clocks["prefill_ms"] = medians(known_prefill, chosen, rounds)
    clocks["known_first_token_ms"] = {
        way.name: statistics.median(found[way.name, turn].timings.first_token_ms for turn in range(1, rounds + 1))
        for way in chosen
    }
    fresh: dict[tuple[str, int], Answer] = {}

    def new_picture(way: Way, turn: int) -> float:
        index = 1 + turn * len(chosen) + [one.name for one in chosen].index(way.name)
        fresh[way.name, turn] = answer(vlm, fresh_picture(index, size), way.vision)
        return fresh[way.name, turn].timings.first_token_ms

    if new_rounds:
        clocks["new_first_token_ms"] = medians(new_picture, chosen, new_rounds)
        clocks["encoder_ms"] = {
            way.name: statistics.median(fresh[way.name, turn].timings.encode_ms for turn in range(1, new_rounds + 1))
            for way in chosen
        }
    rows = []
    for way in chosen:
        usage = found[way.name, 1].usage
        row: dict[str, Any] = {"way": way.name, "visual_tokens_after": usage.visual_tokens_after}
        for name, values in clocks.items():
            row[name] = round(values[way.name], 2)
            row[f"{name.removesuffix('_ms')}_x"] = round(values[WHOLE.name] / values[way.name], 3)
        row |= _sizes(vlm, way, found[way.name, 1], found[WHOLE.name, 1])
        row["peak_bytes"] = peak_bytes(lambda vision=way.vision: answer(vlm, known, vision))
        rows.append(row)
    return rows


def _sizes(vlm: VLM, way: Way, one: Answer, whole: Answer) -> dict[str, Any]:
    config = vlm.checkpoint.config.text
    steps = way.vision.fastv.steps if way.vision and way.vision.fastv else ()
    kept = [(layer, float(num_kept(keep, one.usage.visual_tokens))) for layer, keep in steps]
    lengths = layer_lengths(config.num_layers, one.usage.prompt_tokens, one.usage.visual_tokens, kept)
    plain = decoder_flops(config, layer_lengths(config.num_layers, whole.usage.prompt_tokens, 0))
    flops = decoder_flops(config, lengths)
    return {
        "prefill_gflop": round(flops / 1e9, 1),
        "prefill_flops_x": round(plain / flops, 3),
        "kv_bytes": kv_bytes(config, lengths, vlm.dtype.itemsize),
    }


def peak_bytes(run: Callable[[], object]) -> int | None:
    """By how much the process grew while it ran, at most; None where the system does not tell (other than Linux).

    What the allocator had kept is given back first. Pages of keys and values stay, and are told apart (`kv_bytes`).
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        reset.write_text("5")
        before = _status_bytes(status, "VmRSS")
        run()
        return max(_status_bytes(status, "VmHWM") - before, 0)
    except (OSError, LookupError, AttributeError):
        return None


def _status_bytes(status: Path, name: str) -> int:
    for line in status.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def score_share(vlm: VLM, picture: Any, *, rounds: int) -> dict[str, float]:
    """What ranking costs beside the prefill it ranks for: the query of one row, its attention, and the choice."""
    whole = answer(vlm, picture, None)
    config, decoder = vlm.checkpoint.config.text, vlm.model.decoder
    length, visual = whole.usage.prompt_tokens, whole.usage.visual_tokens
    row_of = attention_row.resolve(vlm.device, vlm.dtype)
    hidden = torch.randn(1, config.hidden_size).to(vlm.dtype)
    page = torch.randn(config.num_kv_heads, vlm.max_context, config.head_dim).to(vlm.dtype)
    position = torch.tensor([length - 1])

    def rank() -> None:
        query = decoder.query(FASTV_LAYER - 1, hidden, position)[0]
        top_places(row_of(query, page[:, :length])[:visual], visual // 2)

    score: list[float] = []
    prefill: list[float] = []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            started = time.perf_counter()
            rank()
            score.append((time.perf_counter() - started) * 1e3)
            prefill.append(answer(vlm, picture, None).timings.prefill_ms)
    score_ms, prefill_ms = statistics.median(score[1:]), statistics.median(prefill[1:])
    return {
        "score_ms": round(score_ms, 3),
        "prefill_ms": round(prefill_ms, 2),
        "score_share": round(score_ms / prefill_ms, 5),
    }
