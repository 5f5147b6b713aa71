"""Records between buffers and slabs, checksums included. Hashing a record takes a fraction of the
time of copying it, and one core does not copy as fast as memory goes: a second thread helps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait
from itertools import groupby
from typing import NamedTuple

from ..schema import Key
from .catalog import fault
from .record import Verdict, footer_bytes, seal, verify
from .rows import Place
from .slab import Slab

SEALED = 4 << 20
"""Bytes that are sealed while as many are written: a second thread pays from here on."""
SHARED = 8 << 20
"""Bytes that two threads read and verify together; of fewer, they only slow each other down."""
READ = 2 << 20
"""Bytes that a thread takes at once: so few that both are done at about the same time."""


class Records(NamedTuple):
    """What is to be moved, and where from or to: columns, since there are many. Sorted by group."""

    keys: list[Key]
    places: list[Place]
    bodies: list[memoryview]

    def parts(self, size: int) -> list[Records]:
        """Runs of one group, of ``size`` bytes or the few more that make records whole."""
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
        """Slots in the slab."""
        return [place.number for place in self.places]


Open = Callable[[bytes], Slab]
"""The slab of a group; raises OSError."""
Failures = list[str | None]
"""What went wrong, by record."""


def save(records: Records, slab: Open, helper: Executor) -> Failures:
    """Seal and write ``records``. The helper seals what is written next."""
    parts = records.parts(SEALED)
    failures, ahead = Failures(), None
    for at, part in enumerate(parts):
        footers = ahead.result() if ahead else _seal(part)
        ahead = helper.submit(_seal, parts[at + 1]) if at + 1 < len(parts) else None
        failures += _write(part, slab, footers)
    return failures


def load(records: Records, slab: Open, helper: Executor) -> Failures:
    """Read and verify ``records``. The helper takes parts, too, when it can, unless a disk is read:
    two threads would disturb the system's readahead."""
    parts = records.parts(READ)
    if sum(map(len, records.bodies)) < SHARED or not _in_memory(records, slab):
        return [failure for part in parts for failure in _read(part, slab)]
    left = iter(range(len(parts)))  # of both threads

    def work() -> dict[int, Failures]:
        return {at: _read(parts[at], slab) for at in left}

    other = helper.submit(work)
    try:
        done = work()
    finally:  # whatever happens: nobody may write into buffers that were given back
        if not other.cancel():
            wait((other,))
    if not other.cancelled():
        done |= other.result()
    return [failure for at in range(len(parts)) for failure in done[at]]


def _in_memory(records: Records, slab: Open) -> bool:
    """Whether the first and the last of them are in the page cache."""
    try:
        ends = [(records.keys[at].group, records.places[at].number) for at in (0, -1)]
        return all(slab(group).in_memory(number) for group, number in ends)
    except OSError:  # no such slab: reading will tell
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
