"""Every option with its default, as frozen values that check themselves. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

from vlmfast.errors import OptionError


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise OptionError(f"{name} must be {rule}, got {value!r}")


def _require_kind(kind: type, name: str, value: object, rule: str) -> None:
    """A value of another type would fail in the middle of a step, where others are computed beside it."""
    _require(isinstance(value, kind) and not isinstance(value, bool), name, value, rule)


_SAMPLING_KINDS: dict[str, type] = {
    "max_new_tokens": int,
    "top_k": int,
    "seed": int,
    "temperature": float,
    "top_p": float,
    "repetition_penalty": float,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen and when to stop.

    Raises:
        OptionError: a value is out of its range.
    """

    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token (greedy); larger values draw from a flatter distribution."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens whose probabilities reach this sum; 1 is off."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the positive, multiplies the negative scores of tokens seen before, prompt included; 1 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the text itself is not returned."""
    seed: int | None = None
    """Makes drawing repeatable; without it every run draws differently."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            _require_kind(Iterable, "stop", self.stop, "a text or several")
            object.__setattr__(self, "stop", tuple(self.stop))
        for name in ("max_new_tokens", "top_k", *(("seed",) if self.seed is not None else ())):
            _require_kind(Integral, name, getattr(self, name), "a whole number")
        for name in ("temperature", "top_p", "repetition_penalty"):
            _require_kind(Real, name, getattr(self, name), "a number")
        _require(self.max_new_tokens > 0, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(0.0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or a positive number")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        penalty = self.repetition_penalty
        _require(1e-3 <= penalty <= 1e3, "repetition_penalty", penalty, "between 0.001 and 1000")
        _require(
            all(isinstance(text, str) and text for text in self.stop), "stop", self.stop, "texts that are not empty"
        )
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        for name, kind in _SAMPLING_KINDS.items():  # numpy's numbers and fractions are numbers, torch wants Python's
            if getattr(self, name) is not None:
                object.__setattr__(self, name, kind(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a single request may cost; pictures are checked from their header, before decoding.

    Raises:
        OptionError: a limit is below 1.
    """

    max_image_pixels: int = 178_956_970
    """Width times height of one picture (Pillow's own error threshold)."""
    max_image_bytes: int = 256 * 2**20
    """Encoded size of one picture."""
    max_images: int = 64
    """Pictures in one request."""

    def __post_init__(self) -> None:
        for name in ("max_image_pixels", "max_image_bytes", "max_images"):
            _require_kind(Integral, name, getattr(self, name), "a whole number")
            _require(getattr(self, name) > 0, name, getattr(self, name), "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How much one engine step takes on.

    Raises:
        OptionError: a value is below 1.
    """

    max_sequences: int = 8
    """Sequences computed at the same time; the others wait."""
    max_step_tokens: int = 4096
    """Tokens in one decoder pass; longer prompts are computed in chunks."""
    max_encode_tiles: int = 4
    """Tiles in one pass of the vision tower; bounds its memory."""

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_step_tokens", "max_encode_tiles"):
            _require_kind(Integral, name, getattr(self, name), "a whole number")
            _require(getattr(self, name) > 0, name, getattr(self, name), "at least 1")
