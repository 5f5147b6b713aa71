"""One file of equal slots, each a body and a footer. The index knows which records they hold."""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from .record import footer_bytes

_BUFFERS = 1024  # of one preadv or pwritev (Linux' IOV_MAX)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>

_PORTION = 1 << 20
"""Bytes of one write at most, aligned to as many. Where the page cache has large folios (ext4 since
Linux 6.16), a write of 2 MiB takes ten times as long per byte, and one across a boundary longer."""


class Slab:
    """A file of equal slots.

    ::

        | body footer | body footer | ...
        0           stride      2 stride

    Thread-safe: all I/O gives its own position.

    Args:
        path: the file.
        body_bytes: of each record.
        writable: False opens for reading only.
        create: make the file if it is absent.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, body_bytes: int, writable: bool, create: bool) -> None:
        self.path = path
        self._body = body_bytes
        self.stride = body_bytes + footer_bytes(body_bytes)
        access = os.O_RDWR if writable else os.O_RDONLY
        self._fd = os.open(path, access | (os.O_CREAT if create else 0), 0o644)
        self._stat = os.fstat(self._fd)

    def current(self) -> bool:
        """Whether the path still names the open file."""
        try:
            return os.path.samestat(os.stat(self.path), self._stat)
        except OSError:
            return False

    def read(
        self, slots: Sequence[int], bodies: Sequence[memoryview], footers: Sequence[memoryview]
    ) -> list[Exception | None]:
        """Fill bodies and footers from slots. Past the end of the file, buffers stay unchanged.

        Returns:
            Per slot, its error or None.
        """
        return self._move(os.preadv, slots, bodies, footers, None)

    def in_memory(self, slot: int) -> bool:
        """Whether the end of a slot is in the page cache; True where the system cannot tell."""
        try:
            os.preadv(self._fd, [bytearray(1)], (slot + 1) * self.stride - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except (OSError, OverflowError, AttributeError):
            pass
        return True

    def write(
        self, slots: Sequence[int], bodies: Sequence[memoryview], footers: Sequence[memoryview]
    ) -> list[Exception | None]:
        """Write bodies and footers into slots.

        Returns:
            Per slot, its error or None. After an error the slot's bytes are undefined.
        """
        return self._move(os.pwritev, slots, bodies, footers, _PORTION)

    def footers(self) -> Iterator[tuple[int, bytes]]:
        """The number and footer of each whole slot that has bytes on disk.

        Raises:
            OSError: the file cannot be read.
        """
        slots = os.fstat(self._fd).st_size // self.stride
        slot = 0
        while slot < slots:
            try:
                data = os.lseek(self._fd, slot * self.stride, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # holes up to the end
                    return
                raise
            slot = max(slot, data // self.stride)
            if slot < slots:
                size = self.stride - self._body
                footer = os.pread(self._fd, size, slot * self.stride + self._body)
                yield slot, footer.ljust(size, b"\0")
            slot += 1

    def punch(self, slot: int) -> bool:
        """Return a slot's bytes to the file system; the slot then reads as zeros.

        Returns:
            False where the platform or the file system cannot punch holes.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        offset, length = ctypes.c_int64(slot * self.stride), ctypes.c_int64(self.stride)
        try:
            return bool(libc.fallocate(self._fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0)
        except AttributeError:  # not Linux
            return False

    def close(self) -> None:
        """Close the file. Call it when no thread reads or writes any more."""
        os.close(self._fd)

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        slots: Sequence[int],
        bodies: Sequence[memoryview],
        footers: Sequence[memoryview],
        portion: int | None,
    ) -> list[Exception | None]:
        failed: list[Exception | None] = [None] * len(slots)
        runs = list(_runs(slots))
        while runs:
            run = runs.pop()
            buffers = [part for i in run for part in (bodies[i], footers[i])]
            try:
                _transfer(call, self._fd, buffers, slots[run[0]] * self.stride, portion)
            except (OSError, OverflowError) as error:  # the offset of an absurd slot overflows
                if len(run) == 1:
                    failed[run[0]] = error
                else:  # retry one by one: a bad block must not cost its neighbours
                    runs += [[i] for i in run]
        return failed


def _runs(slots: Sequence[int]) -> Iterator[list[int]]:
    """Positions in ``slots``, in runs whose slots are neighbours in the file."""
    run: list[int] = []
    for i in sorted(range(len(slots)), key=slots.__getitem__):
        if run and slots[i] != slots[run[-1]] + 1:
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: list[memoryview],
    offset: int,
    portion: int | None,
) -> None:
    """Move all of ``buffers``, in as many calls as it takes; a read stops at the file's end.

    Args:
        portion: no call crosses a multiple of so many bytes; None: no limit.
    """
    left = sum(map(len, buffers))
    while left:
        part = buffers[:_BUFFERS]
        if portion:
            part = _cut(part, portion - offset % portion)
        moved = call(fd, part, offset)
        if moved in (0, left):
            return
        left -= moved
        offset += moved
        buffers = _rest(buffers, moved)


def _rest(buffers: list[memoryview], moved: int) -> list[memoryview]:
    """The buffers without their first ``moved`` bytes, which are fewer than all."""
    ends = list(accumulate(map(len, buffers)))
    first = bisect_right(ends, moved)
    rest = buffers[first:]
    rest[0] = rest[0][len(rest[0]) - (ends[first] - moved) :]
    return rest


def _cut(buffers: list[memoryview], room: int) -> list[memoryview]:
    """The first ``room`` bytes of ``buffers`` at most; the last buffer may be cut."""
    part = []
    for buffer in buffers:
        part.append(buffer[:room])
        room -= len(part[-1])
        if room == 0:
            break
    return part
