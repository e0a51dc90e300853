"""The decoder step on the CPU: decode against transformers, and what a step over M tokens costs beside one.

    python benchmarks/step.py [--quick] [--json] [--threads N]

Ratios: `decode_bf16_x`, `decode_int8_x`, `decode_int4_x` (time per token of transformers in bfloat16 over ours;
SmolVLM-256M's shape, one tile), and c(M)/c(1), the cost of a step over M tokens beside a step over one: `c2` .. `c16`
in bfloat16, `c2_int8` .. `c16_int8`, `c2_int4` .. `c16_int4`. A draft of M - 1 tokens wins where more than c(M)/c(1)
tokens of a step are kept. Also `read_gb_s`, the fastest that this machine was seen to read memory, and by dtype
`bf16_read_mb`, what a one-token step reads, and `bf16_read_share`, the part of `read_gb_s` which it reaches.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table
from side_by_side import Comparison, Options, alternate, parse_options, prepare

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Tokens a step."""
PAST = 128
"""Tokens before them: a prompt with one picture, and a sentence."""
INT8_TOLERANCE = 0.1
"""As `contenders.BF16_TOLERANCE`, for int8: quantisation moves logits by a few hundredths of the best."""
INT4_TOLERANCE = 0.4
"""For int4, on random weights, whose logits lie closer together than a trained model's."""


def main() -> None:
    """Runs the command line."""
    options = parse_options("The decoder step on the CPU.")
    prepare(options)
    import torch
    from cases import one_tile
    from contenders import BF16_TOLERANCE, Ours, Transformers, fresh_picture, smolvlm_checkpoint, variant, verify
    from side_by_side import report

    case = one_tile(15, 3)
    rounds = options.rounds or (case.quick_rounds if options.quick else case.rounds)
    folder = variant(smolvlm_checkpoint(options.cache), options.cache / "smolvlm-256m-512", longest_edge=512)
    theirs, comparisons, more = Transformers(folder), [], {"read_gb_s": round(read_speed(), 1)}
    for name, dtype, tolerance in (
        ("bf16", torch.bfloat16, BF16_TOLERANCE),
        ("int8", "int8", INT8_TOLERANCE),
        ("int4", "int4", INT4_TOLERANCE),
    ):
        ours = Ours(folder, dtype)
        check = verify(ours, theirs, fresh_picture(1_000_000), 12 if options.quick else 24, tolerance)
        times = alternate(
            lambda index, side=ours: side.run(fresh_picture(index), 32).ms_per_token,
            lambda index: theirs.run(fresh_picture(index), 32).ms_per_token,
            rounds=rounds,
        )
        comparisons.append(
            Comparison(key=f"decode_{name}_x", title=f"decode, {name}", ours=times[0], theirs=times[1], check=check)
        )
        more |= step_costs(ours.vlm, name, options, more["read_gb_s"])
        del ours
    report(comparisons, [], options, more)


def step_costs(vlm: Any, name: str, options: Options, read_gb_s: float) -> dict[str, Any]:
    """c(M)/c(1) of one dtype, from rounds that go through all sizes in turn; checked before they are timed."""
    import torch

    from vlmfast.kv import SequenceKV
    from vlmfast.runner import BatchAttention

    decoder, config = vlm.model.decoder, vlm.checkpoint.config.text
    page = SequenceKV(config, 256, vlm.device, vlm.dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (PAST + max(SIZES),), generator=generator)

    @torch.inference_mode()
    def step(start: int, end: int) -> torch.Tensor:
        page.truncate(start)
        attention = BatchAttention([(0, end - start, page)], vlm.device, vlm.dtype)
        return decoder.logits(decoder.run(decoder.embed(ids[start:end]), torch.arange(start, end), attention))

    step(0, PAST)
    alone = torch.cat([step(PAST + index, PAST + index + 1) for index in range(8)])
    if not torch.equal(alone, step(PAST, PAST + 8)):
        print(f"{name}: a step over 8 tokens and 8 steps over one differ in rounding (no compiled step here)")
    samples: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(options.rounds or (15 if options.quick else 60)):
        for size in SIZES:
            started = time.perf_counter()
            step(PAST, PAST + size)
            samples[size].append((time.perf_counter() - started) * 1e3)
    medians = {size: statistics.median(times[1:]) for size, times in samples.items()}
    weights, kv = weight_bytes(vlm, name), page.storage[:, :, :, :PAST].nbytes
    share = (weights + kv) / (medians[1] * 1e6) / read_gb_s

    table = Table(f"{name}: tokens M", "ms", "c(M)/c(1)", "ms a token")
    for size, median in medians.items():
        table.add_row(str(size), f"{median:.2f}", f"{median / medians[1]:.2f}", f"{median / size:.2f}")
    console = Console(stderr=options.json)
    console.print(table)
    console.print(
        f"{name}: a step over one token reads {weights / 1e6:.0f} MB of weights and {kv / 1e6:.1f} MB of keys and "
        f"values: {share:.0%} of the {read_gb_s:.0f} GB/s that this machine reads"
    )
    suffix = "" if name == "bf16" else f"_{name}"
    values: dict[str, Any] = {f"c{size}{suffix}": round(medians[size] / medians[1], 3) for size in SIZES[1:]}
    values |= {f"step_{name}_ms": round(medians[1], 3), f"{name}_read_mb": round((weights + kv) / 1e6, 1)}
    return values | {f"{name}_read_share": round(share, 3)}


def weight_bytes(vlm: Any, name: str) -> int:
    """Weights that one step reads: every linear layer of the decoder and the head, once."""
    config = vlm.checkpoint.config.text
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # q, k, v and out
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    in_layers = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 32}[name]  # int4: a bfloat16 scale for each 32 inputs
    in_head = 2 if name == "bf16" else 1
    return round(config.num_layers * layer * in_layers + config.hidden_size * config.vocab_size * in_head)


def read_speed(megabytes: int = 512) -> float:
    """GB/s of the best of a few passes over memory that no cache holds, on all threads."""
    import torch

    values = torch.ones(megabytes * 2**18)
    seconds = []
    for _ in range(8):
        started = time.perf_counter()
        values.amax()
        seconds.append(time.perf_counter() - started)
    return values.nbytes / min(seconds) / 1e9


if __name__ == "__main__":
    main()
