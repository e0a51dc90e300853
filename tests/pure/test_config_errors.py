"""Configurations: what is missing or not supported is named, both spellings are read, families list what they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from vlmfast.errors import ConfigError, UnsupportedModelError
from vlmfast_models.config import ModelConfig, PreprocessConfig
from vlmfast_models.families import FAMILIES, family

_RAW: dict[str, Any] = {
    "model_type": "idefics3",
    "scale_factor": 2,
    "image_token_id": 3,
    "tie_word_embeddings": True,
    "vision_config": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 32,
        "patch_size": 4,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    },
}
_PREPROCESS: dict[str, Any] = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}


def _with(path: str, value: Any) -> dict[str, Any]:
    """The configuration with one value changed, or removed where it is `...`."""
    raw = copy.deepcopy(_RAW)
    *parents, key = path.split(".")
    target = raw
    for parent in parents:
        target = target[parent]
    if value is ...:
        del target[key]
    else:
        target[key] = value
    return raw


def test_a_small_configuration_is_read() -> None:
    """Guards the base of the tests below, and the values that are filled in."""
    config = ModelConfig.from_hf(_RAW)
    assert (config.tokens_per_tile, config.connector.input_size, config.connector.output_size) == (16, 192, 64)
    assert (config.text.num_kv_heads, config.text.head_dim, config.text.rope_theta) == (4, 16, 10_000.0)
    assert config.text.tie_embeddings and config.vision.head_dim == 16


@pytest.mark.parametrize(
    "path",
    [
        "scale_factor", "image_token_id", "vision_config", "text_config", "model_type",
        *(f"vision_config.{key}" for key in _RAW["vision_config"]),
        *(f"text_config.{key}" for key in _RAW["text_config"] if key != "model_type"),
    ],
)  # fmt: skip
def test_missing_fields_are_named(path: str) -> None:
    """Guards incomplete checkpoints: the field and the place are told."""
    where, _, key = path.rpartition(".")
    with pytest.raises(ConfigError, match=rf"{where or 'config.json'} has no '{key}'"):
        ModelConfig.from_hf(_with(path, ...))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("vision_config.hidden_act", "relu6", r"activation 'relu6' is not supported; supported: silu, gelu"),
        ("text_config.hidden_act", "relu", r"activation 'relu' is not supported; supported: silu"),
        ("text_config.model_type", "mistral", r"decoder type 'mistral' is not supported; supported: llama"),
        ("text_config.rope_scaling", {"type": "linear", "factor": 2.0}, r"rope scaling 'linear' is not supported"),
        ("text_config.rope_parameters", {"rope_type": "yarn"}, r"rope scaling 'yarn' is not supported; supported: def"),
        ("text_config.rope_interleaved", True, "interleaved"),
        ("text_config.num_key_value_heads", 3, "4 heads can not share 3"),
        ("vision_config.num_attention_heads", 5, "48 is not a multiple of 5"),
        ("vision_config.image_size", [32, 40], r"image_size must be square, got \[32, 40\]"),
        ("vision_config.patch_size", [4, 2], "patch_size must be square"),
        ("scale_factor", 3, "8 patches a side can not be shuffled by scale_factor 3"),
    ],
)
def test_unsupported_values_are_named(path: str, value: Any, message: str) -> None:
    """Guards configurations that we do not run: the value is told, and what is supported."""
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(_with(path, value))


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, 7e5),
        ({"rope_scaling": None, "rope_theta": 3e5}, 3e5),
        ({}, 1e4),
    ],
)
def test_both_spellings_of_the_rotary_base(changes: dict[str, Any], theta: float) -> None:
    """Guards `rope_theta` of transformers 4 and `rope_parameters` of 5."""
    raw = copy.deepcopy(_RAW)
    raw["text_config"].update(changes)
    assert ModelConfig.from_hf(raw).text.rope_theta == theta


def test_pairs_of_equal_sides_are_squares() -> None:
    """Guards image_size and patch_size written as lists."""
    assert ModelConfig.from_hf(_with("vision_config.image_size", [32, 32])).vision.image_size == 32


@pytest.mark.parametrize("flag", ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"])
def test_preprocessing_switched_off_is_refused(flag: str) -> None:
    """Guards steps that our preprocessing always takes."""
    assert PreprocessConfig.from_hf({**_PREPROCESS, flag: True})
    with pytest.raises(ConfigError, match=f"{flag}=false is not supported"):
        PreprocessConfig.from_hf({**_PREPROCESS, flag: False})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "has no 'size'"),
        ({"size": {"longest_edge": 4}}, "has no 'max_image_size'"),
        ({"size": {"height": 4}, "max_image_size": {"longest_edge": 4}}, "size has no 'longest_edge'"),
        ({"size": {"longest_edge": 4}, "max_image_size": {}}, "max_image_size has no 'longest_edge'"),
    ],
)
def test_missing_preprocessing_fields_are_named(raw: dict[str, Any], message: str) -> None:
    """Guards preprocessor files of other families."""
    with pytest.raises(ConfigError, match=message):
        PreprocessConfig.from_hf(raw)


def test_unknown_families_name_the_known() -> None:
    """Guards the registry: the error says what is supported, and every entry has a class."""
    with pytest.raises(UnsupportedModelError, match=r"'llava' is not supported; supported: .*idefics3.*smolvlm"):
        family("llava")
    for model_type in FAMILIES:
        network = family(model_type)
        assert network.image_token and callable(network.plan) and callable(network.placeholder)
