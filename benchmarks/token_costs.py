"""What a prompt costs to compute, from sizes alone: arithmetic of decoder and tower, and bytes of keys and values.

A layer over n tokens of width d takes 4 n d^2 + 2 n^2 d + 3 n d m multiply-adds (projections, attention, gated
feed-forward of width m), with the projections' real widths where heads share keys; a FLOP count is twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from vlmfast_models.config import TextConfig, VisionConfig


def layer_lengths(
    num_layers: int, prompt: float, visual: float, steps: Sequence[tuple[int, float]] = ()
) -> list[float]:
    """Tokens in each decoder layer: `prompt` with `visual` of them, of which `steps` (layer, kept) leave some."""
    lengths = [prompt] * num_layers
    for layer, kept in steps:
        for index in range(layer, num_layers):
            lengths[index] = prompt - visual + kept
    return lengths


def decoder_flops(config: TextConfig, lengths: Sequence[float]) -> float:
    """Of a prefill with so many tokens in each layer; embedding and logits not counted."""
    width, own, shared = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    total = 0.0
    for n in lengths:
        total += (
            2 * n * width * own + 2 * n * width * shared + 2 * n * n * own + 3 * n * width * config.intermediate_size
        )
    return 2 * total


def tower_flops(config: VisionConfig, merges: Sequence[int] = ()) -> float:
    """Of the vision tower's layers over one frame, where `merges` tokens go after the attention of each layer."""
    left = [float(config.num_positions)]
    for layer in range(config.num_run_layers):
        left.append(left[-1] - (merges[layer] if layer < len(merges) else 0))
    width, total = config.hidden_size, 0.0
    for before, after in pairwise(left):
        total += 4 * before * width**2 + 2 * before**2 * width + 2 * after * width * config.intermediate_size
    return 2 * total


def kv_bytes(config: TextConfig, lengths: Sequence[float], bytes_per_value: int) -> int:
    """Of the keys and values after the prefill, with as many tokens in each layer as it has."""
    return round(sum(lengths) * 2 * config.num_kv_heads * config.head_dim * bytes_per_value)
