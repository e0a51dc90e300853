"""Counters that parts of the runtime add to and anyone may read. Plain whole numbers; exporters build on these."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Named whole numbers that only grow, safe to share between threads. A name nobody added to reads 0."""

    def __init__(self) -> None:
        self._values: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        """All values at one moment, by name in alphabetical order."""
        with self._lock:
            return dict(sorted(self._values.items()))
