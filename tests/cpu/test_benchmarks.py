"""The benchmark harness: its statistics, and that it refuses to time what does not agree. Nothing here is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vlmfast.spec.options import Speculation
from vlmfast.testing import Shape, random_checkpoint
from vlmfast.vlm import VLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import cases
import contenders
import paired
import side_by_side
import speculate
import token_quality


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose answers never end early."""
    folder = tmp_path_factory.mktemp("tiny")
    return contenders.variant(random_checkpoint(folder / "plain", Shape()), folder / "endless", longest_edge=32)


def _summary(*samples: float) -> side_by_side.Summary:
    return side_by_side.Summary.of(samples)


def test_summary_and_ratio() -> None:
    row = side_by_side.Comparison(
        key="decode_5_tiles_x", title="t", ours=_summary(3, 1, 2), theirs=_summary(4, 9, 5, 5), check="c"
    )
    assert (row.ours.min, row.ours.median, row.ours.max, row.ours.num_samples) == (1, 2, 3, 3)
    values = row.to_dict()
    assert values["decode_5_tiles_x"] == 2.5
    assert values["decode_5_tiles_theirs_max_ms"] == 9


def test_alternate_swaps_the_order_discards_warmups_and_gives_both_the_same_index() -> None:
    calls: list[tuple[str, int]] = []

    def contender(name: str, value: float) -> Any:
        def run(index: int) -> float:
            calls.append((name, index))
            return 1000.0 if index == 7 else value + index

        return run

    ours, theirs = side_by_side.alternate(contender("o", 0), contender("t", 100), rounds=3, warmups=1, first=7)
    assert calls == [("o", 7), ("t", 7), ("t", 8), ("o", 8), ("o", 9), ("t", 9), ("t", 10), ("o", 10)]
    assert ours == _summary(8, 9, 10)
    assert theirs == _summary(108, 109, 110)


def test_report_ends_with_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = side_by_side.parse_options("d", ["--json", "--quick"])
    row = side_by_side.Comparison(key="ttft_x", title="t", ours=_summary(2), theirs=_summary(3), check="c")
    side_by_side.report([row], [("pocket_ttft_x", "pocket missing")], options)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    values = json.loads(lines[0])
    assert values["ttft_x"] == 1.5
    assert values["pocket_ttft_x"] is None
    assert values.keys() >= {"threads", "dtype", "torch", "transformers", "cpu", "omp_wait_policy"}


def test_given_texts_are_what_drafts_are_judged_by() -> None:
    """Guards the rows of given texts: every token is the text's, whatever the model would have said, and drafts fit."""
    vlm = VLM.from_pretrained(speculation=Speculation(drafter="lookup", adaptive=False), caching=False)
    bench = speculate.Bench(drafting=vlm, rounds=1, num_pictures=1)
    text = [900, 901, 902, 903, 904] * 8
    (answer,) = bench.page(vlm, text)
    assert list(answer.token_ids) == text
    assert answer.usage.accepted_tokens > 20


def test_fresh_pictures_differ_and_repeat() -> None:
    pictures = [np.asarray(contenders.fresh_picture(index)) for index in range(20)]
    assert len({picture.tobytes() for picture in pictures}) == 20
    assert np.array_equal(pictures[3], np.asarray(contenders.fresh_picture(3)))
    assert pictures[0].shape == (480, 640, 3)


def test_verification_accepts_the_same_weights(endless: Path) -> None:
    """Exact in float32, within the tolerance in bfloat16; both sides give every token that was asked for."""
    picture = contenders.fresh_picture(0)
    sides = contenders.Ours(endless, torch.float32), contenders.Transformers(endless, torch.float32)
    assert "20 tokens equal" in contenders.verify(*sides, picture, 20, 0.0)
    sides = contenders.Ours(endless), contenders.Transformers(endless)
    assert "tokens best" in contenders.verify(*sides, picture, 20, contenders.BF16_TOLERANCE)
    for side in sides:
        run = side.run(picture, 9)
        assert len(run.token_ids) == 9
        assert 0 < run.first_token_ms < run.total_ms
        assert run.ms_per_token > 0


