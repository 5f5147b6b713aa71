"""The cache an engine calls: prefetch, admit, grow, commit, release, tick.

One thread makes all calls, the scheduler's, and no call waits for bytes: they move on the lanes,
and :meth:`Cache.tick` applies what the lanes report.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from types import TracebackType
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
from .pages import TIERS
from .policy import Policy
from .prefetch import Prefetcher
from .recompute import Recompute
from .residency import Residency
from .slots import DeviceSlots
from .touches import Touches
from .transfer import Transfers

_open: weakref.WeakSet[Transfers] = weakref.WeakSet()


@atexit.register
def _close_lanes() -> None:
    """Lanes are daemon threads: end them before the interpreter takes their libraries away."""
    for transfers in list(_open):
        _open.discard(transfers)
        transfers.close()


class Cache:
    """Three tiers of cached state under one radix tree.

    A context manager that closes itself. A process that exits without :meth:`close` ends the lanes
    after what is queued on them; a cache that is dropped without it ends them, too.

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
        self.schema, self.store = schema, store
        self.policy = policy = policy or Policy()
        self.media = media or Memory(schema, device_slots, host_slots)
        self.counts: Counter[str] = Counter()
        self.residency = residency = Residency(
            schema, device_slots, host_slots, policy.order, policy.strict, store is not None
        )
        self.transfers = Transfers(schema, self.media, store, lane, policy.stall_seconds)
        _open.add(self.transfers)
        weakref.finalize(self, self.transfers.close, 0.0).atexit = False
        self._table, self._tree = residency.table, residency.tree
        self._leases: dict[int, Lease] = {}
        self._prefetches: dict[int, Prefetch] = {}
        self._recompute = Recompute(self.transfers, policy)
        self._touches = Touches(self.transfers)
        self._slots = DeviceSlots(residency, policy)
        flights = Flights(residency, self.transfers)
        self._backup = Backup(residency, self.transfers, flights, policy, self.counts)
        share = HostShare(residency, policy.prefetch_share)
        self._audit = Audit(
            residency,
            self._leases,
            self._prefetches,
            self.transfers.tickets,
            self._backup.lines,
            share,
            self.counts,
        )
        shared = residency, self.transfers, flights, self._recompute, policy, self.counts
        self._prefetcher = Prefetcher(*shared, self._audit, share, self._prefetches)
        self._loader = Loader(*shared, self._slots, self._leases)
        self._admission = Admission(
            residency,
            self.transfers,
            self._slots,
            self._backup,
            self._prefetcher,
            self._loader,
            self._touches,
            self._audit,
            self.counts,
            self._leases,
        )
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def listen(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, whenever there is something to :meth:`tick` for.
        Policies that go by the clock want a tick now and then besides."""
        self.transfers.listen(callback)

    # --- before a request runs

    def prefetch(self, tokens: ArrayLike, namespace: str = "") -> Prefetch:
        """Start bringing a prompt's pages from storage to the host; pins nothing on the device.

        Close it with :meth:`admit` or :meth:`cancel`.

        Args:
            tokens: ``[n]`` integers in int32's range, the whole prompt.

        Raises:
            RequestError: ``tokens`` are something else.
            Closed: the cache is.
        """
        self._check_open()
        raw = bytes(self._raw(as_tokens(tokens)))
        self._audit.mend()
        return self._prefetcher.begin(root_key(namespace), raw)

    def ready(self, prefetch: Prefetch) -> bool:
        """Whether the prefetch policy lets the request be scheduled now. True while the store's
        breaker is open; a hung read that completes later still serves others."""
        broken = self.transfers.storage.breaker.open
        return not prefetch.waits or broken or self._prefetcher.late(prefetch)

    def cancel(self, prefetch: Prefetch) -> None:
        """The request is gone. Idempotent; what is being read arrives for others."""
        with self._audit.guard(prefetch.path):
            self._prefetcher.close(prefetch)

    def admit(
        self,
        tokens: ArrayLike,
        namespace: str = "",
        chunk: int = 0,
        prefetch: Prefetch | None = None,
        priority: int = 0,
        total: int = 0,
    ) -> Lease | None:
        """Match, pin, start loading, and reserve device slots for the first chunk.

        All or nothing: None if the device has no room now. At least one token is left to compute.
        Before ``lease.ready`` its slots may be used layer by layer, each after a wait for the
        lease's ``arriving``; ``lease.pages`` may shrink until then.

        Args:
            tokens: ``[n]`` integers in int32's range, everything known of the sequence, at least
                one token.
            chunk: tokens to be computed after the hit in the first step.
            prefetch: what :meth:`prefetch` gave for it; closed if the lease is granted.
            priority: 0 to 255; pages of the lowest go first where eviction is by priority.
            total: tokens that the device must have room for beside what is in use, or the lease is
                not granted; a scheduler's guess of what all its requests will need.

        Raises:
            RequestError: ``tokens`` or ``priority`` are something else.
            Closed: the cache is.
        """
        self._check_open()
        self._audit.mend()
        run = as_tokens(tokens)
        return self._admission.admit(
            run, self._raw(run), root_key(namespace), chunk, prefetch, priority, total
        )

    # --- while it runs

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Device slots for tokens ``[0, tokens)`` in every group; False, and nothing taken, if
        the device has no room now, or the lease is released, as it is where bookkeeping broke."""
        return self._admission.grow(lease, self._pages(tokens))

    def commit(self, lease: Lease, tokens: ArrayLike, snapshots: Collection[int] = ()) -> None:
        """Make whole pages findable, slide windows, and start write-through.

        Args:
            tokens: ``[final]`` integers in int32's range: the sequence as far as its state is final
                in every group: computed from accepted tokens, and rebuilt from true features.
            snapshots: pages at whose end running state was copied to their slots since the last
                commit, for groups with working slots.

        Raises:
            RequestError: ``tokens`` are something else, or more than the lease has slots for.
        """
        run, size = as_tokens(tokens), self.schema.page_tokens
        first, last = lease.pages, len(run) // size
        if lease.released or last <= first:
            return
        if self._pages(len(run)) > lease.capacity:
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
            self._table.rank(lease.path, lease.priority)
            for g, adopted in self._slots.publish(lease, first, snapshots):
                self._backup.add(g, adopted)
            for g, group in enumerate(self.schema.groups):
                if group.tail is not None:
                    self._slots.slide(g, lease, group.needed(last).start)

    def release(self, lease: Lease) -> None:
        """Give everything back. Idempotent, also while it is being loaded."""
        if lease.released:
            return
        if not lease.ready:
            self._loader.count(lease)
        with self._audit.guard(lease=lease):
            self._slots.let_go(lease, 0)
            for g, slots in enumerate(lease.running):
                self.residency.device.free(g, slots)
            self.residency.unhold(lease.path)
            del self._leases[lease.serial]
            lease.end()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed ``tokens`` prompt tokens in ``seconds``, and nothing else meanwhile.
        From then on, state that is slower to load than that is recomputed
        (``Policy.recompute``)."""
        self._recompute.prefill.observe(tokens, seconds)

    def tick(self) -> None:
        """Apply what the lanes report, start what waits. Call it once per step, and when idle. A
        caller with nothing else to do should wait for :meth:`listen` or sleep between calls, since
        lanes need the interpreter, too."""
        landed = False
        with self._audit.guard():  # also around what takes jobs over, for an interruption there
            for job in self.transfers.landed():
                landed = True
                with self._audit.guard(*job.touched()):
                    job.finish()
        self._audit.mend()
        self._touches.send()
        self._prefetcher.advance()
        with self._audit.guard():
            self._backup.advance()
        self._audit.mend()  # a step comes next
        if not landed and not self.transfers.idle:
            time.sleep(0)  # lets the lanes' threads run

    # --- small things

    def _raw(self, run: NDArray[np.int32]) -> memoryview:
        """Token bytes of the pages that a hit may use: at least one token is computed. A view."""
        pages = (len(run) - 1) // self.schema.page_tokens
        return run[: max(0, pages) * self.schema.page_tokens].view(np.uint8).data

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.schema.page_tokens)

    # --- for operators

    def evict(self, tier: str) -> int:
        """Empty a memory tier ("device" or "host") of all that is not in use; pages dropped.

        Raises:
            RequestError: there is no such tier.
        """
        if tier not in TIERS:
            raise RequestError(f"no memory tier is called {tier!r}: there are {', '.join(TIERS)}")
        place, dropped = self.residency.tiers[TIERS.index(tier)], 0
        with self._audit.guard():
            for g, slots in enumerate(place.capacity):
                dropped += len(self.residency.evict(place, g, slots))
        return dropped

    def make_room(self, slots: list[int]) -> bool:
        """Free so many device slots of each group ahead of need; False: some are not free yet,
        as where pages must be copied first, or cannot be."""
        with self._audit.guard():
            return self._backup.make_room(slots)
        return False

    @property
    def making_room(self) -> bool:
        """Copies under way will free device slots when they land."""
        return self._backup.leaving

    @property
    def idle(self) -> bool:
        """Nothing is on its way between tiers, but for what waits until storage is in order."""
        return self._backup.idle and self.transfers.idle and self._touches.idle

    def drain(self, timeout: float = 30.0) -> bool:
        """Write back everything committed; False if it took longer than ``timeout`` seconds, or
        storage that failed was tried again and failed again."""
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
        """Drain, stop the lanes and close the store, unless a call of it hangs. Idempotent."""
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

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the cache is closed")

    def figures(self) -> dict[str, float]:
        """Counters (``_total``) and gauges by metric name, labels in braces."""
        figures: dict[str, float] = dict(self.counts)
        for tier in self.residency.tiers:
            for g, group in enumerate(self.schema.groups):
                label = f"{{tier={tier.name},group={group.name}}}"
                figures[f"slots{label}"] = tier.capacity[g]
                figures[f"free_slots{label}"] = tier.free_slots(g)
                figures[f"evicted_pages_total{label}"] = tier.evicted[g]
        figures["pages"] = len(self._table)
        under_way = len(self.transfers.tickets) + self.transfers.inquiries
        figures["transfers_pending"] = under_way + (not self._backup.idle)
        for route, speed in self.transfers.speeds.items():
            if seconds := speed.seconds(1):
                figures[f"bytes_per_second{{lane={route.name}}}"] = 1 / seconds
        if seconds := self._recompute.prefill.seconds(1):
            figures["prefill_tokens_per_second"] = 1 / seconds
        figures["leases"] = len(self._leases)
        figures["prefetches"] = len(self._prefetches)
        breaker = self.transfers.storage.breaker
        figures["storage_breaker_open"] = float(breaker.open)
        figures["storage_breaker_trips_total"] = breaker.trips
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
