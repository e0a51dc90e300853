"""The pocket's sizes as the checkpoint's own configuration files: an ordinary Idefics3 folder.

These dictionaries are the single place where the shape is stated; training and runtime read them through
`vlmfast_models.config`, and transformers reads the very same files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TILE_SIDE = 256
PATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What differs between the pockets; heads are 64 wide."""

    vision_width: int
    vision_layers: int
    text_width: int
    text_layers: int
    num_heads: int
    num_kv_heads: int
    feed_forward: int
    longest_edge: int
    """Pixels before tiling. Two tiles' sides: two by two tiles (fewer if long and narrow) and one global frame."""


POCKET_SIZE = Size(
    vision_width=192,
    vision_layers=8,
    text_width=256,
    text_layers=10,
    num_heads=4,
    num_kv_heads=2,
    feed_forward=640,
    longest_edge=2 * TILE_SIDE,
)
DRAFT_SIZE = Size(
    vision_width=POCKET_SIZE.vision_width,
    vision_layers=POCKET_SIZE.vision_layers,
    text_width=128,
    text_layers=2,
    num_heads=2,
    num_kv_heads=1,
    feed_forward=384,
    longest_edge=TILE_SIDE,
)
"""A draft model for the pocket: it has the same tower and sees the global frame only."""


def model_config(size: Size, vocab_size: int, token_ids: dict[str, int]) -> dict[str, Any]:
    """`config.json`; `token_ids` are the ids of `image`, `bos`, `eos` and `pad`."""
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": token_ids["image"],
        "bos_token_id": token_ids["bos"],
        "eos_token_id": token_ids["eos"],
        "pad_token_id": token_ids["pad"],
        "scale_factor": 2,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": size.vision_width,
            "intermediate_size": 4 * size.vision_width,
            "num_hidden_layers": size.vision_layers,
            "num_attention_heads": size.vision_width // 64,
            "num_channels": 3,
            "image_size": TILE_SIDE,
            "patch_size": PATCH_SIZE,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": size.text_width,
            "intermediate_size": size.feed_forward,
            "num_hidden_layers": size.text_layers,
            "num_attention_heads": size.num_heads,
            "num_key_value_heads": size.num_kv_heads,
            "head_dim": 64,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "vocab_size": vocab_size,
            "bos_token_id": token_ids["bos"],
            "eos_token_id": token_ids["eos"],
            "pad_token_id": token_ids["pad"],
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
    }


def generation_config(token_ids: dict[str, int]) -> dict[str, Any]:
    """`generation_config.json`."""
    return {
        "bos_token_id": token_ids["bos"],
        "eos_token_id": token_ids["eos"],
        "pad_token_id": token_ids["pad"],
        "do_sample": False,
    }


def preprocessor_config(size: Size) -> dict[str, Any]:
    """`preprocessor_config.json`."""
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": size.longest_edge},
        "do_image_splitting": True,
        "max_image_size": {"longest_edge": TILE_SIDE},
        "resample": 1,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pad": True,
    }


def processor_config() -> dict[str, Any]:
    """`processor_config.json`."""
    grid = TILE_SIDE // PATCH_SIZE // 2
    return {"processor_class": "Idefics3Processor", "image_seq_len": grid * grid}
