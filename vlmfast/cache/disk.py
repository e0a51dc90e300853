"""A store of checked byte values on disk, limited in bytes: the least recently used go first. No torch.

Several processes may share a folder, and any of them may be killed at any moment: a value is there as it was put, or
not at all. Keeps bytes and knows nothing of what they mean.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vlmfast.cache.environment import Environment, MapFullError, Tables, environment
from vlmfast.metrics import Counters

_log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview
_T = TypeVar("_T")

_FRAME = struct.Struct("<4sIQ")
"""Mark, crc32 of the payload, length of the payload."""
_MARK = b"vfs1"
_USED = struct.Struct(">QQ")
_STAMP = struct.Struct(">Q")
_TOTAL = struct.Struct("<q")

_PAGE_BYTES = 4096
_ENTRY_BYTES = 256
"""What the tables need for an entry besides its value, rounded up."""
_MIN_MAP_BYTES = 2**20
_PENDING_USES = 256
_MAX_ATTEMPTS = 8


class BadEntryError(Exception):
    """A value is not what was put: cut, changed, or written by another version. The store drops it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the store knows of a value."""

    key: bytes
    num_bytes: int
    """What it takes of the limit."""
    used_at: float
    """Seconds since the epoch when it was last used."""


@dataclass(slots=True)
class _Pending:
    """What later goes to disk together with a write: a look-up alone does not write."""

    uses: dict[bytes, int] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)

    def take(self) -> _Pending:
        """All of it, which is then no longer pending."""
        taken = _Pending(uses=self.uses, totals=self.totals)
        self.uses, self.totals = {}, Counter()
        return taken


class DiskStore:
    """Values by key in one folder.

    Args:
        folder: made on first use, readable for this user only.
        max_bytes: limit of the file; what is kept stays a quarter below, since LMDB needs room to move.
        counters: gets `name.puts`, `name.evictions` and `name.dropped` (values that were not whole).
    """

    def __init__(self, folder: Path, *, max_bytes: int, counters: Counters, name: str) -> None:
        self.limit_bytes = max(max_bytes, _MIN_MAP_BYTES)
        self.max_bytes = self.limit_bytes * 3 // 4
        self.counters = counters
        self._environment = environment(folder, self.limit_bytes)
        self._name = name
        self._pending = _Pending()
        weakref.finalize(self, _write_pending, self._environment, self._pending)

    @property
    def folder(self) -> Path:
        return self._environment.folder

    @property
    def file_bytes(self) -> int:
        """Size of the file on disk."""
        return self._environment.file_bytes

    @property
    def failed(self) -> bool:
        """Whether the folder can not be used: nothing is found and nothing is kept."""
        return self._environment.failed

    def get(self, key: bytes, read: Callable[[memoryview], _T]) -> _T | None:
        """Returns read(value), or None where there is no value, or none that is whole (which is dropped then).

        `read` is handed the store's own memory, for the time of the call: what it keeps it must copy. It may raise
        BadEntryError.
        """

        def find(tables: Tables) -> tuple[_T] | None:
            frame = tables.txn.get(key, db=tables.entries)
            return None if frame is None else (read(_payload(frame)),)

        try:
            found = self._environment.read(find, None)
        except BadEntryError:
            self._drop_bad(key)
            return None
        if found is None:
            return None
        self._pending.uses[key] = time.time_ns()
        if len(self._pending.uses) >= _PENDING_USES:
            self.flush()
        return found[0]

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Keeps the parts, joined, under a key; the longest unused values make room. Whether it did.

        A value larger than the whole store is not kept.
        """
        frame = _framed(parts)
        if _footprint(frame) > self.max_bytes:
            return False
        pending = self._pending.take()
        for attempt in range(_MAX_ATTEMPTS):
            try:
                num_evicted = self._environment.write(lambda tables: self._insert(tables, key, frame, pending), None)
            except MapFullError:
                self._make_room(attempt, _footprint(frame), pending)
                continue
            if num_evicted is None:
                return False
            self.counters.add(f"{self._name}.evictions", num_evicted)
            self.counters.add(f"{self._name}.puts")
            return True
        return False

    def record(self, name: str) -> None:
        """Adds one to a number that the store keeps for its whole life (see `totals`)."""
        self._pending.totals[name] += 1

    def drop(self, key: bytes) -> None:
        """Removes a value, if it is there."""
        try:
            self._environment.write(lambda tables: _remove(tables, key), None)
        except MapFullError:
            self._environment.remove()

    def entries(self, read: Callable[[Entry, memoryview], _T]) -> list[_T]:
        """Returns read(entry, value) of every entry, the longest unused first; `read` is bound as in `get`.

        Values that are not whole are left out and dropped.
        """
        bad: list[bytes] = []

        def collect(tables: Tables) -> list[_T]:
            bad.clear()
            found: list[_T] = []
            for row in tables.txn.cursor(db=tables.order).iternext(keys=True, values=False):
                stamp, key = _STAMP.unpack_from(row)[0], bytes(row[_STAMP.size :])
                try:
                    num_bytes = _USED.unpack(tables.txn.get(key, b"", db=tables.used))[1]
                    entry = Entry(key=key, num_bytes=num_bytes, used_at=stamp / 1e9)
                    found.append(read(entry, _payload(tables.txn.get(key, b"", db=tables.entries))))
                except (BadEntryError, struct.error):
                    bad.append(key)
            return found

        nothing: list[_T] = []
        found = self._environment.read(collect, nothing)
        for key in bad:
            self._drop_bad(key)
        return found

    def totals(self) -> dict[str, int]:
        """Numbers of the store's life: `entries` and `bytes` now; `evictions`, `dropped` and what was recorded."""
        self.flush()

        def collect(tables: Tables) -> dict[str, int]:
            kept = {
                bytes(name).decode(): _TOTAL.unpack(value)[0] for name, value in tables.txn.cursor(db=tables.totals)
            }
            zeros = dict.fromkeys(("bytes", "evictions", "dropped"), 0)
            return {"entries": tables.txn.stat(tables.entries)["entries"], **zeros, **kept}

        return self._environment.read(collect, {})

    def clear(self) -> None:
        """Removes everything, the file too."""
        self._pending.take()
        self._environment.remove()

    def flush(self) -> None:
        """Writes down what was used since the last write. Done by itself now and then, and at the end."""
        _write_pending(self._environment, self._pending)

    def check_integrity(self) -> None:
        """The tables agree with each other and with the limit."""

        def check(tables: Tables) -> None:
            used = {bytes(key): _USED.unpack(value) for key, value in tables.txn.cursor(db=tables.used)}
            order = {bytes(row[8:]): _STAMP.unpack_from(row)[0] for row, _ in tables.txn.cursor(db=tables.order)}
            keys = {bytes(key) for key, _ in tables.txn.cursor(db=tables.entries)}
            assert keys == set(used) == set(order)
            assert order == {key: stamp for key, (stamp, _) in used.items()}
            assert tables.txn.stat(tables.order)["entries"] == len(order)
            assert sum(num_bytes for _, num_bytes in used.values()) == _total(tables, "bytes")
            assert _total(tables, "bytes") <= self.max_bytes

        self._environment.read(check, None)

    def _drop_bad(self, key: bytes) -> None:
        self.counters.add(f"{self._name}.dropped")
        self.record("dropped")
        self.drop(key)

    def _insert(self, tables: Tables, key: bytes, frame: bytearray, pending: _Pending) -> int:
        """Puts a frame; how many entries had to go."""
        _apply(tables, pending)
        num_bytes = _footprint(frame)
        _remove(tables, key)
        num_evicted = _evict(tables, self.max_bytes - num_bytes)
        stamp = time.time_ns()
        tables.txn.put(key, frame, db=tables.entries)
        tables.txn.put(key, _USED.pack(stamp, num_bytes), db=tables.used)
        tables.txn.put(_STAMP.pack(stamp) + key, b"", db=tables.order)
        _add_total(tables, "bytes", num_bytes)
        return num_evicted

    def _make_room(self, attempt: int, num_bytes: int, pending: _Pending) -> None:
        """After a full map: evicts more each time, and begins anew when that does not help."""
        target = max(self.max_bytes - num_bytes * 2 ** (attempt + 1), 0)

        def evict(tables: Tables) -> int:
            _apply(tables, pending)
            return _evict(tables, target)

        try:
            if attempt >= _MAX_ATTEMPTS - 2:
                raise MapFullError
            self.counters.add(f"{self._name}.evictions", self._environment.write(evict, 0))
            pending.take()  # written down
        except MapFullError:
            _log.info("the cache in %s is too crowded and begun anew", self.folder)
            self._environment.remove()


