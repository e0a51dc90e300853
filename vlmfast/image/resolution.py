"""Which of the sizes that a model can see a picture at is used: by the caller's word, or by what the picture shows."""

from __future__ import annotations

from collections.abc import Sequence

from vlmfast.errors import OptionError
from vlmfast.image.complexity import detail_lost
from vlmfast.options import Resolution
from vlmfast.types import ImageInput
from vlmfast_models.geometry import TilePlan

LOSS_ALLOWED = 0.039
"""Share of local contrast that "auto" lets the worst blocks of a picture lose.

Of generated scenes at least nine in ten printed pages, in letters of all sizes, and nineteen in twenty with a sign lose
more when their side is halved; six in ten of the others or more lose less (tests/cpu/test_resolution.py)."""


def choose_plan(
    image: ImageInput, plans: Sequence[TilePlan], resolution: Resolution, max_pixels: int | None = None
) -> TilePlan:
    """One of a picture's plans.

    Args:
        plans: from the lowest to the checkpoint's own resolution.
        resolution: "low", "high", "auto", or the most tiles that may be encoded, the global frame included.
        max_pixels: most pixels (width times height, in whole tiles) that a plan may cut into tiles.

    Raises:
        OptionError: even the lowest plan has more tiles or pixels.
    """
    allowed = [plan for plan in plans if max_pixels is None or plan.canvas[0] * plan.canvas[1] <= max_pixels]
    if not allowed:
        width, height = plans[0].canvas
        raise OptionError(
            f"max_pixels is {max_pixels}; this model sees {image.name} at {width}x{height} pixels at least: "
            f"give {width * height} or more"
        )
    if resolution == "low":
        return allowed[0]
    if resolution == "high":
        return allowed[-1]
    if resolution == "auto":
        return _sufficient(image, allowed)
    affordable = [plan for plan in allowed if plan.num_tiles <= resolution]
    if not affordable:
        raise OptionError(f"resolution is {resolution} tiles; give {allowed[0].num_tiles} or more for {image.name}")
    return affordable[-1]


def _sufficient(image: ImageInput, plans: Sequence[TilePlan]) -> TilePlan:
    """The lowest plan at which the picture loses little."""
    smaller, full = plans[:-1], plans[-1]
    if not smaller:
        return full
    losses = detail_lost(image.pixels, full.resized, [plan.resized for plan in smaller])
    return next((plan for plan, loss in zip(smaller, losses, strict=True) if loss <= LOSS_ALLOWED), full)
