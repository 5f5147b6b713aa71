"""One process's hold on a store directory: its files and its index, kept usable."""

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
    """Where records are, for the threads of one process.

    Args:
        path: of the directory; created if absent.
        sizes: group fingerprint -> body bytes, of the groups that this process uses.
        quota: bytes of slots over the whole directory, or None.
        faults: counts what goes wrong.

    Raises:
        OSError, IndexFault: the directory cannot even be read.
    """

    def __init__(
        self, path: Path, sizes: Mapping[bytes, int], quota: int | None, faults: Counter[str]
    ) -> None:
        self.lock = threading.RLock()  # held whenever index, directory or faults are used
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

    @property
    def writable(self) -> bool:
        """False: opened for reading only."""
        return self._directory.writable

    @property
    def owner(self) -> str:
        """The name under which slots are claimed."""
        return self._directory.owner

    def ask(self, work: Callable[[Index], T]) -> T | None:
        """Do ``work`` on the index; None if that failed, which is counted.

        An index that is gone is replaced before, one that proves damaged after.

        Raises:
            StoreError: there is no index any more, nor can one be made.
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
        """Make the index anew: it said what cannot be."""
        with self.lock:
            self._replace(damaged=True)

    def slab(self, fingerprint: bytes, body: int, create: bool = False) -> Slab:
        """The slab of a group.

        Raises:
            OSError: it cannot be opened.
        """
        with self.lock:
            return self._directory.slab(fingerprint, body, create)

    def punch(self, slab: SlabRow, number: int) -> bool:
        """Give a slot's bytes back; False: the file system cannot."""
        try:
            return self.slab(slab.fingerprint, slab.body).punch(number)
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def heal(self) -> int:
        """Free the slots that dead writers held; returns how many."""
        return self.ask(lambda index: index.heal(self._directory.alive)) or 0

    def count(self, kind: str, times: int = 1) -> None:
        """Count a fault."""
        with self.lock:
            if times:
                self._faults[kind] += times

    def close(self) -> None:
        """Leave the directory. Nobody may be reading or writing."""
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
        damaged = damaged and self._index.current()  # else somebody has replaced it already
        self._index.close()
        try:
            self._attach(damaged)
        except (OSError, *IndexFault) as error:
            raise StoreError(f"{self._directory.path} is unusable: {error}") from error

    def _attach(self, damaged: bool) -> None:
        """Open the index, made anew if need be, and put it in order."""
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
    """The name under which an error is counted."""
    if isinstance(error, OverflowError):
        return "unreachable"
    if isinstance(error, IndexFault):  # without a code: Python's own complaint about what it got
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        return _INDEX_REFUSALS.get(code) or _INDEX_REFUSALS.get(code & 0xFF, "index")
    return _REFUSALS.get(getattr(error, "errno", None) or errno.EIO, "io")
