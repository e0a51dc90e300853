"""The command `vlmfast`: what it writes where, and with which exit code it ends."""

from __future__ import annotations

import base64
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from interrupts import heed_interrupts
from PIL import Image

from vlmfast import VLM, Sampling
from vlmfast.cli import loading, output
from vlmfast.cli.describe import describe
from vlmfast.cli.main import main
from vlmfast.cli.options import field_docs

PROMPT = "What is in the picture?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Result]


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two good pictures, one cut short, one that is not there."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, size in (("red", (40, 30)), ("blue", (21, 55))):
        Image.new("RGB", size, name).save(folder / f"{name}.png")
    (folder / "cut.png").write_bytes((folder / "red.png").read_bytes()[:60])
    return {name: str(folder / f"{name}.png") for name in ("red", "blue", "cut", "missing")}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> Result:
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        out, err = capsys.readouterr()
        code = exit_info.value.code
        return Result(code=code if isinstance(code, int) else 0, out=out, err=err)

    return call


@pytest.fixture
def ask(run: Run, checkpoint: Path) -> Run:
    """`vlmfast describe` with the tiny model and a short answer."""

    def call(*args: str) -> Result:
        return run("describe", *args, "--model", str(checkpoint), "-p", PROMPT, "--max-new-tokens", "6")

    return call


def _is_one_error_line(text: str) -> bool:
    return text.startswith("vlmfast: error: ") and text.count("\n") == 1


def test_json_is_the_answer(ask: Run, vlm: VLM, pictures: dict[str, str]) -> None:
    result = ask(pictures["red"], "--json")
    answer = vlm.describe(pictures["red"], PROMPT, sampling=Sampling(max_new_tokens=6))
    (row,) = result.rows
    assert (result.code, result.err) == (0, "")
    assert list(row) == ["image", "text", "finish_reason", "usage", "timings"]
    assert row["image"] == pictures["red"]
    expected = answer.to_dict()
    assert {key: row[key] for key in ("text", "finish_reason")} == {
        key: expected[key] for key in ("text", "finish_reason")
    }
    assert row["usage"].keys() == expected["usage"].keys()
    for key in ("prompt_tokens", "visual_tokens", "completion_tokens", "num_images", "num_tiles"):
        assert row["usage"][key] == expected["usage"][key]  # what was known before differs, the rest may not
    assert row["timings"].keys() == expected["timings"].keys()
    assert row["timings"]["load_ms"] > 0
    assert row["timings"]["total_ms"] > 0


def test_text_is_the_answer(ask: Run, vlm: VLM, pictures: dict[str, str]) -> None:
    result = ask(pictures["red"])
    answer = vlm.describe(pictures["red"], PROMPT, sampling=Sampling(max_new_tokens=6))
    assert (result.code, result.err) == (0, "")
    assert result.out == answer.text.lstrip() + "\n"


def test_one_bad_picture_among_three_as_json(ask: Run, pictures: dict[str, str]) -> None:
    result = ask(pictures["red"], pictures["cut"], pictures["blue"], "--json")
    alone = [ask(pictures[name], "--json").rows[0]["text"] for name in ("red", "blue")]
    first, failed, last = result.rows
    assert (result.code, result.err) == (2, "")
    assert [first["text"], last["text"]] == alone
    assert list(failed) == ["image", "error"]
    assert failed["image"] == pictures["cut"]
    assert failed["error"]["kind"] == "bad_image"
    assert pictures["cut"] in failed["error"]["message"]


