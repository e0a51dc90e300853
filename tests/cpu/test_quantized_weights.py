"""Quantised weights on disk: made once, the same when read, checked, limited, shared, and off when asked."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import noise

from vlmfast import Sampling
from vlmfast.cache.weights import _KIND, _VERSION, WeightsStore
from vlmfast.cli.main import main
from vlmfast.metrics import Counters
from vlmfast.options import Caching
from vlmfast_kernels.ops import quant
from vlmfast_models import layers

_KEY, _OTHER_KEY = "a" * 64, "b" * 64
_TENSORS = {"x.codes": torch.arange(12, dtype=torch.int8).view(3, 4), "x.scale": torch.tensor([0.5, -1.0, 2.0])}
_FORM = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in _TENSORS.items()}
_KINDS = [("int8", "auto"), ("int4", "auto"), ("float32", "int8"), ("int8", "int8")]


def _answer(vlm: Any) -> tuple[int, ...]:
    return vlm.describe(noise(40, 30), "What is it?", sampling=Sampling(max_new_tokens=8)).token_ids


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "weights").glob("*"))


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights", max_bytes=2**20, counters=Counters())


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was quantised, as it happens."""
    seen: list[str] = []
    for name in ("quantize_compiled", "quantize"):
        original = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda weight, kind, f=original: (seen.append(kind), f(weight, kind))[1])
    return seen


@pytest.mark.parametrize(("dtype", "vision_dtype"), _KINDS)
def test_quantised_once_and_the_same_after(
    dtype: str, vision_dtype: str, load_vlm: Callable[..., Any], tmp_path: Path, quantised: list[str]
) -> None:
    """The second load quantises nothing; its answers are those of the first, and of one without a cache."""
    options = {"dtype": dtype, "vision_dtype": vision_dtype}
    caching = Caching(folder=tmp_path, features_disk_bytes=0)
    first = _answer(load_vlm(caching=caching, **options))
    count = len(quantised)
    assert count > 0 and len(_files(tmp_path)) == (dtype != "float32") + (vision_dtype == "int8")
    assert _answer(load_vlm(caching=caching, **options)) == first
    assert len(quantised) == count
    assert _answer(load_vlm(caching=False, **options)) == first
    assert len(quantised) == 2 * count


