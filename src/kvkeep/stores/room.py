"""Slots under one quota: how many there are room for, which are free, and whose records go first.

Slots come from a slab's free ones, from growth while all slabs together hold less than the quota,
and then from the least recently used records: first of slabs that no process has open, a whole slab
before the next, the longest unused one first; then of all others.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator, Sequence

from .places import Places
from .rows import Punch, SlabRow, State, one_row, read_slabs, sound


class Room:
    """The slots of all slabs. Not thread-safe: its :class:`Index` calls it inside a transaction.

    Raises:
        IndexFault: from any method.
    """

    def __init__(self, db: sqlite3.Connection, places: Places) -> None:
        self._db, self._places = db, places

    def held_bytes(self) -> int:
        """Bytes of all slots that are not holes."""
        return sum(slab.held * slab.stride for slab in read_slabs(self._db))

    def fitting(self, wanted: Sequence[int], present: Sequence[int], limit: int | None) -> int:
        """How many of the last ``wanted`` records fit into ``limit`` bytes (None: no limit).

        Slots that are being written and the records of ``present`` are not recycled for them.

        Args:
            wanted: the slab id of each record to be written.
            present: the slab id of each record that must stay.
        """
        if limit is None:
            return len(wanted)
        stride, room = {}, limit
        for slab in read_slabs(self._db):
            stride[slab.id] = slab.stride
            (writing,) = one_row(
                self._db, "SELECT count(*) FROM slot WHERE slab = ? AND state = 2", slab.id
            )
            room -= writing * slab.stride
        room -= sum(map(stride.__getitem__, present))
        needs = itertools.accumulate(stride[slab] for slab in reversed(wanted))
        return sum(need <= room for need in needs)

    def take(
        self, slab: SlabRow, count: int, limit: int | None, stamp: int, punch: Punch
    ) -> list[int]:
        """Up to ``count`` slots of ``slab`` to claim, with the records in them dropped.

        Args:
            limit: bytes that all slabs may hold; None: no limit.
            stamp: records stamped at or after it are not recycled.
        """
        taken = self._numbers(slab, State.FREE, count)
        self._db.executemany(  # so that they are not recycled below
            "UPDATE slot SET state = 2 WHERE slab = ? AND number = ?", ((slab.id, n) for n in taken)
        )
        grown = 0
        (end,) = one_row(
            self._db, "SELECT coalesce(max(number) + 1, 0) FROM slot WHERE slab = ?", slab.id
        )
        growth = itertools.chain(
            self._numbers(slab, State.HOLE, count - len(taken)), itertools.count(end)
        )
        room = slab.stride * count if limit is None else limit - self.held_bytes()
        victims = self.victims(stamp, slab.stride * (count - len(taken)))
        while len(taken) < count:
            if room >= slab.stride:
                taken.append(next(growth))
                grown += 1
                room -= slab.stride
            elif victim := next(victims, None):
                owner, number, page = victim
                if owner.id == slab.id:
                    taken.append(number)
                    self._places.forget(slab.id, page)
                elif self.evict(*victim, punch):
                    room += owner.stride
            else:
                break
        self._hold(slab, grown)
        return taken

    def victims(self, stamp: int, need: int) -> Iterator[tuple[SlabRow, int, bytes]]:
        """Slots to recycle, each with its slab and its page (empty: none), the next to go first.

        They make up at least ``need`` bytes if there are as many that were last used before
        ``stamp``.
        """
        ranked = []
        for slab in read_slabs(self._db):
            rows = self._db.execute(
                "SELECT used, number, coalesce(page, x'') FROM slot"
                " WHERE slab = ? AND state <= 1 AND used < ? ORDER BY state, used LIMIT ?",
                (slab.id, stamp, max(0, need) // slab.stride + 1),
            )
            rank = (slab.open, 0 if slab.open else slab.used)
            ranked += [(*rank, *row, slab) for row in sound(rows, blob=2)]
        yield from ((slab, number, page) for *_, number, page, slab in sorted(ranked))

    def _numbers(self, slab: SlabRow, state: State, count: int) -> list[int]:
        rows = self._db.execute(
            "SELECT number FROM slot WHERE slab = ? AND state = ? LIMIT ?", (slab.id, state, count)
        )
        return [number for (number,) in sound(rows)]

    def evict(self, slab: SlabRow, number: int, page: bytes, punch: Punch) -> bool:
        """Return a slot's bytes to the file system, and drop the record of ``page`` (empty: none).

        False: the file system cannot punch holes, and nothing has changed."""
        if not punch(slab, number):
            return False
        self._places.forget(slab.id, page)
        self._db.execute(
            "UPDATE slot SET state = 3, page = NULL, used = 0 WHERE slab = ? AND number = ?",
            (slab.id, number),
        )
        self._hold(slab, -1)
        return True

    def _hold(self, slab: SlabRow, change: int) -> None:
        self._db.execute("UPDATE slab SET held = held + ? WHERE id = ?", (change, slab.id))
