"""How a world looks into a cache: the only file of tests that knows the core's bookkeeping.

Everything else that the world asks is public: the calls of ``Cache``, the figures, a lease's slots,
and the protocols of media, stores and lanes. Arrays are views where the core has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import kvkeep.core.victims
from kvkeep.core.cache import Cache
from kvkeep.core.lease import Lease
from kvkeep.core.speed import Speed
from kvkeep.core.ticket import READ, Ticket
from kvkeep.schema import Ids, Key, Residence, Slots
from kvkeep.testing.fakes import Switch

SELECT = kvkeep.core.victims._SELECT


def select_victims(share: float) -> None:
    """Let each scan for victims sort this share of a tier, so that even tiny pools are evicted in
    several batches."""
    kvkeep.core.victims._SELECT = share


class Move(NamedTuple):
    """Pages of one group that a ticket moves; a side that is storage has no slots."""

    group: int
    pages: Ids
    source: Slots
    target: Slots
    keys: Sequence[Key]


class Insides:
    """The bookkeeping of a cache."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    # --- pages

    @property
    def table(self):
        """Columns by page id."""
        return self.cache.residency.table

    @property
    def state(self) -> np.ndarray:
        """``[tiers, groups, pages]``: :class:`~kvkeep.schema.Residence`."""
        return self.table.state

    @property
    def slot(self) -> np.ndarray:
        """``[tiers, groups, pages]``."""
        return self.table.slot

    @property
    def pins(self) -> np.ndarray:
        """``[tiers, groups, pages]``."""
        return self.table.pins

    @property
    def used(self) -> np.ndarray:
        """``[groups, pages]``: the clock value when each was last needed."""
        return self.table.used[list(self.table.clocks)]

    @property
    def hits(self) -> np.ndarray:
        """``[groups, pages]``: hits that needed each."""
        return self.table.hits

    @property
    def holds(self) -> np.ndarray:
        """``[pages]``."""
        return self.table.holds

    @property
    def dying(self) -> np.ndarray:
        """``[pages]``: out of the tree but still held."""
        return self.table.dying

    @property
    def keys(self) -> np.ndarray:
        """``[pages, 32]`` uint8: chained keys."""
        return self.table.key

    @property
    def pages(self) -> int:
        """Page ids in use."""
        return len(self.table)

    @property
    def clock(self) -> int:
        """The newest clock value."""
        return self.table.clock

    def runs(self) -> Iterator[tuple[bytes, int, int, bytes, list[int]]]:
        """The tree as runs of pages, parents first: key of the namespace, the run's own handle and
        its parent's, its tokens (int32, little-endian) and page ids."""
        for root, node in self.cache.residency.tree.walk():
            yield root, id(node), id(node.parent), bytes(node.raw), node.ids.tolist()

    # --- transfers

    def moves(self) -> Iterator[tuple[str, Move]]:
        """Moves of tickets that were not collected yet, with their kind."""
        for ticket in self.cache.transfers.tickets:
            for m in ticket.moves:
                yield ticket.route.name, Move(m.group, m.pages, m.source, m.target, m.keys)

    @property
    def busy(self) -> bool:
        """Tickets are in flight."""
        return not self.cache.transfers.idle

    @property
    def tells_storage(self) -> bool:
        """Storage is unusable, or touches wait or are in flight."""
        return not self.cache._touches.idle or not self.cache.transfers.storage.usable

    def switch_breaker(self, switch: Switch) -> None:
        """Replace the breaker of storage by ``switch``."""
        self.cache.transfers.storage.breaker = switch

    def read_at_once(self, size: int) -> None:
        """Let each read ticket have so many bytes, whatever was measured."""
        self.cache.transfers.read_bytes = lambda total: size

    # --- leases

    def own(self, lease: Lease, g: int) -> np.ndarray:
        """Slots that only the lease has: private pages, then recurrent state."""
        return np.concatenate((lease.table[g, lease.owned[g]], lease.running[g]))

    def owned(self, lease: Lease, g: int) -> np.ndarray:
        """``[capacity in pages]``: the lease's slot is private."""
        return lease.owned[g]

    def landed(self, lease: Lease, g: int) -> Slots:
        """The block table without slots that are still being loaded."""
        return lease.table[g]

    def coming(self, lease: Lease, g: int) -> set[int]:
        """Pages of a hit that are being loaded."""
        return set(lease.coming[g][0].tolist()) if g in lease.coming else set()

    def publishes(self, lease: Lease, g: int) -> bool:
        """The lease's prefix has no gaps in this group, so later pages are shared too."""
        return lease.whole[g]

    def detached(self, lease: Lease) -> bool:
        """The lease's path left the tree."""
        return lease.detached or bool(lease.pages and self.dying[lease.path[-1]])

    # --- host memory that prefetches hold

    @property
    def keepers(self) -> np.ndarray:
        """``[groups, pages]``: for how many pins and reads the share counts each page."""
        return self.cache.residency.table.kept

    @property
    def kept(self) -> list[int]:
        """By group, host slots that the share counts."""
        return self.cache._prefetcher._share._used

    def keeps(self) -> Iterator[tuple[int, Ids]]:
        """Groups and pages that open prefetches pin and that reads in flight fill."""
        for prefetch in self.cache._prefetches.values():
            yield from prefetch.pinned
        for ticket in self.reading():
            yield from ((move.group, move.pages) for move in ticket.moves)

    # --- repair

    @property
    def audit(self):
        """The audit, which mends the bookkeeping."""
        return self.cache._audit

    def stumble(self, error: Exception) -> None:
        """Report broken bookkeeping, as a failed check would."""
        with self.audit.guard():
            raise error

    # --- operators and other requests

    def evict(self, tier: int, g: int, count: int) -> Ids:
        """Evict up to ``count`` pages of a group from a tier; returns them."""
        residency = self.cache.residency
        return residency.evict((residency.device, residency.host)[tier], g, count)

    def pin_host(self, g: int) -> None:
        """Pin all pages of a group that the host has."""
        host = self.cache.residency.host
        host.pin(g, np.flatnonzero(self.state[1, g] == Residence.LIVE))

    def flush(self) -> None:
        """Flush as :meth:`Cache.drain` does first."""
        self.cache._backup.flush()

    # --- lines and counts

    def unsaved(self, g: int) -> list[Ids]:
        """Entries of the line to the host, in order; the list itself."""
        return self.cache._backup.lines[0].entries[g]

    def unwritten(self, g: int) -> list[Ids]:
        """Entries of the line to storage, in order; the list itself."""
        return self.cache._backup.lines[1].entries[g]

    @property
    def stored(self) -> np.ndarray:
        """``[groups, pages]``: the hint that storage has it."""
        return self.table.stored

    @property
    def leases(self) -> int:
        """Leases that are not released."""
        return len(self.cache._leases)

    def free(self, tier: int, g: int) -> int:
        """Free slots."""
        return self.cache.residency.tiers[tier].free_slots(g)

    def available(self, tier: int, g: int) -> int:
        """Slots that are free or that evicting everything idle would free."""
        return self.cache.residency.tiers[tier].available(g)

    def reading(self) -> list[Ticket]:
        """Reads in flight, in order."""
        return [ticket for ticket in self.cache.transfers.tickets if ticket.route is READ]

    def speed(self, lane: str) -> Speed:
        """The measured speed of "load" or "read", in bytes."""
        speeds = {route.name: speed for route, speed in self.cache.transfers.speeds.items()}
        return speeds[lane]
