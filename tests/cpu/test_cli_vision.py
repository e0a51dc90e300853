"""`vlmfast describe` on fewer visual tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import noise
from PIL import Image

from vlmfast import FastV, Reduce, Sampling, ToMe, Vision
from vlmfast.cli.main import main

_PROMPT = "What is in the picture?"


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.fromarray(noise(64, 64)).save(tmp_path / "noise.png")
    return str(tmp_path / "noise.png")


@pytest.fixture
def ask(checkpoint_of: Callable[..., Path], picture: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """ask(*options) -> exit code, stdout, stderr."""

    def call(*options: str, image: str = picture) -> tuple[Any, str, str]:
        model = ["--model", str(checkpoint_of()), "--dtype", "float32", "--max-new-tokens", "6"]
        with pytest.raises(SystemExit) as raised:
            main(["describe", image, "-p", _PROMPT, *model, *options])
        return raised.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("options", "vision"),
    [
        ([], None),
        (["--tome", "5"], Vision(tome=ToMe(r=5))),
        (["--tome", "0.25"], Vision(tome=ToMe(r=0.25))),
        (["--reduce", "scope"], Vision(reduce=Reduce("scope"))),
        (["--reduce", "pool", "--keep", "40"], Vision(reduce=Reduce("pool", keep=40))),
        (["--reduce", "diversity", "--keep", "auto"], Vision(reduce=Reduce("diversity", keep="auto"))),
        (["--fastv", "0.5", "--fastv-layer", "1"], Vision(fastv=FastV(layer=1, keep=0.5))),
        (["--fastv", "10", "--tome", "2"], Vision(fastv=FastV(keep=10), tome=ToMe(r=2))),
    ],
)
def test_options_are_those_of_python(
    ask: Any, load_vlm: Callable[..., Any], picture: str, options: list[str], vision: Vision | None
) -> None:
    code, out, err = ask("--json", *options)
    assert not code, err
    row = json.loads(out)
    answer = load_vlm().describe(picture, _PROMPT, sampling=Sampling(max_new_tokens=6), vision=vision)
    assert row["text"] == answer.text
    for name in ("visual_tokens_before", "visual_tokens", "visual_tokens_after", "prompt_tokens"):
        assert row["usage"][name] == getattr(answer.usage, name)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--keep", "0.5"], "--reduce"),
        (["--fastv-layer", "3"], "--fastv K"),
        (["--fastv-layer", "2"], "--fastv K"),
        (["--fastv", "nan"], "--fastv: keep"),
        (["--reduce", "scope", "--keep", "nan", "--fastv", "0.5"], "--keep: keep"),
        (["--tome", "nan"], "--tome: r"),
        (["--reduce", "best"], "method"),
        (["--reduce", "scope", "--keep", "2.5"], "keep"),
        (["--reduce", "scope", "--keep", "half"], "--keep"),
        (["--tome", "many"], "--tome"),
        (["--tome", "0.7"], "r must"),
        (["--fastv", "0"], "keep"),
        (["--fastv", "0.5", "--fastv-layer", "0"], "layer"),
        (["--fastv", "0.5", "--fastv-layer", "77"], "layer=77"),
        (["--show-tokens", "out.txt"], "--show-tokens"),
        (["--show-tokens", "/no/such/folder/out.png"], "--show-tokens"),
    ],
)
def test_bad_values_are_named(ask: Any, options: list[str], named: str) -> None:
    """Guards case 46 on the command line: exit code 2 and a line that names the option."""
    code, out, err = ask(*options)
    assert code == 2 and named in err and not out


def test_the_drawing_is_not_written_over_the_picture(ask: Any, tmp_path: Path) -> None:
    """Guards the pictures: an output named like an input, by whatever spelling, is refused before anything is done."""
    picture = tmp_path / "picture.png"
    Image.new("RGB", (8, 8), "red").save(picture)
    before = picture.read_bytes()
    (tmp_path / "link.png").symlink_to(picture)
    for name in ("picture.png", "link.png"):
        code, out, err = ask("--show-tokens", str(tmp_path / name), image=str(picture))
        assert code == 2 and "one of the pictures" in " ".join(err.split()) and not out
    assert picture.read_bytes() == before


def test_show_tokens_draws_what_was_left_out(ask: Any, tmp_path: Path) -> None:
    """Guards the drawing: as many dark squares as tokens that were dropped, tinted ones where some were merged."""
    file = tmp_path / "tokens.png"
    shares = {}
    for options in ([], ["--fastv", "0.5", "--fastv-layer", "1"], ["--reduce", "diversity"], ["--reduce", "merge"]):
        code, _, err = ask(*options, "--show-tokens", str(file))
        assert not code, err
        with Image.open(file) as drawn:
            assert drawn.size == (64 + 8 + 32, 64), "four tiles, a gap, the global frame"
            shares[" ".join(options)] = np.asarray(drawn, np.float32)[:, :64]
    plain = shares.pop("")

    def dark(drawn: np.ndarray) -> float:
        squares = (drawn / np.maximum(plain, 1)).reshape(8, 8, 8, 8, 3).mean((1, 3, 4))
        return float((squares < 0.5).mean())

    assert dark(plain) == 0
    assert dark(shares["--reduce diversity"]) == 0.75
    assert 0.2 < dark(shares["--fastv 0.5 --fastv-layer 1"]) < 0.8
    assert dark(shares["--reduce merge"]) < 0.3 and not np.array_equal(shares["--reduce merge"], plain)


def test_show_tokens_draws_what_tome_merges(ask: Any, tmp_path: Path) -> None:
    """Guards ToMe's drawing, which has the tower's patches: tinted with ToMe alone, darkened too beside FastV."""
    file = tmp_path / "tokens.png"
    drawn = {}
    for options in ([], ["--tome", "12"], ["--tome", "12", "--fastv", "0.5", "--fastv-layer", "1"]):
        code, _, err = ask(*options, "--show-tokens", str(file))
        assert not code, err
        with Image.open(file) as picture:
            drawn[len(options)] = np.asarray(picture, np.int16)[:, :64]
    patches = np.abs(drawn[2] - drawn[0]).reshape(16, 4, 16, 4, 3).max((1, 3, 4)) > 0  # 4 tiles of 8 x 8 patches
    assert 2 * 24 / 64 >= patches.mean() >= 24 / 64, "24 of 64 patches of a tile went into others"
    black = drawn[6].reshape(8, 8, 8, 8, 3).mean((1, 3, 4)) < 0.5 * drawn[2].reshape(8, 8, 8, 8, 3).mean((1, 3, 4))
    assert 0.2 < black.mean() < 0.8


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], []),
        (["--tome", "5"], ["ToMe r=5"]),
        (["--resolution", "low"], ["resolution low"]),
        (["--fastv", "0.5", "--reduce", "scope"], ["Reduce scope keep=0.25", "FastV layer=2 keep=0.5"]),
    ],
)
def test_usage_names_what_was_asked_for(ask: Any, options: list[str], named: list[str]) -> None:
    """Guards invariant 2: an answer on fewer tokens says so."""
    code, out, err = ask("--json", *options)
    assert not code, err
    assert json.loads(out)["usage"]["fewer_tokens"] == named
