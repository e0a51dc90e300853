"""Captioning many pictures: order, bounded look-ahead, errors as rows, and the command around it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from vlmfast.captions import captions
from vlmfast.cli.main import app
from vlmfast.errors import InputError, OptionError
from vlmfast.types import Answer, CaptionError, Chunk, FinishReason, ImageInput, Timings, Usage

SCENES = Path(__file__).parents[2] / "assets" / "scenes"


def picture(name: str) -> ImageInput:
    from vlmfast.image.load import load_image

    return load_image(Image.new("RGB", (4, 4), name))


def answer(text: str) -> Answer:
    usage = Usage(**dict.fromkeys((field.name for field in fields(Usage)), 1))
    timings = Timings(**dict.fromkeys((field.name for field in fields(Timings)), 0.0))
    return Answer(text=text, finish_reason=FinishReason.STOP, token_ids=(1,), usage=usage, timings=timings)


class Stub:
    """Loads and answers by name, and notes how far ahead of the reader it was asked to go."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.running = 0
        self.most_running = 0

    def load(self, source: object) -> ImageInput:
        self.loaded.append(str(source))
        if source == "broken":
            raise InputError("broken: no picture")
        if source == "odd":
            raise RuntimeError("not foreseen")
        return picture("red")

    def submit(self, image: ImageInput) -> Iterator[Chunk]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)

        def chunks() -> Iterator[Chunk]:
            self.running -= 1
            yield Chunk(text="x", answer=answer(image.name))

        return chunks()

    def rows(self, sources: list[str]) -> Iterator[Answer | CaptionError]:
        return captions(sources, load=self.load, submit=self.submit, max_running=3, look_ahead=2)


def test_errors_are_rows_in_their_place() -> None:
    rows = list(Stub().rows(["a", "broken", "b", "odd", "c"]))
    kinds = [row.kind if isinstance(row, CaptionError) else "answer" for row in rows]
    assert kinds == ["answer", InputError.code, "answer", "internal", "answer"]
    assert isinstance(rows[1], CaptionError) and rows[1].image == "broken"


def test_look_ahead_is_bounded() -> None:
    stub = Stub()
    rows = stub.rows([f"{number}" for number in range(40)])
    for taken in range(1, 30):
        next(rows)
        assert len(stub.loaded) <= taken + 3 + 2
    assert stub.most_running == 3


def test_a_reader_who_stops_leaves_nothing_behind() -> None:
    stub = Stub()
    rows = stub.rows([f"{number}" for number in range(40)])
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert len(stub.loaded) <= 6


def test_no_pictures_no_rows() -> None:
    assert list(Stub().rows([])) == []


def test_the_command_writes_a_row_a_picture(tmp_path: Path) -> None:
    folder = tmp_path / "pictures" / "deep"
    folder.mkdir(parents=True)
    (folder / "dog.png").write_bytes((SCENES / "dog.png").read_bytes())
    (folder.parent / "broken.jpg").write_bytes(b"no picture")
    (folder.parent / "notes.txt").write_text("not asked about")
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(
        app, ["caption", str(folder.parent), "-p", "What is in the picture?", "-o", str(out), "--no-cache"]
    )
    assert result.exit_code == 1 and "1 of 2" in result.stderr
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["broken.jpg", "dog.png"]
    assert rows[0]["error"]["kind"] == "bad_image" and "dog" in rows[1]["caption"]
    assert rows[1]["usage"]["num_images"] == 1


def test_patterns_and_wrong_names(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        (tmp_path / name).write_bytes((SCENES / "dog.png").read_bytes())
    result = CliRunner().invoke(
        app, ["caption", f"{tmp_path}/*.png", f"{tmp_path}/missing.png", "-p", "What is in the picture?"]
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["a.png", "b.png", "missing.png"]
    assert "error" in rows[2] and result.exit_code == 1


@pytest.mark.parametrize("empty", ["folder", "pattern*.png"])
def test_nothing_found_is_said(empty: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, ["caption", str(tmp_path / empty)])
    assert result.exit_code == 2 and "no pictures in" in result.stderr


def test_wrong_names_alone_are_said_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a slip of the keyboard, which cost the loading of a large model; beside a file that is there, it is a row
    (above)."""
    monkeypatch.setattr("vlmfast.cli.caption.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    result = CliRunner().invoke(app, ["caption", str(tmp_path / "a.png"), str(tmp_path / "b.png")])
    assert result.exit_code == 2 and result.stdout == ""
    assert "a.png" in result.stderr and "b.png: no such file" in result.stderr.replace("\n", "")


def test_an_unwritable_output_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    result = CliRunner().invoke(app, ["caption", str(SCENES / "dog.png"), "-o", str(tmp_path / "file" / "out.jsonl")])
    assert result.exit_code == 2 and "can not be written" in result.stderr


def test_rows_are_not_written_over_a_picture(tmp_path: Path) -> None:
    """Guards the pictures: the file for the rows is opened, and so emptied, before the first of them is read."""
    picture = tmp_path / "dog.png"
    picture.write_bytes((SCENES / "dog.png").read_bytes())
    result = CliRunner().invoke(app, ["caption", str(tmp_path), "-o", str(picture)])
    assert isinstance(result.exception, OptionError) and "one of the pictures" in str(result.exception)
    assert picture.read_bytes() == (SCENES / "dog.png").read_bytes()


def test_what_is_wrong_with_every_picture_is_said_once() -> None:
    """Guards options that the model does not have: an error of the whole command, and no row for each picture."""
    for options in (["--fastv", "0.5", "--fastv-layer", "77"], ["--tome", "400"]):
        result = CliRunner().invoke(app, ["caption", str(SCENES), *options])
        assert isinstance(result.exception, OptionError) and result.stdout == ""


@pytest.mark.parametrize("command", ["describe", "caption", "chat"])
def test_usage_lines_name_their_pictures_once(command: str) -> None:
    """Guards brackets and dots written twice; which brackets they are depends on click's version."""
    (line,) = [line for line in CliRunner().invoke(app, [command, "--help"]).output.splitlines() if "Usage:" in line]
    assert line.translate(str.maketrans("", "", "[]{}")).split()[-2:] in (
        ["OPTIONS", "IMAGE..."],
        ["OPTIONS", "FOLDER_OR_GLOB..."],
    )
    assert line.count("...") == 1
