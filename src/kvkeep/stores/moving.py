"""Records between buffers and a slab, checksums included. Hashing a record takes a third of the
time of copying it, so where it is much, a second thread hashes while one copies."""

from __future__ import annotations

from concurrent.futures import Executor, wait
from typing import NamedTuple

from ..schema import Key
from .catalog import fault
from .record import HEADER, Verdict, seal, verify
from .rows import Place
from .slab import Slab

PART = 4 << 20
"""Bytes from which on a second thread pays."""


class Record(NamedTuple):
    """What is to be moved, and where from or to."""

    key: Key
    place: Place
    body: memoryview


def save(slab: Slab, records: list[Record], helper: Executor) -> list[str | None]:
    """Seal and write; per record, what went wrong. The helper seals what is written next."""
    size = -(-PART // slab.stride)
    parts = [records[i : i + size] for i in range(0, len(records), size)]
    failures, headers = list[Exception | None](), _seal(parts[0])
    for part, following in zip(parts, [*parts[1:], []], strict=True):
        ahead = helper.submit(_seal, following) if following else None
        failures += slab.write(_slots(part), headers, _bodies(part))
        headers = ahead.result() if ahead else []
    return [fault(failure) if failure else None for failure in failures]


def load(slab: Slab, records: list[Record], helper: Executor) -> list[str | None]:
    """Read and verify; per record, what went wrong. The helper takes parts, too, when it can."""
    size = -(-PART // slab.stride)
    if len(records) <= size:
        return _load(slab, records)
    left = iter(range(0, len(records), size))  # of both threads

    def work() -> dict[int, list[str | None]]:
        return {first: _load(slab, records[first : first + size]) for first in left}

    other = helper.submit(work)
    try:
        done = work()
    finally:  # whatever happens: nobody may write into buffers that were given back
        if not other.cancel():
            wait((other,))
    if not other.cancelled():
        done |= other.result()
    return [failure for first in sorted(done) for failure in done[first]]


def _load(slab: Slab, records: list[Record]) -> list[str | None]:
    memory = memoryview(bytearray(len(records) * HEADER))
    headers = [memory[i : i + HEADER] for i in range(0, len(memory), HEADER)]
    failures = slab.read(_slots(records), headers, _bodies(records))
    verdicts = [verify(h, r.key, r.body) for h, r in zip(headers, records, strict=True)]
    return [
        fault(failure) if failure else None if verdict is Verdict.GOOD else verdict.name.lower()
        for failure, verdict in zip(failures, verdicts, strict=True)
    ]


def _seal(records: list[Record]) -> list[memoryview]:
    return [memoryview(seal(r.key, r.place.sequence, r.body)) for r in records]


def _slots(records: list[Record]) -> list[int]:
    return [record.place.number for record in records]


def _bodies(records: list[Record]) -> list[memoryview]:
    return [record.body for record in records]
