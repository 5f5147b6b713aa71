"""A cache on a stage that knows the true bytes of each slot and who wrote them.

The media hold names instead of bytes. Lanes move when a test steps them, in any order, and fail
when told to. This file has the operations and the invariants of a stage of any size;
:class:`world.World` is a small stage that compares every step with an oracle of dicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
from insides import SELECT, Insides, select_victims
from request import GROUPS, Request, names
from schemas import ABSENT, LIVE

from kvkeep.core.cache import Cache
from kvkeep.core.lease import Lease
from kvkeep.core.policy import Policy
from kvkeep.schema import Key, LoadFailed, Schema
from kvkeep.testing.fakes import JUNK, DictStore, ManualLane, ManualQueue, Switch, TruthMedia

TIERS = ("device", "host")


class Stage:
    """Operations and checks. Arguments that choose are taken modulo the number of choices."""

    def __init__(
        self,
        schema: Schema,
        device: Sequence[int],
        host: Sequence[int],
        missing: str = "strict",
        select: float = SELECT,
        every: int | None = None,
    ) -> None:
        select_victims(select)
        self.schema, self.device, self.host = schema, list(device), list(host)
        self.missing, self.every, self.size = missing, every, schema.page_tokens
        self.groups = range(len(schema.groups))
        self.prints = {schema.fingerprint(grp): g for g, grp in enumerate(schema.groups)}
        self.store = DictStore()
        self.lost: set[Key] = set()
        self.happened: Counter[str] = Counter()  # shows that a run did something
        self.reads: int | None = None  # bytes of one read; None: the cache decides
        self.restart()

    def settings(self) -> Policy:
        return Policy(missing=self.missing, snapshot_pages=self.every, prefetch_min_tokens=0)

    @property
    def inside(self) -> Insides:
        return Insides(self.cache)

    # --- operations

    def restart(self) -> None:
        """Start a new cache on the same store."""
        self.lanes: dict[str, ManualQueue] = {}
        self.requests: list[Request] = []
        self.media = TruthMedia(self.device, self.host)
        tiers = self.device, self.host, self.store
        self.cache = Cache(self.schema, *tiers, self.settings(), self.media, self._lane)
        self.switch = Switch()
        self.inside.switch_breaker(self.switch)
        if self.reads is not None:
            self.inside.read_at_once(self.reads)
        self.table = self.inside.table

    def _lane(self, name: str, work: Callable, report: Callable) -> ManualLane:
        """Make a lane; inquiries wait in line with reads."""
        lane = "read" if name == "ask" else name
        return self.lanes.setdefault(lane, ManualQueue()).lane(work, report)

    def arrive(self, tokens: Sequence[int], namespace: str = "", ask: bool = True) -> Request:
        request = Request(namespace, tuple(tokens), self.size)
        if ask:
            before = self.inside.pins[0].copy()
            request.prefetch = self.cache.prefetch(request.array, namespace)
            assert np.array_equal(before, self.inside.pins[0]), "a prefetch pins the device"
        self.requests.append(request)
        return request

    def may_come(self, request: Request) -> bool:
        """It only waits to be admitted."""
        return not request.lease and (not request.prefetch or self.cache.ready(request.prefetch))

    def admit(self, request: Request, chunk: int) -> bool:
        if not self.may_come(request):
            return False
        lease = self.cache.admit(request.array, request.namespace, chunk, request.prefetch)
        if lease is None:
            self.happened["refused"] += 1
            return False
        request.lease, request.prefetch, request.computed = lease, None, None
        request.snapshots = []
        self._check_path(request)
        for grp in self.schema.groups:
            assert len(lease.working(grp.name)) == grp.working
        self.happened["hit" if lease.pages else "admitted"] += 1
        self.happened["hit pages"] += lease.pages
        self.happened["loading"] += not lease.ready
        return True

    def run(
        self, request: Request, count: int, ahead: int = 0, commit: bool = True, stop: bool = True
    ) -> bool:
        """One step: grow, compute ``count`` tokens and speculate ``ahead`` more, commit.

        ``stop``: end earlier if a snapshot is due."""
        lease = request.lease
        if not lease or not self.arrived(lease):
            return False
        self.happened["ahead"] += not lease.ready
        start = lease.pages * self.size if request.computed is None else request.computed
        final = min(len(request.tokens), start + count)
        cut = lease.next_cut(start)
        if stop and cut is not None:
            final = min(final, cut)
        if not self.grow(request, final + ahead):
            return False
        request.computed = start
        self._compute(request, final, ahead)
        request.computed = final
        if commit:
            self.commit(request)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Reserve slots for so many tokens in every group, or none."""
        lease = request.lease
        before = [len(lease.slots(grp.name)) for grp in self.schema.groups]
        if self.cache.grow(lease, tokens):
            return True
        assert before == [len(lease.slots(grp.name)) for grp in self.schema.groups]
        self.happened["no room to grow"] += 1
        return False

    def arrived(self, lease: Lease) -> bool:
        """Whether all loads landed, even if no tick has applied them yet."""
        if any(ticket.arrival in lease.arriving for ticket in self.lanes["load"].queue):
            return False
        try:
            for arrival in lease.arriving:
                arrival.wait()
        except LoadFailed:
            return False
        return True

    def _compute(self, request: Request, final: int, ahead: int) -> None:
        """Write what a model's step writes: only private slots of the request."""
        lease, size = request.lease, self.size
        first, whole, last = request.computed // size, final // size, -(-(final + ahead) // size)
        for g, grp in enumerate(self.schema.groups):
            slots, pages = lease.slots(grp.name), range(first, last)
            if grp.working:
                self._write(request, g, lease.working(grp.name), -(request.serial << 20 | final))
                at = whole - 1
                if final % size or final <= request.computed or slots[at] < 0:
                    continue
                pages = range(at, whole)
                request.snapshots += [at] * (at not in request.snapshots)
            written, values = slots[pages.start : pages.stop], np.full(len(pages), JUNK)
            assert len(written) == len(pages), "the block table is too short"
            true = request.truth[pages.start : whole] + g
            values[: len(true)] = true
            self._write(request, g, written, values)

    def _write(self, request: Request, g: int, slots: np.ndarray, values: np.ndarray | int) -> None:
        assert ((slots >= 0) & (slots < self.device[g])).all(), "a page is written that has no slot"
        self.media.tiers[0, g][slots] = values

    def commit(self, request: Request) -> None:
        lease = request.lease
        before = lease.pages
        self.cache.commit(lease, request.array[: request.computed], request.snapshots)
        if lease.pages > before:
            self.happened["committed"] += 1
            request.snapshots = []
        self._check_path(request)

    def release(self, request: Request, again: bool = False) -> None:
        """End the request at any time; ``again``: it was preempted and comes back."""
        for _ in range(2):
            if request.lease:
                self.cache.release(request.lease)
            if request.prefetch and not again:
                self.cache.cancel(request.prefetch)
        request.lease, request.snapshots, request.outrun = None, [], set()
        if not again:
            self.requests.remove(request)

    def step(self, lane: str, first: int = 0, count: int = 1, fault: str = "") -> None:
        """Let a lane run some of its queue."""
        queue = self.lanes[lane]
        if not queue.queue:
            return
        self.happened[f"{lane} {fault or 'lands'}"] += 1
        self.media.failing, self.store.fault = bool(fault), fault
        queue.step(first % len(queue.queue), count)
        self.media.failing, self.store.fault = False, ""

    def tick(self) -> None:
        self.cache.tick()

    def evict(self, tier: int, g: int, count: int) -> None:
        """Drop some pages."""
        self.happened["evicted"] += len(self.inside.evict(tier, g, count))

    def empty(self, tier: int) -> None:
        """Evict all idle pages, as an operator may."""
        self.happened["evicted"] += self.cache.evict(TIERS[tier])

    def lose(self, index: int) -> None:
        """Delete a record from storage behind the cache's back."""
        if records := self.store.records:
            key = next(islice(records, index % len(records), None))
            del records[key]
            self.lost.add(key)

    def outage(self, on: bool) -> None:
        self.switch.open = on

    # --- invariants

    def check(self) -> None:
        """Check every invariant, also with the cache's own audit."""
        self.cache.check()
        self.compare()

    def compare(self) -> None:
        """Compare the whole state with what must be true of it, without the audit."""
        assert not self.cache.counts["invariant_errors_total"], "bookkeeping went wrong"
        self._check_owners()
        self._check_bytes()
        self._check_storage()
        self._check_tickets()
        self._check_share()
        for request in self.requests:
            if request.lease and (request.lease.ready or request.computed is not None):
                self._check_lease(request)

    def _check_path(self, request: Request) -> None:
        path = request.lease.path
        right = np.array_equal(self.inside.keys[path], request.keys[: len(path)])
        assert right, "a path of another prompt's pages"

    def _check_owners(self) -> None:
        """Each slot has one owner: a page, or the request that it is private to."""
        inside, (_, groups, most) = self.inside, self.media.tiers.shape
        tier, g, _ = rows = (inside.state != ABSENT).nonzero()
        sizes = np.array([self.device, self.host])
        assert (inside.slot[rows] < sizes[tier, g]).all(), "a slot that there is not"
        places = [(tier * groups + g) * most + inside.slot[rows]]
        for request in self.requests:
            if request.lease:
                places += [g * most + inside.own(request.lease, g) for g in self.groups]
        owners = np.bincount(np.concatenate(places), minlength=1)
        if owners.max() > 1:
            at = np.unravel_index(owners.argmax(), self.media.tiers.shape)
            raise AssertionError(f"{self.who(*map(int, at))} share a slot")

    def who(self, tier: int, g: int, slot: int) -> list[str]:
        """All owners of a slot, as text."""
        inside = self.inside
        rows = (inside.state[tier, g] != ABSENT) & (inside.slot[tier, g] == slot)
        found = [self.said(int(name) + g) for name in names(inside.keys[rows])]
        leases = [request for request in self.requests if tier == 0 and request.lease]
        own = [r.serial for r in leases if slot in inside.own(r.lease, g)]
        return found + [f"request {serial}" for serial in own]

    def said(self, value: int) -> str:
        """The name of a slot's bytes, as text."""
        if value == JUNK:
            return "junk"
        if value < 0:
            return f"request {-value >> 20} running at token {-value & (1 << 20) - 1}"
        return f"{self.schema.groups[value % GROUPS].name} of {self.page(value - value % GROUPS)}"

    def page(self, name: int) -> str:
        """A page, as text."""
        return f"page {name:#x}"

    def _check_bytes(self) -> None:
        """Every LIVE slot holds its page's bytes."""
        inside = self.inside
        tier, g, page = live = (inside.state == LIVE).nonzero()
        self._compare(self.media.tiers[tier, g, inside.slot[live]], names(inside.keys)[page] + g)

    def _compare(self, found: np.ndarray, want: np.ndarray) -> None:
        if (found != want).any():
            at = (found != want).argmax()
            wrong, right = self.said(int(found[at])), self.said(int(want[at]))
            raise AssertionError(f"wrong bytes: {wrong}, not {right}")

    def _check_storage(self) -> None:
        """Records written since the last check are right; records do not change."""
        for key, value in self.store.written:
            right = int(names(np.frombuffer(key.page, np.uint8))) + self.prints[key.group]
            assert value == right, f"wrong bytes in storage: {self.said(value)}"
        self.store.written.clear()

    def _check_tickets(self) -> None:
        """A ticket owns the slots that it fills, and no page is read twice at once."""
        inside, reading = self.inside, Counter()
        for kind, move in inside.moves():
            tier = 0 if kind == "load" else 1
            if len(move.target):
                rows = inside.slot[tier, move.group, move.pages]
                assert (rows == move.target).all(), "somebody else got a ticket's slot"
            if kind == "read":
                alive = ~inside.dying[move.pages]
                reading.update(key for key, ok in zip(move.keys, alive, strict=True) if ok)
        assert max(reading.values(), default=0) <= 1, "a record is read twice at once"

    def _check_share(self) -> None:
        """The share counts what prefetches pin and what is being read, and nothing else."""
        keepers = np.zeros_like(self.inside.keepers)
        for g, pages in self.inside.keeps():
            keepers[g, pages] += 1
        assert np.array_equal(keepers, self.inside.keepers), "the share counts other pages"
        assert np.count_nonzero(keepers, axis=1).tolist() == self.inside.kept

    def _check_lease(self, request: Request) -> None:
        """The next step finds the right bytes in every slot that it reads."""
        lease = request.lease
        pages = lease.pages if request.computed is None else request.computed // self.size
        if request.computed is None:
            assert sum(lease.explanation.tokens.values()) == lease.pages * self.size
        for g, grp in enumerate(self.schema.groups):
            slots, valid, pool = lease.slots(grp.name), lease.valid_from(grp.name), self.media.tiers
            assert valid == 0 or (self.missing == "lenient" and not grp.required)
            assert valid <= lease.pages
            if grp.working and request.computed is not None:  # it has read its snapshot
                running = pool[0, g][lease.working(grp.name)]
                assert (running == request.running).all(), f"state is lost: {running}"
                continue
            first = 0 if grp.tail is None else max(0, pages - grp.tail)
            first = max(first, valid)
            assert len(slots) >= pages
            assert (slots[first:pages] >= 0).all(), f"a running request lost a page of {grp.name}"
            self._compare(pool[0, g][slots[first:pages]], request.truth[first:pages] + g)

    # --- the end

    def settle(self) -> None:
        """Let everything in flight land."""
        for _ in range(1000):
            self.tick()
            if not self.inside.busy:
                return  # what still waits in line waits for requests
            for lane in self.lanes:
                self.step(lane, 0, 99)
        raise AssertionError("transfers never end")

    def finish(self) -> None:
        """End all requests: nothing is leaked, and the cache still serves."""
        self.outage(False)
        while self.requests:
            self.settle()
            waiting = [r.prefetch for r in self.requests if r.prefetch]
            assert not waiting or any(self.cache.ready(p) for p in waiting), "all wait forever"
            ready = [r for r in self.requests if not r.prefetch or self.cache.ready(r.prefetch)]
            self.release(ready[0])
            self.check()
        self.settle()
        self.check()
        self._check_idle()
        self._check_written()
        self._check_serves()

    def _check_idle(self) -> None:
        inside, figures = self.inside, self.cache.figures()
        assert self.cache.idle, "something is still under way"
        assert not inside.holds.any(), "a hold is left"
        assert not inside.pins.any(), "a pin is left"
        assert inside.pages == sum(len(ids) for *_, ids in inside.runs()), "a page is left"
        for tier, sizes in enumerate((self.device, self.host)):
            for g, grp in enumerate(self.schema.groups):
                free = figures[f"free_slots{{tier={TIERS[tier]},group={grp.name}}}"]
                assert free == sizes[g] - np.count_nonzero(inside.state[tier, g] != ABSENT), (
                    "a private slot is left"
                )

    def _check_written(self) -> None:
        """Storage has what memory has, except pages that were lost or counted as unwritten."""
        inside, missing = self.inside, 0
        pages = np.concatenate([np.empty(0, np.intp), *(ids for *_, ids in inside.runs())])
        keys = [key.tobytes() for key in inside.keys[pages.astype(np.intp)]]
        for fingerprint, g in self.prints.items():
            kept = inside.state[:, g, pages.astype(np.intp)].any(axis=0) & bool(self.host[g])
            wanted = {Key(fingerprint, keys[i]) for i in np.flatnonzero(kept)}
            missing += len(wanted - self.lost - self.store.records.keys())
        counts = self.cache.counts
        assert missing <= counts["unsaved_pages_total"] + counts["unwritten_pages_total"]

    def _check_serves(self) -> None:
        sizes = zip(self.schema.groups, self.device, strict=True)
        pages = min((size for grp, size in sizes if not grp.working), default=1)
        last = self.arrive([1, 1, 0, 0] * pages * (self.size // 2), "last")
        last.tokens = last.tokens[: pages * self.size]
        self.settle()
        assert self.cache.ready(last.prefetch), "a prefetch waits for nobody"
        assert self.admit(last, chunk=pages * self.size), "an idle cache has no room"
        self.release(last)
        self.check()
