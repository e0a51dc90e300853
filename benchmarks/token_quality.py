"""What fewer visual tokens cost: accuracy on held-out scenes against the whole run, question by question.

Every method answers the same questions about the same pictures, so differences are paired (see `paired.Loss`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from held_out import HeldOut, Marks, WorkFile, marks
from paired import losses
from token_costs import decoder_flops, kv_bytes, layer_lengths, tower_flops

from vlmfast.options import REDUCERS, FastV, Reduce, ToMe, Vision
from vlmfast.prune.counts import merge_schedule, num_kept
from vlmfast.vlm import VLM
from vlmfast_models.config import ModelConfig

SHARES = (0.75, 0.5, 0.25, 0.1)
"""Of the visual tokens (with ToMe: of the tower's patches that reach its last layer)."""
_FURTHER_SHARES = (0.5, 0.25)
"""Of FastV at further layers."""
TOME_SHARE, TOME_HEADLINE = 0.34, 0.25
"""The shares that 56 and 64 merges in each of 12 layers leave of 1,024 patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to keep a share of the tokens; `vision` None is the whole run."""

    name: str
    keep: float
    vision: Vision | None

    @property
    def label(self) -> str:
        """Names it among all; NaN is for a share that the picture or several steps decide."""
        return self.name if math.isnan(self.keep) else f"{self.name} {self.keep:g}"


WHOLE = Method(name="whole", keep=1.0, vision=None)


def methods(config: ModelConfig, fastv_layers: Sequence[int], shares: Sequence[float] = SHARES) -> list[Method]:
    """Every method at every share, those asked for most first; random controls beside them."""
    first, *further = fastv_layers
    found = [fastv(first, keep) for keep in shares]
    found += [fastv(first, keep, rank="random") for keep in shares]
    tome = sorted({*shares, TOME_SHARE, TOME_HEADLINE}, reverse=True)
    found += [Method(name="tome", keep=keep, vision=Vision(tome=tome_of(config, keep))) for keep in tome]
    names = sorted(REDUCERS, key=lambda name: ("scope", "random", "merge", "diversity", "pool", "saliency").index(name))
    found += [
        Method(name=name, keep=keep, vision=Vision(reduce=Reduce(name, keep=keep))) for name in names for keep in shares
    ]
    found.append(Method(name="diversity auto", keep=math.nan, vision=Vision(reduce=Reduce("diversity", keep="auto"))))
    found += [
        fastv(layer, keep, rank=rank)
        for layer in further
        for rank in ("attention", "random")
        for keep in _FURTHER_SHARES
        if keep in shares
    ]
    return [*found, _pyramid(config.text.num_layers)]


def fastv(layer: int, keep: float, *, rank: Literal["attention", "random"] = "attention") -> Method:
    name = f"fastv@{layer}" if rank == "attention" else f"fastv {rank}@{layer}"
    return Method(name=name, keep=keep, vision=Vision(fastv=FastV(layer=layer, keep=keep, rank=rank)))


def tome_of(config: ModelConfig, keep: float) -> ToMe:
    """As many merges in every layer as leave about this share of the patches."""
    layers, patches = config.vision.num_run_layers, config.vision.num_positions - config.vision.class_token
    return ToMe(r=max(1, round(patches * (1 - keep) / layers)))


def _pyramid(num_layers: int) -> Method:
    """PyramidDrop's halving at each quarter of the decoder, at FastV's positions."""
    first, second, third = (max(number, num_layers * number // 4) for number in (1, 2, 3))
    steps = FastV(layer=first, keep=0.5, then=((second, 0.25), (third, 0.125)))
    return Method(name="fastv pyramid", keep=math.nan, vision=Vision(fastv=steps))


def measure(
    vlm: VLM, chosen: Sequence[Method], held_out: HeldOut, work: WorkFile, weights: str, *, only_estimate: bool = False
) -> list[dict[str, Any]]:
    """A row of results for each method: its losses by kind, on text, and on all else; and what it costs.

    The first block of every method tells how long all will take; with `only_estimate` that is all.
    """
    chosen = [WHOLE, *(method for method in chosen if method.vision is not None)]
    seconds = {method.label: _of_block(vlm, method, held_out, work, weights, 0).seconds for method in chosen}
    num_blocks = len(held_out.blocks)
    _say(f"{len(held_out.kinds)} questions, {len(chosen)} ways; a question in ms:")
    for label, one in seconds.items():
        _say(f"  {label:24} {1e3 * one / len(held_out.blocks[0]):6.1f}")
    _say(f"all of it takes about {sum(seconds.values()) * num_blocks / 60:.0f} minutes")
    if only_estimate:
        return []
    started = time.perf_counter()
    found: dict[str, list[Marks]] = {}
    for index, method in enumerate(chosen):
        found[method.label] = [_of_block(vlm, method, held_out, work, weights, block) for block in range(num_blocks)]
        left = sum(seconds[later.label] for later in chosen[index + 1 :]) * num_blocks / 60
        _say(f"{method.label}: done after {(time.perf_counter() - started) / 60:.1f} minutes, about {left:.0f} left")
    whole = found[WHOLE.label]
    return [_row(vlm, method, held_out.kinds, whole, found[method.label]) for method in chosen]


def _of_block(vlm: VLM, method: Method, held_out: HeldOut, work: WorkFile, weights: str, block: int) -> Marks:
    name = held_out.name(block)
    key = f"{method.label} {method.vision}"
    known = work.get(weights, key, name)
    if known is None:
        known = marks(vlm, held_out.blocks[block], method.vision)
        work.put(weights, key, name, known)
    return known


def _row(
    vlm: VLM, method: Method, kinds: Sequence[str], whole: Sequence[Marks], blocks: Sequence[Marks]
) -> dict[str, Any]:
    right, right_whole = ([mark for block in side for mark in block.right] for side in (blocks, whole))
    credits, credits_whole = ([value for block in side for value in block.credits] for side in (blocks, whole))
    count = max(len(kinds), 1)
    means = {name: sum(block.sums[name] for block in blocks) / count for name in blocks[0].sums}
    before = sum(block.sums["visual_tokens_before"] for block in whole) / count
    config = vlm.checkpoint.config
    lengths = _lengths(config, means, method.vision)
    prompt = sum(block.sums["prompt_tokens"] for block in whole) / count
    plain = layer_lengths(config.text.num_layers, prompt, before)
    merges = merge_schedule(
        method.vision.tome if method.vision else None,
        config.vision.num_run_layers,
        config.vision.num_positions,
        int(config.vision.class_token),
    )
    texts = max(len(credits), 1)
    return {
        "method": method.name,
        "keep": None if math.isnan(method.keep) else method.keep,
        "visual_tokens": round(means["visual_tokens"], 1),
        "visual_tokens_after": round(means["visual_tokens_after"], 1),
        "decoder_share": round(1 - (sum(plain) - sum(lengths)) / (len(plain) * before), 4) if before else 1.0,
        "prefill_gflop": round(decoder_flops(config.text, lengths) / 1e9, 3),
        "prefill_flops_x": round(decoder_flops(config.text, plain) / decoder_flops(config.text, lengths), 3),
        "encoder_flops_x": round(tower_flops(config.vision) / tower_flops(config.vision, merges), 3),
        "kv_bytes": kv_bytes(config.text, lengths, vlm.dtype.itemsize),
        "text_words": {
            "share": round(sum(credits) / texts, 4),
            "lost": round(sum(credits_whole) / texts - sum(credits) / texts, 4),
        },
        **{name: loss.numbers() for name, loss in losses(kinds, right_whole, right).items()},
    }


def _lengths(config: ModelConfig, means: Mapping[str, float], vision: Vision | None) -> list[float]:
    """Tokens in each decoder layer, on average."""
    steps = vision.fastv.steps if vision and vision.fastv else ()
    visual = means["visual_tokens"]
    kept = [(layer, float(num_kept(keep, round(visual)))) for layer, keep in steps]
    return layer_lengths(config.text.num_layers, means["prompt_tokens"], visual, kept)


def points_lost(rows: Iterable[Mapping[str, Any]], method: str, keep: float) -> float | None:
    """Points that a method loses off text, of a table's rows; None if it is not there."""
    for row in rows:
        if row["method"] == method and row["keep"] == keep:
            return float(row["off_text"]["points_lost"])
    return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
