"""The values that cross the public surface: pictures going in, chunks and answers coming out. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInput:
    """A decoded picture. Its identity is its content: never a path, never an object id."""

    pixels: npt.NDArray[np.uint8]
    """RGB, [H, W, 3], upright, alpha flattened."""
    digest: str
    """sha256 over mode, width, height and pixels, in hex."""
    name: str
    """How to call it in messages: a file name, or what kind of object it was."""

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, or a stop text appeared."""
    LENGTH = "length"
    """`max_new_tokens` or the model's context was reached."""
    CANCELLED = "cancelled"
    """The caller went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an answer cost, in tokens."""

    prompt_tokens: int
    """All tokens before the answer, visual ones included."""
    visual_tokens: int
    completion_tokens: int
    num_images: int
    num_tiles: int
    """Frames that the vision tower encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, in milliseconds of wall clock."""

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
