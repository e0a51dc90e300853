"""Keys and values of picture prefixes on disk, so that a new process answers about a known picture without a prefill.

One record a picture: the tokens since the picture before it, under a digest of the whole prefix that they end and of
all that keys and values depend on.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmfast.cache.disk import BadEntryError, DiskStore
from vlmfast.cache.folder import cache_folder
from vlmfast.cache.prefix import Segment, Units
from vlmfast.cache.record import bytes_of, tensor_of
from vlmfast.errors import OptionError
from vlmfast.image.identity import digest_of
from vlmfast.metrics import Counters
from vlmfast.options import Caching

_log = logging.getLogger(__name__)

_SCHEMA = 1
_HEADER = struct.Struct("<HIIII")
"""Schema, L, G, n, D."""
_MAX_NAMES = 4096


def open_prefix_store(caching: Caching, counters: Counters) -> DiskStore | None:
    """The store of prefixes, or None where it is off or has no place."""
    if not caching.prefix_disk or caching.prefix_disk_bytes == 0:
        return None
    try:
        folder = cache_folder(caching) / "prefixes"
    except OptionError as error:
        _log.warning("prefixes are kept in memory only: %s", error)
        return None
    return DiskStore(folder, max_bytes=caching.prefix_disk_bytes, counters=counters, name="prefix_disk")


def prefix_fingerprint(*, weights: str, network: str, arithmetic: Iterable[str], salt: str) -> str:
    """Digest of what keys and values depend on besides the tokens and pictures; the arguments are those of
    `vision_fingerprint`, of the decoder."""
    return digest_of("decoder", weights, network, repr(tuple(arithmetic)), salt)


class PrefixDisk:
    """A `PrefixStore`. Segments are tensors [L, 2, G, n, D] to it.

    Args:
        fingerprint: see `prefix_fingerprint`. Pictures bring their own in their keys.
        shape: (L, G, D).
        rows_of: the tensor of a segment.
        wrap: the segment of a tensor.
    """

    def __init__(
        self,
        store: DiskStore,
        *,
        fingerprint: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        rows_of: Callable[[Any], Tensor],
        wrap: Callable[[Tensor], Segment],
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._rows_of = rows_of
        self._wrap = wrap
        self._on_disk: set[bytes] = set()
        """Names that need no second look: reading a record to see that it is there costs its checksum."""

    def load(self, prefix: Units, num_tokens: int) -> Segment | None:
        """See `PrefixStore`. A bad record is dropped and not there."""
        name = self._name(prefix)
        rows = self._store.get(name, partial(self._unpack, num_tokens))
        if rows is None:
            self._on_disk.discard(name)
            return None
        self._note(name)
        return self._wrap(rows.to(self._device))

    def save(self, prefix: Units, num_tokens: int, copy: Callable[[], Segment]) -> None:
        """See `PrefixStore`."""
        name = self._name(prefix)
        if name in self._on_disk or self._store.get(name, lambda value: True):
            return
        layers, groups, dim = self._shape
        rows = self._rows_of(copy()).cpu()
        if self._store.put(name, [_HEADER.pack(_SCHEMA, layers, groups, num_tokens, dim), bytes_of(rows)]):
            self._note(name)

    def _note(self, name: bytes) -> None:
        if len(self._on_disk) >= _MAX_NAMES:
            self._on_disk.clear()
        self._on_disk.add(name)

    def _name(self, prefix: Units) -> bytes:
        parts: list[str | int] = []
        for unit in prefix:
            parts += [unit] if isinstance(unit, int) else ["picture", unit.key, unit.reduce_id, repr(unit.ids)]
        return bytes.fromhex(digest_of("prefix", _SCHEMA, self._fingerprint, *parts))

    def _unpack(self, num_tokens: int, value: memoryview) -> Tensor:
        layers, groups, dim = self._shape
        if len(value) < _HEADER.size or _HEADER.unpack_from(value) != (_SCHEMA, layers, groups, num_tokens, dim):
            raise BadEntryError("a prefix of another version or shape")
        shape = (layers, 2, groups, num_tokens, dim)
        if len(value) - _HEADER.size != torch.Size(shape).numel() * self._dtype.itemsize:
            raise BadEntryError("a prefix of another size than its header says")
        return tensor_of(value[_HEADER.size :], self._dtype).view(shape)
