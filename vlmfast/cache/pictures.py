"""Which encoded files are which pictures: what `load_image` needs to put off decoding. No torch."""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from typing import Any

from vlmfast.cache.disk import BadEntryError, DiskStore
from vlmfast.image.known import PictureFacts

PICTURES = b"p"
"""First byte of a picture's key on disk."""
_RECORD = struct.Struct("<H32sII")
"""Schema, digest, width, height."""
_SCHEMA = 1
_MAX_IN_RAM = 16_384


class PictureMemory:
    """A `KnownPictures` in memory (a few MB at most) over the disk store of the features, where there is one."""

    def __init__(self, disk: DiskStore | None) -> None:
        self._disk = disk
        self._ram: OrderedDict[str, PictureFacts] = OrderedDict()
        self._lock = threading.Lock()

    def recall(self, key: str) -> PictureFacts | None:
        """The facts of the picture with this `encoded_key`, if it is known."""
        with self._lock:
            facts = self._ram.get(key)
            if facts is not None:
                self._ram.move_to_end(key)
                return facts
        facts = None if self._disk is None else self._disk.get(_disk_key(key), _unpack)
        if facts is not None:
            self._keep(key, facts)
        return facts

    def remember(self, key: str, facts: PictureFacts) -> None:
        """Keeps the facts of a picture."""
        self._keep(key, facts)
        if self._disk is not None:
            record = _RECORD.pack(_SCHEMA, bytes.fromhex(facts.digest), facts.width, facts.height)
            self._disk.put(_disk_key(key), [record])

    def _keep(self, key: str, facts: PictureFacts) -> None:
        with self._lock:
            self._ram[key] = facts
            if len(self._ram) > _MAX_IN_RAM:
                self._ram.popitem(last=False)


def describe_picture(value: memoryview) -> dict[str, Any]:
    """What a record on disk says, in plain values.

    Raises:
        BadEntryError: it is of another version.
    """
    facts = _unpack(value)
    return {"digest": facts.digest, "width": facts.width, "height": facts.height}


def _disk_key(key: str) -> bytes:
    return PICTURES + bytes.fromhex(key)


def _unpack(value: memoryview) -> PictureFacts:
    if len(value) != _RECORD.size:
        raise BadEntryError("a picture's record of another size")
    schema, digest, width, height = _RECORD.unpack(value)
    if schema != _SCHEMA:
        raise BadEntryError("a picture's record of another version")
    return PictureFacts(digest=digest.hex(), width=width, height=height)
