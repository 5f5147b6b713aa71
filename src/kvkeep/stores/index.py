"""Which record is in which slot: one SQLite file that several processes share.

It is a hint. A row may claim what the slab does not hold (a torn write, another file), so
readers verify the record and take a row back that proved wrong; a record without a row is as good
as absent. Losing the index costs nothing but a scan of the slabs' footers.

A slot's life::

    (none) -> WRITING -> LIVE -> WRITING -> ...     allocate, publish, recycle
                 |         |
                 +-> FREE <+ -> HOLE                 release, clear; evict for another slab, delete

Every claim of a slot has a ``sequence`` of its own from the one clock; a publish or a clear names
the sequence that it means, and is void if the slot has been claimed again meanwhile.

``synchronous=OFF``: what a killed process wrote is in the page cache and survives it; after a power
failure the index may be damaged, which is found and costs the scan. Nothing waits for the disk.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..schema import Key
from .rows import TABLES, Found, Grant, Place, Punch, SlabRow, SlotRow, State, seek, sound

BUSY_SECONDS = 10.0
"""How long to wait for another process, which holds the index for milliseconds."""

MOST_SEEN = 1 << 16
"""Places that are remembered, so that they need not be looked up again."""


class Index:
    """The rows. Not thread-safe: the store calls it under its lock; processes exclude each other.

    Args:
        path: the SQLite file, or None for one in memory.
        found: None opens an existing index; otherwise a new one is made of these slots. Of two
            records of one page the older one is dropped.

    Raises:
        IndexFault: from any method: it is damaged, locked for long, or the disk is full.
    """

    def __init__(self, path: Path | None, found: Iterable[Found] | None = None) -> None:
        self.ids: dict[bytes, int] = {}  # group fingerprint -> slab id, of the registered ones
        self._seen: dict[int, dict[bytes, Place]] = defaultdict(dict)  # by slab id and page, ...
        self._version = 0  # ... in this state of what others wrote
        self._path = path
        mode = "rw" if found is None else "rwc"
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}" if path else ":memory:",
            uri=True,
            isolation_level=None,
            timeout=BUSY_SECONDS,
            check_same_thread=False,
        )
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.execute("PRAGMA wal_autocheckpoint=256")  # pages, 1 MiB: a disk may be full
            if found is not None:
                self._fill(found)
            self._tick(0)  # fails here, not later, if this is no index
            self._stat = os.stat(path) if path else None
            self._open = True
        except BaseException:
            self._db.close()
            raise

    def current(self) -> bool:
        """Is it open, and does the path still name its file?"""
        try:
            same = self._stat is None or os.path.samestat(self._stat, os.stat(str(self._path)))
        except OSError:
            return False
        return self._open and same

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._open = False
        self._db.close()

    # -- who is here

    def register(self, owner: str, sizes: Mapping[bytes, int]) -> None:
        """``owner`` has the slabs of ``sizes`` (fingerprint -> body bytes) open."""
        with self._transaction():
            for name in sizes.items():
                self._db.execute(
                    "INSERT OR IGNORE INTO slab (fingerprint, body) VALUES (?, ?)", name
                )
                (slab,) = self._row("SELECT id FROM slab WHERE fingerprint = ? AND body = ?", *name)
                self._db.execute("INSERT OR IGNORE INTO owner VALUES (?, ?)", (owner, slab))
                self.ids[name[0]] = slab

    def heal(self, alive: Callable[[str], bool]) -> int:
        """Drop owners that are not ``alive``, free the slots they were writing, recount bytes.

        Returns:
            Slots freed.
        """
        with self._transaction():
            for (owner,) in self._db.execute("SELECT DISTINCT id FROM owner").fetchall():
                if not alive(owner):
                    self._db.execute("DELETE FROM owner WHERE id = ?", (owner,))
            freed = self._db.execute(
                "UPDATE slot SET state = 0, page = NULL, used = 0, owner = NULL WHERE state > 3"
                " OR state = 2 AND (owner IS NULL OR owner NOT IN (SELECT id FROM owner))"
            )
            self._db.execute(
                "UPDATE slab SET held = "
                "(SELECT count(*) FROM slot WHERE slot.slab = slab.id AND state < 3)"
            )
            return freed.rowcount

    # -- records

    def find(self, keys: Iterable[Key]) -> dict[Key, Place]:
        """Where each record should be that is here. Keys of registered groups only.

        A row is looked up once, until somebody changes it: a look takes longer than the rest."""
        self._refresh()
        wanted: dict[bytes, list[Key]] = defaultdict(list)
        for key in keys:
            wanted[key.group].append(key)
        found: dict[Key, Place] = {}
        for group, some in wanted.items():
            seen = self._seen[self.ids[group]]
            if new := [key.page for key in some if key.page not in seen]:
                seen |= seek(self._db, self.ids[group], new)
            found |= {key: seen[key.page] for key in some if key.page in seen}
        return found

    def allocate(self, keys: Sequence[Key], limit: int | None, owner: str, punch: Punch) -> Grant:
        """Claim slots for the keys that are not present; stamp those that are.

        Slots come from this slab's free ones, from growth while all slabs together hold less than
        ``limit`` bytes (None: no limit), and then from the least recently used records: first of
        slabs that nobody has open, the longest unused slab first, then of all others. If there is
        not room for all keys, the last ones get it.
        """
        order = {key: i for i, key in enumerate(keys)}
        grant = Grant()
        with self._transaction():
            grant.present = set(self.find(order))
            stamp = self._tick(len(keys))
            self._stamp((stamp + order[key], key) for key in grant.present)
            for slab in self.slabs():
                wanted = [
                    key for key in order
                    if key not in grant.present and self.ids[key.group] == slab.id
                ]  # fmt: skip
                numbers = sorted(self._take(slab, len(wanted), limit, stamp, punch))
                wanted = wanted[len(wanted) - len(numbers) :]
                places = [
                    Place(slab.id, number, stamp + order[key])
                    for key, number in zip(wanted, numbers, strict=True)
                ]
                self._db.executemany(  # before the next slab looks for victims
                    "INSERT INTO slot VALUES (?, ?, 2, NULL, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                    " (state, page, sequence, used, owner)"
                    " = (2, NULL, excluded.sequence, excluded.used, excluded.owner)",
                    ((*place, place.sequence, owner) for place in places),
                )
                grant.claims |= zip(wanted, places, strict=True)
        return grant

    def publish(
        self, landed: Mapping[Key, Place], abandoned: Iterable[Place], punch: Punch
    ) -> set[Key]:
        """Make written records findable; give abandoned slots back.

        Returns:
            The landed keys that are present now, be it because another process was faster. A slot
            that is not needed for that is freed, one that was claimed again is left alone.
        """
        with self._transaction():
            published = self._db.executemany(
                "UPDATE OR IGNORE slot SET state = 1, page = ?, owner = NULL"
                " WHERE slab = ? AND number = ? AND sequence = ? AND state = 2",
                ((key.page, *place) for key, place in landed.items()),
            )
            present = set(landed)
            if published.rowcount != len(landed):  # others were faster, or claimed a slot again
                found = self.find(landed)
                present &= found.keys()
                for key, place in landed.items():
                    if found.get(key) != place and self._release(place) and key not in present:
                        raise sqlite3.DatabaseError("a page is taken by no row")
            freed = [place for place in abandoned if self._release(place)]
            slabs = {slab.id: slab for slab in self.slabs()} if freed else {}
            for place in freed:
                self._evict(slabs[place.slab], place.number, b"", punch)
            return present

    def clear(self, places: Mapping[Key, Place]) -> set[Key]:
        """Take back rows whose record proved bad, unless they have changed since: compare, delete.

        Returns:
            The keys whose rows were unchanged. For the others the reader lost a race to a writer.
        """
        with self._transaction():
            cleared = {key for key, place in places.items() if self._clear(key, place)}
            if any((k.page, p) in seek(self._db, p.slab, [k.page]) for k, p in places.items()):
                raise sqlite3.DatabaseError("a row is found and is not there")
            return cleared

    def touch(self, keys: Sequence[Key]) -> None:
        """Stamp records as used; the last key is the newest."""
        with self._transaction():
            self._stamp(enumerate(keys, start=self._tick(len(keys))))

    def delete(self, keys: Iterable[Key], punch: Punch) -> None:
        """Forget records and give their bytes back."""
        with self._transaction():
            slabs = {slab.id: slab for slab in self.slabs()}
            for key, place in self.find(keys).items():
                if not self._evict(slabs[place.slab], place.number, key.page, punch):
                    self._clear(key, place)

    def shrink(self, limit: int, punch: Punch) -> int:
        """Give back the least recently used bytes until ``limit`` are held.

        Returns:
            Bytes given back; fewer than asked for if the file system cannot punch holes.
        """
        freed = 0
        with self._transaction():
            excess = self.held_bytes() - limit
            for slab, number, page in self._victims(self._tick(1), excess):
                if freed < excess and self._evict(slab, number, page, punch):
                    freed += slab.stride
        return freed

    # -- accounts

    def held_bytes(self) -> int:
        """Bytes of all slots that are not holes."""
        return sum(slab.held * slab.stride for slab in self.slabs())

    def slabs(self) -> list[SlabRow]:
        """All slabs of the directory."""
        rows = self._db.execute(
            "SELECT id, fingerprint, body, held,"
            " coalesce((SELECT max(used) FROM slot WHERE slot.slab = slab.id AND state = 1), 0),"
            " EXISTS (SELECT 1 FROM owner WHERE owner.slab = slab.id) FROM slab"
        )
        return [SlabRow(*row) for row in sound(rows, blob=1)]

    def slots(self, slab: SlabRow) -> list[SlotRow]:
        """All slots of a slab."""
        rows = self._db.execute(
            "SELECT number, min(state, 3), coalesce(page, x''), sequence FROM slot WHERE slab = ?",
            (slab.id,),
        )
        return [SlotRow(*row) for row in sound(rows, blob=2)]

    # -- statements; all run inside a transaction

    def _tick(self, count: int) -> int:
        """The first of ``count`` new stamps."""
        (tick,) = self._row("UPDATE clock SET tick = tick + ? RETURNING tick - ? + 1", count, count)
        return tick

    def _stamp(self, stamps: Iterable[tuple[int, Key]]) -> None:
        self._db.executemany(
            "UPDATE slot SET used = ? WHERE slab = ? AND page = ? AND state = 1",
            ((stamp, self.ids[key.group], key.page) for stamp, key in stamps),
        )

    def _take(
        self, slab: SlabRow, count: int, limit: int | None, stamp: int, punch: Punch
    ) -> list[int]:
        """Up to ``count`` slots of ``slab`` that may be claimed."""
        taken = self._numbers(slab, State.FREE, count)
        self._db.executemany(  # so that they are no victims
            "UPDATE slot SET state = 2 WHERE slab = ? AND number = ?", ((slab.id, n) for n in taken)
        )
        grown = 0
        (end,) = self._row("SELECT coalesce(max(number) + 1, 0) FROM slot WHERE slab = ?", slab.id)
        growth = itertools.chain(
            self._numbers(slab, State.HOLE, count - len(taken)), itertools.count(end)
        )
        room = slab.stride * count if limit is None else limit - self.held_bytes()
        victims = self._victims(stamp, slab.stride * (count - len(taken)))
        while len(taken) < count:
            if room >= slab.stride:
                taken.append(next(growth))
                grown += 1
                room -= slab.stride
            elif victim := next(victims, None):
                owner, number, page = victim
                if owner.id == slab.id:
                    taken.append(number)
                    self._forget(slab.id, page)
                elif self._evict(*victim, punch):
                    room += owner.stride
            else:
                break
        self._hold(slab, grown)
        return taken

    def _victims(self, stamp: int, need: int) -> Iterator[tuple[SlabRow, int, bytes]]:
        """Slots that may be recycled, and what page each holds (empty: none), the first to go
        first: at least ``need`` bytes if there are.

        Nothing stamped at or after ``stamp`` is among them.
        """
        ranked = []
        for slab in self.slabs():
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

    def _evict(self, slab: SlabRow, number: int, page: bytes, punch: Punch) -> bool:
        """Drop a slot's bytes, and the record of ``page`` (empty: none) with them; False: all stays
        as it was."""
        if not punch(slab, number):
            return False
        self._forget(slab.id, page)
        self._db.execute(
            "UPDATE slot SET state = 3, page = NULL, used = 0 WHERE slab = ? AND number = ?",
            (slab.id, number),
        )
        self._hold(slab, -1)
        return True

    def _hold(self, slab: SlabRow, change: int) -> None:
        self._db.execute("UPDATE slab SET held = held + ? WHERE id = ?", (change, slab.id))

    def _clear(self, key: Key, place: Place) -> bool:
        self._forget(place.slab, key.page)
        cleared = self._db.execute(
            "UPDATE slot SET state = 0, page = NULL, used = 0"
            " WHERE slab = :slab AND number = :number AND state = 1"
            " AND page = :page AND sequence = :sequence",
            place._asdict() | {"page": key.page},
        )
        return cleared.rowcount == 1

    def _release(self, place: Place) -> bool:
        released = self._db.execute(
            "UPDATE slot SET state = 0, used = 0, owner = NULL"
            " WHERE slab = ? AND number = ? AND sequence = ? AND state = 2",
            place,
        )
        return released.rowcount == 1

    def _row(self, statement: str, *values: object) -> tuple[int, ...]:
        """The one row of an answer that an intact index always gives."""
        rows = sound(self._db.execute(statement, values))
        if len(rows) != 1:
            raise sqlite3.DatabaseError("a row is missing")
        return rows[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, and no other process writes meanwhile."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._seen.clear()  # some of it in this transaction
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _refresh(self) -> None:
        """Forget what others may have changed, or what is too much to remember."""
        (version,) = self._row("PRAGMA data_version")
        if version != self._version or sum(map(len, self._seen.values())) > MOST_SEEN:
            self._seen.clear()
        self._version = version

    def _forget(self, slab: int, page: bytes) -> None:
        self._seen[slab].pop(page, None)

    def _fill(self, found: Iterable[Found]) -> None:
        self._db.executescript(TABLES)
        with self._transaction():
            pages: set[tuple[int, bytes]] = set()
            for slot in sorted(found, key=lambda slot: slot.sequence, reverse=True):
                name = (slot.fingerprint, slot.body)
                self._db.execute(
                    "INSERT OR IGNORE INTO slab (fingerprint, body) VALUES (?, ?)", name
                )
                (slab,) = self._row("SELECT id FROM slab WHERE fingerprint = ? AND body = ?", *name)
                page = None if (slab, slot.page) in pages else slot.page
                if page is not None:
                    pages.add((slab, page))
                sequence = 0 if page is None else slot.sequence
                self._db.execute(
                    "INSERT INTO slot VALUES (?, ?, ?, ?, ?, ?, NULL)",
                    (slab, slot.number, page is not None, page, sequence, sequence),
                )
            self._db.execute("UPDATE clock SET tick = (SELECT coalesce(max(used), 0) FROM slot)")
