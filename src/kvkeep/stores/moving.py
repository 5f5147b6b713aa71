"""Records between buffers and slabs, checksums included. Hashing a record takes a fraction of the
time of copying it, and one core does not copy as fast as memory goes: a second thread helps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait
from itertools import groupby
from typing import NamedTuple

from ..schema import Key
from .catalog import fault
from .record import HEADER, Verdict, seal, verify
from .rows import Place
from .slab import Slab

SEALED = 4 << 20
"""Bytes that are sealed while as many are written: a second thread pays from here on."""
READ = 4 << 20
"""Bytes that one thread reads and verifies while the other does as many; of fewer, two threads only
slow each other down."""


class Record(NamedTuple):
    """What is to be moved, and where from or to."""

    key: Key
    place: Place
    body: memoryview


Open = Callable[[bytes], Slab]
"""The slab of a group; raises OSError."""
Failures = list[str | None]
"""What went wrong, by record."""


def save(records: list[Record], slab: Open, helper: Executor) -> Failures:
    """Seal and write ``records``, sorted by group. The helper seals what is written next."""
    parts = _parts(records, SEALED)
    failures, ahead = Failures(), None
    for at, part in enumerate(parts):
        headers = ahead.result() if ahead else _seal(part)
        ahead = helper.submit(_seal, parts[at + 1]) if at + 1 < len(parts) else None
        failures += _write(part, slab, headers)
    return failures


def load(records: list[Record], slab: Open, helper: Executor) -> Failures:
    """Read and verify ``records``, sorted by group. The helper takes parts, too, when it can."""
    parts = _parts(records, READ)
    if sum(len(record.body) for record in records) < 2 * READ:
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


def _parts(records: list[Record], size: int) -> list[list[Record]]:
    """Runs of one group, of ``size`` bytes or the few more that make records whole."""
    parts = []
    for _, same in groupby(records, lambda record: record.key.group):
        group = list(same)
        count = -(-size // len(group[0].body))
        parts += [group[at : at + count] for at in range(0, len(group), count)]
    return parts


def _seal(records: list[Record]) -> list[memoryview]:
    return [memoryview(seal(r.key, r.place.sequence, r.body)) for r in records]


def _write(records: list[Record], slab: Open, headers: list[memoryview]) -> Failures:
    try:
        failures = slab(records[0].key.group).write(*_split(records, headers))
    except OSError as error:
        return [fault(error)] * len(records)
    return [fault(failure) if failure else None for failure in failures]


def _read(records: list[Record], slab: Open) -> Failures:
    memory = memoryview(bytearray(len(records) * HEADER))
    headers = [memory[i : i + HEADER] for i in range(0, len(memory), HEADER)]
    try:
        failures = slab(records[0].key.group).read(*_split(records, headers))
    except OSError as error:
        return [fault(error)] * len(records)
    verdicts = [verify(h, r.key, r.body) for h, r in zip(headers, records, strict=True)]
    return [
        fault(failure) if failure else None if verdict is Verdict.GOOD else verdict.name.lower()
        for failure, verdict in zip(failures, verdicts, strict=True)
    ]


def _split(
    records: list[Record], headers: list[memoryview]
) -> tuple[list[int], list[memoryview], list[memoryview]]:
    """As a slab wants them: slots, headers, bodies."""
    return [r.place.number for r in records], headers, [r.body for r in records]
