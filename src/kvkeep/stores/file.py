"""The default store: a slab file per group, an index, and one byte quota over a directory.

Nothing is synced to disk on the way. A write claims slots in the index, writes bodies and footers,
and then publishes the rows; whatever a crash leaves, a reader verifies the record. This is what a
crash may leave behind, and what clears it away:

==========================  ==========================  ============================================
crash                       leaves                      cleared by
==========================  ==========================  ============================================
killed before the claim     nothing                     SQLite, which rolls back
killed between claim and    a slot that is ``WRITING``  the next process to open the directory, or
publish                     and has no page             a writer that finds no room: ``heal``
killed after the publish    the record, whole           nothing: it stays
killed while it gives       a row whose slot is a hole  the next read: ``empty``, the row is cleared
bytes back
killed while it rebuilds    ``index-*.new``             the next process, which rebuilds the index
the index
killed at any time          ``owner-*``, unlocked       the next process to open the directory
power lost, slab behind     rows whose record is torn,  the next read: ``corrupt``, ``empty`` or
the index                   absent or another's         ``other_key``, the row is cleared
power lost, index behind    records without a row       the next claim of their slots: overwritten
the slab
power lost, index damaged   a file that SQLite or the   the call that finds it: ``index``, rebuilt
                            checks on rows refuse       from the footers of the slabs
index file lost             slabs alone                 the next call: ``index``, rebuilt likewise
slab file lost              rows without a slab         the next read: ``missing``, rows are cleared
==========================  ==========================  ============================================

The worst outcome is a miss.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ..schema import Closed, ConfigError, Key
from .catalog import Catalog
from .fsck import Report, Usage, fsck, usage
from .index import Index
from .labels import Label
from .moving import Records, load, save
from .record import footer_bytes
from .rows import Grant, IndexFault, Place
from .slab import Slab

RETRY_SECONDS = 60.0
"""After the disk was full, a store does not grow for this long."""


class FileStore:
    """Records in a directory that any number of processes of one machine may share.

    The index is a hint and the record is the truth: whatever a crash, a torn write, a full disk or
    another process does, the worst outcome is a miss.

    The quota is in bytes of slots, over all groups that were ever stored in the directory. When it
    is used up, the store recycles the least recently used records: first those of groups that no
    process has open, a whole group before the next, then those of all others.

    In a directory that it may not write to, or on a full disk, the store opens for reading: it
    serves what the slabs hold at that moment and refuses writes until it is opened again.

    Thread-safe. Bytes move outside of all locks, straight between the caller's buffers and the
    file. Do not use it across a ``fork``.

    ``faults`` counts, in records unless said otherwise:

    - read, and its row cleared: ``corrupt`` (torn or damaged), ``empty``, ``other_key``,
      ``other_version``, ``missing`` (no slab file), ``io`` (unreadable);
    - not written: ``full``, ``no_room`` (all slots are being written), ``read_only``, ``io``,
      ``unreachable`` (no file can be that large);
    - calls that the index refused: ``busy``, ``full``, ``read_only``, ``io``;
    - ``index``: times that the index was lost or damaged, and rebuilt;
    - ``recycled``: no fault; a writer recycled a slot while it was being read.

    Args:
        directory: on a local file system; created if absent.
        sizes: group fingerprint -> body bytes (``Group.record_bytes``). Keys of other groups are
            misses, and are not written.
        quota_bytes: None for as much as the disk holds.
        labels: what people call the groups, by fingerprint; kept for ``usage``.

    Raises:
        ConfigError: the directory cannot be used, or the quota does not hold one record.
    """

    def __init__(
        self,
        directory: Path,
        sizes: Mapping[bytes, int],
        quota_bytes: int | None = None,
        labels: Mapping[bytes, Label] = MappingProxyType({}),
    ) -> None:
        for fingerprint, size in sizes.items():
            if len(fingerprint) != 16 or size < 1:
                raise ConfigError(
                    f"a group has a fingerprint of 16 bytes and a body of at least 1, not "
                    f"{fingerprint.hex()!r} and {size}"
                )
            stride = size + footer_bytes(size)
            if quota_bytes is not None and quota_bytes < stride:
                raise ConfigError(
                    f"a storage quota of {quota_bytes} bytes does not hold one record of "
                    f"{stride}; raise the quota or use smaller pages"
                )
        self.faults: Counter[str] = Counter()
        self._sizes = dict(sizes)
        self._quota = quota_bytes
        self._ceiling = (0, -math.inf)  # bytes held when the disk was last full, and the time
        self._stranded: list[Place] = []  # claims that are still to be ended in the index
        self._left = threading.Condition()  # guards the two below; notified when a caller leaves
        self._inside = 0  # callers in a verb
        self._closed = False
        self._helper = ThreadPoolExecutor(
            1, "kvkeep-store"
        )  # its thread starts with its first work
        try:
            self._catalog = Catalog(directory, self._sizes, quota_bytes, self.faults, labels)
        except (OSError, *IndexFault) as error:
            raise ConfigError(
                f"cannot keep a cache in {directory}: {error}; choose a directory on a local file "
                "system that this user may write to"
            ) from error

    # -- the protocol

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        """Which records the index has."""
        with self._entered():
            found = self._find(keys)
        return [key in found for key in keys]

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        """Read each body into its writable buffer. False: a miss, and the buffer is undefined.

        Count a record that fails in ``faults``, and clear its row.
        """
        bodies = self._views(keys, out)
        with self._entered():
            places = self._find(keys)
            known = [i for i, key in enumerate(keys) if key in places]
            known.sort(key=lambda i: keys[i].group)
            found = [keys[i] for i in known]
            records = Records(found, [places[key] for key in found], [bodies[i] for i in known])
            failures = load(records, self._slab, self._helper)
            if bad := {key: why for key, why in zip(found, failures, strict=True) if why}:
                self._take_back(bad, places)
        hits = [False] * len(keys)
        for i, failure in zip(known, failures, strict=True):
            hits[i] = failure is None
        return hits

    def write(self, keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        """Store each body. True: a read finds it from now on.

        A key that the index has is neither written again nor read to verify it. Keys name content,
        so the bytes would be the same; if the record is bad, the next read clears the row.
        """
        bodies = dict(zip(keys, self._views(keys, records), strict=True))
        with self._entered():
            grant = self._allocate(self._known(keys))
            landed, abandoned = self._put(grant.claims, bodies)  # bytes first, then the promise
            present = grant.present | self._publish(landed, abandoned)
        return [key in present for key in keys]

    def touch(self, keys: Sequence[Key]) -> None:
        """Recycle these records last, the last key last of all."""
        with self._entered():
            known = self._known(keys)
            self._catalog.ask(lambda index: index.touch(known))

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these records and return their bytes to the file system."""
        with self._entered():
            known = self._known(keys)
            self._catalog.ask(lambda index: index.delete(known, self._catalog.punch))

    def close(self) -> None:
        """Wait for calls under way, then release all resources. Idempotent."""
        with self._left:
            if self._closed:
                return
            self._closed = True
            self._left.wait_for(lambda: not self._inside)
        self._helper.shutdown()
        self._catalog.close()

    # -- for administrators

    def usage(self) -> list[Usage]:
        """The space that each group of the directory takes, the least recently used first."""
        with self._entered():
            return usage(self._catalog)

    def fsck(self, repair: bool = False) -> Report:
        """Read and verify every record of the directory. Other processes may go on using it.

        Args:
            repair: clear the rows of records that fail, and free the slots of dead writers.
        """
        with self._entered():
            return fsck(self._catalog, repair)

    def gc(self, limit: int) -> int:
        """Drop the least recently used records until the directory holds ``limit`` bytes.

        Returns:
            Bytes returned to the file system.
        """
        with self._entered():
            return self._catalog.ask(lambda index: index.shrink(limit, self._catalog.punch)) or 0

    # -- below the verbs

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._left:
            if self._closed:
                raise Closed("the store is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    def _known(self, keys: Sequence[Key]) -> list[Key]:
        return [key for key in keys if key.group in self._sizes]

    def _find(self, keys: Sequence[Key]) -> dict[Key, Place]:
        known = self._known(keys)
        return self._catalog.ask(lambda index: index.find(known)) or {}

    def _views(self, keys: Sequence[Key], buffers: Sequence[memoryview]) -> list[memoryview]:
        """The buffers as bytes.

        Raises:
            ConfigError: a buffer has the wrong size for its group.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        for key, view in zip(keys, views, strict=True):
            if len(view) != self._sizes.get(key.group, len(view)):
                raise ConfigError(
                    f"a buffer has {len(view)} bytes, a record of its group "
                    f"{self._sizes[key.group]}"
                )
        return views

    def _allocate(self, keys: Sequence[Key]) -> Grant:
        """Claim slots for the keys that are absent; count those that get none."""
        if not self._catalog.writable:
            found = self._find(keys)
            self._catalog.count("read_only", len({*keys} - found.keys()))
            return Grant({*found})
        grant = Grant()
        for healed in (False, True):
            rest = [key for key in keys if key not in grant.present and key not in grant.claims]
            if not rest or (healed and not self._catalog.heal()):
                break
            more = self._catalog.ask(
                partial(
                    Index.allocate,
                    keys=rest,
                    limit=self._limit(),
                    owner=self._catalog.owner,
                    punch=self._catalog.punch,
                ),
            )
            if more is None:
                return grant
            grant.present |= more.present
            grant.claims |= more.claims
        self._catalog.count("no_room", len({*keys} - grant.present - grant.claims.keys()))
        return grant

    def _take_back(self, bad: Mapping[Key, str], places: Mapping[Key, Place]) -> None:
        """Clear the rows of records that failed, and count each under its reason."""
        seen = {key: places[key] for key in bad}
        cleared = self._catalog.ask(lambda index: index.clear(seen)) or ()
        for key, why in bad.items():
            # If the row has changed since, a writer recycled the slot meanwhile: a plain miss.
            self._catalog.count(why if key in cleared else "recycled")

    def _limit(self) -> int | None:
        """Bytes that the directory may hold now; None for no limit."""
        held, since = self._ceiling
        if time.monotonic() - since > RETRY_SECONDS:
            return self._quota
        return held if self._quota is None else min(held, self._quota)

    def _put(
        self, claims: Mapping[Key, Place], bodies: Mapping[Key, memoryview]
    ) -> tuple[dict[Key, Place], list[Place]]:
        """Write records into their claimed slots.

        Returns:
            The places of the records that landed, and the places of the others.
        """
        landed: dict[Key, Place] = {}
        failed: dict[Place, str] = {}
        keys = sorted(claims, key=lambda key: key.group)
        records = Records(keys, [claims[key] for key in keys], [bodies[key] for key in keys])
        failures = save(records, partial(self._slab, create=True), self._helper)
        for key, place, failure in zip(keys, records.places, failures, strict=True):
            if failure is None:
                landed[key] = place
            else:
                self._catalog.count(failure)
                failed[place] = failure
        if "unreachable" in failed.values():  # no file can be large enough for such a slot
            self._catalog.distrust()
        if "full" in failed.values():
            held = self._catalog.ask(Index.held_bytes) or 0
            sizes = [self._sizes[key.group] for key in claims if key not in landed]
            lost = sum(size + footer_bytes(size) for size in sizes)
            self._ceiling = (held - lost, time.monotonic())
        return landed, list(failed)

    def _publish(self, landed: Mapping[Key, Place], abandoned: Sequence[Place]) -> set[Key]:
        """Publish the records that landed, and end all other claims.

        Returns:
            The keys that are present now.
        """
        with self._catalog.lock:
            self._stranded += abandoned
            if not landed and not self._stranded:
                return set()
            punch = self._catalog.punch
            present = self._catalog.ask(lambda index: index.publish(landed, self._stranded, punch))
            if present is None:
                self._stranded += landed.values()
                return set()
            self._stranded.clear()
            return present

    def _slab(self, group: bytes, create: bool = False) -> Slab:
        """The slab of a group.

        Raises:
            OSError: the slab cannot be opened.
        """
        return self._catalog.slab(group, self._sizes[group], create)
