"""Checkpoint configurations as plain frozen values: vision tower, connector, decoder, preprocessing.

`from_hf` reads the dictionaries of a checkpoint's own files (`config.json`, `preprocessor_config.json`); a field that
vlmfast needs and does not find is a `ConfigError` naming it. No torch, no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlmfast_models.errors import ConfigError
from vlmfast_models.fields import activation, count, need, positive, square
from vlmfast_models.rope import RopeConfig

TEXT_MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders that run, by their `model_type`."""
_TOWERS = ("clip_vision_model", "siglip_vision_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A ViT: pre-norm blocks over square patches, learned positions (CLIP, arXiv 2103.00020; SigLIP, 2303.15343)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    """Layers of the checkpoint; those above the last one in `feature_layers` are neither loaded nor run."""
    num_heads: int
    num_channels: int
    image_size: int
    """Side of the square tile the position table was made for, in pixels."""
    patch_size: int
    activation: str
    norm_eps: float
    class_token: bool = False
    """CLIP's form: a class token before the patches, a norm after the embedding, no bias in the patch embedding."""
    bucketed_positions: bool = True
    """Idefics3's way to look positions up (see `vit.position_ids`); else patch i has entry i."""
    feature_layers: tuple[int, ...] = ()
    """Hidden states that make the features, side by side; 0 is the embedding, i the output of layer i - 1. Empty: the
    last layer's output behind the final norm."""
    drop_first: bool = False
    """Leave the first token out of the features (the strategy "default" of LLaVA, made for the class token)."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patches_per_side(self) -> int:
        """Whole patches only: pixels that are left over at the right and bottom are not seen."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        return self.patches_per_side**2 + self.class_token

    @property
    def num_features(self) -> int:
        """Tokens that leave the tower for one tile."""
        return self.num_positions - self.drop_first

    @property
    def num_run_layers(self) -> int:
        """Layers that the features depend on."""
        return max(self.feature_layers, default=self.num_layers)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> VisionConfig:
        """Reads a `vision_config` of Idefics3, SigLIP or CLIP."""
        where = "vision_config"
        clip = config.get("model_type") == "clip_vision_model"
        vision = cls(
            hidden_size=count(config, "hidden_size", where),
            intermediate_size=count(config, "intermediate_size", where),
            num_layers=count(config, "num_hidden_layers", where),
            num_heads=count(config, "num_attention_heads", where),
            num_channels=count({"num_channels": 3, **config}, "num_channels", where),
            image_size=square(need(config, "image_size", where), f"{where}.image_size"),
            patch_size=square(need(config, "patch_size", where), f"{where}.patch_size"),
            activation=activation(config.get("hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh"), where),
            norm_eps=positive(config.get("layer_norm_eps", 1e-5 if clip else 1e-6), "layer_norm_eps", where),
            class_token=clip,
            bucketed_positions=config.get("model_type") not in _TOWERS,
        )
        if not 1 <= vision.patch_size <= vision.image_size:
            raise ConfigError(f"{where}: patch_size {vision.patch_size} does not fit image_size {vision.image_size}")
        if vision.bucketed_positions and vision.image_size % vision.patch_size:
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
    """A Llama-type decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP.

    Mistral is the same; Qwen2 has biases on q, k and v; Qwen3 norms each head's query and key.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence; not beyond a sliding window, within which it attends to everything as full attention does."""
    rope: RopeConfig
    norm_eps: float
    activation: str
    attention_bias: bool
    """Biases on the query, key and value projections."""
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool

    @property
    def rope_theta(self) -> float:
        return self.rope.theta

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, tie_embeddings: bool) -> TextConfig:
        where = "text_config"
        model_type = config.get("model_type", "llama")
        if model_type not in TEXT_MODELS:
            raise ConfigError(
                f"{where}: decoder type '{model_type}' is not supported; supported: {', '.join(TEXT_MODELS)}"
            )
        hidden_size = count(config, "hidden_size", where)
        num_heads = count(config, "num_attention_heads", where)
        num_kv_heads = _or(config, "num_key_value_heads", num_heads, where)
        if num_heads % num_kv_heads:
            raise ConfigError(f"{where}: {num_heads} heads can not share {num_kv_heads} key/value heads evenly")
        biased = bool(config.get("attention_bias", False)) and model_type in ("llama", "qwen3")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=count(config, "intermediate_size", where),
            num_layers=count(config, "num_hidden_layers", where),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_or(config, "head_dim", hidden_size // num_heads, where),
            vocab_size=count(config, "vocab_size", where),
            max_positions=min(count(config, "max_position_embeddings", where), _window(config, model_type, where)),
            rope=RopeConfig.from_hf(config, where),
            norm_eps=positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
            activation=activation(config.get("hidden_act", "silu"), where),
            attention_bias=biased or model_type == "qwen2",
            out_bias=biased,
            mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            tie_embeddings=tie_embeddings,
        )


