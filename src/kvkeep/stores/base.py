"""The interface of a storage backend: five batched verbs on checksummed records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from ..schema import Key


class Store(Protocol):
    """A storage backend: blocking, thread-safe, batched.

    A body is ``Group.record_bytes`` long. A backend keeps each body with a footer (see
    :mod:`kvkeep.stores.record`) and verifies it on every read: a record that is absent, of
    another key, torn or corrupt is a *miss*, never an exception and never wrong bytes. A key of a
    group that the backend was not opened with is a miss, and is not written. Buffers belong to the
    caller again as soon as a call returns.

    :mod:`kvkeep.testing.stores` has a suite that checks these rules, and a whole backend as an
    example.

    Raises:
        StoreError, OSError: from any verb: the backend itself failed.
        Closed: from any verb after ``close``.
        ConfigError: from ``read`` and ``write``: a buffer has the wrong size for its group.
    """

    faults: Counter[str]
    """Contained failures by kind: ``corrupt``, ``full``, ``io``, ...

    Counts only grow. The metrics page reads them from another thread."""

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        """Which records the backend believes it has. A hint: only ``read`` verifies."""
        ...

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        """Read each body into its writable buffer. False: a miss, and the buffer is undefined."""
        ...

    def write(self, keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        """Store each body. True: a read finds it from now on. False: not stored (say, no room).

        The last key becomes the newest record, also if it was there already. If there is not room
        for all, the last keys get it, whatever their groups."""
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """Recycle these records last, the last key last of all: some tier had a hit on them.

        Lossy: a backend may ignore it. Absent records are no error and take no room."""
        ...

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these records and free their room. Absent records are no error."""
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...
