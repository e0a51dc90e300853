"""Options for fewer visual tokens, and the counts that follow from sizes alone."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmfast.errors import OptionError
from vlmfast.options import REDUCERS, FastV, Reduce, ToMe, Vision
from vlmfast.prune.counts import merge_schedule, num_kept, reduce_id, run_counts

_NAN = float("nan")


@pytest.mark.parametrize("keep", [1e-9, 0.5, 1.0, 1, 2, 10**6])
def test_keeps_in_range_are_taken(keep: float) -> None:
    """Guards both ends of both forms of `keep`."""
    assert FastV(keep=keep).keep == Reduce("pool", keep=keep).keep == keep


@pytest.mark.parametrize("keep", [0, 0.0, -1, -0.5, 1.5, 2.5, _NAN, True, None, "half", [0.5]])
def test_keeps_out_of_range_are_named(keep: Any) -> None:
    """Guards case 46: out of range is an error, not silently off."""
    for make in (FastV, lambda keep: Reduce("random", keep=keep), lambda keep: FastV(then=((5, keep),))):
        with pytest.raises(OptionError, match="keep"):
            make(keep=keep)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: FastV(layer=0), "layer"),
        (lambda: FastV(layer=-1), "layer"),
        (lambda: FastV(layer=1.5), "layer"),  # type: ignore[arg-type]
        (lambda: FastV(layer=True), "layer"),
        (lambda: FastV(then=5), "then"),  # type: ignore[arg-type]
        (lambda: FastV(then=(5, 0.5)), "then"),  # type: ignore[arg-type]
        (lambda: FastV(then=((2, 0.25),)), "then"),
        (lambda: FastV(then=((8, 0.25), (4, 0.1))), "then"),
        (lambda: FastV(keep=0.5, then=((8, 0.75),)), "then"),
        (lambda: FastV(keep=100, then=((8, 200),)), "then"),
        (lambda: FastV(rank="position"), "rank"),  # type: ignore[arg-type]
        (lambda: ToMe(r=-1), "r must"),
        (lambda: ToMe(r=0.6), "r must"),
        (lambda: ToMe(r=1.5), "r must"),
        (lambda: ToMe(r=_NAN), "r must"),
        (lambda: ToMe(r="8"), "r must"),  # type: ignore[arg-type]
        (lambda: ToMe(r=(8, -1)), "r must"),
        (lambda: ToMe(r=True), "r must"),
        (lambda: Reduce("best"), "method"),
        (lambda: Reduce("pool", keep="auto"), "keep"),
        (lambda: Reduce("scope", floor=0.0), "floor"),
        (lambda: Reduce("scope", floor=1.1), "floor"),
        (lambda: Reduce("scope", keep=0.5, floor=0.1), "floor must be left out"),
        (lambda: Reduce("scope", seed=3), "seed must be left out"),
        (lambda: Reduce("random", seed=-1), "seed"),
        (lambda: Reduce("random", seed=0.5), "seed"),  # type: ignore[arg-type]
        (lambda: Vision(tome=8), "tome"),  # type: ignore[arg-type]
        (lambda: Vision(reduce="scope"), "reduce"),  # type: ignore[arg-type]
        (lambda: Vision(fastv=0.5), "fastv"),  # type: ignore[arg-type]
    ],
)
def test_other_values_out_of_range_are_named(make: Any, name: str) -> None:
    with pytest.raises(OptionError, match=name):
        make()


def test_numbers_of_other_libraries_become_pythons() -> None:
    """Guards torch, which takes no numpy seed, and keys, in which equal options must read the same."""
    fastv = FastV(layer=np.int64(2), keep=np.float64(0.5), then=((np.int32(3), Fraction(1, 4)),))  # type: ignore[arg-type]
    reduce = Reduce("random", keep=np.float32(0.5), floor=np.float64(0.25), seed=np.int64(3))  # type: ignore[arg-type]
    tome = ToMe(r=[np.int64(2), np.float64(0.1)])  # type: ignore[arg-type]
    vision = Vision(resolution=np.int64(3), max_pixels=np.int64(9))  # type: ignore[arg-type]
    assert repr(fastv) == repr(FastV(layer=2, keep=0.5, then=((3, 0.25),)))
    assert repr(reduce) == repr(Reduce("random", keep=0.5, floor=0.25, seed=3))
    assert repr((tome, vision)) == repr((ToMe(r=(2, 0.1)), Vision(resolution=3, max_pixels=9)))


def test_steps_list_the_first_one_too() -> None:
    assert FastV(layer=3, keep=0.5, then=((8, 0.25),)).steps == ((3, 0.5), (8, 0.25))
    assert FastV(keep=0.5, then=[[8, 40]]).steps == ((2, 0.5), (8, 40))  # type: ignore[arg-type]
    assert Vision() == Vision(tome=None, reduce=None, fastv=None)


def test_num_kept() -> None:
    """Guards the count's rule: a rounded share, or the number itself, at least one and at most all."""
    assert [num_kept(keep, 576) for keep in (1.0, 1, 0.5, 0.25, 0.1, 1e-9, 2, 64, 576, 1000)] == [
        576, 576, 288, 144, 58, 1, 2, 64, 576, 576,
    ]  # fmt: skip


