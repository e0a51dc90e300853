"""Features of pictures seen before: in memory over on disk, whole features only.

Only what does not depend on the question enters. A key is asked for by many and encoded by one.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from vlmfast.cache.disk import DiskStore
from vlmfast.cache.folder import cache_folder
from vlmfast.cache.key import ImageKey
from vlmfast.cache.record import pack_features, unpack_features
from vlmfast.errors import OptionError
from vlmfast.metrics import Counters
from vlmfast.options import Caching
from vlmfast.types import FeatureSource
from vlmfast_models.batch import VisionFeatures
from vlmfast_models.geometry import TilePlan

_log = logging.getLogger(__name__)

FEATURES = b"f"
"""First byte of a feature's key on disk; what else lives in the store begins otherwise."""


def open_feature_store(caching: Caching, counters: Counters) -> DiskStore | None:
    """The disk tier, or None where it is off or has no place."""
    if caching.features_disk_bytes == 0:
        return None
    try:
        folder = cache_folder(caching) / "features"
    except OptionError as error:
        _log.warning("features are kept in memory only: %s", error)
        return None
    return DiskStore(folder, max_bytes=caching.features_disk_bytes, counters=counters, name="features_disk")


def open_feature_cache(caching: Caching, disk: DiskStore | None, counters: Counters) -> FeatureCache | None:
    """The cache of both tiers, or None where both are off."""
    if caching.features_ram_bytes == 0 and disk is None:
        return None
    return FeatureCache(ram_bytes=caching.features_ram_bytes, disk=disk, counters=counters)


@dataclass(slots=True)
class _Flight:
    """A key being encoded: what the others wait for."""

    done: threading.Event = field(default_factory=threading.Event)
    features: VisionFeatures | None = None
    """Set before `done`, unless the encoder failed."""


class FeatureCache:
    """Features by `ImageKey`; safe to share between threads.

    Features handed out share memory with the cache: read them, never write to them.

    Args:
        ram_bytes: limit of the memory tier; the least recently used go first. 0 is none.
        disk: the tier below, which may be shared with other processes.
        counters: gets features.ram_hits, .disk_hits, .misses and .ram_evictions.
    """

    def __init__(self, *, ram_bytes: int, disk: DiskStore | None, counters: Counters) -> None:
        self._max_ram_bytes = ram_bytes
        self._ram_bytes = 0
        self._ram: OrderedDict[ImageKey, VisionFeatures] = OrderedDict()
        self._disk = disk
        self._counters = counters
        self._flights: dict[ImageKey, _Flight] = {}
        self._lock = threading.Lock()

    @property
    def num_ram_bytes(self) -> int:
        """Memory held by the features in the memory tier."""
        return self._ram_bytes

    def get_or_encode(
        self, key: ImageKey, plan: TilePlan, encode: Callable[[], VisionFeatures]
    ) -> tuple[VisionFeatures, FeatureSource]:
        """Features by key, on the CPU: from memory, from disk, or else from `encode`, whose result is kept.

        One thread encodes a key while the others wait for it; if it fails, the next one tries. What `encode` raises is
        raised here, and nothing is kept.
        """
        while True:
            with self._lock:
                found = self._ram.get(key)
                if found is not None:
                    self._ram.move_to_end(key)
                    self._count("ram_hits", "hits")
                    return found, FeatureSource.RAM
                flight = self._flights.get(key)
                leads = flight is None
                if flight is None:
                    flight = self._flights[key] = _Flight()
            if leads:
                return self._fly(key, flight, plan, encode)
            flight.done.wait()
            if flight.features is not None:
                self._count("ram_hits", "hits")
                return flight.features, FeatureSource.RAM

    def check_integrity(self) -> None:
        """The bytes counted are the bytes held, and are within the limit."""
        assert self._ram_bytes == sum(map(_num_bytes, self._ram.values()))
        assert self._ram_bytes <= self._max_ram_bytes
        assert not self._flights

    def _fly(
        self, key: ImageKey, flight: _Flight, plan: TilePlan, encode: Callable[[], VisionFeatures]
    ) -> tuple[VisionFeatures, FeatureSource]:
        try:
            features = None
            source = FeatureSource.DISK
            if self._disk is not None:
                features = self._disk.get(_disk_key(key), partial(unpack_features, plan=plan))
            if features is None:
                source = FeatureSource.ENCODER
                features = _on_cpu(encode())
                if self._disk is not None:
                    self._disk.put(_disk_key(key), pack_features(features))
            if source is FeatureSource.DISK:
                self._count("disk_hits", "hits")
            else:
                self._count("misses", "misses")
            with self._lock:
                self._keep(key, features)
            flight.features = features
            return features, source
        finally:
            with self._lock:
                del self._flights[key]
            flight.done.set()

    def _keep(self, key: ImageKey, features: VisionFeatures) -> None:
        num_bytes = _num_bytes(features)
        if num_bytes > self._max_ram_bytes:
            return
        self._ram[key] = features
        self._ram_bytes += num_bytes
        while self._ram_bytes > self._max_ram_bytes:
            _, gone = self._ram.popitem(last=False)
            self._ram_bytes -= _num_bytes(gone)
            self._counters.add("features.ram_evictions")

    def _count(self, name: str, lifetime_name: str) -> None:
        self._counters.add(f"features.{name}")
        if self._disk is not None:
            self._disk.record(lifetime_name)


def _disk_key(key: ImageKey) -> bytes:
    return FEATURES + bytes.fromhex(key)


def _num_bytes(features: VisionFeatures) -> int:
    return features.tokens.nbytes + (0 if features.saliency is None else features.saliency.nbytes)


def _on_cpu(features: VisionFeatures) -> VisionFeatures:
    """The same on the CPU, in memory of their own: a view would keep all alive that it was cut from."""
    return replace(
        features, tokens=_own(features.tokens), saliency=None if features.saliency is None else _own(features.saliency)
    )


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
