"""Pictures on the command line: URLs, and the limits that have a flag."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from internet import replace_resolver, serving
from oracle import noise
from pictures import encode
from PIL import Image

from vlmfast.cli.main import main

Ask = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], checkpoint_of: Callable[..., Path]) -> Ask:
    """ask(*arguments) -> exit code and JSON rows of `vlmfast describe` with the tiny model."""

    def call(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        options = ["-p", "What?", "--model", str(checkpoint_of()), "--max-new-tokens", "2", "--json", "--no-cache"]
        with pytest.raises(SystemExit) as exit_info:
            main(["describe", *arguments, *options])
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return int(exit_info.value.code or 0), rows

    return call


def test_urls(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards URLs as arguments: each is fetched once, and one that fails is a row that says why."""
    replace_resolver(monkeypatch)
    with serving() as server:
        urls = [server.url("/first.jpg"), server.url("/missing"), server.url("/second.jpg")]
        code, rows = ask(*urls)
        assert [path for _, path in server.requests] == ["/first.jpg", "/missing", "/second.jpg"]
    assert code == 2
    assert [row["image"] for row in rows] == urls
    assert rows[1]["error"] == {"kind": "image_fetch", "message": f"{urls[1]}: answered 404 Not Found"}
    assert "text" in rows[0] and "text" in rows[2]


def test_limits_have_flags(ask: Ask, tmp_path: Path) -> None:
    """Guards that the flags reach the loader, both where pictures are tried first and in the model."""
    good, cut = tmp_path / "good.png", tmp_path / "cut.png"
    data = encode(Image.fromarray(noise(40, 30)))
    good.write_bytes(data)
    cut.write_bytes(data[: len(data) // 2])
    for pictures in ([good, cut], [cut, good]):
        names = [str(picture) for picture in pictures]
        code, rows = ask(*names)
        assert code == 2 and [("error" in row) for row in rows] == [picture == cut for picture in pictures]
        code, rows = ask(*names, "--allow-truncated")
        assert code == 0 and all("text" in row for row in rows)
    code, rows = ask(str(good), "--max-image-pixels", "1199")
    assert (code, rows[0]["error"]["kind"]) == (2, "image_too_large")
