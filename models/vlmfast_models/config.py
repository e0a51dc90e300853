"""Checkpoint configurations as plain frozen values: vision tower, connector, decoder, preprocessing.

`from_hf` reads the dictionaries of a checkpoint's own files (`config.json`, `preprocessor_config.json`); a field that
vlmfast needs and does not find is a `ConfigError` naming it. No torch, no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmfast_models.errors import ConfigError

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu")


def _need(config: Mapping[str, Any], key: str, where: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{where} has no '{key}'; the checkpoint's configuration is incomplete")
    return value


def _count(config: Mapping[str, Any], key: str, where: str) -> int:
    """A whole number of at least 1."""
    value = _need(config, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ConfigError(f"{where}: '{key}' must be a whole number of at least 1, got {value!r}")
    return value


def _positive(value: Any, key: str, where: str) -> float:
    """A finite number above 0."""
    number = float(value)
    if not 0.0 < number < float("inf"):
        raise ConfigError(f"{where}: '{key}' must be a positive number, got {value!r}")
    return number


def _activation(name: str, where: str) -> str:
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{where}: activation '{name}' is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return name


def _square(value: Any, where: str) -> int:
    """The side of a square given as an int or as a pair of equal ints."""
    if isinstance(value, (list, tuple)):
        if len(value) != 2 or value[0] != value[1]:
            raise ConfigError(f"{where} must be square, got {list(value)}")
        value = value[0]
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A ViT: pre-norm blocks over square patches with learned positions (SigLIP, arXiv 2303.15343)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    """Side of the square tile the position table was made for, in pixels."""
    patch_size: int
    activation: str
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> VisionConfig:
        where = "vision_config"
        vision = cls(
            hidden_size=_count(config, "hidden_size", where),
            intermediate_size=_count(config, "intermediate_size", where),
            num_layers=_count(config, "num_hidden_layers", where),
            num_heads=_count(config, "num_attention_heads", where),
            num_channels=int(config.get("num_channels", 3)),
            image_size=_square(_need(config, "image_size", where), f"{where}.image_size"),
            patch_size=_square(_need(config, "patch_size", where), f"{where}.patch_size"),
            activation=_activation(config.get("hidden_act", "gelu_pytorch_tanh"), where),
            norm_eps=_positive(config.get("layer_norm_eps", 1e-6), "layer_norm_eps", where),
        )
        if vision.image_size < 1 or vision.patch_size < 1 or vision.image_size % vision.patch_size:
            raise ConfigError(
                f"{where}: image_size {vision.image_size} is not a multiple of patch_size {vision.patch_size}"
            )
        if vision.hidden_size % vision.num_heads:
            raise ConfigError(
                f"{where}: hidden_size {vision.hidden_size} is not a multiple of {vision.num_heads} attention heads"
            )
        return vision


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """A Llama-type decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    activation: str
    attention_bias: bool
    mlp_bias: bool
    tie_embeddings: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, tie_embeddings: bool) -> TextConfig:
        where = "text_config"
        model_type = config.get("model_type", "llama")
        if model_type != "llama":
            raise ConfigError(f"{where}: decoder type '{model_type}' is not supported; supported: llama")
        hidden_size = _count(config, "hidden_size", where)
        num_heads = _count(config, "num_attention_heads", where)
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"{where}: {num_heads} heads can not share {num_kv_heads} key/value heads evenly")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size", where),
            num_layers=_count(config, "num_hidden_layers", where),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            vocab_size=_count(config, "vocab_size", where),
            max_positions=_count(config, "max_position_embeddings", where),
            rope_theta=_rope_theta(config, where),
            norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
            activation=_activation(config.get("hidden_act", "silu"), where),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_embeddings=tie_embeddings,
        )


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    """Rotary base from either spelling (`rope_theta`, or `rope_parameters` of transformers 5); scaling is refused."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{where}: rope scaling '{kind}' is not supported; supported: default")
    if config.get("rope_interleaved"):
        raise ConfigError(f"{where}: interleaved rotary positions are not supported")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return _positive(10_000.0 if theta is None else theta, "rope_theta", where)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Pixel shuffle by `scale_factor` on each side, then one linear layer into the decoder's width."""

    input_size: int
    output_size: int
    scale_factor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the networks of one checkpoint need to know."""

    model_type: str
    vision: VisionConfig
    text: TextConfig
    connector: ConnectorConfig
    image_token_id: int

    @property
    def tokens_per_tile(self) -> int:
        """Visual tokens the decoder sees for one tile."""
        return (self.vision.patches_per_side // self.connector.scale_factor) ** 2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` dictionary (also one expanded by transformers with its defaults)."""
        vision = VisionConfig.from_hf(_need(config, "vision_config", "config.json"))
        text = TextConfig.from_hf(
            _need(config, "text_config", "config.json"), tie_embeddings=bool(config.get("tie_word_embeddings", False))
        )
        scale = _count(config, "scale_factor", "config.json")
        if vision.patches_per_side % scale:
            raise ConfigError(
                f"config.json: {vision.patches_per_side} patches a side can not be shuffled by scale_factor {scale}"
            )
        return cls(
            model_type=str(_need(config, "model_type", "config.json")),
            vision=vision,
            text=text,
            connector=ConnectorConfig(
                input_size=vision.hidden_size * scale**2, output_size=text.hidden_size, scale_factor=scale
            ),
            image_token_id=int(_need(config, "image_token_id", "config.json")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessConfig:
    """How a checkpoint wants its pixels: `preprocessor_config.json` of the Idefics3 / SmolVLM image processors."""

    longest_edge: int
    """The picture is scaled, up or down, until its longer side has this many pixels."""
    tile_size: int
    split: bool
    """Cut into tiles beside the global frame; off means one square frame."""
    resample: int
    """Pillow's resampling filter number (1 is Lanczos)."""
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> PreprocessConfig:
        where = "preprocessor_config.json"
        for flag in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not config.get(flag, True):
                raise ConfigError(f"{where}: {flag}=false is not supported")
        size = _need(config, "size", where)
        tile = _need(config, "max_image_size", where)
        mean, std = config.get("image_mean", (0.5,) * 3), config.get("image_std", (0.5,) * 3)
        if len(mean) != 3 or len(std) != 3:
            raise ConfigError(f"{where}: image_mean and image_std must have three numbers, got {mean!r} and {std!r}")
        resample = config.get("resample", 1)
        if resample not in range(6):
            raise ConfigError(f"{where}: 'resample' must be one of Pillow's filters 0 to 5, got {resample!r}")
        return cls(
            longest_edge=_count(size, "longest_edge", f"{where} size"),
            tile_size=_count(tile, "longest_edge", f"{where} max_image_size"),
            split=bool(config.get("do_image_splitting", True)),
            resample=resample,
            rescale_factor=_positive(config.get("rescale_factor", 1 / 255), "rescale_factor", where),
            mean=tuple(float(value) for value in mean),
            std=tuple(_positive(value, "image_std", where) for value in std),
        )
