"""The parts of `verify` by themselves: comparisons (what passes, what parts, what is said of it), and taps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmfast.testing import TINY_SHAPES
from vlmfast.verify.compare import compare_choices, compare_ids, compare_pixels, compare_rows
from vlmfast.verify.reference import LAYOUTS, pixel_tiles
from vlmfast.verify.taps import vision_taps
from vlmfast_models.families import FAMILIES


def test_rows_are_measured_by_themselves() -> None:
    """Guards small rows beside a huge one: an error as large as the small row must not pass."""
    theirs = torch.ones(3, 8)
    theirs[0] = 1000.0
    ours = theirs.clone()
    ours[1, 2] += 0.5
    stage = compare_rows("x", "x", ours, theirs, 0.05)
    assert stage.parted and stage.max_abs == 0.5 and "1 of 3 rows part, row 1 most" in stage.note
    ours = theirs.clone()
    ours[0] += 0.5
    assert not compare_rows("x", "x", ours, theirs, 1e-3).parted


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_parts(value: float) -> None:
    theirs = torch.ones(2, 4)
    ours = theirs.clone()
    ours[1, 1] = value
    for first, second in ((ours, theirs), (theirs, ours), (ours, ours)):
        assert compare_rows("x", "x", first, second, 1.0).parted
        pixels = (tensor.view(2, 1, 2, 2) for tensor in (first, second))
        assert compare_pixels(*pixels, grey_level=1.0, tolerance=1.0).parted


def test_other_shapes_part() -> None:
    assert "[2, 4]" in compare_rows("x", "x", torch.ones(2, 4), torch.ones(3, 4), 1.0).note
    assert compare_rows("x", "x", torch.ones(2, 4), torch.ones(4, 2), 1.0).parted
    assert compare_pixels(torch.ones(2, 3, 4, 4), torch.ones(1, 3, 4, 4), 1.0, 1.0).parted
    assert not compare_rows("x", "x", torch.ones(0, 4), torch.ones(0, 4), 1.0).parted


def test_ids() -> None:
    assert not compare_ids((1, 2), [1, 2]).parted
    assert "from token 1 on ours are [2], theirs [3]" in compare_ids((1, 2), [1, 3]).note
    assert "ours 1 tokens, theirs 2; from token 1 on ours are [], theirs [2]" in compare_ids((1,), [1, 2]).note


def test_choices() -> None:
    """Guards ties, the order of the rows, and both ends of an answer."""
    logits = torch.eye(4)  # row i chooses token i; RMS 0.5

    def choices(answer: tuple[int, ...], end: set[int], *, stopped: bool, logits: torch.Tensor = logits) -> Any:
        return compare_choices(answer, logits, frozenset(end), stopped=stopped, tolerance=1e-3)

    assert not choices((0, 1, 2), {3}, stopped=True).parted
    assert not choices((0, 1, 2), {9}, stopped=False).parted
    assert "token 1 is 2 here, 1 there" in choices((0, 2, 2), {3}, stopped=True).note
    assert "token 2 is the end here, 2 there" in choices((0, 1), {3}, stopped=True).note
    assert choices((0, 1), set(), stopped=True).parted
    assert "ends their answer" in choices((0, 1, 2), {1}, stopped=False).note
    tied = logits.clone()
    tied[1, 2] = 1.0009  # a gap of 0.0009 at an RMS of about 0.7: within twice the tolerance
    assert "1 ties" in choices((0, 1, 2), {3}, stopped=True, logits=tied).note
    tied[1, 2] = 1.01
    assert choices((0, 1, 2), {3}, stopped=True, logits=tied).parted
    assert choices((0, 1, 2), {3}, stopped=True, logits=logits * float("nan")).parted


def test_tiles_without_filling() -> None:
    padded = torch.zeros(2, 3, 3, 2, 2)
    padded[0] = 1.0
    padded[1, 0] = 2.0
    assert pixel_tiles(padded).flatten(1).mean(1).tolist() == [1.0, 1.0, 1.0, 2.0]


def test_taps_are_removed(vlm: Any) -> None:
    """Guards the product: after a look inside, nothing of it is left on the networks."""
    model = vlm.model
    with pytest.raises(KeyError), vision_taps(model.vision, model.connector, lambda name, seen: None):
        raise KeyError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_every_family_has_a_layout() -> None:
    assert set(LAYOUTS) >= set(FAMILIES)
    assert set(TINY_SHAPES) == set(FAMILIES)
