"""Lookups of records in the index, and a memory of what they found.

A lookup in SQLite takes longer than all the rest of a hit, so each row is looked up once until it
changes. The index forgets the rows that it changes itself; SQLite's ``data_version`` tells when
another connection has changed any.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from .rows import Place, one_row, sound

MOST_SEEN = 1 << 16
"""Places to remember before all of them are forgotten."""

_VARIABLES = 1000  # of one statement; SQLite's own limit is 32,766


class Places:
    """Where records are, by slab and page. Not thread-safe: used by one :class:`Index` only.

    Raises:
        IndexFault: from :meth:`refresh` and :meth:`find`.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._seen: dict[int, dict[bytes, Place]] = defaultdict(dict)  # by slab id and page, ...
        self._version = 0  # ... valid while this is SQLite's data_version

    def refresh(self) -> None:
        """Forget everything if another connection has written, or if it has become too much."""
        (version,) = one_row(self._db, "PRAGMA data_version")
        if version != self._version or sum(map(len, self._seen.values())) > MOST_SEEN:
            self._seen.clear()
        self._version = version

    def find(self, slab: int, pages: Sequence[bytes]) -> Mapping[bytes, Place]:
        """The places of those ``pages`` of a slab that have a record, and perhaps of others.

        Call :meth:`refresh` before, in the same transaction if there is one.
        """
        seen = self._seen[slab]
        if new := [page for page in pages if page not in seen]:
            seen |= seek(self._db, slab, new)
        return seen

    def forget(self, slab: int, page: bytes) -> None:
        """Look this page up again next time: its row is about to change."""
        self._seen[slab].pop(page, None)

    def forget_all(self) -> None:
        """Look every page up again next time."""
        self._seen.clear()


def seek(
    db: sqlite3.Connection, slab: int, pages: Sequence[bytes]
) -> Iterator[tuple[bytes, Place]]:
    """The pages of a slab that have a record, each with its place.

    One statement looks up many pages: that takes a sixth of the time of a statement for each.
    """
    for start in range(0, len(pages), _VARIABLES):
        part = pages[start : start + _VARIABLES]
        rows = db.execute(
            "SELECT page, slab, number, sequence FROM slot INDEXED BY slot_page"
            f" WHERE slab = ? AND state = 1 AND page IN ({', '.join('?' * len(part))})",
            (slab, *part),
        )
        for row in sound(rows, blob=0):
            yield row[0], Place._make(row[1:])
