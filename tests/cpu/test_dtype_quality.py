"""`benchmarks/quality.py` and `benchmarks/paired.py`: what they count. Nothing here is timed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import quality
from paired import losses

from vlmfast.errors import DeviceError


def test_a_row_counts_losses_by_kind_and_identical_answers() -> None:
    kinds = ["what", "what", "sign", "where"]
    whole = quality.Told(texts=("a", "b", "c", "d"), right=(True, True, True, False))
    told = quality.Told(texts=("a", "x", "y", "d"), right=(True, False, True, False))
    row = quality.row("int8", kinds, whole, told)
    assert row["identical"] == 0.5
    assert (row["what"]["points_lost"], row["what"]["asked"], row["what"]["accuracy"]) == (50.0, 2, 0.5)
    assert row["text"] == row["sign"] == {"points_lost": 0.0, "half_width": 0.0, "accuracy": 1.0, "asked": 1}
    assert row["off_text"]["asked"] == 3
    same = quality.row("float32", kinds, whole, whole)
    assert same["identical"] == 1.0 and same["off_text"]["points_lost"] == 0.0


def test_groups_are_paired_over_the_same_questions() -> None:
    """One gained and one lost cancel in the mean and still widen the interval."""
    found = losses(["what", "what"], [True, False], [False, True])
    assert found["what"].points == 0.0 and found["what"].half_width > 100
    assert found["text"].num_asked == 0
    with pytest.raises(ValueError, match="shorter"):
        losses(["what"], [True], [])


def test_a_dtype_that_is_not_there_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import held_out

    class Questions:
        kinds = ("what",)

        def __init__(self, vlm: Any, num_questions: int) -> None:
            assert num_questions == 1

    def load(folder: Path, way: quality.Way) -> str:
        if way.dtype == "int4":
            raise DeviceError("no int4 here")
        return way.name

    monkeypatch.setattr(held_out, "HeldOut", Questions)
    monkeypatch.setattr(quality, "_load", load)
    monkeypatch.setattr(quality, "ask", lambda vlm, questions: quality.Told(texts=(vlm,), right=(True,)))
    result = quality.measure(tmp_path, 1)
    assert [row["dtype"] for row in result["rows"]] == [
        "float32", "bfloat16", "int8", "float32, vision int8", "int8, vision int8"
    ]  # fmt: skip
    assert [row["identical"] for row in result["rows"]] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert result["missing"] == {"int4": "no int4 here"}
    assert quality._table(result).row_count == 4  # same answer, off text, text, what
