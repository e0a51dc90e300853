"""Quantised weights on disk: one safetensors file for each checkpoint and scheme, mapped at load.

A file is written beside its place and renamed, so several processes may share the folder and any may be killed. What
is not whole, or not ours, is said once, removed and made anew. A folder that can not be used costs a warning, no more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlmfast.cache.disk import Entry
from vlmfast.cache.folder import cache_folder
from vlmfast.cache.key import file_identity
from vlmfast.image.identity import digest_of
from vlmfast.metrics import Counters
from vlmfast.options import Caching
from vlmfast_models.weights import checkpoint_files

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FOLDER = "weights"
"""Below the cache folder."""
_KIND = "vlmfast quantized weights"
_VERSION = "1"
"""Raise it when the same weights come to give other codes, or the same codes are stored otherwise."""
_SUFFIX = ".safetensors"
_STALE_SECONDS = 3600
"""A file half written so long ago belongs to a process that is gone."""

Form = Mapping[str, tuple[Any, tuple[int, ...]]]
"""Tensor name -> torch dtype and shape."""


class _BadFileError(Exception):
    """A file is not what was written."""


def weights_key(folder: Path, *scheme: str) -> str:
    """The name of a checkpoint's weights in some form, in hex; `scheme`: all else that the form depends on.

    The checkpoint's files are known by (device, inode, size, times of change), as in `vlmfast.cache.key`.
    """
    return digest_of("quantized", _VERSION, repr([file_identity(file) for file in checkpoint_files(folder)]), *scheme)


def open_weights_store(caching: Caching) -> WeightsStore | None:
    """The store that `caching` asks for; None where it is off."""
    if caching.weights_disk_bytes == 0:
        return None
    return WeightsStore(cache_folder(caching) / FOLDER, max_bytes=caching.weights_disk_bytes, counters=Counters())


class WeightsStore:
    """Sets of tensors by key in one folder, limited in bytes: the longest unused go first."""

    def __init__(self, folder: Path, *, max_bytes: int, counters: Counters) -> None:
        self.folder = folder
        self.limit_bytes = max_bytes
        self.counters = counters
        self.failed = False
        """Whether the folder can not be used."""

    def load(self, key: str, form: Form) -> dict[str, Tensor] | None:
        """The tensors under a key, mapped from the file; None where there are none, or none that are whole."""
        file = self._file(key)
        if self.failed:
            return None
        try:
            file.stat()
            tensors = _read(file, key)
            found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            if found != dict(form):
                raise _BadFileError("it holds other tensors")
        except _BadFileError as error:
            self._drop(file, str(error))
            return None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            self._give_up(error)
            return None
        with contextlib.suppress(OSError):  # a shared folder may be read-only
            os.utime(file)
        return tensors

    def save(self, key: str, tensors: Mapping[str, Tensor], about: str) -> bool:
        """Keeps contiguous CPU tensors; the longest unused files make room. Whether it did. `about` is for people."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if self.failed or num_bytes > self.limit_bytes:
            return False
        metadata = {"kind": _KIND, "version": _VERSION, "key": key, "about": about, "crc32": str(_checksum(tensors))}
        partial = self._file(key).with_suffix(f".{os.getpid()}-{time.time_ns()}.part")
        try:
            from safetensors.torch import save_file

            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._evict(self.limit_bytes - num_bytes)
            save_file(dict(tensors), partial, metadata=metadata)
            with partial.open("rb") as stream:
                os.fsync(stream.fileno())  # a rename that outlives the data would leave a torn file
            partial.replace(self._file(key))
        except (OSError, ValueError, SafetensorError) as error:
            with contextlib.suppress(OSError, ValueError):
                partial.unlink(missing_ok=True)
            self._give_up(error)
            return False
        return True

    def entries(self, read: Callable[[Entry, memoryview], _T]) -> list[_T]:
        """read(entry, description in JSON) of every whole file; the others are dropped."""
        found = []
        for file in self._files():
            try:
                with _opened(file) as reader:
                    about = str(reader.metadata().get("about", ""))
                _read(file, file.stem)
                state = file.stat()
            except _BadFileError as error:
                self._drop(file, str(error))
                continue
            except OSError:
                continue  # another process has removed it
            entry = Entry(key=bytes.fromhex(file.stem), num_bytes=state.st_size, used_at=state.st_mtime)
            found.append(read(entry, memoryview(json.dumps({"weights": about}).encode())))
        return found

    def totals(self) -> dict[str, int]:
        """`entries` and `bytes` now, and how many this process has `dropped`."""
        return {
            "entries": len(self._files()),
            "bytes": self.file_bytes,
            "dropped": self.counters["weights.dropped"],
        }

    @property
    def file_bytes(self) -> int:
        """Size of all files."""
        return sum(_size(file) for file in self._files())

    def clear(self) -> None:
        """Removes everything that is ours, and the folder if nothing else is in it."""
        for file in [*self._files(), *self._partial_files()]:
            with contextlib.suppress(OSError):
                _remove(file)
        with contextlib.suppress(OSError, ValueError):
            self.folder.rmdir()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self) -> list[Path]:
        """Ours by name: 64 hexadecimal digits."""
        return [file for file in self._like(f"*{_SUFFIX}") if _is_key(file.stem)]

    def _partial_files(self) -> list[Path]:
        return [file for file in self._like("*.part") if _is_key(file.name.split(".")[0])]

    def _like(self, pattern: str) -> list[Path]:
        """In order; none of a folder that can not be read."""
        try:
            return sorted(self.folder.glob(pattern))
        except OSError:
            return []

    def _evict(self, target: int) -> None:
        """Removes the longest unused files until at most `target` bytes are kept, and what killed processes left."""
        for file in self._partial_files():
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > _STALE_SECONDS:
                    _remove(file)
        kept = sorted(self._files(), key=_used_at)
        while kept and sum(map(_size, kept)) > target:
            _remove(kept.pop(0))  # who has it mapped keeps it until it is done

    def _drop(self, file: Path, reason: str) -> None:
        _log.warning("%s is not used and made anew: %s", file, reason)
        self.counters.add("weights.dropped")
        with contextlib.suppress(OSError):
            _remove(file)

    def _give_up(self, error: Exception) -> None:
        _log.warning("quantized weights can not be kept in %s, going on without: %s", self.folder, error)
        self.failed = True


