"""Which record is in which slot: one SQLite file that several processes share.

The index is a hint. A row may claim what the slab does not hold (a torn write, another file), so
readers verify the record and clear a row that proves wrong. A record without a row counts as
absent. Losing the index costs a scan of the slabs' footers.

A slot's life::

    (none) -> WRITING -> LIVE -> WRITING -> ...     allocate, publish, recycle
                 |         |
                 +-> FREE <+ -> HOLE                 release, clear; evict for another slab, delete

Every claim of a slot gets a ``sequence`` of its own from the directory's one clock. A publish or a
clear names the sequence that it means, and does nothing if the slot has been claimed again since.

``synchronous=OFF``: no transaction waits for the disk. The page cache keeps what a killed process
wrote. A power failure may damage the index; the next call finds that and rebuilds it.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..schema import Key
from .places import Places, seek
from .room import Room
from .rows import (
    TABLES,
    Found,
    Grant,
    Place,
    Punch,
    SlabRow,
    SlotRow,
    one_row,
    read_slabs,
    sound,
)

BUSY_SECONDS = 10.0
"""How long to wait for another process, whose transactions take milliseconds."""


class Index:
    """The rows. Not thread-safe: the catalog calls it under its lock. Processes exclude each other.

    Args:
        path: the SQLite file, or None for an index in memory.
        found: None to open an existing index; else the slots to make a new one of. Of two records
            of one page the newer one counts.

    Raises:
        IndexFault: from any method: the index is damaged or locked for long, or the disk is full.
    """

    def __init__(self, path: Path | None, found: Iterable[Found] | None = None) -> None:
        self.ids: dict[bytes, int] = {}  # group fingerprint -> slab id, of the registered ones
        self._path = path
        mode = "rw" if found is None else "rwc"
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}" if path else ":memory:",
            uri=True,
            isolation_level=None,
            timeout=BUSY_SECONDS,
            check_same_thread=False,
        )
        self._places = Places(self._db)
        self._room = Room(self._db, self._places)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.execute(
                "PRAGMA wal_autocheckpoint=256"
            )  # pages, 1 MiB: a small log, as a disk may be full
            if found is not None:
                self._fill(found)
            self._tick(0)  # fails here, not later, if this is no index
            self._stat = os.stat(path) if path else None
            self._open = True
        except BaseException:
            self._db.close()
            raise

    def current(self) -> bool:
        """Whether the index is open and its path still names its file."""
        try:
            same = self._stat is None or os.path.samestat(self._stat, os.stat(str(self._path)))
        except OSError:
            return False
        return self._open and same

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._open = False
        self._db.close()

    # -- owners

    def register(self, owner: str, sizes: Mapping[bytes, int]) -> None:
        """Record that ``owner`` has the slabs of ``sizes`` (fingerprint -> body bytes) open."""
        with self._transaction():
            for name in sizes.items():
                self._db.execute(
                    "INSERT OR IGNORE INTO slab (fingerprint, body) VALUES (?, ?)", name
                )
                (slab,) = one_row(
                    self._db, "SELECT id FROM slab WHERE fingerprint = ? AND body = ?", *name
                )
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
        """The place of each record that the index has. Keys of registered groups only."""
        self._places.refresh()
        wanted: dict[bytes, list[Key]] = defaultdict(list)
        for key in keys:
            wanted[key.group].append(key)
        found: dict[Key, Place] = {}
        for group, some in wanted.items():
            places = self._places.find(self.ids[group], [key.page for key in some])
            found |= {key: places[key.page] for key in some if key.page in places}
        return found

    def allocate(self, keys: Sequence[Key], limit: int | None, owner: str, punch: Punch) -> Grant:
        """Claim slots for the keys that are absent; stamp those that are present as used.

        :mod:`~kvkeep.stores.room` says where slots come from. If ``limit`` bytes (None: no limit)
        do not hold all keys, the last ones get slots, whatever their groups.
        """
        order = {key: i for i, key in enumerate(keys)}
        grant = Grant()
        with self._transaction():
            grant.present = set(self.find(order))
            stamp = self._tick(len(keys))
            self._stamp((stamp + order[key], key) for key in grant.present)
            missing = sorted(order.keys() - grant.present, key=order.__getitem__)
            present = [self.ids[key.group] for key in grant.present]
            fit = self._room.fitting([self.ids[key.group] for key in missing], present, limit)
            fitting = missing[len(missing) - fit :]
            for slab in self.slabs():
                wanted = [key for key in fitting if self.ids[key.group] == slab.id]
                numbers = sorted(self._room.take(slab, len(wanted), limit, stamp, punch))
                wanted = wanted[len(wanted) - len(numbers) :]
                places = [
                    Place(slab.id, number, stamp + order[key])
                    for key, number in zip(wanted, numbers, strict=True)
                ]
                self._db.executemany(  # now, so that the next slab does not take them
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
        """Let reads find the records that landed, and return the bytes of abandoned slots.

        Free the slot of a record that another process published first. Leave alone a slot that was
        claimed again.

        Returns:
            The landed keys that are present now, whichever process wrote them.
        """
        with self._transaction():
            published = self._db.executemany(
                "UPDATE OR IGNORE slot SET state = 1, page = ?, owner = NULL"
                " WHERE slab = ? AND number = ? AND sequence = ? AND state = 2",
                ((key.page, *place) for key, place in landed.items()),
            )
            present = set(landed)
            if published.rowcount != len(
                landed
            ):  # another process was faster, or claimed a slot again
                found = self.find(landed)
                present &= found.keys()
                for key, place in landed.items():
                    if found.get(key) != place and self._release(place) and key not in present:
                        raise sqlite3.DatabaseError("a page is taken by no row")
            freed = [place for place in abandoned if self._release(place)]
            slabs = {slab.id: slab for slab in self.slabs()} if freed else {}
            for place in freed:
                self._room.evict(slabs[place.slab], place.number, b"", punch)
            return present

    def clear(self, places: Mapping[Key, Place]) -> set[Key]:
        """Clear the rows of records that proved bad, unless a row has changed since it was read.

        Returns:
            The keys whose rows were cleared. For the others, a writer was faster than the reader.
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
        """Forget records and return their bytes to the file system."""
        with self._transaction():
            slabs = {slab.id: slab for slab in self.slabs()}
            for key, place in self.find(keys).items():
                if not self._room.evict(slabs[place.slab], place.number, key.page, punch):
                    self._clear(key, place)

    def shrink(self, limit: int, punch: Punch) -> int:
        """Drop the least recently used records until all slots hold ``limit`` bytes.

        Returns:
            Bytes returned to the file system; fewer than needed if it cannot punch holes.
        """
        freed = 0
        with self._transaction():
            excess = self.held_bytes() - limit
            for slab, number, page in self._room.victims(self._tick(1), excess):
                if freed < excess and self._room.evict(slab, number, page, punch):
                    freed += slab.stride
        return freed

    # -- accounts

    def held_bytes(self) -> int:
        """Bytes of all slots that are not holes."""
        return self._room.held_bytes()

    def slabs(self) -> list[SlabRow]:
        """All slabs of the directory."""
        return read_slabs(self._db)

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
        (tick,) = one_row(
            self._db, "UPDATE clock SET tick = tick + ? RETURNING tick - ? + 1", count, count
        )
        return tick

    def _stamp(self, stamps: Iterable[tuple[int, Key]]) -> None:
        self._db.executemany(
            "UPDATE slot SET used = ? WHERE slab = ? AND page = ? AND state = 1",
            ((stamp, self.ids[key.group], key.page) for stamp, key in stamps),
        )

    def _clear(self, key: Key, place: Place) -> bool:
        self._places.forget(place.slab, key.page)
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

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit all of the block or nothing. No other process writes meanwhile."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._places.forget_all()  # some of it in this transaction
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _fill(self, found: Iterable[Found]) -> None:
        self._db.executescript(TABLES)
        with self._transaction():
            pages: set[tuple[int, bytes]] = set()
            for slot in sorted(found, key=lambda slot: slot.sequence, reverse=True):
                name = (slot.fingerprint, slot.body)
                self._db.execute(
                    "INSERT OR IGNORE INTO slab (fingerprint, body) VALUES (?, ?)", name
                )
                (slab,) = one_row(
                    self._db, "SELECT id FROM slab WHERE fingerprint = ? AND body = ?", *name
                )
                page = None if (slab, slot.page) in pages else slot.page
                if page is not None:
                    pages.add((slab, page))
                sequence = 0 if page is None else slot.sequence
                self._db.execute(
                    "INSERT INTO slot VALUES (?, ?, ?, ?, ?, ?, NULL)",
                    (slab, slot.number, page is not None, page, sequence, sequence),
                )
            self._db.execute("UPDATE clock SET tick = (SELECT coalesce(max(used), 0) FROM slot)")
