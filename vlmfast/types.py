"""The values that cross the public surface: pictures going in, chunks and answers coming out. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInput:
    """A picture. Its identity is its content: never a path, never an object id."""

    width: int
    height: int
    digest: str
    """sha256 over mode, width, height and pixels, in hex."""
    name: str
    """How to call it in messages: a file name, or what kind of object it was."""
    source: npt.NDArray[np.uint8] | Callable[[], npt.NDArray[np.uint8]] = field(repr=False)
    """The pixels, or what decodes them: a picture whose features are known need not be decoded."""

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """RGB, [H, W, 3], upright, alpha flattened."""
        return self.source() if callable(self.source) else self.source


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, or a stop text appeared."""
    LENGTH = "length"
    """`max_new_tokens` or the model's context was reached."""
    CANCELLED = "cancelled"
    """The caller went away."""


class FeatureSource(StrEnum):
    """Where a picture's features came from."""

    ENCODER = "encoder"
    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an answer cost, in tokens, and on what it was computed."""

    prompt_tokens: int
    """All tokens before the answer, visual ones included."""
    cached_tokens: int
    """How many of these had their keys and values already: the beginning of an earlier prompt or chat."""
    visual_tokens: int
    """Tokens of the pictures in the prompt."""
    visual_tokens_before: int
    """As many as there would be without a reducer (`Vision.reduce`)."""
    visual_tokens_after: int
    """As many as reach the last layer of the decoder: fewer than in the prompt with `Vision.fastv`."""
    completion_tokens: int
    draft_tokens: int
    """Tokens proposed ahead and verified."""
    accepted_tokens: int
    """How many of these were right: passes through the decoder that were saved."""
    num_images: int
    num_tiles: int
    """Frames of the pictures for the vision tower."""
    images_encoded: int
    """Pictures that went through the vision tower for this answer."""
    images_from_ram: int
    """Pictures whose features were in memory."""
    images_from_disk: int
    """Pictures whose features were on disk."""
    images_from_prefix: int
    """Pictures among the cached tokens, which needed no features."""
    fewer_tokens: tuple[str, ...]
    """What was asked for in `Vision`, by name, for example "ToMe r=0.08"; empty if all was to be computed on."""
    vision_weights: str
    """Number format of the vision tower's weights: as `weights`, or bfloat16 or float32 beside a quantised decoder."""
    weights: str
    """Number format of the decoder's weights: "float32", "bfloat16", "float16", or the lossy "int8" and "int4"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, in milliseconds of wall clock."""

    load_ms: float
    """Loading the model, in the first answer after it; 0 in the others. Not part of the times below."""
    image_ms: float
    """Loading the pictures and building the prompt."""
    encode_ms: float
    """Resampling to tiles, vision tower and connector."""
    prefill_ms: float
    """Decoder passes over the prompt."""
    first_token_ms: float
    """From the call to the first token."""
    decode_ms: float
    """Decoder passes after the first token."""
    token_ms: float
    """`decode_ms` a token."""
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer; `str(answer)` is its text."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    token_ids: tuple[int, ...]
    """The generated tokens, without the one that ended the answer."""
    kept_places: tuple[int, ...] | None = None
    """With `Vision.fastv`: the places in the prompt of the visual tokens that reach the last layer."""

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: text, finish_reason, usage, timings (rounded to microseconds)."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason.value,
            "usage": asdict(self.usage),
            "timings": {name: round(value, 3) for name, value in asdict(self.timings).items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of streamed text, whole characters only. The last chunk carries the answer."""

    text: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionError:
    """A picture of a captioning job that could not be answered; the others are not touched by it."""

    image: str
    """How the picture was given: its path, or its kind and place in the input."""
    kind: str
    """The stable code of the error."""
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"image": self.image, "error": {"kind": self.kind, "message": self.message}}
