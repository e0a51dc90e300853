"""`vlmfast cache` and `--no-cache`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from oracle import noise
from PIL import Image

from vlmfast.cache.disk import DiskStore
from vlmfast.cli.main import main
from vlmfast.metrics import Counters

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLMFAST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*args) -> (exit code, stdout, stderr)."""

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        out, err = capsys.readouterr()
        return int(exit_info.value.code or 0), out, err

    return call


@pytest.fixture
def describe(run: Run, checkpoint_of: Callable[..., Path], tmp_path: Path) -> Run:
    Image.fromarray(noise(40, 30)).save(tmp_path / "a.png")

    def call(*args: str) -> tuple[int, str, str]:
        common = ("-p", "What?", "--max-new-tokens", "3", "--model", str(checkpoint_of()), "--json")
        return run("describe", str(tmp_path / "a.png"), *common, *args)

    return call


def test_an_empty_cache_stays_absent(run: Run, folder: Path) -> None:
    for command in ("stats", "list", "verify", "clear"):
        code, out, err = run("cache", command)
        assert (code, err) == (0, "") and out
    assert json.loads(run("cache", "stats", "--json")[1]) == {"folder": str(folder)}
    assert not folder.exists()


def test_from_a_question_to_an_empty_folder(run: Run, describe: Run, folder: Path) -> None:
    assert json.loads(describe()[1])["usage"]["images_encoded"] == 1
    assert json.loads(describe()[1])["usage"]["images_from_disk"] == 1
    stats = json.loads(run("cache", "stats", "--json")[1])["features"]
    assert stats["entries_by_kind"] == {"features": 1, "known file": 1, "weights digest": 1}
    assert (stats["hits"], stats["misses"], stats["entries"], stats["evictions"]) == (1, 1, 3, 0)
    rows = [json.loads(line) for line in run("cache", "list", "--json")[1].splitlines()]
    assert {row["kind"] for row in rows} == set(stats["entries_by_kind"])
    assert [row["used_at"] for row in rows] == sorted((row["used_at"] for row in rows), reverse=True)
    (known,) = [row for row in rows if row["kind"] == "known file"]
    assert (known["width"], known["height"]) == (40, 30)
    assert len(run("cache", "list", "--json", "--limit", "1")[1].splitlines()) == 1
    assert "known file" in run("cache", "list")[1] and str(folder) in run("cache", "stats")[1]
    assert json.loads(run("cache", "verify", "--json")[1]) == {"good": 3, "dropped": 0}
    assert json.loads(run("cache", "clear", "--json")[1])["removed_bytes"] > 0
    assert list(folder.iterdir()) == []
    assert json.loads(describe()[1])["usage"]["images_encoded"] == 1


def test_no_cache_touches_nothing(describe: Run, folder: Path) -> None:
    for _ in range(2):
        assert json.loads(describe("--no-cache")[1])["usage"]["images_encoded"] == 1
    assert not folder.exists()


def test_verify_drops_what_is_not_whole(run: Run, describe: Run, folder: Path) -> None:
    describe()
    store = DiskStore(folder / "features", max_bytes=2**30, counters=Counters(), name="features")
    (key,) = [key for key in store.entries(lambda entry, _: entry.key) if key.startswith(b"f")]
    store._environment.write(lambda tables: tables.txn.put(key, b"not whole", db=tables.entries), None)
    code, out, _ = run("cache", "verify", "--json")
    assert (code, json.loads(out)) == (1, {"good": 2, "dropped": 1})
    assert run("cache", "verify")[0] == 0
    assert json.loads(describe()[1])["usage"]["images_encoded"] == 1


def test_prefixes_are_not_taken_for_features(run: Run, folder: Path) -> None:
    """A digest may begin with any byte, also with those that mark the kinds of the feature store."""
    store = DiskStore(folder / "prefixes", max_bytes=2**20, counters=Counters(), name="p")
    for first in (b"f", b"p", b"w", b"\0"):
        store.put(first + bytes(31), [b"keys and values"])
    assert json.loads(run("cache", "verify", "--json")[1]) == {"good": 4, "dropped": 0}
    assert json.loads(run("cache", "stats", "--json")[1])["prefixes"]["entries_by_kind"] == {"prefix": 4}


def test_a_useless_folder_is_named(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad" / "features"
    bad.mkdir(parents=True)
    (bad / "data.mdb").mkdir()
    code, out, _ = run("cache", "stats", "--folder", str(tmp_path / "bad"))
    assert (code, out) == (1, "")


def test_clear_leaves_what_no_cache_wrote(run: Run, tmp_path: Path) -> None:
    """Guards a user's own folder that happens to be called like one of ours."""
    mine = tmp_path / "features" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("my own")
    run("cache", "clear", "--folder", str(tmp_path))
    assert mine.read_text() == "my own"
