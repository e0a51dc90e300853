"""Rotary positions as a checkpoint configures them. No torch: `vlmfast_kernels.ops.rope` does the arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmfast_models.errors import ConfigError
from vlmfast_models.fields import count, need, positive

_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: the base, and how the frequencies are changed for contexts longer than first trained on.

    The kinds are those of transformers' `rope_parameters`: "default", "linear", "yarn" (arXiv 2309.00071) and "llama3".
    "dynamic" changes nothing within `max_position_embeddings`, which we never go beyond, and is read as "default".
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    """Positions of the first training (yarn, llama3)."""
    low: float = 0.0
    """llama3: `low_freq_factor`; yarn: `beta_slow`."""
    high: float = 0.0
    """llama3: `high_freq_factor`; yarn: `beta_fast`."""
    magnitude: float = 1.0
    """Factor on cosines and sines (yarn)."""
    truncate: bool = True
    """yarn: bounds of the ramp are rounded to whole dimensions."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> RopeConfig:
        """Reads either spelling: `rope_theta` and `rope_scaling`, or `rope_parameters` of transformers 5."""
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _KINDS:
            raise ConfigError(f"{where}: rope scaling '{kind}' is not supported; supported: {', '.join(_KINDS)}")
        if config.get("rope_interleaved"):
            raise ConfigError(f"{where}: interleaved rotary positions are not supported")
        if (given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ConfigError(f"{where}: partial rotary positions are not supported")
        theta = given.get("rope_theta", config.get("rope_theta"))
        theta = positive(10_000.0 if theta is None else theta, "rope_theta", where)
        if kind in ("default", "dynamic"):
            return cls(theta=theta)
        factor = positive(need(given, "factor", f"{where} rope scaling"), "factor", where)
        if kind == "linear":
            return cls(theta=theta, kind=kind, factor=factor)
        original = given.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        original = int(original or count(config, "max_position_embeddings", where))
        if kind == "llama3":
            low, high = (positive(need(given, f"{end}_freq_factor", where), end, where) for end in ("low", "high"))
            if low >= high:
                raise ConfigError(f"{where} rope scaling: low_freq_factor {low} must be below high_freq_factor {high}")
            return cls(theta=theta, kind=kind, factor=factor, original_positions=original, low=low, high=high)
        magnitude = given.get("attention_factor")
        if magnitude is None:
            magnitude = _yarn_magnitude(factor, given.get("mscale"), given.get("mscale_all_dim"))
        return cls(
            theta=theta,
            kind=kind,
            factor=factor,
            original_positions=original,
            low=positive(given.get("beta_slow") or 1, "beta_slow", where),
            high=positive(given.get("beta_fast") or 32, "beta_fast", where),
            magnitude=positive(magnitude, "attention_factor", where),
            truncate=bool(given.get("truncate", True)),
        )


def _yarn_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def scaled(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    return scaled(mscale) / scaled(mscale_all_dim) if mscale and mscale_all_dim else scaled(1.0)