@pytest.mark.parametrize("tolerance", [0.0, contenders.BF16_TOLERANCE])
def test_verification_refuses_other_weights(endless: Path, tmp_path: Path, tolerance: float) -> None:
    """Negative control: a checkpoint of another seed must not pass as the same (20 tokens equal by chance: 500^-20)."""
    other = contenders.variant(random_checkpoint(tmp_path / "o", Shape(), seed=1), tmp_path / "e", longest_edge=32)
    ours, theirs = contenders.Ours(endless, torch.float32), contenders.Transformers(other, torch.float32)
    with pytest.raises(contenders.DisagreementError):
        contenders.verify(ours, theirs, contenders.fresh_picture(0), 20, tolerance)


def test_verification_refuses_other_tiling(endless: Path, tmp_path: Path) -> None:
    other = contenders.variant(endless, tmp_path / "e", longest_edge=64)
    ours, theirs = contenders.Ours(endless, torch.float32), contenders.Transformers(other, torch.float32)
    with pytest.raises(contenders.DisagreementError, match="prompts differ"):
        contenders.verify(ours, theirs, contenders.fresh_picture(0), 4, 0.0)


def test_a_case_runs_on_a_stand_in_for_the_pocket(
    endless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = side_by_side.parse_options(
        "d", ["--json", "--quick", "--rounds", "1", "--cache", str(tmp_path), "--pocket", str(endless)]
    )
    cases.run_cases([cases.pocket(1, 1)], "decode", lambda side, picture: side.run(picture, 4).ms_per_token, options)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pocket_decode_x"] > 0


def test_a_missing_pocket_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = side_by_side.parse_options(
        "d", ["--json", "--quick", "--cache", str(tmp_path), "--pocket", str(tmp_path)]
    )
    cases.run_cases([cases.pocket(1, 1)], "ttft", lambda side, picture: 1.0, options)
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["pocket_ttft_x"] is None
    assert "pocket missing" in values["missing"]["pocket_ttft_x"]


def test_preprocessing_is_compared_only_where_pixels_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check before the clock: equal pixels are timed, others stop the script."""
    import preprocess

    llava = next(one for one in preprocess.FAMILIES if one.model_type == "llava")
    assert "7 photographs, 7 tiles" in preprocess.compare(llava, 1).check
    ours, theirs = preprocess.contenders(llava)
    monkeypatch.setattr(preprocess, "contenders", lambda family: (lambda image: ours(image) + 0.01, theirs))
    with pytest.raises(SystemExit, match=r"pixels differ by 0\.01"):
        preprocess.compare(llava, 1)


def test_token_losses_are_paired() -> None:
    """Guards the interval: it is that of the differences, so equal answers lose nothing, surely."""
    whole = [True, True, False, True] * 25
    assert paired.Loss.of(whole, whole) == paired.Loss(points=0.0, half_width=0.0, accuracy=0.75, num_asked=100)
    worse = paired.Loss.of(whole, [False, *whole[1:]])
    assert worse.points == 1.0 and 1.9 < worse.half_width < 2.0  # 1.96 * 0.1 / sqrt(100)
    other = paired.Loss.of([True, False] * 50, [False, True] * 50)
    assert other.points == 0.0 and other.half_width > 19


def test_every_method_has_its_control(load_vlm: Any) -> None:
    config = load_vlm(caching=False).checkpoint.config
    found = token_quality.methods(config, [2, 1])
    for keep in token_quality.SHARES:
        names = [method.name for method in found if method.keep == keep]
        assert {"fastv@2", "fastv random@2", "tome", "random", "scope", "pool"} <= set(names)
        assert len(set(names)) == len(names)
    assert {"fastv pyramid", "diversity auto", "fastv@1"} <= {method.name for method in found}
    assert len({method.label for method in found}) == len(found)
    assert token_quality.points_lost([{"method": "tome", "keep": 0.5, "off_text": {"points_lost": 1.5}}], "tome", 0.5)
    assert token_quality.points_lost([], "tome", 0.5) is None
