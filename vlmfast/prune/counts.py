"""How many visual tokens stay, from sizes alone: a prompt's length is known before any pixel is touched. No torch."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt

from vlmfast.errors import OptionError
from vlmfast.options import Keep, Reduce, ToMe


def num_kept(keep: Keep, total: int) -> int:
    """How many of `total` tokens a share or a number keeps: at least one, never more than there are."""
    return max(1, round(total * keep)) if keep <= 1 else min(int(keep), total)


def run_counts(runs: tuple[int, ...], reduce: Reduce) -> tuple[int, ...]:
    """Tokens kept of each run of a picture's visual tokens. A run is a frame, or all of them where none separates them.

    The runs share what the whole picture keeps evenly; each keeps at least one.

    Raises:
        OptionError: "pool" for runs that are no squares.
    """
    assert not isinstance(reduce.keep, str), "'auto' depends on the picture: see reducers.auto_counts"
    total = sum(runs)
    wanted = num_kept(reduce.keep, total)
    ends = [0]
    for run in runs:
        ends.append(ends[-1] + run)
    counts = tuple(max(1, wanted * end // total - wanted * start // total) for start, end in pairwise(ends))
    if reduce.method != "pool" or counts == runs:
        return counts
    if any(isqrt(run) ** 2 != run for run in runs):
        raise OptionError(
            "Reduce('pool') needs square frames of tokens, and this model lays out a picture's tokens as one grid with "
            "line breaks; use another method, for example Reduce('diversity')"
        )
    return tuple(isqrt(count) ** 2 for count in counts)


def reduce_id(reduce: Reduce | None) -> str:
    """Names a reduction: equal ids make equal tokens of equal features. Empty when there is none."""
    if reduce is None or reduce.keep == 1.0:
        return ""
    return f"{_SCHEMA}:{reduce.method}:{reduce.keep!r}:{reduce.floor!r}:{reduce.seed}"


_SCHEMA = 1
"""Raise it when a method comes to choose otherwise."""


def merge_schedule(tome: ToMe | None, num_layers: int, num_patches: int, protected: int = 0) -> tuple[int, ...]:
    """Patches merged in each of the tower's layers; empty when none are.

    Args:
        num_patches: tokens of a frame that enter the tower, class token included.
        protected: how many of them are never merged (a class token).

    Raises:
        OptionError: more values than layers, or a number that the first layer can not merge.
    """
    if tome is None:
        return ()
    values = tome.r if isinstance(tome.r, tuple) else (tome.r,) * num_layers
    if len(values) > num_layers:
        raise OptionError(
            f"ToMe: r has {len(values)} values; give {num_layers} at most, one for each layer of the tower"
        )
    schedule: list[int] = []
    left = num_patches
    for index, value in enumerate(values):
        room = (left - protected) // 2
        merged = int(value if value >= 1 else value * (left - protected))
        if index == 0 and merged > room:
            raise OptionError(
                f"ToMe: r={value} of {left - protected} patches; a layer merges half at most, so give up to {room}"
            )
        schedule.append(min(merged, room))
        left -= schedule[-1]
    return tuple(schedule) if any(schedule) else ()
