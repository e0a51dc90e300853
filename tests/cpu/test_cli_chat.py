"""The command `vlmfast chat`: from a pipe, on a terminal, and interrupted."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from interrupts import heed_interrupts
from oracle import noise
from PIL import Image

from vlmfast import VLM, Sampling
from vlmfast.cli.main import main

_SHORT = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("chat pictures")
    for name, size in (("one", (40, 30)), ("two", (21, 55))):
        Image.fromarray(noise(*size)).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in ("one", "two")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def converse(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """converse(lines, *arguments) -> what a chat wrote that read these lines from a pipe."""

    def run(lines: list[str], *arguments: str) -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        with pytest.raises(SystemExit) as end:
            main([*_arguments(checkpoint_of), *arguments])
        out, err = capsys.readouterr()
        return Result(returncode=end.value.code if isinstance(end.value.code, int) else 0, stdout=out, stderr=err)

    return run


def _arguments(checkpoint_of: Callable[..., Path], max_new_tokens: int = 6) -> list[str]:
    options = ["--model", str(checkpoint_of()), "--dtype", "float32", "--device", "cpu"]
    return ["chat", *options, "--max-new-tokens", str(max_new_tokens)]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from vlmfast.cli.main import main; main()", *arguments]


def _answers(vlm: VLM, picture: str, *questions: tuple[str, str | None]) -> list[str]:
    chat = vlm.chat(picture)
    return [chat.ask(text, image, sampling=_SHORT).text for text, image in questions]


def test_lines_are_answered_in_one_conversation(
    converse: Callable[..., Any], vlm: VLM, pictures: dict[str, str], tmp_path: Path
) -> None:
    """Guards questions, pictures in between, save and load: the output is the answers of `VLM.chat`, a line each."""
    saved = str(tmp_path / "chat.json")
    done = converse(
        ["What is it?", "", f"/image '{pictures['two']}'", "And this?", f"/save {saved}", "/quit", "Never asked"],
        pictures["one"],
    )
    expected = _answers(vlm, pictures["one"], ("What is it?", None), ("And this?", pictures["two"]))
    assert (done.returncode, done.stdout) == (0, "".join(answer + "\n" for answer in expected))
    assert "21x55: goes with your next question" in done.stderr
    again = converse([f"/load {saved}", "/undo", "And this?"])
    assert (again.returncode, again.stdout) == (0, expected[1] + "\n")
    assert "taken back: And this?" in again.stderr


def test_given_options_hold_for_a_loaded_chat(
    converse: Callable[..., Any], pictures: dict[str, str], tmp_path: Path
) -> None:
    """Guards a lossy option that a file of a chat without one undid in silence; without options the file's holds."""
    saved, reduced = str(tmp_path / "chat.json"), str(tmp_path / "reduced.json")
    converse(["What is it?", f"/save {saved}"], pictures["one"])
    done = converse([f"/load {saved}", "And?", f"/save {reduced}"], "--reduce", "random", "--keep", "0.25", "--stats")
    assert "as the options say: Reduce random keep=0.25" in done.stderr and "; visual tokens " in done.stderr
    done = converse([f"/load {reduced}", "And?"], "--stats")
    assert "as the file says: Reduce random keep=0.25" in done.stderr and "; visual tokens " in done.stderr
    for options in ([], ["--resolution", "high"]):  # said outright, a default is an option as any other
        done = converse([f"/load {reduced if options else saved}", "And?"], *options, "--stats")
        assert "visual tokens" not in done.stderr


def test_a_chat_is_not_saved_over_its_pictures(converse: Callable[..., Any], pictures: dict[str, str]) -> None:
    """Guards the pictures: /save with the wrong name must not cost one, waiting or asked about."""
    before = Path(pictures["one"]).read_bytes()
    done = converse([f"/save {pictures['one']}", "What?", f"/save {pictures['one']}"], pictures["one"])
    assert done.returncode == 2 and done.stderr.count("is one of the chat's pictures") == 2
    assert Path(pictures["one"]).read_bytes() == before


def test_a_draft_model_is_asked_for(converse: Callable[..., Any]) -> None:
    done = converse(["What?"], "--speculation", "model")
    assert (done.returncode, done.stdout) == (2, "") and "--draft-model" in done.stderr


def test_a_wrong_dtype_names_those_that_run(converse: Callable[..., Any]) -> None:
    done = converse(["What?"], "--dtype", "int2")
    assert done.returncode != 0 and "float16 (CUDA only)" in " ".join(done.stderr.split())


def test_bad_lines_are_reported_and_the_others_run(
    converse: Callable[..., Any], vlm: VLM, pictures: dict[str, str]
) -> None:
    lines = ["/undo", "/frob", "/image", "/image missing.png", "/load missing.json", "/save no/folder", "What is it?"]
    done = converse(lines, pictures["one"], "--stats")
    assert (done.returncode, done.stdout) == (2, _answers(vlm, pictures["one"], ("What is it?", None))[0] + "\n")
    errors = [line for line in done.stderr.splitlines() if line.startswith("vlmfast: error: ")]
    assert len(errors) == 6 and "/help" in errors[1] and "missing.png" in errors[3]
    assert "0 of them known; pictures encoded: " in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_picture_is_said_before_the_model_is_loaded(converse: Callable[..., Any]) -> None:
    done = converse(["What?"], "missing.png")
    assert (done.returncode, done.stdout) == (2, "") and "missing.png" in done.stderr


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    checkpoint_of: Callable[..., Path], pictures: dict[str, str]
) -> None:
    """Guards Ctrl-C in the middle of an answer: the next question is answered without the stopped one."""
    process = subprocess.Popen(
        _command(*_arguments(checkpoint_of, max_new_tokens=1900), pictures["one"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Tell me a long story.\n")
    process.stdin.flush()
    assert os.read(process.stdout.fileno(), 1), "the answer has begun"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"/undo\n/help\n", timeout=120)
    assert b"stopped; the question is forgotten" in err
    assert b"nothing to undo" in err and b"/image PATH" in out and b"Traceback" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_on_a_terminal(checkpoint_of: Callable[..., Path], pictures: dict[str, str], vlm: VLM) -> None:
    """Guards the prompt: Ctrl-C at it is no end, Ctrl-D is, with exit code 0 whatever failed before."""
    import pty

    master, slave = pty.openpty()
    process = subprocess.Popen(
        _command(*_arguments(checkpoint_of), pictures["one"]),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    os.close(slave)
    seen = b""

    def read_until(wanted: bytes, count: int = 1) -> None:
        nonlocal seen
        while seen.count(wanted) < count:
            assert select.select([master], [], [], 120)[0], f"{wanted!r} does not come after {seen[-200:]!r}"
            seen += os.read(master, 4096)

    read_until(b"> ")
    for _ in range(120):  # readline misses a signal that comes between its prompt and its wait
        process.send_signal(signal.SIGINT)
        if select.select([master], [], [], 1)[0]:
            break
    read_until(b"/quit or Ctrl-D ends the chat")
    os.write(master, b"/frob\r")
    read_until(b"no command /frob")
    os.write(master, b"/undo\r")
    read_until(b"nothing to undo")
    read_until(b"> ", 4)
    os.write(master, b"\x04")
    assert process.wait(timeout=120) == 0
    os.close(master)


def test_help_lists_what_it_takes(converse: Callable[..., Any]) -> None:
    done = converse([], "--help")
    for option in ("--system", "--model", "--temperature", "--overflow", "--no-cache", "--stats"):
        assert option in done.stdout
