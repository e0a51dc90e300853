"""The configurations of well-known checkpoints on the hub: read, and every tensor has its place in our networks.

Networks are made without memory, on torch's meta device; the dictionaries hold what the hub's files state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vlmfast.checkpoint import _with_defaults
from vlmfast_models.config import ModelConfig
from vlmfast_models.families import family

_CLIP_L = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
    "vocab_size": 32000,
}
_SIGLIP_SO = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 26,
    "patch_size": 14,
    "vision_use_head": False,
}
_QWEN2_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "max_window_layers": 24,
    "sliding_window": 32768,
    "vocab_size": 152000,
}
_STRATEGY = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}

HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "llava-hf/llava-1.5-7b-hf": (
        "Llava",
        {
            "model_type": "llava",
            "image_token_index": 32000,
            "text_config": {
                "model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064,
            },
            "vision_config": _CLIP_L,
            **_STRATEGY,
        },
    ),
    "llava-hf/llava-v1.6-mistral-7b-hf": (
        "LlavaNext",
        {
            "model_type": "llava_next",
            "image_token_index": 32000,
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
            "text_config": {
                "model_type": "mistral", "intermediate_size": 14336, "max_position_embeddings": 32768,
                "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
                "vocab_size": 32064,
            },
            "vision_config": _CLIP_L,
            "use_image_newline_parameter": True,
            **_STRATEGY,
        },
    ),
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": (
        "LlavaOnevision",
        {
            "model_type": "llava_onevision",
            "image_token_index": 151646,
            "video_token_index": 151647,
            "text_config": _QWEN2_05B,
            "tie_word_embeddings": True,
            "vision_aspect_ratio": "anyres_max_9",
            "vision_config": _SIGLIP_SO,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava-hf/llava-interleave-qwen-0.5b-hf": (
        "Llava",
        {
            "model_type": "llava",
            "image_token_index": 151646,
            "text_config": _QWEN2_05B,
            "vision_config": _SIGLIP_SO,
            **_STRATEGY,
            "vision_feature_select_strategy": "full",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_every_tensor_has_its_place(tmp_path: Path, name: str) -> None:
    """Guards real sizes and what their files leave out: our names and shapes against those of transformers' network."""
    prefix, raw = HUB[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_hf(_with_defaults(tmp_path, raw))
    with torch.device("meta"):
        ours = family(config.model_type)(config)
        theirs = getattr(transformers, f"{prefix}ForConditionalGeneration")(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    stored = {ours.canonical_name(key): tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}
    sources = ours.tensor_sources()
    parameters = dict(ours.named_parameters())
    assert set(sources) == set(parameters)
    wanted: dict[str, tuple[int, ...]] = {}
    for ours_name, pieces in sources.items():
        shape = tuple(parameters[ours_name].shape)
        assert sum(rows for _, rows in pieces) == shape[0], ours_name
        for source, rows in pieces:
            wanted[source] = ours.stored_shape(source) or (rows, *shape[1:])
    assert {key: stored[key] for key in wanted} == wanted
    assert [key for key in stored if key not in wanted and not ours.ignored_tensor(key)] == []


def test_what_the_files_say_is_what_is_run() -> None:
    """Guards the figures of these models: visual tokens a tile, layers of the tower that run, longest context."""
    figures = {}
    for name, (_, raw) in HUB.items():
        config = ModelConfig.from_hf(transformers.AutoConfig.for_model(**raw).to_dict())
        figures[name.split("/")[1]] = (
            config.tokens_per_tile, config.vision.num_run_layers, config.text.max_positions, config.text.tie_embeddings
        )  # fmt: skip
    assert figures == {
        "llava-1.5-7b-hf": (576, 23, 4096, False),
        "llava-v1.6-mistral-7b-hf": (576, 23, 32768, False),
        "llava-onevision-qwen2-0.5b-ov-hf": (729, 26, 32768, True),
        "llava-interleave-qwen-0.5b-hf": (729, 25, 32768, True),
    }
