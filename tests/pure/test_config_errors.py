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
        ("text_config.model_type", "gemma", r"decoder type 'gemma' is not supported; supported: llama, mistral, qwen2"),
        ("text_config.rope_scaling", {"type": "longrope"}, r"rope scaling 'longrope' is not supported; supported: def"),
        ("text_config.rope_scaling", {"type": "linear"}, r"rope scaling has no 'factor'"),
        ("text_config.rope_parameters", {"rope_type": "yarn", "factor": -1}, r"'factor' must be a positive number"),
        ("text_config.rope_parameters", {"partial_rotary_factor": 0.5}, "partial rotary"),
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


_LLAVA: dict[str, Any] = {
    **{key: value for key, value in _RAW.items() if key != "scale_factor"},
    "model_type": "llava_next",
    "vision_config": {**_RAW["vision_config"], "model_type": "clip_vision_model"},
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "image_grid_pinpoints": [[32, 64], [64, 32]],
}


def test_a_small_llava_configuration_is_read() -> None:
    """Guards which hidden states are the features, and that layers behind them are not run."""
    config = ModelConfig.from_hf(_LLAVA)
    vision = config.vision
    assert (vision.num_layers, vision.num_run_layers, vision.feature_layers, vision.drop_first) == (2, 1, (1,), True)
    assert (vision.num_positions, config.tokens_per_tile, config.pinpoints) == (65, 64, ((64, 32), (32, 64)))
    both = ModelConfig.from_hf({**_LLAVA, "vision_feature_layer": [0, -1]})
    assert (both.vision.feature_layers, both.vision.num_run_layers, both.connector.input_size) == ((0, 2), 2, 96)
    assert not vision.bucketed_positions and ModelConfig.from_hf(_RAW).vision.bucketed_positions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": -4}, r"vision_feature_layer \[-4\] is outside the tower's 2 layers"),
        ({"vision_feature_layer": [1, 3]}, "is outside"),
        ({"vision_feature_layer": []}, "is outside"),
        ({"vision_feature_layer": [0, -3]}, "runs no layer"),
        ({"vision_feature_select_strategy": "cls"}, "'cls' is not supported: default, full"),
        ({"vision_feature_select_strategy": "full"}, "does not leave one feature a patch"),
        ({"projector_hidden_act": "swish"}, "activation 'swish'"),
        ({"image_grid_pinpoints": [[32, 0]]}, "must be pairs of pixels"),
        ({"image_grid_pinpoints": None}, "has no 'image_grid_pinpoints'"),
        ({"vision_config": {**_RAW["vision_config"], "model_type": "pixtral"}}, "tower 'pixtral' is not supported"),
        ({"model_type": "llava_onevision", "vision_aspect_ratio": "pad"}, "'pad' is not supported; supported: anyres"),
        ({"model_type": "llava_onevision", "vision_aspect_ratio": "anyres_max_0"}, "'anyres_max_0' is not supported"),
    ],
    ids=str,
)
def test_llava_values_that_do_not_run(changes: dict[str, Any], message: str) -> None:
    """Guards LLaVA's own fields."""
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**_LLAVA, **changes})


@pytest.mark.parametrize(
    ("model_type", "fields", "longest"),
    [
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": None}, 256),
        ("mistral", {"sliding_window": 1000}, 256),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 60}, 60),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 60}, 256),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 60}, 60),
        ("qwen3", {"layer_types": ["full_attention"] * 2, "sliding_window": 60}, 256),
        ("llama", {"sliding_window": 60}, 256),
    ],
)
def test_a_sliding_window_bounds_the_context(model_type: str, fields: dict[str, Any], longest: int) -> None:
    """Guards windows that bite: beyond them full attention would give other answers, so they end the context."""
    text = {**_RAW["text_config"], "model_type": model_type, **fields}
    assert ModelConfig.from_hf({**_RAW, "text_config": text}).text.max_positions == longest


def test_decoders_differ_in_their_biases_and_norms() -> None:
    """Guards the four decoder types: whose q, k, v and o have biases, and whose heads are normed."""
    fields = {}
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        for biased in (False, True):
            raw = {**_RAW["text_config"], "model_type": model_type, "attention_bias": biased}
            text = ModelConfig.from_hf({**_RAW, "text_config": raw}).text
            fields[model_type, biased] = text.attention_bias, text.out_bias, text.qk_norm
    assert fields == {
        ("llama", False): (False, False, False), ("llama", True): (True, True, False),
        ("mistral", False): (False, False, False), ("mistral", True): (False, False, False),
        ("qwen2", False): (True, False, False), ("qwen2", True): (True, False, False),
        ("qwen3", False): (False, False, True), ("qwen3", True): (True, True, True),
    }  # fmt: skip


_CLIP_PROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
    "image_mean": [0.5] * 3,
    "image_std": [0.25] * 3,
}


@pytest.mark.parametrize(
    ("changes", "tile", "shortest"),
    [
        ({}, 32, 32),
        ({"size": 32, "crop_size": 32}, 32, 32),
        ({"size": {"shortest_edge": 21}}, 32, 21),
        ({"size": {"height": 32, "width": 32}, "crop_size": None}, 32, 0),
        ({"size": {"height": 32, "width": 32}, "do_center_crop": False, "crop_size": 10}, 32, 0),
    ],
    ids=str,
)
def test_frames_of_clip_and_siglip_processors(changes: dict[str, Any], tile: int, shortest: int) -> None:
    """Guards the spellings of size and crop_size on the hub."""
    config = PreprocessConfig.from_hf({**_CLIP_PROCESSOR, **changes}, model_type="llava")
    assert (config.tile_size, config.shortest_edge, config.resample) == (tile, shortest, 3)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llava", {"do_center_crop": False}, "do not lead to one square frame"),
        ("llava", {"size": {"height": 32, "width": 30}, "crop_size": None}, "size must be square"),
        ("llava", {"crop_size": {"height": 32}}, "crop_size has no 'width'"),
        ("llava", {"size": {}}, "size has no 'width'"),
        ("llava", {"image_mean": None}, "has no 'image_mean'"),
        ("llava_next", {}, "has no 'image_grid_pinpoints'"),
        ("llava_next", {"image_grid_pinpoints": [[32, 33]]}, "must be multiples of the tile's 32"),
        ("llava_next", {"image_grid_pinpoints": [[32, 32]], "size": {"shortest_edge": 30}}, "one square frame"),
    ],
    ids=str,
)
def test_llava_processors_that_do_not_run(model_type: str, changes: dict[str, Any], message: str) -> None:
    """Guards settings that would lead to frames that the tower can not take."""
    with pytest.raises(ConfigError, match=message):
        PreprocessConfig.from_hf({**_CLIP_PROCESSOR, **changes}, model_type=model_type)


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
    with pytest.raises(UnsupportedModelError, match=r"'pali' is not supported; supported: idefics3, llava, .*smolvlm"):
        family("pali")
    for model_type in FAMILIES:
        network = family(model_type)
        assert network.image_token and callable(network.plan) and callable(network.placeholder)
