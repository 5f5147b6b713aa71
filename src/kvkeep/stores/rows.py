"""The tables of the index, the states of a slot, and rows as the index reads them."""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..schema import Key
from .record import footer_bytes

MAX_SEQUENCE = 1 << 61
_LIMIT = 1 << 62  # integers in an intact index are below this

TABLES = """
CREATE TABLE clock (tick INTEGER NOT NULL);
INSERT INTO clock VALUES (0);
CREATE TABLE slab (id INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, body INTEGER NOT NULL,
                   held INTEGER NOT NULL DEFAULT 0, UNIQUE (fingerprint, body));
CREATE TABLE slot (slab INTEGER NOT NULL, number INTEGER NOT NULL, state INTEGER NOT NULL,
                   page BLOB, sequence INTEGER NOT NULL, used INTEGER NOT NULL, owner TEXT,
                   PRIMARY KEY (slab, number)) WITHOUT ROWID;
CREATE UNIQUE INDEX slot_page ON slot (slab, page) WHERE page IS NOT NULL;
CREATE INDEX slot_used ON slot (slab, state, used);
CREATE TABLE owner (id TEXT NOT NULL, slab INTEGER NOT NULL, PRIMARY KEY (id, slab));
"""


class State(enum.IntEnum):
    """The state of a slot."""

    FREE = 0  # has bytes on disk, but no record
    LIVE = 1  # should hold the record of ``page``
    WRITING = 2  # ``owner`` is writing it; it has no page until the publish
    HOLE = 3  # the file system has its bytes; not counted in ``held``


class Place(NamedTuple):
    """One claim of a slot."""

    slab: int  # id
    number: int
    sequence: int


class SlabRow(NamedTuple):
    """The row of a slab."""

    id: int
    fingerprint: bytes
    body: int  # bytes
    held: int  # slots that have bytes on disk
    used: int  # the newest stamp of its records
    open: bool  # some process has it open

    @property
    def stride(self) -> int:
        """Bytes of one slot."""
        return self.body + footer_bytes(self.body)


class SlotRow(NamedTuple):
    """The row of a slot."""

    number: int
    state: int
    page: bytes  # empty: none
    sequence: int


class Found(NamedTuple):
    """A slot that a scan of the slabs found."""

    fingerprint: bytes
    body: int
    number: int
    page: bytes | None  # None: no record
    sequence: int  # less than MAX_SEQUENCE


@dataclass(slots=True)
class Grant:
    """The answer of ``allocate``; a key in neither field got no room."""

    present: set[Key] = field(default_factory=set)  # there already
    claims: dict[Key, Place] = field(default_factory=dict)  # write there, then publish


IndexFault = (sqlite3.Error, UnicodeDecodeError)
"""What a statement may raise. Messages quote the schema; Python cannot decode a damaged one."""

Punch = Callable[[SlabRow, int], bool]
"""Returns the bytes of a slab's slot to the file system. False: it cannot punch holes.

Called inside the transaction: later it could destroy a record that another process put there."""


def sound(rows: Iterable[tuple[Any, ...]], blob: int = -1) -> list[tuple[Any, ...]]:
    """``rows`` as a list, checked: bytes at position ``blob``, integers in range elsewhere.

    Raises:
        sqlite3.DatabaseError: a row is damaged.
    """
    rows = list(rows)
    for position, column in enumerate(zip(*rows, strict=True)):
        intact = set(map(type, column)) == {bytes if position == blob else int}
        if not intact or (position != blob and not 0 <= min(column) <= max(column) < _LIMIT):
            raise sqlite3.DatabaseError("a row is damaged")
    return rows


def one_row(db: sqlite3.Connection, statement: str, *values: object) -> tuple[int, ...]:
    """The one row, of integers, that ``statement`` always gives on an intact index.

    Raises:
        sqlite3.DatabaseError: the row is missing or damaged.
    """
    rows = sound(db.execute(statement, values))
    if len(rows) != 1:
        raise sqlite3.DatabaseError("a row is missing")
    return rows[0]


def read_slabs(db: sqlite3.Connection) -> list[SlabRow]:
    """All slabs of the directory."""
    rows = db.execute(
        "SELECT id, fingerprint, body, held,"
        " coalesce((SELECT max(used) FROM slot WHERE slot.slab = slab.id AND state = 1), 0),"
        " EXISTS (SELECT 1 FROM owner WHERE owner.slab = slab.id) FROM slab"
    )
    return [SlabRow(*row) for row in sound(rows, blob=1)]
