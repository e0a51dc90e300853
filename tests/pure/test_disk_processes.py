"""Several processes on one folder of the disk store: writing together, killed at any moment, forked."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stores import check_all, store_at, value_of

from vlmfast.cache.disk import DiskStore

NUM_KILLS = int(os.environ.get("VLMFAST_KILLS", "5"))

# What workers in other processes run; they share `stores`.
WORKER = f"""
import random, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from stores import check_value, key_of, store_at, value_of
store, seed, count = store_at(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
print("ready", flush=True)
for _ in range(count):
    key = key_of(rng.randrange(40))
    if rng.random() < 0.6:
        assert store.put(key, [value_of(key, rng.choice((1, 3000, 70_000, 300_000)))])
    else:
        store.get(key, lambda value: check_value(key, value))
assert not store.failed and store.counters["s.dropped"] == 0
"""


def worker(folder: Path, seed: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(folder), str(seed), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return store_at(tmp_path / "store")


def test_processes_share_a_folder(store: DiskStore) -> None:
    """Four processes write, read and evict at once; nobody meets a bad value."""
    processes = [worker(store.folder, seed, 120) for seed in range(4)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert check_all(store) > 0
    assert store.totals()["dropped"] == 0


def test_a_map_that_another_process_enlarged(tmp_path: Path) -> None:
    """Processes may have different limits."""
    store = store_at(tmp_path / "store", 2**20)
    store.put(b"a", [b"1"])
    code = """
import sys
from pathlib import Path
from vlmfast.cache.disk import DiskStore
from vlmfast.metrics import Counters
store = DiskStore(Path(sys.argv[1]), max_bytes=32 * 2**20, counters=Counters(), name="s")
for number in range(20):
    assert store.put(b"%d" % number, [bytes(500_000)])
"""
    subprocess.run([sys.executable, "-c", code, str(store.folder)], check=True)
    assert store.get(b"19", len) == 500_000
    assert store.put(b"b", [b"2"])
    assert store.get(b"b", bytes) == b"2"
    store.check_integrity()


def test_a_folder_that_another_process_made_anew(store: DiskStore) -> None:
    """Case 11: what is put after that is where the others look."""
    store.put(b"old", [b"1"])
    shutil.rmtree(store.folder)
    process = worker(store.folder, 0, 20)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert store.put(b"new", [value_of(b"new", 100)])
    assert check_all(store) > 1
    assert store.get(b"old", bytes) is None


def test_killed_writers_leave_no_bad_value(store: DiskStore) -> None:
    """kill -9 at any moment (VLMFAST_KILLS=50 for the long run): the next reader finds whole values only."""
    rng = random.Random(0)
    num_entries = 0
    for seed in range(NUM_KILLS):
        process = worker(store.folder, seed, 10**9)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if seed % 2:
            store._environment.close()  # a new process, and one that had the folder open all the time
        num_entries = check_all(store)
        assert store.put(b"after", [b"still writable"])
        store.drop(b"after")
    assert num_entries > 0
    assert store.counters["s.dropped"] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_opens_its_own(store: DiskStore) -> None:
    """An LMDB environment must not cross a fork; both sides go on."""
    store.put(b"parent", [b"1"])
    child = os.fork()
    if child == 0:
        good = (
            store._environment._env is None
            and store.get(b"parent", bytes) == b"1"
            and store.put(b"child", [b"2"])
            and not store.failed
        )
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get(b"child", bytes) == b"2"
    assert store.put(b"after", [b"3"])
    store.check_integrity()