@pytest.mark.parametrize("bad", ["cut", "missing"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_picture_among_three_as_text(ask: Run, pictures: dict[str, str], bad: str, place: int) -> None:
    names = ["red", "blue"]
    names.insert(place, bad)
    result = ask(*(pictures[name] for name in names))
    assert result.code == 2
    assert [line for line in result.out.splitlines() if line.startswith("==>")] == [
        f"==> {pictures[name]} <==" for name in names
    ]
    assert ask(pictures["red"]).out in result.out
    assert ask(pictures["blue"]).out in result.out
    assert _is_one_error_line(result.err)
    assert pictures[bad] in result.err


def test_together_is_one_question(ask: Run, vlm: VLM, pictures: dict[str, str]) -> None:
    paths = [pictures["red"], pictures["blue"]]
    answer = vlm.describe(paths, PROMPT, sampling=Sampling(max_new_tokens=6))
    (row,) = ask(*paths, "--together", "--json").rows
    assert row["images"] == paths
    assert row["usage"]["num_images"] == 2
    assert row["text"] == answer.text
    assert ask(*paths, "--together").out == answer.text.lstrip() + "\n"


def test_together_fails_as_one(ask: Run, pictures: dict[str, str]) -> None:
    paths = [pictures["red"], pictures["missing"]]
    result = ask(*paths, "--together", "--json")
    (row,) = result.rows
    assert result.code == 2
    assert row["images"] == paths
    assert row["error"]["kind"] == "bad_image"


def test_a_data_url_is_answered_but_not_repeated(ask: Run, pictures: dict[str, str]) -> None:
    url = "data:image/png;base64," + base64.b64encode(Path(pictures["red"]).read_bytes()).decode()
    from_url, from_file = ask(url, pictures["red"], "--json").rows
    assert from_url["text"] == from_file["text"]
    assert from_url["image"] == "str #0"
    assert url not in ask(url, pictures["red"]).out


def test_a_bug_in_one_picture_leaves_the_others(
    ask: Run, pictures: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = VLM.stream

    def fails_on_red(self: VLM, images: Any, prompt: str, **options: Any) -> Iterator[Any]:
        if "red" in images[0]:
            raise RuntimeError("an accident")
        return stream(self, images, prompt, **options)

    monkeypatch.setattr(VLM, "stream", fails_on_red)
    result = ask(pictures["red"], pictures["blue"], "--json")
    failed, good = result.rows
    assert result.code == 2
    assert failed["error"] == {"kind": "internal", "message": "an accident"}
    assert good["text"]
    assert "an accident" in caplog.text


def test_sampling_options_arrive(ask: Run, vlm: VLM, pictures: dict[str, str]) -> None:
    options = ["--temperature", "5", "--top-p", "0.9", "--top-k", "40", "--repetition-penalty", "1.3"]
    sampling = Sampling(max_new_tokens=6, temperature=5, top_p=0.9, top_k=40, repetition_penalty=1.3, seed=3)
    expected = vlm.describe(pictures["red"], PROMPT, sampling=sampling).text
    assert ask(pictures["red"], *options, "--seed", "3", "--json").rows[0]["text"] == expected
    assert ask(pictures["red"], *options, "--seed", "4", "--json").rows[0]["text"] != expected


def test_stop_texts_arrive(ask: Run, pictures: dict[str, str]) -> None:
    text = ask(pictures["red"], "--json").rows[0]["text"]
    stop = text[len(text) // 2 :][:3]
    (row,) = ask(pictures["red"], "--stop", "never seen", "--stop", stop, "--json").rows
    assert row["text"] == text[: text.index(stop)]
    assert row["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--max-new-tokens", "-1"], "max_new_tokens"),
        (["--temperature", "-0.5"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--top-k", "-1"], "top_k"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--stop", ""], "stop"),
        (["--seed", "-1"], "seed"),
        (["--device", "abacus"], "abacus"),
        (["--dtype", "float7"], "float7"),
        (["--model", "/no/such/folder"], "no such folder"),
        (["--model", "not-a-hub-name"], "no such folder"),
    ],
)
def test_bad_options(run: Run, checkpoint: Path, pictures: dict[str, str], args: list[str], message: str) -> None:
    model = [] if "--model" in args else ["--model", str(checkpoint)]
    result = run("describe", pictures["red"], "-p", PROMPT, *model, *args)
    assert (result.code, result.out) == (2, "")
    assert _is_one_error_line(result.err)
    assert message in result.err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json"),
        ("{", "config.json"),
        ('{"model_type": "blip"}', "supported: idefics3, llava, llava_next, llava_onevision, smolvlm"),
        ('{"model_type": "idefics3"}', ""),
    ],
)
def test_a_folder_that_is_no_checkpoint(
    run: Run, pictures: dict[str, str], tmp_path: Path, config: str | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    result = run("describe", pictures["red"], "-p", PROMPT, "--model", str(tmp_path))
    assert (result.code, result.out) == (2, "")
    assert _is_one_error_line(result.err)
    assert message in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["describe", "a.png"], "--prompt"),
        (["describe", "a.png", "-p", "  "], "--prompt"),
        (["describe", "-p", PROMPT], "IMAGE"),
        (["describe", "a.png", "-p", PROMPT, "--modle", "x"], "--model"),
        (["describe", "a.png", "-p", PROMPT, "--top-k", "many"], "--top-k"),
        (["descrbe", "a.png"], "describe"),
    ],
)
def test_bad_usage(run: Run, args: list[str], message: str) -> None:
    result = run(*args)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


