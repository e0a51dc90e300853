"""Reads single values of a checkpoint's dictionaries; what is missing or wrong is a `ConfigError` naming it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmfast_models.errors import ConfigError

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu")


def need(config: Mapping[str, Any], key: str, where: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{where} has no '{key}'; the checkpoint's configuration is incomplete")
    return value


def count(config: Mapping[str, Any], key: str, where: str) -> int:
    """A whole number of at least 1."""
    value = need(config, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ConfigError(f"{where}: '{key}' must be a whole number of at least 1, got {value!r}")
    return value


def positive(value: Any, key: str, where: str) -> float:
    """A finite number above 0."""
    number = float(value)
    if not 0.0 < number < float("inf"):
        raise ConfigError(f"{where}: '{key}' must be a positive number, got {value!r}")
    return number


def activation(name: str, where: str) -> str:
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{where}: activation '{name}' is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return name


def square(value: Any, where: str) -> int:
    """The side of a square given as an int or as a pair of equal ints."""
    if isinstance(value, (list, tuple)):
        if len(value) != 2 or value[0] != value[1]:
            raise ConfigError(f"{where} must be square, got {list(value)}")
        value = value[0]
    return int(value)