def _framed(parts: Sequence[Buffer]) -> bytearray:
    checksum, length = 0, 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
        length += memoryview(part).nbytes
    frame = bytearray(_FRAME.pack(_MARK, checksum, length))
    for part in parts:
        frame += part
    return frame


def _payload(frame: Buffer) -> memoryview:
    """The value in a frame.

    Raises:
        BadEntryError: it is not whole.
    """
    if len(frame) < _FRAME.size:
        raise BadEntryError("cut short")
    mark, checksum, length = _FRAME.unpack_from(frame)
    payload = memoryview(frame)[_FRAME.size :]
    if mark != _MARK or length != len(payload) or zlib.crc32(payload) != checksum:
        raise BadEntryError("cut short, changed, or of another version")
    return payload


def _footprint(frame: bytearray) -> int:
    """What a frame takes in the file: large values have pages of their own."""
    pages = -(-(len(frame) + 16) // _PAGE_BYTES) if len(frame) > _PAGE_BYTES // 4 else 0
    return _ENTRY_BYTES + (pages * _PAGE_BYTES or len(frame))


def _total(tables: Tables, name: str) -> int:
    value = tables.txn.get(name.encode(), db=tables.totals)
    return 0 if value is None else int(_TOTAL.unpack(value)[0])


def _add_total(tables: Tables, name: str, amount: int) -> None:
    if amount:
        tables.txn.put(name.encode(), _TOTAL.pack(_total(tables, name) + amount), db=tables.totals)


def _remove(tables: Tables, key: bytes) -> bool:
    used = tables.txn.get(key, db=tables.used)
    if used is None:
        return False
    stamp, num_bytes = _USED.unpack(used)
    tables.txn.delete(key, db=tables.entries)
    tables.txn.delete(_STAMP.pack(stamp) + key, db=tables.order)
    tables.txn.delete(key, db=tables.used)
    _add_total(tables, "bytes", -num_bytes)
    return True


def _evict(tables: Tables, target: int) -> int:
    """Removes the longest unused entries until at most `target` bytes are kept; how many went."""
    num_evicted = 0
    cursor = tables.txn.cursor(db=tables.order)
    while _total(tables, "bytes") > target and cursor.first():
        _remove(tables, bytes(cursor.key()[_STAMP.size :]))
        num_evicted += 1
    _add_total(tables, "evictions", num_evicted)
    return num_evicted


def _apply(tables: Tables, pending: _Pending) -> None:
    """Writes down what was pending."""
    for key, stamp in list(pending.uses.items()):  # a look-up of another thread may be adding one
        used = tables.txn.get(key, db=tables.used)
        if used is None:
            continue
        before, num_bytes = _USED.unpack(used)
        if before < stamp:
            tables.txn.delete(_STAMP.pack(before) + key, db=tables.order)
            tables.txn.put(_STAMP.pack(stamp) + key, b"", db=tables.order)
            tables.txn.put(key, _USED.pack(stamp, num_bytes), db=tables.used)
    for name, amount in list(pending.totals.items()):
        _add_total(tables, name, amount)


def _write_pending(env: Environment, pending: _Pending) -> None:
    """A module function, so that it can run after its store is gone. Makes no folder that is gone."""
    taken = pending.take()
    if (taken.uses or taken.totals) and env.file_bytes > 0:
        with contextlib.suppress(MapFullError):  # the next put will make room; this much may be lost
            env.write(lambda tables: _apply(tables, taken), None)