LIGHT = [
    (["--help"], 0),
    (["--version"], 0),
    (["describe", "--help"], 0),
    (["scenes", "--help"], 0),
    (["train", "--help"], 0),
    (["models"], 0),
    (["describe", "a.png"], 2),
    (["describe", "a.png", "-p", "x", "--unknown"], 2),
    (["describe", "a.png", "-p", "x", "--max-new-tokens", "0"], 2),
    (["describe", "/no/such/picture.png", "-p", "x"], 2),
]


def test_what_needs_no_model_loads_no_torch() -> None:
    """One process for all: help, version, bad arguments and a missing picture answer at once."""
    code = f"""
import sys
from vlmfast.cli.main import main
for args, expected in {LIGHT!r}:
    try:
        main(args)
    except SystemExit as exit_info:
        assert (exit_info.code or 0) == expected, (args, exit_info.code)
    assert "torch" not in sys.modules and "transformers" not in sys.modules, args
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("vlmfast: error: ") == 2


def test_help_and_defaults_are_those_of_sampling(run: Run) -> None:
    docs = field_docs(Sampling)
    assert docs.keys() == {field.name for field in fields(Sampling)}
    parameters = inspect.signature(describe).parameters
    for field in fields(Sampling):
        if field.name != "stop":
            assert parameters[field.name].default == getattr(Sampling(), field.name)
    text = run("describe", "--help").out
    for field in fields(Sampling):
        assert f"--{field.name.replace('_', '-')}" in text
        assert docs[field.name][:20] in text


def test_version_and_models(run: Run) -> None:
    assert run("--version").out.startswith("vlmfast 0.")
    text = run("models").out
    assert "idefics3" in text
    assert "smolvlm" in text


@pytest.mark.parametrize("name", ["scenes", "train"])
def test_mounted_commands(run: Run, name: str) -> None:
    assert f"vlmfast {name}" in run(name, "--help").out
    result = run(name, "--no-such-option")
    assert result.code == 2
    assert "no-such-option" in result.err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[31m\x9b red\x07\tcircle\n"
    for stream, expected in ((_Terminal(), "a[31m red\tcircle\n"), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        output.write_foreign(text)
        assert stream.getvalue() == expected


def test_progress_only_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with loading._progress("Loading tiny") as report:
        assert report is not None
        report(1, 2)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(loading, "_QUIET_SECONDS", 0.0)
    with loading._progress("Loading tiny") as report:
        assert report is not None
        report(1, 2)
        time.sleep(0.5)
    assert "Loading tiny" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with loading._progress("Loading tiny") as report:
        assert report is None


def _start(checkpoint: Path, picture: str) -> subprocess.Popen[bytes]:
    """The installed command on a long answer, in a process group of its own."""
    command = [str(Path(sys.executable).parent / "vlmfast"), "describe", *[picture] * 50]
    options = ["-p", PROMPT, "--model", str(checkpoint), "--max-new-tokens", "1000"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=heed_interrupts,
        start_new_session=True,
    )


def test_interrupting_is_quiet(checkpoint: Path, pictures: dict[str, str]) -> None:
    process = _start(checkpoint, pictures["red"])
    assert process.stdout is not None
    process.stdout.readline()  # the header
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_closed_pipe_is_quiet(checkpoint: Path, pictures: dict[str, str]) -> None:
    process = _start(checkpoint, pictures["red"])
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()
