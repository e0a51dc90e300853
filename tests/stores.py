"""Stores for tests, and values that say of themselves whether they are whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

from vlmfast.cache.disk import DiskStore
from vlmfast.metrics import Counters

LIMIT = 2 * 2**20


def store_at(folder: Path, max_bytes: int = LIMIT) -> DiskStore:
    return DiskStore(folder, max_bytes=max_bytes, counters=Counters(), name="s")


def key_of(number: int) -> bytes:
    return b"k" + number.to_bytes(32, "big")


def value_of(key: bytes, num_bytes: int) -> bytes:
    """A value that says of itself whether it is whole: any reader can make it again from key and length."""
    seed = hashlib.sha256(key + num_bytes.to_bytes(8, "big")).digest()
    return (seed * (num_bytes // 32 + 1))[:num_bytes]


def check_value(key: bytes, value: memoryview) -> None:
    assert bytes(value) == value_of(key, len(value)), f"{key!r} holds something else"


def check_all(store: DiskStore) -> int:
    """Every entry is what was put; how many there are."""
    store.check_integrity()
    return len(store.entries(lambda entry, value: check_value(entry.key, value)))
