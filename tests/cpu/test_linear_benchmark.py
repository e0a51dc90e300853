"""The table of linear layers: a wrong product is not timed, a lacking one is told, what is printed holds together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import linear
import linear_candidates
from linear_candidates import Candidate, Missing, Setup, candidates

TINY = ["--shape", "64", "128", "--copies", "2", "--sizes", "1", "3", "130", "--rounds", "2"]


def test_the_table_at_a_tiny_size(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "prepare", lambda options: None)  # it sets up the process, for good
    linear.main([*TINY, "--quick", "--json", "--markdown"])
    *lines, last = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1  # a rectangle
    assert rows[0].split("|")[3:6] == [" M = 1 ", " M = 3 ", " M = 130 "]
    values = json.loads(last)
    assert values["shape"] == [64, 128] and values["copies"] == 2
    assert len(rows) == 2 + len(values["candidates"])
    measured = {key: one for key, one in values["candidates"].items() if one is not None}
    assert measured and values["missing"].keys() == values["candidates"].keys() - measured.keys()
    assert "--inductor" in values["missing"]["inductor"]
    for key, one in measured.items():
        assert one["ms"].keys() == {"1", "3", "130"} and min(one["ms"].values()) > 0, key
        assert one["error"] < 0.2, key
    assert values["cpu"] in lines[0]
    assert ("AMX-TILE" in lines[0]) == bool(torch.cpu.get_capabilities().get("amx_tile"))


def _all(setup: Setup) -> dict[str, Candidate | Missing]:
    return {one.key: one for one in candidates(setup, inductor=False)}


def test_a_lacking_library_and_a_wrong_product_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check before the clock: a product with another weight is no candidate."""

    def wrong(setup: Setup) -> linear_candidates._Form:
        return linear_candidates._Form(run=lambda rows: rows @ setup.weights[0].T, bytes_a_copy=1)

    builders = dict(linear_candidates._BUILDERS)
    builders[("other", "another weight", "int4")] = wrong  # the check is of the last weight
    monkeypatch.setattr(linear_candidates, "_BUILDERS", builders)
    monkeypatch.setattr(linear_candidates, "why_not_compiled", lambda *_: "not built")
    found = _all(Setup.random(64, 128, 2, [1, 5]))
    assert isinstance(found["other"], Missing) and "wrong: relative error" in found["other"].reason
    for kind in ("bf16", "int8", "int4"):
        one = found[f"compiled_{kind}"]
        assert isinstance(one, Missing) and one.reason == "not built"


def test_a_result_that_depends_on_the_batch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(setup: Setup) -> linear_candidates._Form:
        def run(rows: torch.Tensor) -> torch.Tensor:
            unit = rows.float().abs().max() / 127
            return (((rows.float() / unit).round() * unit) @ setup.weights[-1].float().T).bfloat16()

        return linear_candidates._Form(run=run, bytes_a_copy=1)

    def alone(setup: Setup) -> linear_candidates._Form:
        def run(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([row[None] @ setup.weights[-1].T for row in rows])

        return linear_candidates._Form(run=run, bytes_a_copy=1)

    builders = {("batch", "", "int8"): batch, ("alone", "", "bf16"): alone}
    monkeypatch.setattr(linear_candidates, "_BUILDERS", builders)
    found = _all(Setup.random(64, 128, 2, [1, 5]))
    assert isinstance(found["batch"], Candidate) and not found["batch"].row_alone
    assert isinstance(found["alone"], Candidate) and found["alone"].row_alone


def test_times_are_the_lower_quartile_of_rounds_whose_order_swaps() -> None:
    """Guards the clock: the warm-up is left out, and both of a pair are first equally often."""
    calls: list[str] = []
    now = [0.0]

    def contender(key: str, seconds: list[float]) -> Candidate:
        left = iter(seconds)

        def run(rows: torch.Tensor) -> torch.Tensor:
            calls.append(key)
            now[0] += next(left)
            return rows

        return Candidate(
            key=key, title=key, megabytes=1.0, prepare=lambda rows: rows, run=run, error=0.0, row_alone=True
        )

    one, two = contender("a", [9, 5, 4, 3, 2, 1]), contender("b", [7.0] * 6)
    times = linear.measure([one, two], Setup.random(2, 2, 1, [1]), 5, lambda: now[0])
    assert times == {"a": {1: 2000.0}, "b": {1: 7000.0}}
    assert "".join(calls) == "abba" * 3
