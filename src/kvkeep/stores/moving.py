"""Moves records between buffers and slabs, and seals or verifies them.

Hashing a record takes a fraction of the time of copying it, and one core does not copy as fast as
memory can: a second thread, the helper, takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from ..schema import Key
from .catalog import fault
from .record import Verdict, footer_bytes, seal, verify
from .rows import Place
from .slab import Slab

T = TypeVar("T")

SEALED = 4 << 20
"""Bytes that the helper seals while as many are written; with fewer it does not pay."""
SHARED = 8 << 20
"""Bytes from which on two threads read and verify; with fewer they slow each other down."""
READ = 2 << 20
"""Bytes that a thread takes at a time: few, so that both finish at about the same time."""


class Records(NamedTuple):
    """Records to move and their places, as columns of one length, sorted by group."""

    keys: list[Key]
    places: list[Place]
    bodies: list[memoryview]

    def parts(self, size: int) -> list[Records]:
        """Split into parts of one group each, of ``size`` bytes rounded up to whole records."""
        cuts, start = [], 0
        for _, same in groupby(key.group for key in self.keys):
            end = start + len(list(same))
            count = -(-size // len(self.bodies[start]))
            cuts += [slice(at, min(at + count, end)) for at in range(start, end, count)]
            start = end
        keys, places, bodies = self
        return [Records(keys[cut], places[cut], bodies[cut]) for cut in cuts]

    @property
    def numbers(self) -> list[int]:
        """The slot of each record."""
        return [place.number for place in self.places]


Open = Callable[[bytes], Slab]
"""Opens the slab of a group; raises OSError."""
Failures = list[str | None]
"""Per record the kind of its fault; None: it landed."""


def save(records: Records, slab: Open, helper: Executor) -> Failures:
    """Seal and write ``records``. The helper seals one part while this thread writes another."""
    parts = records.parts(SEALED)
    failures, ahead = Failures(), None
    for at, part in enumerate(parts):
        footers = ahead.result() if ahead else _seal(part)
        ahead = _help(helper, partial(_seal, parts[at + 1])) if at + 1 < len(parts) else None
        failures += _write(part, slab, footers)
    return failures


def load(records: Records, slab: Open, helper: Executor) -> Failures:
    """Read and verify ``records``. The helper takes parts of a large batch from the page cache; it
    does not read from a disk, where two threads disturb the kernel's readahead."""
    parts = records.parts(READ)
    if sum(map(len, records.bodies)) < SHARED or not _in_memory(records, slab):
        return [failure for part in parts for failure in _read(part, slab)]
    left = iter(range(len(parts)))  # shared by both threads

    def work() -> dict[int, Failures]:
        return {at: _read(parts[at], slab) for at in left}

    other = _help(helper, work)
    try:
        done = work()
    finally:  # the buffers are the caller's again when this returns
        if not other.cancel():
            wait((other,))
    if not other.cancelled():
        done |= other.result()
    return [failure for at in range(len(parts)) for failure in done[at]]


def _help(helper: Executor, work: Callable[[], T]) -> Future[T]:
    """``work()`` on the helper; here and now if the interpreter exits, when executors take
    no more work but a cache may still be closing."""
    try:
        return helper.submit(work)
    except RuntimeError:
        done: Future[T] = Future()
        done.set_result(work())
        return done


def _in_memory(records: Records, slab: Open) -> bool:
    """Whether the first and the last record are in the page cache."""
    try:
        ends = [(records.keys[at].group, records.places[at].number) for at in (0, -1)]
        return all(slab(group).in_memory(number) for group, number in ends)
    except OSError:  # no such slab: the read counts it
        return True


def _seal(records: Records) -> list[memoryview]:
    return [
        memoryview(seal(key, place.sequence, body))
        for key, place, body in zip(*records, strict=True)
    ]


def _write(records: Records, slab: Open, footers: list[memoryview]) -> Failures:
    try:
        failures = slab(records.keys[0].group).write(records.numbers, records.bodies, footers)
    except OSError as error:
        return [fault(error)] * len(footers)
    return [fault(failure) if failure else None for failure in failures]


def _read(records: Records, slab: Open) -> Failures:
    size = footer_bytes(len(records.bodies[0]))
    memory = memoryview(bytearray(len(records.keys) * size))
    footers = [memory[i : i + size] for i in range(0, len(memory), size)]
    try:
        failures = slab(records.keys[0].group).read(records.numbers, records.bodies, footers)
    except OSError as error:
        return [fault(error)] * len(footers)
    verdicts = map(verify, footers, records.keys, records.bodies)
    return [
        fault(failure) if failure else None if verdict is Verdict.GOOD else verdict.name.lower()
        for failure, verdict in zip(failures, verdicts, strict=True)
    ]