@contextlib.contextmanager
def _opened(file: Path) -> Any:
    """The file's reader.

    Raises:
        _BadFileError: it is no whole file of ours.
    """
    if file.is_dir():
        raise _BadFileError("it is a folder")
    try:
        with safe_open(file, framework="pt") as reader:
            if (reader.metadata() or {}).get("kind") != _KIND:
                raise _BadFileError("it was not written by vlmfast")
            yield reader
    except SafetensorError as error:  # an incomplete file, too
        raise _BadFileError(str(error)) from error


def _read(file: Path, key: str) -> dict[str, Tensor]:
    """The file's tensors, checked against their checksum.

    Raises:
        _BadFileError: something is wrong with it.
    """
    with _opened(file) as reader:
        metadata = reader.metadata()
        if (metadata.get("version"), metadata.get("key")) != (_VERSION, key):
            raise _BadFileError("it is of another version or checkpoint")
        tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  (no mapping)
    if metadata.get("crc32") != str(_checksum(tensors)):
        raise _BadFileError("it is damaged")
    return tensors


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    import torch

    checksum = 0
    for name in sorted(tensors):
        data: Any = tensors[name].reshape(-1).view(torch.uint8).numpy()  # a single number has no bytes to view
        checksum = zlib.crc32(data, zlib.crc32(name.encode(), checksum))
    return checksum


def _remove(file: Path) -> None:
    """Removes a file, or a folder that took its place."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _is_key(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _used_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
