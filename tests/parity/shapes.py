"""Shapes of the families that parity is checked on: sizes that differ in what the networks branch on."""

from __future__ import annotations

from dataclasses import replace

from vlmfast.testing import TINY_SHAPES, Shape

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

_LLAVA = replace(TINY_SHAPES["llava"], initializer_range=_RANGE)
_NEXT = replace(TINY_SHAPES["llava_next"], initializer_range=_RANGE)
_ONEVISION = replace(TINY_SHAPES["llava_onevision"], initializer_range=0.25)
_SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

SHAPES |= {
    "llava": _LLAVA,
    "llava, class token kept, two layers, qwen3": replace(
        _LLAVA,
        more={"vision_feature_layer": [-2, 1], "vision_feature_select_strategy": "full"},
        text={**_TEXT, "model_type": "qwen3", "head_dim": 24},
        tied=True,
        initializer_range=0.25,
    ),
    "llava, siglip, last layer, no biases, llama3 rope": replace(
        _LLAVA,
        image_size=30,
        vision={**_LLAVA.vision, "model_type": "siglip_vision_model"},
        more={
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
            "projector_hidden_act": "silu",
        },
        preprocessor={"size": {"height": 30, "width": 30}, "do_center_crop": False, "resample": 2},
        text={
            **_TEXT,
            "rope_parameters": {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    "llava, siglip without its first patch, squared, qwen2 with yarn": replace(
        _LLAVA,
        vision={**_LLAVA.vision, "model_type": "siglip_vision_model"},
        preprocessor={"do_pad": True},
        text={**_LLAVA.text, "model_type": "qwen2", "rope_parameters": {**_SCALED, "rope_type": "yarn"}},
    ),
    "llava, crop larger than the picture, mistral": replace(
        _LLAVA,
        preprocessor={"size": {"shortest_edge": 21}},
        text={**_LLAVA.text, "model_type": "mistral", "sliding_window": 4096},
    ),
    "llava_next": _NEXT,
    "llava_next, qwen2 with linear rope": replace(
        _NEXT,
        text={
            **_LLAVA.text,
            "model_type": "qwen2",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        },
    ),
    "llava_onevision": _ONEVISION,
    "llava_onevision, pools to 2 tiles, pooling head, dynamic rope": replace(
        _ONEVISION,
        vision={**_ONEVISION.vision, "vision_use_head": True},
        more={"vision_aspect_ratio": "anyres_max_2"},
        text={
            **_ONEVISION.text,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        },
    ),
}
