"""What stands for memory, threads and storage where a cache is tested or simulated: media whose
slots hold numbers instead of bytes, or nothing; lanes that move at once or by hand; a store in a
dict; a breaker that is thrown by hand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from ..core.lanes import J
from ..core.ticket import Job
from ..media.base import NOW, Copy, Mark, Reached
from ..schema import Key, Slots, StoreError

JUNK = 0
"""The number in a slot whose bytes mean nothing."""

# --- media


class NoBytes:
    """Media whose copies are no work."""

    def mark(self) -> Mark:
        return NOW

    def save(self, copies: Sequence[Copy], after: Iterable[Mark] = ()) -> None: ...
    def load(
        self,
        copies: Sequence[Copy],
        after: Iterable[Mark] = (),
        reached: Reached = lambda layer, mark: None,
    ) -> None: ...
    def bodies(self, group: int, slots: Slots) -> list[memoryview]:
        return [memoryview(b"")] * len(slots)

    def keep(self, group: int, slots: Slots, bodies: Sequence[memoryview]) -> None: ...


class TruthMedia:
    """Media whose slots each hold one number: the name of what the bytes would be.

    ``tiers``: ``[2, groups, slots]`` int64, device and host; as many slots as the largest pool has.
    While ``failing``, a copy spoils its targets and raises.
    """

    def __init__(self, device: Sequence[int], host: Sequence[int]) -> None:
        most = max(*device, *host)
        self.tiers: NDArray[np.int64] = np.full((2, len(device), most), JUNK, np.int64)
        self.failing = False

    def mark(self) -> Mark:
        return NOW

    def save(self, copies: Sequence[Copy], after: Iterable[Mark] = ()) -> None:
        self._copy(copies, 0, 1)

    def load(
        self,
        copies: Sequence[Copy],
        after: Iterable[Mark] = (),
        reached: Reached = lambda layer, mark: None,
    ) -> None:
        self._copy(copies, 1, 0)

    def bodies(self, group: int, slots: Slots) -> list[memoryview]:
        pool = memoryview(self.tiers[1, group])
        return [pool[slot : slot + 1] for slot in slots.tolist()]

    def keep(self, group: int, slots: Slots, bodies: Sequence[memoryview]) -> None: ...

    def _copy(self, copies: Sequence[Copy], source: int, target: int) -> None:
        for g, froms, tos in copies:
            self.tiers[target, g][tos] = JUNK if self.failing else self.tiers[source, g][froms]
        if self.failing:
            raise RuntimeError("the copy engine failed")


# --- lanes


class AtOnce(Generic[J]):
    """A lane that carries out what is submitted before it returns."""

    def __init__(
        self, name: str, work: Callable[[list[J]], None], report: Callable[[J], None]
    ) -> None:
        self._work, self._report = work, report

    def submit(self, job: J) -> None:
        self._work([job])
        self._report(job)

    def withdraw(self) -> list[J]:
        return []

    def close(self, timeout: float) -> bool:
        return True


class ManualQueue:
    """Jobs that are carried out when :meth:`step` says so, in any order. Several lanes of a cache
    may share one queue: each has a :class:`ManualLane` of its own."""

    def __init__(self) -> None:
        self.queue: list[Job] = []
        self.lanes: list[ManualLane[Any]] = []

    def lane(self, work: Callable[[list[J]], None], report: Callable[[J], None]) -> ManualLane[J]:
        """One more lane that queues here."""
        self.lanes.append(lane := ManualLane(self.queue, work, report))
        return lane

    def step(self, first: int = 0, count: int = 1) -> None:
        """Carry out ``count`` jobs, from the one at ``first`` on, and report them."""
        batch = self.queue[first : first + count]
        del self.queue[first : first + count]
        for lane in self.lanes:
            lane.carry_out([job for job in batch if lane.has(job)])


class ManualLane(Generic[J]):
    """A lane of a :class:`ManualQueue`."""

    def __init__(
        self, queue: list[Job], work: Callable[[list[J]], None], report: Callable[[J], None]
    ) -> None:
        self._queue, self._work, self._report = queue, work, report
        self._mine: list[J] = []

    def has(self, job: Job) -> bool:
        """It was submitted here, and not carried out yet."""
        return any(one is job for one in self._mine)

    def carry_out(self, batch: list[Any]) -> None:
        """Jobs of this lane, as one batch."""
        if batch:
            self._work(batch)
        for job in batch:
            self._mine.remove(job)
            self._report(job)

    def submit(self, job: J) -> None:
        self._mine.append(job)
        self._queue.append(job)

    def withdraw(self) -> list[J]:
        taken, self._mine = self._mine, []
        self._queue[:] = [job for job in self._queue if not any(job is one for one in taken)]
        return taken

    def close(self, timeout: float) -> bool:
        return True


# --- storage


class DictStore:
    """A store of the numbers that :class:`TruthMedia` holds; it outlives caches.

    ``fault`` is "" for none, "raise", or "partial": every other record of a call fails.
    """

    def __init__(self) -> None:
        self.records: dict[Key, int] = {}
        self.faults: Counter[str] = Counter()
        self.fault = ""
        self.reads: Counter[Key] = Counter()
        self.touched: deque[Key] = deque(maxlen=10_000)  # the newest
        self.written: list[tuple[Key, int]] = []  # for whoever checks it, and clears it then

    def _works(self, count: int) -> list[bool]:
        if self.fault == "raise":
            raise StoreError("the disk is gone")
        return [not (self.fault and i % 2) for i in range(count)]

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        works = self._works(len(keys))
        return [ok and key in self.records for ok, key in zip(works, keys, strict=True)]

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        landed = []
        for works, key, body in zip(self._works(len(keys)), keys, out, strict=True):
            self.reads[key] += 1
            landed.append(works and key in self.records)
            body[0] = self.records[key] if landed[-1] else JUNK
        return landed

    def write(self, keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        works = self._works(len(keys))
        for key, body, ok in zip(keys, records, works, strict=True):
            if ok:
                self.records[key] = body[0]
                self.written.append((key, body[0]))
        return works

    def touch(self, keys: Sequence[Key]) -> None:
        self.touched.extend(keys)

    def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.records.pop(key, None)

    def close(self) -> None: ...


class Switch:
    """A circuit breaker that is thrown by hand."""

    trips = 0
    open = False

    def success(self) -> None: ...
    def retry(self) -> None: ...
    def failure(self, trip: bool = False) -> None: ...