@given(
    num_runs=st.integers(1, 17),
    side=st.integers(1, 12),
    keep=st.one_of(st.floats(0.01, 1.0), st.integers(2, 400)),
    method=st.sampled_from(REDUCERS),
)
def test_run_counts_share_what_the_picture_keeps(num_runs: int, side: int, keep: float, method: str) -> None:
    """Guards prompt lengths: every run keeps something, never more than it has, and they add up to what was asked."""
    runs = (side * side,) * num_runs
    counts = run_counts(runs, Reduce(method, keep=keep))
    wanted = num_kept(keep, sum(runs))
    assert len(counts) == num_runs and all(1 <= count <= run for count, run in zip(counts, runs, strict=True))
    if method == "pool" and counts != runs:
        assert all(int(count**0.5 + 0.5) ** 2 == count for count in counts)
        assert sum(counts) <= max(wanted, num_runs)
    else:
        assert sum(counts) == max(wanted, num_runs)
        assert max(counts) - min(counts) <= 1


def test_everything_kept_is_every_run_whole() -> None:
    """Guards case 46: keep = 1 is off, for runs of any length."""
    for method in REDUCERS:
        assert run_counts((64, 64, 64), Reduce(method, keep=1.0)) == (64, 64, 64)
        assert run_counts((587,), Reduce(method, keep=10_000)) == (587,)
        assert reduce_id(Reduce(method, keep=1.0)) == reduce_id(None) == ""


def test_pool_refuses_what_is_no_square() -> None:
    """Guards LLaVA-NeXT, whose line breaks are among the tokens: refused by name, with another way."""
    with pytest.raises(OptionError, match=r"pool.*line breaks.*diversity"):
        run_counts((64, 65), Reduce("pool", keep=0.5))


def test_reduce_ids_differ_whenever_tokens_may() -> None:
    """Guards reused keys and values: no two reductions that choose otherwise have one id."""
    reductions = [
        *(Reduce(method, keep=keep) for method in REDUCERS for keep in (0.5, 0.25, 50)),
        Reduce("scope", keep="auto"),
        Reduce("scope", keep="auto", floor=0.5),
        Reduce("random", keep=0.5, seed=1),
        None,
    ]
    assert len({reduce_id(one) for one in reductions}) == len(reductions)


@pytest.mark.parametrize(
    ("r", "layers", "patches", "protected", "expected"),
    [
        (0, 12, 1024, 0, ()),
        (0.0, 12, 1024, 0, ()),
        (48, 3, 1024, 0, (48, 48, 48)),
        (0.25, 3, 64, 0, (16, 12, 9)),
        (0.25, 2, 65, 1, (16, 12)),
        ((0, 8), 4, 64, 0, (0, 8)),
        (16, 5, 32, 0, (16, 8, 4, 2, 1)),
        (1, 3, 2, 1, None),
        (33, 2, 64, 0, None),
        ((1, 2, 3), 2, 64, 0, None),
    ],
)
def test_merge_schedules(r: Any, layers: int, patches: int, protected: int, expected: tuple[int, ...] | None) -> None:
    """Guards ToMe's counts: shares are of what is left, later layers merge at most half, the first may not ask more."""
    if expected is None:
        with pytest.raises(OptionError, match="ToMe"):
            merge_schedule(ToMe(r=r), layers, patches, protected)
    else:
        assert merge_schedule(ToMe(r=r), layers, patches, protected) == expected
    assert merge_schedule(None, layers, patches) == ()
