"""The file store beside plain positioned I/O of the same bytes, and beside SGLang's file backend.

All three read and write through the page cache (no ``O_DIRECT``, nothing synced on the clock), in
the same batches, from and into the same buffers. Ours also looks up and publishes keys, and
checksums every byte both ways; the plain side knows where its bytes are and trusts them.
A cold read comes after the files were synced and dropped from the page cache (``posix_fadvise``,
``DONTNEED``); what the disk, or the host of a virtual machine, keeps is out of reach. Of files
in memory no read is cold, so none is timed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..schema import Key, StoreError
from ..stores.file import FileStore
from .measure import Row, Samples, Step, Tell, uncollected

OURS = "kvkeep"
TOTAL = 256 << 20  # bytes that are written and read
BATCH = 64  # records of one call of a store; SGLang's batches are up to 128
PORTION = 1 << 20  # bytes of one call of plain I/O: it is fastest so

Bodies = Sequence[memoryview]


class Files(Protocol):
    """A place for records, by number. Each call prepares a step, off the clock."""

    def write(self, first: int, bodies: Bodies) -> Step:
        """Store records ``first`` and on."""

    def read(self, first: int, out: Bodies) -> Step:
        """Read records ``first`` and on."""

    def close(self) -> None:
        """Release all resources."""


Make = Callable[[Path, int], Files]


class Plain:
    """One file: no names, no checksums. Each call moves 1 MiB, which is the fastest."""

    def __init__(self, directory: Path, size: int) -> None:
        self._size = size
        self._fd = os.open(directory / "plain", os.O_RDWR | os.O_CREAT, 0o644)

    def write(self, first: int, bodies: Bodies) -> Step:
        return partial(_whole, os.pwritev, self._fd, bodies, first * self._size)

    def read(self, first: int, out: Bodies) -> Step:
        return partial(_whole, os.preadv, self._fd, out, first * self._size)

    def close(self) -> None:
        os.close(self._fd)


def _whole(call: Callable[[int, Bodies, int], int], fd: int, bodies: Bodies, offset: int) -> None:
    size = len(bodies[0])
    count = max(1, PORTION // size)
    for first in range(0, len(bodies), count):
        part = bodies[first : first + count]
        if call(fd, part, offset + first * size) != len(part) * size:
            raise StoreError("the file system moved less than it was asked to")


class Ours:
    """:class:`~kvkeep.stores.file.FileStore`."""

    def __init__(self, directory: Path, size: int) -> None:
        self._group = b"\1" * 16
        self._store = FileStore(directory, {self._group: size})

    def write(self, first: int, bodies: Bodies) -> Step:
        return partial(self._all, self._store.write, self._keys(first, len(bodies)), bodies)

    def read(self, first: int, out: Bodies) -> Step:
        return partial(self._all, self._store.read, self._keys(first, len(out)), out)

    def close(self) -> None:
        self._store.close()

    def _keys(self, first: int, count: int) -> list[Key]:
        digests = (hashlib.sha256(b"%d" % i).digest() for i in range(first, first + count))
        return [Key(self._group, digest) for digest in digests]

    def _all(
        self, verb: Callable[[list[Key], Bodies], list[bool]], keys: list[Key], bodies: Bodies
    ) -> None:
        if not all(verb(keys, bodies)):
            raise StoreError(f"the store lost records: {dict(self._store.faults)}")


def in_memory(directory: Path) -> bool:
    """Whether files there are never anywhere else: a tmpfs."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
    return any(m[2] == number and m[m.index("-") + 1] == "tmpfs" for m in mounts)


def measure(
    size: int, total: int, peers: dict[str, Make], repeats: int, tell: Tell, where: Path | None
) -> list[Row]:
    """Write, read warm and read cold; batches take turns, on fresh files each time.

    Args:
        size: bytes of a record.
        total: bytes that are written and read, of whole batches.
        where: a directory for the files; None: the temporary one.
    """
    sides: dict[str, Make] = {OURS: Ours, "plain I/O": Plain, **peers}
    bodies = np.random.default_rng(0).integers(256, size=(total // size, size), dtype=np.uint8)
    samples = Samples()
    for turn in range(repeats):
        tell(f"records of {size >> 10} KiB: turn {turn + 1} of {repeats}")
        with tempfile.TemporaryDirectory(dir=where) as directory, uncollected():
            _pass(sides, Path(directory), bodies, samples)
    return samples.rows(f"{BATCH} x {size >> 10} KiB:", OURS, list(sides)[1:])


def _pass(makes: dict[str, Make], root: Path, bodies: NDArray[np.uint8], samples: Samples) -> None:
    """Fresh files, written, and read warm and cold, batch by batch."""
    sides = list[tuple[str, Files]]()
    for at, (name, make) in enumerate(makes.items()):
        (root / str(at)).mkdir()
        sides.append((name, make(root / str(at), bodies.shape[1])))
    targets = itertools.cycle(np.ones((len(sides) + 1, BATCH, bodies.shape[1]), dtype=np.uint8))
    for what in ("write", "read, warm", *(() if in_memory(root) else ("read, cold",))):
        if what == "read, cold":
            _drop([file for file in root.rglob("*") if file.is_file()])
        for first in range(0, len(bodies), BATCH):
            sides = sides[1:] + sides[:1]
            batch = bodies[first : first + BATCH]
            for name, side in sides:
                if what == "write":
                    samples.time(name, what, side.write(first, _views(batch)))
                    continue
                out = next(targets)  # not the one just used, which the processor still holds
                samples.time(name, what, side.read(first, _views(out)))
                if not np.array_equal(out, batch):
                    raise StoreError(f"{name} read other bytes than it wrote")
                out.fill(0)
    for _, side in sides:
        side.close()


def _views(bodies: NDArray[np.uint8]) -> Bodies:
    return [memoryview(body) for body in bodies]


def _drop(files: Sequence[Path]) -> None:
    """Take files out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
