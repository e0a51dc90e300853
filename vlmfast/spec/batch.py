"""Drafters that propose for all sequences of a step at once, as a network does. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vlmfast.options import Sampling
from vlmfast.spec.tree import DraftTree
from vlmfast.types import ImageInput
from vlmfast_models.geometry import TilePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What a drafter that reads the prompt itself needs to know of a request."""

    prompt_ids: tuple[int, ...]
    images: tuple[ImageInput, ...]
    places: tuple[tuple[int, int], ...]
    """For each picture the tokens start .. end - 1 of the prompt that stand for it."""
    plans: tuple[TilePlan, ...]
    """For each picture the target's frames."""
    sampling: Sampling
    max_tokens: int
    """Prompt and answer together will not grow beyond this."""


class BatchDrafter(Protocol):
    """Proposes chains for many sequences. Whatever it proposes, answers stay as they are."""

    origin: str
    """Of all its drafts."""

    def chain_ms(self, length: int) -> float:
        """Typical time of so many tokens for all sequences of a step; 0 until it is known."""
        ...

    def begin(self, seq_id: int, asked: Asked) -> None:
        """A new sequence; costs nothing until a first draft is wanted."""
        ...

    def end(self, seq_id: int) -> None:
        """The sequence is over, or was never begun here: all that is kept of it goes."""
        ...

    def propose(self, wanted: Sequence[tuple[int, Sequence[int], int]]) -> list[DraftTree]:
        """A chain, or none, for each (seq_id, answer so far, most tokens)."""
        ...

    def reading_ms(self, seq_id: int) -> float:
        """Time spent so far on reading the sequence's prompt and pictures."""
        ...
