"""The cache an engine calls: prefetch, admit, grow, commit, release, tick.

All calls come from one thread, the scheduler's, and none waits for bytes: they move on the lanes,
and what the lanes report is applied in :meth:`Cache.tick`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from ..media.base import Media
from ..media.memory import Memory
from ..schema import (
    NO_IDS,
    NO_SLOTS,
    Closed,
    Ids,
    InvariantError,
    RequestError,
    Schema,
)
from ..stores.base import Store
from .audit import Audit
from .backup import Backup
from .lease import Explanation, Lease, Prefetch, Share
from .loading import Loader
from .pages import DEVICE, MANY, TIERS
from .policy import Policy
from .prefetch import Prefetcher
from .recompute import Recompute
from .residency import Residency
from .slots import DeviceSlots
from .tier import Tier
from .transfer import (
    LOAD,
    PROBE,
    READ,
    SAVE,
    TOUCH,
    WRITE,
    MakeLane,
    Move,
    ThreadLane,
    Ticket,
    Transfers,
)


class Cache:
    """Three tiers of cached state under one radix tree.

    Args:
        schema: what one page is made of.
        device_slots, host_slots: slots of each group, in the schema's order.
        store: the storage tier; None for none. Closed with the cache.
        policy: what to do where there is a choice.
        media: device and host bytes; None: CPU tensors.
        lane: makes transfer lanes; tests give lanes that they step by hand.
    """

    def __init__(
        self,
        schema: Schema,
        device_slots: list[int],
        host_slots: list[int],
        store: Store | None = None,
        policy: Policy | None = None,
        media: Media | None = None,
        lane: MakeLane = ThreadLane,
    ) -> None:
        self.schema = schema
        self.policy = policy or Policy()
        self.media = media or Memory(schema, device_slots, host_slots)
        self.store = store
        keyed = store is not None
        self.residency = Residency(schema, device_slots, host_slots, self.policy.order, keyed)
        self.transfers = Transfers(schema, self.media, store, lane, self.policy.stall_seconds)
        self.counts: Counter[str] = Counter()
        self._table, self._tree = self.residency.table, self.residency.tree
        self._device, self._host = self.residency.device, self.residency.host
        self._slots = DeviceSlots(self.residency, self.policy)
        both = self.residency, self.transfers
        self._backup = Backup(*both, self.policy, self.counts, self._apply)
        self._recompute = Recompute(self.transfers, self.policy)
        self._prefetcher = Prefetcher(
            *both, self._recompute, self.policy, self.counts, lambda path: self._audit.broke(path)
        )
        self._loader = Loader(
            *both, self._slots, self._backup, self._recompute, self.policy, self.counts
        )
        self._appliers: dict[str, Callable[[Ticket], None]] = {
            LOAD: self._loader.loaded,
            SAVE: self._backup.saved,
            WRITE: self._backup.written,
            READ: self._prefetcher.read,
            PROBE: self._prefetcher.probed,
            TOUCH: lambda _: None,
        }
        self._leases: dict[int, Lease] = {}
        prefetches, pending = self._prefetcher.open, self.transfers.pending
        self._audit = Audit(
            self.residency, self._leases, prefetches, self._backup.held, pending, self.counts
        )
        self._touches: list[Ticket] = []  # hits that storage is to hear of
        self._closed = False

    def listen(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on any thread, whenever there is something to :meth:`tick`
        for. Policies that go by the clock want a tick now and then besides."""
        self.transfers.listen(callback)

    # --- before a request runs

    def prefetch(self, tokens: NDArray[np.int32], namespace: str = "") -> Prefetch:
        """Start bringing a prompt's pages from storage to the host; pins nothing on the device.

        Args:
            tokens: ``[n]`` int32, the whole prompt.

        Close it with :meth:`admit` or :meth:`cancel`.
        """
        self._check_open()
        return self._prefetcher.begin(bytes(self._raw(tokens)), namespace)

    def ready(self, prefetch: Prefetch) -> bool:
        """Whether the prefetch policy lets the request be scheduled now. Nobody waits for storage
        that is out of order: what a call that hangs brings at last, it brings for others."""
        return prefetch.done or self.transfers.breaker.open or self._prefetcher.late(prefetch)

    def cancel(self, prefetch: Prefetch) -> None:
        """The request is gone. Idempotent; what is being read arrives for others."""
        try:
            self._prefetcher.close(prefetch)
        except InvariantError:
            self._audit.broke(prefetch.path)

    def admit(
        self,
        tokens: NDArray[np.int32],
        namespace: str = "",
        chunk: int = 0,
        prefetch: Prefetch | None = None,
        priority: int = 0,
    ) -> Lease | None:
        """Match, pin, start loading, and reserve device slots for the first chunk.

        All or nothing: None if the device has no room now. At least one token is left to compute.
        Before ``lease.ready`` its slots may be used layer by layer, each after a wait for the
        lease's ``arriving``; ``lease.pages`` may shrink until then.

        Args:
            tokens: ``[n]`` int32, everything known of the sequence, at least one token.
            chunk: tokens to be computed after the hit in the first step.
            prefetch: what :meth:`prefetch` gave for it; closed if the lease is granted.
            priority: 0 to 255; pages of the lowest go first where eviction is by priority.
        """
        self._check_open()
        self._audit.mend()
        path = self._tree.match(namespace, self._raw(tokens))
        present = self.residency.present(path)
        usable = self.schema.usable(present, self.policy.strict)
        pages = self._loader.worth(path, usable)
        explanation = Explanation(
            limited_by=self.schema.limit(present, usable, self.policy.strict),
            skipped=(usable - pages) * self.schema.page_tokens,
        )
        known, path = len(path), path[:pages]
        fresh = self._pages(min(len(tokens), pages * self.schema.page_tokens + chunk)) - pages
        lease = Lease(namespace, path, {}, explanation=explanation, priority=priority)
        self._table.hold(path)
        self._leases[lease.serial] = lease
        if any(group.working for group in self.schema.groups):
            ends = sorted({len(self._raw(tokens)) // self._tree.page_bytes, known})
            lease.cuts = [n * self.schema.page_tokens for n in ends if n > pages]
            lease.lasting = frozenset(lease.cuts)
        self._slots.plan_snapshots(lease, pages, pages + fresh)
        try:
            moves = self._slots.place(lease, [has[:pages] for has in present], fresh)
            if moves is not None:
                self._loader.begin(lease, moves, prefetch.fetched if prefetch else NO_IDS)
        except InvariantError:
            moves = None
            self._audit.broke(path)
        if moves is None:
            self.release(lease)
            return None
        if pages:
            self.residency.stamp(path)
            self._count_hit(path)
            self._touch_storage(path)
        self.counts["lenient_hits_total"] += any(not s.whole for s in lease.shares.values())
        if prefetch:
            self.cancel(prefetch)
        return lease

    def fits(self, tokens: NDArray[np.int32], namespace: str, total: int, chunk: int) -> bool:
        """Whether the device has room beside what is in use. A hint for schedulers.

        Args:
            tokens, namespace: the sequence; its pages that are in use already are no burden.
            total: tokens that every-page groups should have room for.
            chunk: tokens computed in one step, which other groups hold for a moment.
        """
        path = self._tree.match(namespace, self._raw(tokens))
        for g, group in enumerate(self.schema.groups):
            need = self._pages(total)
            if group.tail is not None:
                step = 0 if group.working else 1 + self._pages(chunk)  # snapshots need no room
                need = min(need, group.tail + step) + group.working
            shared = np.count_nonzero(self._table.pins[DEVICE, g][path])
            if self._device.available(g) + shared < need:
                return False
        return True

    # --- while it runs

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Device slots for tokens ``[0, tokens)`` in every group; False, and nothing taken, if
        the device has no room now, or the lease is released, as it is where bookkeeping broke."""
        if lease.released:
            return False
        count = self._pages(tokens)
        taken: list[tuple[int, Share, int]] = []
        try:
            for g, group in enumerate(self.schema.groups):
                share = lease.shares[group.name]
                had = len(share.slots)
                self._slots.plan_snapshots(lease, had, count)
                if not self._slots.extend(g, lease, max(0, count - had), NO_IDS):
                    for group_index, shared, size in taken:
                        self._slots.let_go(group_index, shared, lease.path, size)
                    return False
                taken.append((g, share, had))
        except InvariantError:
            self._lose(lease)
            return False
        return True

    def commit(
        self, lease: Lease, tokens: NDArray[np.int32], snapshots: Collection[int] = ()
    ) -> None:
        """Make whole pages findable, slide windows, and start write-through.

        Args:
            tokens: ``[final]`` int32: the sequence as far as its state is final in every group:
                computed from accepted tokens, and rebuilt from true features.
            snapshots: pages at whose end running state was copied to their slots since the last
                commit, for groups with working slots.
        """
        first, last = lease.pages, len(tokens) // self.schema.page_tokens
        if lease.released or last <= first:
            return
        lease.detached |= bool(first and self._table.dying[lease.path[-1]])
        if lease.detached:
            return
        size = self.schema.page_tokens
        run = np.ascontiguousarray(tokens[first * size : last * size], dtype="<i4")
        try:
            lease.path = self.residency.extend(lease.namespace, lease.path, run.view(np.uint8).data)
            self._table.hold(lease.path[first:])
            self.residency.stamp(lease.path)
            self._table.rank(lease.path, lease.priority)
            for g, group in enumerate(self.schema.groups):
                share = lease.shares[group.name]
                if share.whole:
                    adopted = self._slots.publish(g, lease, first, snapshots)
                    self._backup.add(g, adopted)
                if group.tail is not None:
                    self._slots.slide(g, lease, group.needed(last).start)
        except InvariantError:
            self._lose(lease)

    def release(self, lease: Lease) -> None:
        """Give everything back. Idempotent, also while it is being loaded."""
        if lease.released:
            return
        path, shares = self._leases.pop(lease.serial).end()
        try:
            for g, group in enumerate(self.schema.groups):
                if group.name in shares:
                    self._slots.let_go(g, shares[group.name], path, 0)
                    self._device.free(g, shares[group.name].working)
            self.residency.unhold(path)
        except InvariantError:
            self._audit.broke(path)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed so many prompt tokens in so long, and nothing else meanwhile. What
        would take longer to load than that is not loaded from then on (``Policy.recompute``)."""
        self._recompute.prefill.observe(tokens, seconds)

    def tick(self) -> None:
        """Apply what the lanes report, start what waits. Call it once per step, and when idle."""
        for ticket in self.transfers.landed():
            self._apply(ticket)
        self._audit.mend()
        for ticket in self._touches:
            self.transfers.submit(ticket)
        self._touches.clear()
        self._prefetcher.advance()
        try:
            self._backup.advance()
        except InvariantError:
            self._audit.broke()
        self._audit.mend()  # a step comes next

    def _apply(self, ticket: Ticket) -> None:
        """What came back takes effect. If it cannot, its pages are dropped and nobody waits for
        it: a lease that did, and may have begun on it, is released."""
        try:
            self._appliers[ticket.kind](ticket)
        except InvariantError:
            self._audit.broke(*(move.pages for move in ticket.moves))
            for waiter in ticket.waiters:
                if isinstance(waiter, Prefetch):
                    waiter.reads = [read for read in waiter.reads if read is not ticket]
                    waiter.done |= not waiter.reads
                else:
                    waiter.arriving = [one for one in waiter.arriving if one is not ticket.arrival]
                    if not waiter.released:
                        self._leases.pop(waiter.serial).end()

    def _lose(self, lease: Lease) -> None:
        """Its bookkeeping raised InvariantError, which is being handled: it is released."""
        self._audit.broke(lease.path)
        self._leases.pop(lease.serial).end()

    # --- small things

    def _raw(self, tokens: NDArray[np.int32]) -> memoryview:
        """Token bytes of the pages that a hit may use: at least one token is computed. A view."""
        pages = (len(tokens) - 1) // self.schema.page_tokens
        whole = np.ascontiguousarray(tokens[: pages * self.schema.page_tokens], "<i4")
        return whole.view(np.uint8).data

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.schema.page_tokens)

    def _count_hit(self, path: Ids) -> None:
        """A hit ended here. Where many do, a tail stays when longer requests slide past it."""
        self._table.reused[path] += 1
        for g, group in enumerate(self.schema.groups):
            tail = path[group.needed(len(path)).start :]
            if group.tail is not None:
                self._table.hits[g, tail] = np.minimum(self._table.hits[g, tail] + 1, MANY)
            self._backup.hit(g, tail)

    def _touch_storage(self, path: Ids) -> None:
        """Tell storage of a hit in any tier, ancestors last; in the next tick, since a step waits
        for what is being loaded."""
        if not self.transfers.storage:
            return
        moves = []
        for g, group in enumerate(self.schema.groups):
            pages = path[group.needed(len(path)).start :][::-1]
            keys = self.transfers.names(g, self._table.keys(pages))
            moves.append(Move(g, NO_IDS, NO_SLOTS, NO_SLOTS, keys))
        self._touches.append(Ticket(TOUCH, moves))

    # --- for operators

    def evict(self, tier: str) -> int:
        """Empty a memory tier ("device" or "host") of all that is not in use; pages dropped."""
        place, dropped = self._tier(tier), 0
        try:
            for g, slots in enumerate(place.capacity):
                dropped += len(self.residency.evict(place, g, slots))
        except InvariantError:
            self._audit.broke()
        return dropped

    def _tier(self, name: str) -> Tier:
        if name not in TIERS:
            raise RequestError(f"no memory tier is called {name!r}: there are {', '.join(TIERS)}")
        return (self._device, self._host)[TIERS.index(name)]

    @property
    def making_room(self) -> bool:
        """Device slots will be free, without anybody's doing, when copies under way have landed."""
        return self._backup.leaving

    @property
    def idle(self) -> bool:
        """Nothing is on its way between tiers, but for what waits until storage is in order."""
        return self._backup.idle and not self.transfers.pending and not self._touches

    def drain(self, timeout: float = 30.0) -> bool:
        """Write back everything committed; False if it took longer than ``timeout`` seconds, or
        storage that failed was tried again and failed again."""
        breaker, end = self.transfers.breaker, time.monotonic() + timeout
        self._backup.flush()
        self.tick()  # what has failed is in line again before storage is tried again
        trips = breaker.trips
        breaker.retry()
        while self._backup.waiting or not self.idle:
            if time.monotonic() > end or (breaker.open and breaker.trips > trips + 1):
                return False
            self.tick()
            time.sleep(0.001)
        return True

    def close(self, timeout: float = 30.0) -> None:
        """Drain, stop the lanes and close the store, unless a call of it hangs. Idempotent."""
        if self._closed:
            return
        self.drain(timeout)
        self._closed = True
        if self.transfers.close() and self.store is not None:
            self.store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the cache is closed")

    def figures(self) -> dict[str, float]:
        """Counters (``_total``) and gauges by metric name, labels in braces."""
        figures: dict[str, float] = dict(self.counts)
        for tier in (self._device, self._host):
            for g, group in enumerate(self.schema.groups):
                label = f"{{tier={tier.name},group={group.name}}}"
                figures[f"slots{label}"] = tier.capacity[g]
                figures[f"free_slots{label}"] = tier.free_slots(g)
                figures[f"evicted_pages_total{label}"] = tier.evicted[g]
        figures["pages"] = len(self._table)
        figures["transfers_pending"] = len(self.transfers.pending) + (not self._backup.idle)
        for lane, speed in self.transfers.speeds.items():
            if seconds := speed.seconds(1):
                figures[f"bytes_per_second{{lane={lane}}}"] = 1 / seconds
        if seconds := self._recompute.prefill.seconds(1):
            figures["prefill_tokens_per_second"] = 1 / seconds
        figures["leases"] = len(self._leases)
        figures["prefetches"] = len(self._prefetcher.open)
        figures["storage_breaker_open"] = float(self.transfers.breaker.open)
        figures["storage_breaker_trips_total"] = self.transfers.breaker.trips
        for lane, size in dict(self.transfers.moved).items():
            figures[f"moved_bytes_total{{lane={lane}}}"] = size
        for lane, count in dict(self.transfers.faults).items():
            figures[f"transfer_faults_total{{lane={lane}}}"] = count
        for kind, count in dict(self.store.faults if self.store else {}).items():
            figures[f"storage_faults_total{{kind={kind}}}"] = count
        return figures

    def check(self) -> None:
        """Raise InvariantError unless every owner is sound, and every hold, pin and private slot
        has one."""
        self.residency.check()
        self._audit.check()
