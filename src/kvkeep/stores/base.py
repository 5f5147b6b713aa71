"""What a storage backend implements: five batched verbs on checksummed records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from ..schema import Key


class Store(Protocol):
    """A storage backend. Blocking, thread-safe, batched.

    Bodies are ``Group.record_bytes`` long. A backend keeps each with a footer (see
    :mod:`kvkeep.stores.record`) and verifies it on every read: a record that is absent, of
    another key, torn or corrupt is a *miss*, never an exception and never wrong bytes. A group
    that the backend was not opened with is a miss, and is not written. An exception
    (:class:`~kvkeep.schema.StoreError` or ``OSError``) means the backend itself failed; after
    ``close``, every verb raises :class:`~kvkeep.schema.Closed`; a buffer of the wrong size is a
    :class:`~kvkeep.schema.ConfigError`.
    """

    faults: Counter[str]
    """What went wrong and was contained, by kind: ``corrupt``, ``torn``, ``full``, ...

    Monotonic; read by the metrics page from another thread."""

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        """Which records seem to be there. A hint: only ``read`` knows."""
        ...

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        """Read each body into its writable buffer. False: a miss, the buffer is undefined."""
        ...

    def write(self, keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        """Store each body. True once a read would find it; False: not stored (say, no room).

        The last key is the newest, as with ``touch``. If there is not room for all, the last ones
        get it."""
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """These were hit, in any tier: recycle them last. Lossy; the last key is the newest.

        Absent records are no error."""
        ...

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these records; absent ones are no error."""
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...
