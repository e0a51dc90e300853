"""What a vision tower made of the last pictures, for a second model that stands on the same tower."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from vlmfast_models.geometry import TilePlan

TowerKey = tuple[str, TilePlan, tuple[int, ...]]
"""Digest of a picture, its tiles, patches merged in each layer."""
TowerOutputs = Sequence[tuple[Tensor, Tensor | None]]
"""For each group of tiles the outputs [P, patches, hidden], and the attention that each patch received if asked for."""


class TowerMemory:
    """Outputs by picture until they are taken, the oldest going first; safe to share between threads.

    No cache: it holds what was just computed for one model until the other comes for it.

    Args:
        max_bytes: held in all; a picture larger than that is not kept.
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._outputs: OrderedDict[TowerKey, TowerOutputs] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: TowerKey, *, scored: bool) -> TowerOutputs | None:
        """The outputs, which are held no longer; None where there are none, or `scored` and they came without."""
        with self._lock:
            found = self._outputs.get(key)
            if found is None or (scored and any(received is None for _, received in found)):
                return None
            self._num_bytes -= _num_bytes(found)
            return self._outputs.pop(key)

    def put(self, key: TowerKey, outputs: TowerOutputs) -> None:
        """Holds the outputs."""
        with self._lock:
            self._num_bytes += _num_bytes(outputs) - _num_bytes(self._outputs.pop(key, ()))
            self._outputs[key] = outputs
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _num_bytes(self._outputs.popitem(last=False)[1])


def _num_bytes(outputs: TowerOutputs) -> int:
    return sum(each.nbytes + (0 if received is None else received.nbytes) for each, received in outputs)
