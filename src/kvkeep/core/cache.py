"""The cache that an engine calls: prefetch, admit, grow, commit, release, tick.

The scheduler's thread makes all calls. No call waits for bytes: lanes move them, and
:meth:`Cache.tick` applies what the lanes report.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..media.base import Media
from ..media.memory import Memory
from ..schema import Closed, RequestError, Schema, as_tokens, root_key
from ..stores.base import Store
from .admission import Admission
from .audit import Audit
from .backup import Backup
from .flight import Flights
from .host_share import HostShare
from .lanes import MakeLane, ThreadLane
from .lease import Lease, Prefetch
from .loading import Loader
from .pages import PLAIN, TIERS, Retention
from .policy import Policy
from .prefetch import Prefetcher
from .residency import Residency
from .slots import DeviceSlots
from .touches import Touches
from .transfer import Recompute, Transfers, close_all

_open: weakref.WeakSet[Transfers] = weakref.WeakSet()


@atexit.register
def _close_lanes() -> None:
    """Lanes are daemon threads: end them before the interpreter unloads their libraries."""
    for transfers in list(_open):
        _open.discard(transfers)
        transfers.close()


class Cache:
    """Three tiers of cached state under one radix tree; a context manager that closes itself.

    Without :meth:`close`, the lanes finish their queues at process exit, or end when the cache is
    garbage collected.

    Args:
        device_slots, host_slots: slots of each group, in the schema's order.
        store: the storage tier or None; closed with the cache.
        media: device and host bytes; None: CPU tensors.
        lane: makes transfer lanes; tests pass lanes that they step by hand.
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
        self.schema, self.store = schema, store
        self.policy = policy = policy or Policy()
        self.media = media or Memory(schema, device_slots, host_slots)
        self.counts: Counter[str] = Counter()
        rules = policy.order, policy.missing == "strict", store is not None
        self.residency = residency = Residency(schema, device_slots, host_slots, *rules)
        self.transfers = Transfers(schema, self.media, store, lane, policy.stall_seconds)
        _open.add(self.transfers)
        weakref.finalize(self, close_all, self.transfers.closers, 0.0).atexit = False
        self._table = residency.table
        self._recompute = Recompute(self.transfers, policy)
        self._touches = Touches(self.transfers)
        flights = Flights(residency, self.transfers)
        self._backup = Backup(flights, policy, self.counts)
        self._slots = DeviceSlots(residency, self._backup, policy)
        share = HostShare(residency, policy.prefetch_share)
        self._audit = audit = Audit(flights, self._backup, share, self.counts)
        self._leases, self._prefetches = audit.leases, audit.prefetches
        shared = flights, self._recompute, policy, self.counts
        self._prefetcher = Prefetcher(*shared, audit, share)
        self._loader = Loader(*shared, self._slots, self._leases)
        self._admission = Admission(
            flights, self._backup, self._prefetcher, self._loader, self._touches, audit
        )
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def listen(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, whenever a job is done and :meth:`tick` is due.
        Timeouts need a tick from time to time besides."""
        self.transfers.listen(callback)

    # --- before a request runs

    def prefetch(self, tokens: ArrayLike, namespace: str = "") -> Prefetch:
        """Start reading a prompt's pages from storage to the host; pins nothing on the device.

        End it with :meth:`admit` or :meth:`cancel`.

        Args:
            tokens: ``[n]`` integers in int32's range, the whole prompt.

        Raises:
            RequestError: ``tokens`` are anything else.
            Closed: the cache is closed.
        """
        self._begin()
        raw = bytes(self._raw(as_tokens(tokens)))
        return self._prefetcher.begin(root_key(namespace), raw)

    def ready(self, prefetch: Prefetch) -> bool:
        """Whether the prefetch policy lets the request be scheduled now. True while the breaker is
        open; a hung read that completes later still serves others."""
        broken = self.transfers.storage.breaker.open
        return not prefetch.waits or broken or self._prefetcher.late(prefetch)

    def cancel(self, prefetch: Prefetch) -> None:
        """End a prefetch whose request is gone. Idempotent; reads in flight still serve others."""
        with self._audit.guard(prefetch.path):
            self._prefetcher.close(prefetch)

    def admit(
        self,
        tokens: ArrayLike,
        namespace: str = "",
        chunk: int = 0,
        prefetch: Prefetch | None = None,
        retention: Retention = PLAIN,
        total: int = 0,
        reuse: bool = True,
    ) -> Lease | None:
        """Match, pin, start loading, and reserve device slots for the first chunk.

        All or nothing: None if the device has no room now. At least one token is left to compute.
        Until ``lease.ready``, ``lease.pages`` may shrink, and each layer of a slot may be used only
        after a wait for the lease's ``arriving``.

        Args:
            tokens: ``[n >= 1]`` integers in int32's range: all known tokens of the sequence.
            chunk: tokens to compute after the hit in the first step.
            prefetch: the request's prefetch; closed if the lease is granted.
            retention: the priority of the request's pages, for how long, and if they stay at all.
            total: tokens that the device must have room for beside what is in use, or None is
                returned; a scheduler's estimate of what all its requests will need.
            reuse: False: hit nothing, for a caller that needs every token's logits.

        Raises:
            RequestError: ``tokens`` are anything else.
            Closed: the cache is closed.
        """
        self._begin()
        run = as_tokens(tokens)
        raw, root = self._raw(run), root_key(namespace)
        return self._admission.admit(run, raw, root, chunk, prefetch, retention, total, reuse)

    # --- while it runs

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Reserve device slots for tokens ``[0, tokens)`` in every group; False, and none taken, if
        the device has no room now or the lease is released, as after an InvariantError."""
        return self._admission.grow(lease, tokens)

    def commit(self, lease: Lease, tokens: ArrayLike, snapshots: Collection[int] = ()) -> None:
        """Add whole pages to the tree, slide windows, and start write-through.

        Args:
            tokens: ``[final]`` integers in int32's range: the sequence as far as its state is final
                in every group (from accepted tokens, rebuilt from true features).
            snapshots: pages at whose end running state was copied to their slots since the last
                commit, for groups with working slots.

        Raises:
            RequestError: ``tokens`` are anything else, or exceed the lease's slots.
        """
        run, size = as_tokens(tokens), self.schema.page_tokens
        first, last = lease.pages, len(run) // size
        if lease.released or last <= first:
            return
        if len(run) > lease.capacity * size:
            raise RequestError(
                f"{len(run)} tokens are committed to a lease with slots for "
                f"{lease.capacity * size}: grow it first"
            )
        lease.detached |= bool(first and self._table.dying[lease.path[-1]])
        if lease.detached:
            return
        raw = run[first * size : last * size].view(np.uint8).data
        with self._audit.guard(lease=lease):
            lease.path = self.residency.extend(lease.root, lease.path, raw)
            self._table.hold(lease.path[first:])
            self.residency.stamp(lease.path)
            self._table.rank(lease.path, lease.retention)
            for g, adopted in self._slots.publish(lease, first, snapshots):
                self._backup.add(g, adopted)
            for g, group in enumerate(self.schema.groups):
                if group.tail is not None:
                    self._slots.slide(g, lease, group.needed(last).start)

    def release(self, lease: Lease) -> None:
        """Give everything back. Idempotent; allowed while the lease is loading."""
        if lease.released:
            return
        if not lease.ready:
            self._loader.count(lease)
        with self._audit.guard(lease=lease):
            self._table.rank(lease.path, lease.retention)  # its time begins now
            self._slots.let_go(lease, 0)
            self._slots.free_running(lease)
            self.residency.unhold(lease.path)
            del self._leases[lease.serial]
            lease.end()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record that the engine computed ``tokens`` prompt tokens, and nothing else, in
        ``seconds``. State that is slower to load than that is recomputed (``Policy.recompute``)."""
        self._recompute.prefill.observe(tokens, seconds)

    def tick(self) -> None:
        """Apply what the lanes report and start what waits. Call it once per step, and when idle.

        An idle caller should wait for :meth:`listen` or sleep between calls: lanes need the GIL."""
        landed = False
        with self._audit.guard():  # also around what takes jobs over, for an interruption there
            for job in self.transfers.landed():
                landed = True
                with self._audit.guard(*job.touched()):
                    job.finish()
        self._audit.mend()
        self._touches.send()
        self.residency.expire()
        self._prefetcher.advance()
        with self._audit.guard():
            self._backup.advance()
        self._audit.mend()  # a step comes next
        if not landed and not self.transfers.idle:
            time.sleep(0)  # lets the lanes' threads run

    # --- helpers

    def _begin(self) -> None:
        if self._closed:
            raise Closed("the cache is closed")
        self._audit.mend()

    def _raw(self, run: NDArray[np.int32]) -> memoryview:
        """Token bytes of the pages that a hit may use; at least one token is left. A view."""
        pages = (len(run) - 1) // self.schema.page_tokens
        return run[: max(0, pages) * self.schema.page_tokens].view(np.uint8).data

    # --- for operators

    def evict(self, tier: str) -> int:
        """Evict all idle pages of a memory tier, "device" or "host"; returns how many.

        Raises RequestError for any other tier."""
        if tier not in TIERS:
            raise RequestError(f"no memory tier is called {tier!r}: there are {', '.join(TIERS)}")
        place = self.residency.tiers[TIERS.index(tier)]
        with self._audit.guard():
            return sum(len(self.residency.evict(place, g, n)) for g, n in enumerate(place.capacity))
        return 0

    def make_room(self, slots: list[int]) -> bool:
        """Free ``slots[g]`` device slots of each group ahead of need. False: some are not free yet,
        because pages must be copied first or are in use.

        Raises:
            RequestError: there are more or fewer groups.
        """
        if len(slots) != len(self.schema.groups):
            raise RequestError(f"{len(slots)} slot counts for {len(self.schema.groups)} groups")
        with self._audit.guard():
            return self._backup.make_room(slots)
        return False

    @property
    def making_room(self) -> bool:
        """Copies in flight will free device slots when they land."""
        return self._backup.leaving

    @property
    def idle(self) -> bool:
        """No transfer is in flight or waits, except for a store whose breaker is open."""
        return self._backup.idle and self.transfers.idle and self._touches.idle

    def drain(self, timeout: float = 30.0) -> bool:
        """Write back everything committed. False: it took longer than ``timeout`` seconds, or a
        failed store was retried and failed again."""
        breaker, end = self.transfers.storage.breaker, time.monotonic() + timeout
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
        """Drain, stop the lanes and close the store unless one of its calls hangs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.transfers in _open:  # else the process exits, and the lanes have ended
                self.drain(timeout)
        finally:  # also where a signal interrupts the wait
            _open.discard(self.transfers)
            if self.transfers.close() and self.store is not None:
                self.store.close()

    def figures(self) -> dict[str, float]:
        """Counters (``_total``) and gauges by metric name, with labels in braces."""
        transfers, breaker = self.transfers, self.transfers.storage.breaker
        under_way = len(transfers.tickets) + transfers.inquiries + (not self._backup.idle)
        figures: dict[str, float] = {
            **self.counts,
            "pages": len(self._table),
            "transfers_pending": under_way,
            "leases": len(self._leases),
            "prefetches": len(self._prefetches),
            "storage_breaker_open": float(breaker.open),
            "storage_breaker_trips_total": breaker.trips,
        }
        for tier in self.residency.tiers:
            for g, group in enumerate(self.schema.groups):
                label = f"{{tier={tier.name},group={group.name}}}"
                figures[f"slots{label}"] = tier.capacity[g]
                figures[f"free_slots{label}"] = tier.free_slots(g)
                figures[f"evicted_pages_total{label}"] = tier.evicted[g]
        speeds = {f"bytes_per_second{{lane={x.name}}}": y for x, y in transfers.speeds.items()}
        speeds["prefill_tokens_per_second"] = self._recompute.prefill
        for name, speed in speeds.items():
            if seconds := speed.seconds(1):
                figures[name] = 1 / seconds
        counts: Mapping[str, float]
        for name, label, counts in (
            ("moved_bytes_total", "lane", transfers.moved),
            ("lane_seconds_total", "lane", transfers.seconds_at_work),
            ("transfer_faults_total", "lane", transfers.faults),
            ("storage_faults_total", "kind", self.store.faults if self.store else {}),
        ):
            for what, count in dict(counts).items():
                figures[f"{name}{{{label}={what}}}"] = count
        return figures

    def check(self) -> None:
        """Raise InvariantError unless all bookkeeping agrees. Slow."""
        self.residency.check()
        self._audit.check()
