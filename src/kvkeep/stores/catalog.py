"""One process's view of a store directory: opens its files and its index, and replaces an index
that is lost or damaged."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ..schema import StoreError
from .directory import Directory
from .index import Index
from .labels import Label, load, save
from .rows import IndexFault, SlabRow
from .slab import Slab

T = TypeVar("T")

_REFUSALS = {
    errno.ENOENT: "missing",
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
    errno.EFBIG: "unreachable",
}
_INDEX_REFUSALS = {
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_CANTOPEN: "io",
    sqlite3.SQLITE_IOERR: "io",
    sqlite3.SQLITE_IOERR_SHMSIZE: "full",
}


class Catalog:
    """The directory and its index, shared by the threads of one process. Thread-safe.

    On a full or read-only file system it opens for reading.

    Args:
        path: the directory; created if absent.
        sizes: group fingerprint -> body bytes, of the groups that this process uses.
        quota: bytes of slots over the whole directory, or None for no limit.
        faults: the counter of contained failures, by kind.
        labels: what people call the groups, by fingerprint.

    Raises:
        OSError, IndexFault: the directory cannot be read.
    """

    def __init__(
        self,
        path: Path,
        sizes: Mapping[bytes, int],
        quota: int | None,
        faults: Counter[str],
        labels: Mapping[bytes, Label],
    ) -> None:
        self.lock = threading.RLock()  # guards the index, the directory and faults
        self._sizes = sizes
        self._quota = quota
        self._faults = faults
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._open(Directory(path, writable=True))
        except (OSError, *IndexFault) as error:
            kind = fault(error)
            if kind not in ("full", "read_only") or not path.is_dir():
                raise
            self.count(kind)
            self._open(Directory(path, writable=False))
        else:
            save(path, labels)

    @property
    def writable(self) -> bool:
        """False: opened for reading only."""
        return self._directory.writable

    @property
    def owner(self) -> str:
        """The name under which this process claims slots."""
        return self._directory.owner

    def ask(self, work: Callable[[Index], T]) -> T | None:
        """Run ``work`` on the index. Count a failure and return None.

        Replace an index file that has vanished before, and one that proves damaged after.

        Raises:
            StoreError: the index is lost and a new one cannot be made.
        """
        with self.lock:
            if not self._index.current():
                self._replace(damaged=False)
            try:
                return work(self._index)
            except (OSError, *IndexFault) as error:
                kind = fault(error)
                if kind == "index":
                    self._replace(damaged=True)
                else:
                    self.count(kind)
                return None

    def distrust(self) -> None:
        """Rebuild the index: one of its rows turned out to be impossible."""
        with self.lock:
            self._replace(damaged=True)

    def slab(self, fingerprint: bytes, body: int, create: bool = False) -> Slab:
        """The slab of a group; see :meth:`Directory.slab`.

        Raises:
            OSError: the slab cannot be opened.
        """
        with self.lock:
            return self._directory.slab(fingerprint, body, create)

    def label(self, fingerprint: bytes) -> Label | None:
        """What people call a group; None: nobody has said it."""
        return load(self._directory.path, fingerprint)

    def written(self, slab: SlabRow) -> float | None:
        """When a slab's file last changed, in seconds of ``time.time``; None: it is gone."""
        try:
            return self._directory.file(slab.fingerprint, slab.body).stat().st_mtime
        except OSError:
            return None

    def punch(self, slab: SlabRow, number: int) -> bool:
        """Return a slot's bytes to the file system. False: it cannot punch holes."""
        try:
            return self.slab(slab.fingerprint, slab.body).punch(number)
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def heal(self) -> int:
        """Free the slots that dead processes were writing; returns how many."""
        return self.ask(lambda index: index.heal(self._directory.alive)) or 0

    def count(self, kind: str, times: int = 1) -> None:
        """Add ``times`` faults of this kind."""
        with self.lock:
            if times:
                self._faults[kind] += times

    def close(self) -> None:
        """Leave the directory. Call it when no thread reads or writes any more."""
        with self.lock:
            if self._index.current():
                me, alive = self.owner, self._directory.alive
                self.ask(lambda index: index.heal(lambda who: who != me and alive(who)))
            self._index.close()
            self._directory.close()

    def _open(self, directory: Directory) -> None:
        self._directory = directory
        try:
            self._attach(damaged=False)
        except BaseException:
            directory.close()
            raise

    def _replace(self, damaged: bool) -> None:
        damaged = damaged and self._index.current()  # else another process has replaced it
        self._index.close()
        try:
            self._attach(damaged)
        except (OSError, *IndexFault) as error:
            raise StoreError(f"{self._directory.path} is unusable: {error}") from error

    def _attach(self, damaged: bool) -> None:
        """Open and heal the index; rebuild it if it is ``damaged`` or proves so."""
        with self._directory.locked():
            if damaged:
                self._directory.drop_index()
            try:
                self._join()
            except IndexFault as error:
                if fault(error) != "index":
                    raise
                self._directory.drop_index()
                self._join()

    def _join(self) -> None:
        self._index, rebuilt = self._directory.index()
        if rebuilt:
            self.count("index")
        try:
            self._index.register(self.owner, self._sizes)
            if self.writable:
                self._index.heal(self._directory.alive)
                if self._quota is not None:
                    self._index.shrink(self._quota, self.punch)
        except BaseException:
            self._index.close()
            raise


def fault(error: Exception) -> str:
    """The kind of fault that an error counts as."""
    if isinstance(error, OverflowError):
        return "unreachable"
    if isinstance(
        error, IndexFault
    ):  # without a code: Python could not decode what SQLite returned
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        return _INDEX_REFUSALS.get(code) or _INDEX_REFUSALS.get(code & 0xFF, "index")
    return _REFUSALS.get(getattr(error, "errno", None) or errno.EIO, "io")
