"""The disk store: what was put or nothing, within its limit, whatever happens to processes, files and folders."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
from stores import LIMIT, check_all, check_value, key_of, store_at, value_of

from vlmfast.cache.disk import BadEntryError, DiskStore
from vlmfast.cache.environment import Tables

Open = Callable[..., DiskStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Open:
    """Opens the one folder of the test."""

    def make(max_bytes: int = LIMIT) -> DiskStore:
        return store_at(tmp_path / "root" / "store", max_bytes)

    return make


def test_what_was_put_is_found(open_store: Open) -> None:
    store = open_store()
    assert store.get(b"none", bytes) is None
    for size in (0, 1, 4096, 500_000):
        assert store.put(key_of(size), [b"", value_of(key_of(size), size), b"!"])
        assert store.get(key_of(size), bytes) == value_of(key_of(size), size) + b"!"
    assert store.put(key_of(1), [b"new"])
    assert store.get(key_of(1), bytes) == b"new"
    store.drop(key_of(1))
    assert store.get(key_of(1), bytes) is None
    store.check_integrity()


def test_the_folder_is_private(open_store: Open, tmp_path: Path) -> None:
    open_store().put(b"a", [b"1"])
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "root" / "store").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "root" / "store").iterdir()} == {0o600}


@pytest.mark.parametrize("seed", range(3))
def test_random_use_agrees_with_a_plain_model(open_store: Open, seed: int) -> None:
    """LRU by bytes: exactly the entries of an ordered dictionary are kept. Restarts change nothing."""
    rng = random.Random(seed)
    store = open_store()
    model: OrderedDict[bytes, bytes] = OrderedDict()
    for step in range(400):
        key = key_of(rng.randrange(30))
        if rng.random() < 0.5:
            model[key] = value_of(key, rng.choice((10, 900, 20_000, 250_000)))
            model.move_to_end(key)
            assert store.put(key, [model[key]])
            kept = set(store.entries(lambda entry, value: entry.key))
            while len(model) > len(kept):
                model.popitem(last=False)
            assert kept == set(model), f"seed {seed}, step {step}"
        else:
            assert store.get(key, bytes) == model.get(key), f"seed {seed}, step {step}"
            if key in model:
                model.move_to_end(key)
        if step % 50 == 0:
            store.check_integrity()
            store.flush()
            store = open_store()
    assert store.totals()["evictions"] > 20
    assert store.file_bytes <= LIMIT
    assert store.totals()["bytes"] <= LIMIT


def test_uses_are_written_down_at_the_end(open_store: Open) -> None:
    """A process that only reads still keeps what it read from being evicted."""
    store = open_store()
    for number in range(4):
        store.put(key_of(number), [bytes(300_000)])
    assert store.get(key_of(0), len)
    del store  # as the end of the process does
    store = open_store()
    store.put(key_of(9), [bytes(600_000)])
    kept = store.entries(lambda entry, value: entry.key)
    assert key_of(0) in kept
    assert key_of(1) not in kept


def test_a_value_beyond_the_limit_is_not_kept(open_store: Open) -> None:
    """Case 8: never a spin, and what is there stays."""
    store = open_store()
    store.put(b"small", [b"1"])
    assert not store.put(b"large", [bytes(LIMIT)])
    assert store.get(b"small", bytes) == b"1"


def _tamper(store: DiskStore, key: bytes, change: Callable[[bytes], bytes]) -> None:
    def write(tables: Tables) -> None:
        tables.txn.put(key, change(bytes(tables.txn.get(key, db=tables.entries))), db=tables.entries)

    store._environment.write(write, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[:-1],
        lambda frame: frame[:3],
        lambda frame: b"",
        lambda frame: frame + b"x",
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        lambda frame: frame[:5] + bytes([frame[5] ^ 128]) + frame[6:],
        lambda frame: b"vfs0" + frame[4:],
    ],
    ids=["cut", "header cut", "emptied", "longer", "bit in value", "bit in checksum", "other version"],
)
def test_a_bad_entry_is_dropped(open_store: Open, change: Callable[[bytes], bytes]) -> None:
    """Case 18."""
    store = open_store()
    store.put(b"a", [bytes(range(200))])
    store.put(b"b", [b"other"])
    _tamper(store, b"a", change)
    assert store.get(b"a", bytes) is None
    assert store.counters["s.dropped"] == 1
    store.check_integrity()
    assert store.totals()["entries"] == 1
    assert store.put(b"a", [b"again"])
    assert store.get(b"a", bytes) == b"again"
    _tamper(store, b"a", change)
    assert store.entries(lambda entry, value: bytes(value)) == [b"other"]
    assert store.counters["s.dropped"] == 2


def test_a_reader_may_refuse_a_value(open_store: Open) -> None:
    def refuse(value: memoryview) -> None:
        raise BadEntryError("an old version")

    store = open_store()
    store.put(b"a", [b"1"])
    assert store.get(b"a", refuse) is None
    assert store.get(b"a", bytes) is None


@pytest.mark.parametrize("damage", ["garbage", "cut", "emptied"])
def test_a_damaged_file_is_begun_anew(open_store: Open, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store()
    for number in range(6):
        store.put(key_of(number), [bytes(100_000)])
    store._environment.close()
    file = store.folder / "data.mdb"
    with file.open("r+b") as stream:
        if damage == "garbage":
            stream.write(random.Random(0).randbytes(3 * 4096))
        else:
            stream.truncate(file.stat().st_size // 2 if damage == "cut" else 0)
    assert store.get(key_of(1), bytes) is None
    assert store.put(key_of(1), [b"new"])
    assert store.get(key_of(1), bytes) == b"new"
    assert not store.failed
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("place", ["below a file", "in /proc"])
def test_a_useless_folder_is_one_warning(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case 11. Works for root too, whom permissions do not stop."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "store" if place == "below a file" else Path("/proc/vlmfast/store")
    store = store_at(folder)
    for _ in range(3):
        assert not store.put(b"a", [b"1"])
        assert store.get(b"a", bytes) is None
    again = store_at(folder)
    assert not again.put(b"a", [b"1"])
    assert store.failed
    assert store.totals() == {}
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(folder) in warning.getMessage()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_warning(open_store: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o500)
    try:
        store = open_store()
        assert not store.put(b"a", [b"1"])
        assert not store.put(b"a", [b"1"])
    finally:
        tmp_path.chmod(0o700)
    assert len(caplog.records) == 1


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    """Case 11, with a limit on the size of files in place of a full disk: LMDB's writes fail half way."""
    code = """
import resource, sys
from pathlib import Path
from vlmfast.cache.disk import DiskStore
from vlmfast.metrics import Counters
store = DiskStore(Path(sys.argv[1]), max_bytes=64 * 2**20, counters=Counters(), name="s")
assert store.put(b"first", [b"1" * 1000])
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, resource.RLIM_INFINITY))
kept = [store.put(b"%d" % number, [bytes(300_000)]) for number in range(20)]
assert kept[0] and not kept[-1] and store.failed, kept
assert store.get(b"first", bytes) is None
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("can not be used") == 1
    store = store_at(tmp_path / "store", 64 * 2**20)
    assert store.get(b"first", bytes) == b"1" * 1000
    store.check_integrity()


def test_a_deleted_folder_is_made_again(open_store: Open, tmp_path: Path) -> None:
    """Case 11: also one that was deleted and made again by another process."""
    store = open_store()
    store.put(b"a", [b"1"])
    shutil.rmtree(tmp_path / "root")
    assert store.put(b"b", [b"2"])
    assert (store.folder / "data.mdb").is_file()
    assert store.get(b"b", bytes) == b"2"
    store.clear()
    assert not store.folder.exists()
    assert store.get(b"b", bytes) is None
    assert store.put(b"c", [b"3"])
    assert store.totals()["entries"] == 1


def test_threads_share_a_store(open_store: Open) -> None:
    """Eight threads, half of them with a store of their own on the same folder."""
    shared = open_store()
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        store = shared if seed % 2 else open_store()
        rng = random.Random(seed)
        try:
            for _ in range(60):
                key = key_of(rng.randrange(20))
                if rng.random() < 0.5:
                    store.put(key, [value_of(key, rng.choice((5, 30_000, 200_000)))])
                else:
                    store.get(key, lambda value, key=key: check_value(key, value))  # type: ignore[misc]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert check_all(shared) > 0


def test_a_store_collected_in_the_middle_of_another_one_waits_for_nothing(open_store: Open) -> None:
    """The garbage collector may run a store's last write while this thread is in a transaction on the same folder."""
    store, dying = open_store(), open_store()
    store.put(b"a", [b"1"])
    assert dying.get(b"a", bytes) == b"1"
    holder = [dying]
    del dying

    def collect(value: memoryview) -> bytes:
        holder.clear()
        assert store.get(b"a", bytes) is None
        assert not store.put(b"b", [b"2"])
        return bytes(value)

    assert store.get(b"a", collect) == b"1"
    assert store.put(b"b", [b"2"])
    store.check_integrity()


def test_the_last_write_makes_no_folder(open_store: Open, tmp_path: Path) -> None:
    """Guards temporary folders: they are often gone before the process ends."""
    store = open_store()
    store.put(b"a", [b"1"])
    assert store.get(b"a", bytes) == b"1"
    shutil.rmtree(tmp_path / "root")
    store.flush()
    assert not (tmp_path / "root").exists()
