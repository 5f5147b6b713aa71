"""The files of one store directory: their names, their owners, and the scan that rebuilds an index.

::

    directory/
      lock                          locked while a process joins, or rebuilds the index
      owner-<random>                one per open store, which keeps it locked
      index-<random>.sqlite         which record is in which slot; a hint
      <fingerprint>-<bytes>.slab    the records of one group, in equal slots
      <fingerprint>.json            what people call the group (labels.py)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .index import Index
from .record import Footer, parse
from .rows import MAX_SEQUENCE, Found
from .slab import Slab

_SLAB = re.compile(r"([0-9a-f]{32})-([0-9]+)\.slab")


class Directory:
    """One process's view of the files. Not thread-safe: the catalog calls it under its lock.

    Args:
        path: an existing directory.
        writable: False changes no file and takes no lock.

    Raises:
        OSError: a file cannot be made or locked.
    """

    def __init__(self, path: Path, writable: bool) -> None:
        self.path = path
        self.writable = writable
        self.owner = uuid.uuid4().hex
        self._slabs: dict[tuple[bytes, int], Slab] = {}
        self._replaced: list[Slab] = []  # a thread may still be reading them
        os.scandir(path).close()  # raises if it cannot be listed
        if not writable:
            return
        with self.locked():
            self._own = os.open(self._badge(self.owner), os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._own, fcntl.LOCK_EX)
            for stray in path.glob("owner-*"):
                if not self.alive(stray.name.removeprefix("owner-")):
                    stray.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other processes from joining and from rebuilding the index."""
        if not self.writable:
            yield
            return
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def alive(self, owner: str) -> bool:
        """Whether the owner's store is open. The kernel unlocks its file however it ends."""
        try:
            badge = os.open(self._badge(owner), os.O_RDONLY)
        except (FileNotFoundError, ValueError):  # a damaged index may hold an impossible name
            return False
        try:
            fcntl.flock(badge, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(badge)
        return False

    def slab(self, fingerprint: bytes, body: int, create: bool = False) -> Slab:
        """The slab of a group, opened anew if its path names another file by now.

        Raises:
            OSError: the slab cannot be opened; ``FileNotFoundError`` if there is none.
        """
        name = (fingerprint, body)
        slab = self._slabs.get(name)
        if slab and not slab.current():
            self._replaced.append(self._slabs.pop(name))
            slab = None
        if slab is None:
            path = self.file(fingerprint, body)
            slab = self._slabs[name] = Slab(path, body, self.writable, create)
        return slab

    def file(self, fingerprint: bytes, body: int) -> Path:
        """Where the slab of a group is, if there is one."""
        return self.path / f"{fingerprint.hex()}-{body}.slab"

    def index(self) -> tuple[Index, bool]:
        """The index, and whether it was rebuilt from slabs. Call it ``locked``.

        Raises:
            IndexFault: the index is damaged, or the disk has no room for a new one.
        """
        if not self.writable:  # SQLite writes beside a log even to read it
            return Index(None, self._scan()), False
        for path in self.path.glob("index-*.sqlite"):
            return Index(path), False
        # Each index has a name of its own: a process that still has the last one open cannot
        # write into this one's log.
        self.drop_index()
        path = self.path / f"index-{uuid.uuid4().hex}.sqlite"
        fresh = path.with_suffix(".new")
        found = list(self._scan())
        Index(fresh, found).close()
        fresh.rename(path)  # whole or not at all
        return Index(path), bool(found)

    def drop_index(self) -> None:
        """Remove every file of an index. Call it ``locked``."""
        for path in self.path.glob("index-*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close and unlock all files. Call it when no thread reads or writes any more."""
        for slab in (*self._slabs.values(), *self._replaced):
            slab.close()
        if self.writable:
            self._badge(self.owner).unlink(missing_ok=True)
            os.close(self._own)

    def _badge(self, owner: str) -> Path:
        return self.path / f"owner-{owner}"

    def _scan(self) -> Iterator[Found]:
        """The slots that the slabs' footers claim. Bodies are verified when they are read."""
        for path in self.path.glob("*.slab"):
            name = _SLAB.fullmatch(path.name)
            if not name:
                continue
            fingerprint, body = bytes.fromhex(name[1]), int(name[2])
            with contextlib.suppress(OSError):  # an unreadable slab counts as absent
                for number, block in self.slab(fingerprint, body).footers():
                    footer = parse(block)
                    page, sequence = None, 0
                    if isinstance(footer, Footer) and footer.sequence < MAX_SEQUENCE:
                        page, sequence = footer.key.page, footer.sequence
                    yield Found(fingerprint, body, number, page, sequence)