def _window(config: Mapping[str, Any], model_type: str, where: str) -> int:
    """The sliding window of any layer, in tokens; without one, more than any context."""
    sliding = model_type == "mistral" or "sliding_attention" in (config.get("layer_types") or ())
    if model_type in ("qwen2", "qwen3") and config.get("layer_types") is None:
        sliding = bool(config.get("use_sliding_window", False))
    if not sliding or config.get("sliding_window") is None:
        return 2**31
    return count(config, "sliding_window", where)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Into the decoder's width: pixel shuffle and one linear layer, or two linear layers with an activation between."""

    input_size: int
    output_size: int
    scale_factor: int = 1
    """Pixel shuffle: patches a side that become one token."""
    activation: str | None = None
    """Of the two-layer form; None is the pixel shuffle."""
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the networks of one checkpoint need to know."""

    model_type: str
    vision: VisionConfig
    text: TextConfig
    connector: ConnectorConfig
    image_token_id: int
    pinpoints: tuple[tuple[int, int], ...] = ()
    """LLaVA-NeXT: the canvases (width, height) in pixels that pictures are fitted to."""
    max_grid_tiles: int | None = None
    """LLaVA-OneVision: tiles' worth of visual tokens that a picture's grid is pooled down to; None never pools."""

    @property
    def tokens_per_tile(self) -> int:
        """Visual tokens of one tile in the decoder's width."""
        return self.vision.num_features // self.connector.scale_factor**2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` dictionary (also one expanded by transformers with its defaults)."""
        model_type = str(need(config, "model_type", "config.json"))
        vision = VisionConfig.from_hf(need(config, "vision_config", "config.json"))
        text = TextConfig.from_hf(
            need(config, "text_config", "config.json"), tie_embeddings=bool(config.get("tie_word_embeddings", False))
        )
        token_key = "image_token_index" if "image_token_index" in config else "image_token_id"
        image_token_id = int(need(config, token_key, "config.json"))
        if model_type.startswith("llava"):
            return _llava(config, model_type, vision, text, image_token_id)
        scale = count(config, "scale_factor", "config.json")
        if vision.patches_per_side % scale:
            raise ConfigError(
                f"config.json: {vision.patches_per_side} patches a side can not be shuffled by scale_factor {scale}"
            )
        return cls(
            model_type=model_type,
            vision=vision,
            text=text,
            connector=ConnectorConfig(
                input_size=vision.hidden_size * scale**2, output_size=text.hidden_size, scale_factor=scale
            ),
            image_token_id=image_token_id,
        )


def _llava(
    config: Mapping[str, Any], model_type: str, vision: VisionConfig, text: TextConfig, image_token_id: int
) -> ModelConfig:
    """LLaVA, LLaVA-NeXT and LLaVA-OneVision: which hidden states are the features, and the two-layer connector."""
    where = "config.json"
    tower = config["vision_config"].get("model_type")
    if tower not in _TOWERS:
        raise ConfigError(f"vision_config: tower '{tower}' is not supported; supported: {', '.join(_TOWERS)}")
    chosen = need(config, "vision_feature_layer", where)
    chosen = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
    states = vision.num_layers + 1
    if not chosen or not all(isinstance(layer, int) and -states <= layer < states for layer in chosen):
        raise ConfigError(f"{where}: vision_feature_layer {chosen} is outside the tower's {vision.num_layers} layers")
    if not any(layer % states for layer in chosen):
        raise ConfigError(f"{where}: vision_feature_layer {chosen} runs no layer of the tower")
    strategy = need(config, "vision_feature_select_strategy", where)
    if strategy not in ("default", "full"):
        raise ConfigError(f"{where}: vision_feature_select_strategy '{strategy}' is not supported: default, full")
    vision = replace(vision, feature_layers=tuple(layer % states for layer in chosen), drop_first=strategy == "default")
    tiled = model_type != "llava"
    if tiled and vision.num_features != vision.patches_per_side**2:
        raise ConfigError(f"{where}: vision_feature_select_strategy '{strategy}' does not leave one feature a patch")
    max_grid_tiles = None
    if model_type == "llava_onevision":
        ratio = str(need(config, "vision_aspect_ratio", where))
        most = ratio.removeprefix("anyres_max_")
        if most == ratio or not most.isdecimal() or int(most) < 1:
            raise ConfigError(f"{where}: vision_aspect_ratio '{ratio}' is not supported; supported: anyres_max_N")
        max_grid_tiles = int(most)
    return ModelConfig(
        model_type=model_type,
        vision=vision,
        text=text,
        connector=ConnectorConfig(
            input_size=vision.hidden_size * len(chosen),
            output_size=text.hidden_size,
            activation=activation(need(config, "projector_hidden_act", where), where),
            bias=bool(config.get("multimodal_projector_bias", True)),
        ),
        image_token_id=image_token_id,
        pinpoints=read_pinpoints(need(config, "image_grid_pinpoints", where), where) if tiled else (),
        max_grid_tiles=max_grid_tiles,
    )


