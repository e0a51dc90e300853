"""The pocket's sizes as the checkpoint's own configuration files: an ordinary Idefics3 folder.

These dictionaries are the single place where the shape is stated; training and runtime read them through
`vlmfast_models.config`, and transformers reads the very same files.
"""

from __future__ import annotations

from typing import Any

TILE_SIDE = 256
PATCH_SIZE = 16
MAX_PICTURE_SIDE = 256
"""Longest edge before tiling; equal to the tile's side, so every picture is one global frame."""


def model_config(vocab_size: int, token_ids: dict[str, int]) -> dict[str, Any]:
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
            "hidden_size": 192,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 3,
            "num_channels": 3,
            "image_size": TILE_SIDE,
            "patch_size": PATCH_SIZE,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_hidden_layers": 10,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
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


def preprocessor_config() -> dict[str, Any]:
    """`preprocessor_config.json`."""
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": MAX_PICTURE_SIDE},
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