def test_off_leaves_nothing(load_vlm: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_CACHE_DIR", str(tmp_path))
    load_vlm(dtype="int8", caching=False)
    load_vlm(dtype="int8", caching=Caching(weights_disk_bytes=0))
    load_vlm(dtype="float32")
    assert not (tmp_path / "weights").exists()


def test_another_checkpoint_has_another_file(
    load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    caching = Caching(folder=tmp_path, features_disk_bytes=0)
    first = _answer(load_vlm(dtype="int8", caching=caching))
    other = checkpoint_of(seed=5)
    assert _answer(load_vlm(other, dtype="int8", caching=caching)) == _answer(
        load_vlm(other, dtype="int8", caching=False)
    )
    assert len(_files(tmp_path)) == 2
    assert _answer(load_vlm(dtype="int8", caching=caching)) == first


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 16
    file.write_bytes(data)


def _foreign(file: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x.codes": torch.zeros(3)}, file)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _nonsense(file: Path) -> None:
    file.write_bytes(os.urandom(4096))


def _another(file: Path) -> None:
    """A whole file of ours under a wrong name."""
    store = WeightsStore(file.parent, max_bytes=2**20, counters=Counters())
    store.save(_OTHER_KEY, _TENSORS, "other")
    (file.parent / f"{_OTHER_KEY}.safetensors").replace(file)


def _number(file: Path) -> None:
    """Ours, but for a tensor without dimensions."""
    from safetensors.torch import save_file

    metadata = {"kind": _KIND, "version": _VERSION, "key": file.stem, "crc32": "0"}
    save_file({"x.codes": torch.tensor(3, dtype=torch.int8), "x.scale": torch.tensor(1.0)}, file, metadata=metadata)


def _folder(file: Path) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)


@pytest.mark.parametrize("damage", [_cut, _flip, _foreign, _empty, _nonsense, _another, _number, _folder])
def test_a_file_that_is_not_whole_is_made_anew(
    damage: Callable[[Path], None],
    load_vlm: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Said once, never used, and whole again for the next load."""
    caching = Caching(folder=tmp_path, features_disk_bytes=0)
    first = _answer(load_vlm(dtype="int8", caching=caching))
    (file,) = _files(tmp_path)
    size = file.stat().st_size
    damage(file)
    with caplog.at_level(logging.WARNING):
        assert _answer(load_vlm(dtype="int8", caching=caching)) == first
    assert sum("made anew" in record.message for record in caplog.records) == 1
    assert file.stat().st_size == size
    caplog.clear()
    load_vlm(dtype="int8", caching=caching)
    assert not caplog.records


def test_a_folder_that_can_not_be_written_costs_a_warning(
    load_vlm: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "weights").write_text("a file where the folder should be")
    vlm = load_vlm(dtype="int8", caching=Caching(folder=tmp_path, features_disk_bytes=0))
    assert _answer(vlm) and sum("going on without" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("how", ["long", "zero", "closed"])
def test_a_folder_that_can_not_be_reached_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Guards a load that an unusable folder ended: one warning, nothing found, nothing kept, nothing raised."""
    folder = {"long": tmp_path / ("x" * 300), "zero": tmp_path / "a\0b", "closed": tmp_path / "closed" / "weights"}[how]
    if how == "closed":

        def closed(self: Path, **kwargs: Any) -> Any:  # as for a user who may not search the folder
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "stat", closed)
    store = WeightsStore(folder, max_bytes=2**20, counters=Counters())
    assert store.load(_KEY, _FORM) is None and not store.save(_KEY, _TENSORS, "")
    assert sum("going on without" in record.message for record in caplog.records) == 1
    monkeypatch.undo()
    fresh = WeightsStore(folder, max_bytes=2**20, counters=Counters())
    assert fresh.totals()["entries"] == 0
    fresh.clear()


def test_a_folder_in_the_place_of_a_file_is_no_entry(store: WeightsStore) -> None:
    """Guards the lists and the limit: it is dropped, and makes room as a file does."""
    for act in (lambda: store.entries(lambda entry, _: entry), store.clear, lambda: store._evict(0)):
        place = store.folder / f"{_KEY}.safetensors"
        (place / "inside").mkdir(parents=True)
        act()
        assert not place.exists() and not store.failed


def test_store_gives_back_what_was_put(store: WeightsStore) -> None:
    assert store.load(_KEY, _FORM) is None
    assert store.save(_KEY, _TENSORS, "about")
    found = store.load(_KEY, _FORM)
    assert found is not None and all(torch.equal(found[name], _TENSORS[name]) for name in _TENSORS)
    assert store.load(_OTHER_KEY, _FORM) is None
    assert store.load(_KEY, {**_FORM, "y.codes": (torch.int8, (1,))}) is None, "the form must be the one asked for"


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    """And a set larger than the limit is not kept; what is mapped stays readable."""
    big = {"x.codes": torch.ones(60_000, dtype=torch.int8)}
    form = {"x.codes": (torch.int8, (60_000,))}
    store = WeightsStore(tmp_path, max_bytes=150_000, counters=Counters())
    keys = [letter * 64 for letter in "abc"]
    for age, key in enumerate(keys[:2]):
        assert store.save(key, big, "")
        os.utime(tmp_path / f"{key}.safetensors", (time.time() - 100 + age, time.time() - 100 + age))
    mapped = store.load(keys[0], form)  # used: now the younger
    assert store.save(keys[2], big, "")
    assert store.load(keys[1], form) is None and store.load(keys[2], form) is not None
    assert mapped is not None and int(mapped["x.codes"].sum()) == 60_000
    assert not store.save("d" * 64, {"x": torch.zeros(200_000, dtype=torch.int8)}, "")
    assert store.file_bytes <= 150_000


def test_what_a_killed_process_left_is_swept(store: WeightsStore) -> None:
    store.save(_KEY, _TENSORS, "")
    old, fresh = (store.folder / f"{_OTHER_KEY}.{name}.part" for name in ("1-1", "2-2"))
    for file in (old, fresh):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    store.save(_KEY, _TENSORS, "")
    assert not old.exists() and fresh.exists()
    store.clear()
    assert not store.folder.exists()


def _save_and_load(folder: str) -> bool:
    store = WeightsStore(Path(folder), max_bytes=2**20, counters=Counters())
    for _ in range(30):
        store.save(_KEY, _TENSORS, "")
        found = store.load(_KEY, _FORM)
        if found is None or not torch.equal(found["x.codes"], _TENSORS["x.codes"]):
            return False
    return not store.failed


def test_processes_share_a_folder(store: WeightsStore) -> None:
    """All write the same file over each other; a reader finds a whole one at any moment."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_save_and_load, [str(store.folder)] * 2) == [True, True]
    assert [file.name for file in store.folder.iterdir()] == [f"{_KEY}.safetensors"]


def test_the_command_knows_them(
    load_vlm: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(("cache", *args, "--folder", str(tmp_path), "--json"))
        return int(exit_info.value.code or 0), capsys.readouterr().out

    load_vlm(dtype="int8", vision_dtype="int8", caching=Caching(folder=tmp_path, features_disk_bytes=0))
    weights = json.loads(run("stats")[1])["weights"]
    assert weights["entries"] == 2 and weights["entries_by_kind"] == {"quantized weights": 2}
    assert 0 < weights["bytes"] == sum(file.stat().st_size for file in _files(tmp_path)) < weights["limit_bytes"]
    rows = [json.loads(line) for line in run("list")[1].splitlines()]
    assert {row["weights"].split(" ", 1)[1] for row in rows} == {"decoder int8", "vision int8"}
    assert run("verify")[0] == 0
    _flip(_files(tmp_path)[0])
    assert run("verify")[0] == 1 and len(_files(tmp_path)) == 1
    assert run("clear")[0] == 0 and not (tmp_path / "weights").exists()


def test_int4_form_is_the_kernels(load_vlm: Callable[..., Any]) -> None:
    """What is expected of a file is what quantising gives, odd widths included."""
    from vlmfast_models.quantized import parts_of, stored_form, with_parts

    linear = layers.Linear(70, 5, bias=False)
    torch.nn.init.normal_(linear.weight)
    for kind in ("int8", "int4"):
        weight = quant.quantize(linear.weight.detach(), kind)
        parts = parts_of({"x": weight})
        plan: Any = {"x": (linear, kind)}
        assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == stored_form(plan)
        back = with_parts(plan, parts)["x"]
        assert torch.equal(back.dequantize(torch.float32), weight.dequantize(torch.float32))