def read_pinpoints(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    """Canvases (width, height) from the (height, width) pairs of a checkpoint file, in its order."""
    if not value or not all(
        len(pair) == 2 and all(isinstance(side, int) and side > 0 for side in pair) for pair in value
    ):
        raise ConfigError(f"{where}: image_grid_pinpoints must be pairs of pixels, got {value!r}")
    return tuple((int(width), int(height)) for height, width in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessConfig:
    """How a checkpoint wants its pixels: the image processor's part of its files."""

    tile_size: int
    """Side of the square frames that the tower takes, in pixels."""
    resample: int
    """Pillow's resampling filter number (1 is Lanczos, 3 bicubic)."""
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    longest_edge: int = 0
    """Idefics3: the picture is scaled, up or down, until its longer side has this many pixels."""
    split: bool = False
    """Idefics3: cut into tiles beside the global frame; off means one square frame."""
    shortest_edge: int = 0
    """LLaVA: the picture is scaled until its shorter side has this many pixels, and its middle is cut out; 0 means
    that both sides are scaled to the tile's."""
    pad_square: bool = False
    """LLaVA: the picture is first put on a square of the mean colour."""
    pinpoints: tuple[tuple[int, int], ...] = ()
    """LLaVA-NeXT: the canvases (width, height) that a picture may be fitted to, whole tiles."""

    def same_pixels(self, other: PreprocessConfig) -> bool:
        """Whether both make the same numbers of a picture's frames where these are cut alike."""
        alike = replace(
            other,
            longest_edge=self.longest_edge,
            split=self.split,
            shortest_edge=self.shortest_edge,
            pinpoints=self.pinpoints,
        )
        return alike == self

    @property
    def mean_colour(self) -> tuple[int, ...]:
        """The colour around pictures that are made square."""
        return tuple(int(value * 255) for value in self.mean)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, model_type: str = "idefics3") -> PreprocessConfig:
        """Reads the dictionary of an image processor of the family that `model_type` belongs to."""
        where = "preprocessor_config.json"
        for flag in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not config.get(flag, True):
                raise ConfigError(f"{where}: {flag}=false is not supported")
        llava = model_type.startswith("llava")
        rule = _llava_rule(config, where, tiled=model_type != "llava") if llava else _idefics3_rule(config, where)
        mean, std = (
            need(config, name, where) if llava else config.get(name, (0.5,) * 3) for name in ("image_mean", "image_std")
        )
        if len(mean) != 3 or len(std) != 3:
            raise ConfigError(f"{where}: image_mean and image_std must have three numbers, got {mean!r} and {std!r}")
        resample = config.get("resample", 3 if llava else 1)
        if resample not in range(6):
            raise ConfigError(f"{where}: 'resample' must be one of Pillow's filters 0 to 5, got {resample!r}")
        return cls(
            **rule,
            resample=resample,
            rescale_factor=positive(config.get("rescale_factor", 1 / 255), "rescale_factor", where),
            mean=tuple(float(value) for value in mean),
            std=tuple(positive(value, "image_std", where) for value in std),
        )


def _idefics3_rule(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    size = need(config, "size", where)
    tile = need(config, "max_image_size", where)
    return {
        "longest_edge": count(size, "longest_edge", f"{where} size"),
        "tile_size": count(tile, "longest_edge", f"{where} max_image_size"),
        "split": bool(config.get("do_image_splitting", True)),
    }


def _llava_rule(config: Mapping[str, Any], where: str, *, tiled: bool) -> dict[str, Any]:
    """CLIP's, SigLIP's and the LLaVA processors': a size, and a middle cut out of it where there is a crop size."""
    size = need(config, "size", where)
    size = {"shortest_edge": size} if isinstance(size, int) else size
    shortest = count(size, "shortest_edge", f"{where} size") if size.get("shortest_edge") else 0
    exact = 0 if shortest else square([need(size, side, f"{where} size") for side in ("width", "height")], "size")
    crop = config.get("crop_size") if config.get("do_center_crop", True) else None
    if isinstance(crop, Mapping):
        crop = square([need(crop, side, f"{where} crop_size") for side in ("width", "height")], "crop_size")
    tile = crop or exact or (shortest if tiled else 0)
    if not tile or (exact and tile != exact) or (tiled and shortest and tile != shortest):
        raise ConfigError(f"{where}: size {size} and crop_size {crop} do not lead to one square frame")
    processor = str(config.get("image_processor_type") or "")
    pinpoints = read_pinpoints(need(config, "image_grid_pinpoints", where), where) if tiled else ()
    if any(side % tile for canvas in pinpoints for side in canvas):
        raise ConfigError(f"{where}: image_grid_pinpoints must be multiples of the tile's {tile} pixels")
    return {
        "tile_size": tile,
        "shortest_edge": 0 if tiled else shortest,
        "pad_square": not tiled and bool(config.get("do_pad")) and processor.startswith("Llava"),
        "pinpoints": pinpoints,
    }


def _or(config: Mapping[str, Any], key: str, default: int, where: str) -> int:
    """A count, or the default where the key is absent, null or 0."""
    return count({key: config.get(key) or default}, key, where)
