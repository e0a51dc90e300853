"""What is to be left out of a prompt inside the decoder. No torch: it is known before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlmfast.options import Keep
from vlmfast.prune.counts import num_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn with pictures, as places in its prompt."""

    rank_at: int
    """The token whose attention ranks: the last one before the answer to this turn."""
    visual: tuple[int, ...]
    """The visual tokens of all its pictures, ascending and before `rank_at`."""
    seed: int = 0
    """Of the random control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """FastV of one prompt."""

    turns: tuple[Turn, ...]
    steps: tuple[tuple[int, Keep], ...]
    """(layer, keep) as in `FastV.steps`."""
    rank: Literal["attention", "random"] = "attention"

    def active_steps(self, num_layers: int) -> dict[int, Keep]:
        """The steps that leave something out, by layer."""
        return {
            layer: keep
            for layer, keep in self.steps
            if layer < num_layers and any(num_kept(keep, len(turn.visual)) < len(turn.visual) for turn in self.turns)
        }
