"""One LMDB environment per folder and process: opening, forks, folders that vanish, and what to do about errors.

Knows nothing of what is stored. A cache must never be the reason why an answer fails: whatever is wrong with the
folder ends in one warning, and from then on nothing is found and nothing is kept. No torch; lmdb is imported when a
folder is first opened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import lmdb

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_READERS = 512
_MAX_ATTEMPTS = 4


class MapFullError(Exception):
    """A write found no room in the map; it has not happened. Make room and try again."""


_FILES = {"data.mdb", "lock.mdb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """One transaction and the tables of the environment, while the transaction lasts."""

    txn: lmdb.Transaction[Any]
    entries: Any
    """key -> framed value"""
    used: Any
    """key -> when it was last used, and its bytes"""
    order: Any
    """when it was last used + key -> nothing; the order in which entries are evicted"""
    totals: Any
    """name -> a number kept for the whole store"""


class Environment:
    """An LMDB environment that may be used from any thread, after a fork, and beside other processes.

    One transaction at a time in this process: they take a millisecond, and LMDB wants none open when the map is
    resized. Other processes read and write at the same time; LMDB orders them.
    """

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self._map_bytes = map_bytes
        self._env: lmdb.Environment | None = None
        self._databases: tuple[Any, ...] = ()
        self._inode = 0
        self._failed = False
        self._busy = False

    @property
    def failed(self) -> bool:
        """Whether this process has given the folder up."""
        return self._failed

    @property
    def file_bytes(self) -> int:
        """Size of the file; it does not shrink when entries go."""
        try:
            return self._file.stat().st_size
        except OSError:
            return 0

    def grow(self, map_bytes: int) -> None:
        """Makes the map at least this large."""
        with self.lock:
            if map_bytes > self._map_bytes:
                self._map_bytes = map_bytes
                self.close()

    def read(self, function: Callable[[Tables], _T], default: _T) -> _T:
        """Returns function(tables) in a read transaction, or `default` where the folder can not be used.

        Buffers that the function gets from the transaction end with it.
        """
        return self._run(function, default, write=False)

    def write(self, function: Callable[[Tables], _T], default: _T) -> _T:
        """The same in a write transaction, all of which happens or nothing. The function may run several times.

        Raises:
            MapFullError: there is no room.
        """
        return self._run(function, default, write=True)

    def close(self) -> None:
        """Lets go of the files; the next transaction opens them again."""
        with self.lock:
            if self._env is not None:
                self._env.close()
                self._env = None

    def remove(self) -> None:
        """Deletes our files, if that is allowed; a folder that holds anything else is left as it is.

        Other processes go on with what they hold, and notice at their next write.
        """
        with self.lock:
            self.close()
            try:
                strange = set(os.listdir(self.folder)) - _FILES
            except OSError:
                return
            if strange:
                _log.warning("%s is not deleted: it holds %s, which no cache wrote", self.folder, min(strange))
                return
            # Renamed first, in one step: a process that opens meanwhile must not find the lock of one environment
            # beside the data of another.
            leaving = self.folder.with_name(f"{self.folder.name}.removed-{os.getpid()}")
            with contextlib.suppress(OSError):
                os.rename(self.folder, leaving)
            shutil.rmtree(leaving, ignore_errors=True)

    def _run(self, function: Callable[[Tables], _T], default: _T, *, write: bool) -> _T:
        with self.lock:
            # Busy: the garbage collector runs a store's last write in the middle of a transaction of this thread.
            if self._failed or self._busy:
                return default
            self._busy = True
            try:
                return self._attempt(function, default, write=write)
            finally:
                self._busy = False

    def _attempt(self, function: Callable[[Tables], _T], default: _T, *, write: bool) -> _T:
        try:
            import lmdb
        except ImportError as error:
            return self._give_up(error, default)
        damaged = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)
        reason: Exception = OSError("it changes faster than it can be read")
        for _ in range(_MAX_ATTEMPTS):
            try:
                env = self._opened(must_be_current=write)
                with env.begin(write=write, buffers=True) as txn:
                    entries, used, order, totals = self._databases
                    return function(Tables(txn=txn, entries=entries, used=used, order=order, totals=totals))
            except lmdb.MapFullError as error:
                raise MapFullError(str(error)) from error
            except lmdb.MapResizedError:  # another process has a larger map
                assert self._env is not None
                self._env.set_mapsize(0)
            except lmdb.ReadersFullError as error:  # processes that were killed may have left slots behind
                assert self._env is not None
                reason = error
                self._env.reader_check()
            except (*damaged, _DamagedFileError) as error:
                _log.info("the cache in %s is damaged (%s) and begun anew", self.folder, error)
                reason = error
                self.remove()
            except (lmdb.Error, OSError) as error:
                return self._give_up(error, default)
        return self._give_up(reason, default)

    def _opened(self, *, must_be_current: bool) -> lmdb.Environment:
        """The environment, opened where it is not, or (`must_be_current`) where its file has been replaced."""
        if self._env is not None and must_be_current and not self._is_current():
            self.close()
        if self._env is None:
            self._open()
        assert self._env is not None
        return self._env

    @property
    def _file(self) -> Path:
        return self.folder / "data.mdb"

    def _is_current(self) -> bool:
        try:
            return self._file.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        import lmdb

        for folder in (self.folder.parent, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # metasync=False: after a power cut the last writes may be missing, but what is there is whole.
        self._env = lmdb.open(
            os.fspath(self.folder),
            map_size=self._map_bytes,
            max_dbs=4,
            max_readers=_MAX_READERS,
            metasync=False,
            mode=0o600,
        )
        try:
            self._inode = self._file.stat().st_ino
            self._env.reader_check()
            # A page beyond the end of a file that was cut short would kill the process when it is touched.
            needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            if self._file.stat().st_size < needed:
                raise _DamagedFileError(f"{self._file} has {self._file.stat().st_size} bytes of {needed}")
            self._databases = tuple(self._env.open_db(name) for name in (b"entries", b"used", b"order", b"totals"))
        except BaseException:
            self.close()
            raise

    def _give_up(self, error: Exception, default: _T) -> _T:
        _log.warning("the cache in %s can not be used, going on without it: %s", self.folder, error)
        self._failed = True
        with contextlib.suppress(Exception):
            self.close()
        return default


class _DamagedFileError(Exception):
    """The file is shorter than its own table says."""


_environments: dict[str, Environment] = {}
"""By real path. LMDB allows one environment per folder in a process, so all who name a folder share it."""
_environments_lock = threading.Lock()
_watches_forks = False


def environment(folder: Path, map_bytes: int) -> Environment:
    """This process's environment for a folder, with a map of at least `map_bytes`. Opens nothing yet."""
    global _watches_forks
    path = os.path.realpath(folder)
    with _environments_lock:
        if not _watches_forks:
            os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
            _watches_forks = True
        if path not in _environments:
            _environments[path] = Environment(Path(path), map_bytes)
        found = _environments[path]
    found.grow(map_bytes)
    return found


def _before_fork() -> None:
    """No transaction may be under way in a fork: its locks would stay locked in the child."""
    _environments_lock.acquire()
    for item in _environments.values():
        item.lock.acquire()


def _after_fork() -> None:
    for item in _environments.values():
        item.lock.release()
    _environments_lock.release()


def _after_fork_in_child() -> None:
    """The child opens its own: an LMDB environment must not cross a fork."""
    for item in _environments.values():
        item.close()
    _after_fork()
