"""How the pocket and its draft model are trained: how much of every stage, of which pictures, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlmfast.train import shape
from vlmfast.train.optimise import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One kind of pictures among the lessons."""

    count: int
    share: float
    """Of the steps, beside the other kinds; 0 leaves it out."""
    global_share: float
    """Of its steps: pictures by their global frame alone."""
    dense_share: float = 0.0
    """Of the frames that the tower learns on alone. Of other than the crowded pictures only those that bear letters,
    which are what it learns slowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How much of everything."""

    size: shape.Size
    decoder: Schedule
    """Connector and decoder alone, on the tower's features, which are computed once."""
    dense: Schedule | None = None
    """The tower alone, before; None leaves a stage out."""
    joint: Schedule | None = None
    """All together."""
    cool: Schedule | None = None
    """All together, to a standstill."""
    tower: Path | None = None
    """A pocket whose tower is taken as it is, to learn on or to keep."""
    emphasis: float = 5.0
    """How many times the words that are slow to learn (shapes, sign texts, numbers, yes and no) count."""
    crowded: Portion = Portion(count=8_000, share=0.3, global_share=0.0, dense_share=0.4)
    """Their pages are full: short ones are soon known by heart instead of read."""
    scenes: Portion = Portion(count=8_000, share=0.4, global_share=0.4, dense_share=0.45)
    pages: Portion = Portion(count=4_000, share=0.15, global_share=0.1, dense_share=0.1)
    large_print: Portion = Portion(count=3_000, share=0.1, global_share=0.5, dense_share=0.05)
    """Pages in letters twice as large, which are easier to learn to read on."""
    easy: Portion = Portion(count=4_000, share=0.05, global_share=0.5)
    """Of the training split of easy-VQA."""
    dense_patches: int = 128
    """Of the 256 patches of a frame, those that dense pretraining looks at."""
    num_held_out_frames: int = 256
    num_scored_scenes: int = 64
    """Scenes behind each accuracy in the log."""
    vocab_size: int = 2048
    tokenizer: Path | None = None
    """A tokenizer of another pocket to use; None makes one of `vocab_size` pieces."""
    seed: int = 0

    @property
    def stages(self) -> dict[str, Schedule]:
        """Stages by name, in their order."""
        every = {"dense": self.dense, "decoder": self.decoder, "joint": self.joint, "cool": self.cool}
        return {name: schedule for name, schedule in every.items() if schedule is not None}

    @property
    def global_only(self) -> bool:
        """Whether the model sees every picture as its global frame alone."""
        return self.size.longest_edge == shape.TILE_SIDE

    def one_frame(self) -> Recipe:
        """The recipe for a model that sees every picture as its global frame alone."""
        return replace(self, size=replace(self.size, longest_edge=shape.TILE_SIDE))

    def scaled(self, factor: float) -> Recipe:
        """The recipe with `factor` times as many steps in every stage, one at least."""
        longer: dict[str, Any] = {
            name: replace(schedule, num_steps=max(1, round(schedule.num_steps * factor)))
            for name, schedule in self.stages.items()
        }
        return replace(self, **longer)


POCKET_RECIPE = Recipe(
    size=shape.POCKET_SIZE,
    dense=Schedule(num_steps=12_000, batch_size=32, learning_rate=8e-4, final_share=0.05),
    decoder=Schedule(num_steps=12_000, batch_size=16, learning_rate=8e-4, final_share=0.1),
    joint=Schedule(num_steps=12_000, batch_size=8, learning_rate=4e-4, final_share=1.0),
    cool=Schedule(num_steps=900, batch_size=8, learning_rate=4e-4, warmup_steps=0),
)


DRAFT_RECIPE = Recipe(
    size=shape.DRAFT_SIZE,
    decoder=Schedule(num_steps=2_000, batch_size=32, learning_rate=1.2e-3, final_share=0.02),
    crowded=Portion(count=0, share=0.0, global_share=1.0),
    scenes=Portion(count=8_000, share=0.8, global_share=1.0),
    pages=Portion(count=0, share=0.0, global_share=1.0),
    large_print=Portion(count=3_000, share=0.15, global_share=1.0),
)
"""A smaller decoder that drafts for a pocket, on that pocket's own tower (`tower`), which stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where training happens."""

    folder: Path
    device: torch.device
    num_workers: int = 2
    """Processes that draw."""
    num_processes: int = 1
    """Processes that train, each with its share of every batch; of use on CPU, see `parallel`."""
    resume: bool = False
    anneal: bool = False
    """End the joint stage where it was last saved, and cool down from there."""
