"""Shapes of the family that parity is checked on, each with our model and transformers' on the same folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference import Reference

from vlmfast.testing import Shape

_VISION = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}

# Wide enough that answers vary from token to token, narrow enough that float32 keeps logits within 1e-4.
_RANGE = 0.2

SHAPES: dict[str, Shape] = {
    "plain": Shape(longest_edge=90, text=_TEXT, initializer_range=_RANGE),
    "side 14, 4/1 heads, tied": Shape(
        image_size=56, longest_edge=112, tied=True, text={**_TEXT, "num_key_value_heads": 1}, initializer_range=_RANGE
    ),
    # 25 patches a side: float32 rounding puts some patches into their neighbour's position bucket.
    "side 25, scale 5": Shape(
        image_size=50, patch_size=2, scale_factor=5, longest_edge=100, text=_TEXT, initializer_range=_RANGE
    ),
    "side 26, 3/3 heads, other rope base": Shape(
        image_size=52,
        patch_size=2,
        longest_edge=104,
        initializer_range=0.25,
        text={
            **_TEXT,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    ),
    "scale 3, 8/2 heads, biases, wide heads": Shape(
        image_size=36,
        scale_factor=3,
        longest_edge=150,
        initializer_range=_RANGE,
        vision={**_VISION, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
        text={
            **_TEXT,
            "num_attention_heads": 8,
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "scale 4, no splitting, tied": Shape(
        patch_size=2,
        scale_factor=4,
        longest_edge=100,
        do_image_splitting=False,
        tied=True,
        text=_TEXT,
        initializer_range=_RANGE,
    ),
}


class Twin:
    """The same folder loaded by both."""

    def __init__(self, ours: Any, theirs: Reference) -> None:
        self.ours, self.theirs = ours, theirs


@pytest.fixture(scope="session")
def twin_of(checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any]) -> Callable[[str], Twin]:
    made: dict[str, Twin] = {}

    def make(name: str) -> Twin:
        if name not in made:
            folder = checkpoint_of(SHAPES[name])
            made[name] = Twin(load_vlm(folder), Reference(folder))
        return made[name]

    return make


@pytest.fixture(scope="session", params=list(SHAPES), ids=str)
def twin(request: pytest.FixtureRequest, twin_of: Callable[[str], Twin]) -> Twin:
    """Every shape in turn."""
    return twin_of(request.param)


@pytest.fixture(scope="session")
def plain_twin(twin_of: Callable[[str], Twin]) -> Twin:
    return twin_of("plain")
