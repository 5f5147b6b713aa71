"""A cache in a world that knows the truth: what each page's bytes are, and what should be where.

The media hold, instead of bytes, what each slot's bytes mean. Lanes move only when they are stepped
by hand, in any order, and fail when told to. Beside the cache runs an oracle of plain dicts, and
after every operation the two are compared.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

import kvkeep.core.victims
from kvkeep.core.cache import Cache
from kvkeep.core.lease import Lease, Prefetch
from kvkeep.core.policy import Policy
from kvkeep.core.transfer import READ, Ticket
from kvkeep.media.base import NOW, Mark
from kvkeep.schema import Component, Group, Identity, Key, LoadFailed, Residence, Schema, StoreError

P = 2
JUNK = "junk"
ABSENT, WRITING, LIVE = Residence
Path = tuple[str, tuple[int, ...]]  # a page by its prompt: namespace, and all tokens to its end


def group(name: str, tail: int | None = None, required: bool = True, working: int = 0) -> Group:
    component = Component("k", (0,), (1,), "F32")
    return Group(name, (component,), tail=tail, required=required, working=working)


TWO = Schema(Identity("m"), P, (group("full"), group("draft")))
FOUR = Schema(
    Identity("m"),
    P,
    (group("full"), group("window", 2), group("state", 1), group("draft", required=False)),
)
FIVE = Schema(
    Identity("m"),
    P,
    (
        group("full"),
        group("window", 2),
        group("state", 1, working=1),
        group("draft", required=False),
        group("near draft", 3, required=False),
    ),
)


# --- media, store and lanes


class Cell:
    """What a memoryview of a host slot is to a store, where bytes are meanings."""

    def __init__(self, slots: list[Hashable], slot: int) -> None:
        self.slots, self.slot = slots, slot

    @property
    def value(self) -> Hashable:
        return self.slots[self.slot]

    @value.setter
    def value(self, value: Hashable) -> None:
        self.slots[self.slot] = value


class TruthMedia:
    """Slots that hold meanings. A copy that fails has spoilt its targets."""

    def __init__(self, device: Sequence[int], host: Sequence[int]) -> None:
        self.tiers = [[[JUNK] * n for n in device], [[JUNK] * n for n in host]]
        self.failing = False

    def mark(self) -> Mark:
        return NOW

    def save(self, copies, after=()) -> None:
        self._copy(copies, *self.tiers)

    def load(self, copies, after=(), reached=None) -> None:
        self._copy(copies, *reversed(self.tiers))

    def bodies(self, group: int, slots) -> list[Cell]:
        return [Cell(self.tiers[1][group], int(slot)) for slot in slots]

    def keep(self, group: int, slots, bodies) -> None: ...

    def _copy(self, copies, source, target) -> None:
        for group, froms, tos in copies:
            for a, b in zip(froms, tos, strict=True):
                target[group][b] = JUNK if self.failing else source[group][a]
        if self.failing:
            raise RuntimeError("the copy engine failed")


class DictStore:
    """Storage that outlives caches. ``fault``: "" (none), "raise", or "partial" (every other)."""

    def __init__(self) -> None:
        self.records: dict[Key, Hashable] = {}
        self.faults: Counter[str] = Counter()
        self.fault = ""
        self.reads: Counter[Key] = Counter()
        self.touched: list[Key] = []

    def _works(self, count: int) -> list[bool]:
        if self.fault == "raise":
            raise StoreError("the disk is gone")
        return [not (self.fault and i % 2) for i in range(count)]

    def probe(self, keys):
        works = self._works(len(keys))
        return [ok and key in self.records for ok, key in zip(works, keys, strict=True)]

    def read(self, keys, out):
        landed = []
        for works, key, cell in zip(self._works(len(keys)), keys, out, strict=True):
            self.reads[key] += 1
            landed.append(works and key in self.records)
            cell.value = self.records[key] if landed[-1] else JUNK
        return landed

    def write(self, keys, records):
        works = self._works(len(keys))
        for key, cell, ok in zip(keys, records, works, strict=True):
            if ok:
                self.records[key] = cell.value
        return works

    def touch(self, keys) -> None:
        self.touched += keys

    def delete(self, keys) -> None:
        for key in keys:
            self.records.pop(key, None)

    def close(self) -> None:
        pass


class ManualLane:
    """Runs what is queued when it is told to, in any order; several lanes of the cache may share
    one."""

    def __init__(self, report: Callable) -> None:
        self.work: dict[str, Callable] = {}  # by lane
        self.report = report
        self.queue: list[Ticket] = []

    def submit(self, ticket: Ticket) -> None:
        self.queue.append(ticket)

    def withdraw(self) -> list[Ticket]:
        taken, self.queue = self.queue, []
        return taken

    def close(self, timeout: float) -> None:
        pass

    def step(self, first: int = 0, count: int = 1) -> None:
        batch = self.queue[first : first + count]
        del self.queue[first : first + count]
        for name, work in self.work.items():
            if mine := [t for t in batch if t.kind == name or (name, t.kind) == ("write", "touch")]:
                work(mine)
        for ticket in batch:
            self.report(ticket)


class Switch:
    """A circuit breaker that is thrown by hand."""

    trips = 0
    open = False

    def success(self) -> None: ...
    def retry(self) -> None: ...
    def failure(self, trip: bool = False) -> None: ...


# --- the world


@dataclass(eq=False)
class Request:
    """One request of the engine, which writes true bytes and junk where it speculates."""

    namespace: str
    tokens: tuple[int, ...]
    prefetch: Prefetch | None = None
    lease: Lease | None = None
    computed: int | None = None  # tokens; None until it began to run
    cuts: set[int] = field(default_factory=set)  # pages where a hit may be expected to end
    snapshots: list[int] = field(default_factory=list)  # pages, since the last commit
    outrun: set[tuple[int, int]] = field(default_factory=set)  # slid past before they had landed

    def path(self, page: int) -> Path:
        return self.namespace, self.tokens[: (page + 1) * P]

    @property
    def array(self) -> np.ndarray:
        return np.array(self.tokens, np.int32)


@dataclass
class Oracle:
    """Clocks as DESIGN.md has them, in dicts by path."""

    clock: int = 0
    used: dict[tuple[int, Path], int] = field(default_factory=dict)
    hits: Counter[tuple[int, Path]] = field(default_factory=Counter)

    def forget(self, gone: Callable[[Path], bool]) -> None:
        self.used = {key: used for key, used in self.used.items() if not gone(key[1])}
        self.hits = Counter({key: n for key, n in self.hits.items() if not gone(key[1])})


@lru_cache(None)
def true_key(path: Path) -> bytes:
    """The chained key of a page, written down a second time."""
    namespace, tokens = path
    if not tokens:
        return hashlib.sha256(b"2:%d:" % len(namespace) + namespace.encode()).digest()
    return hashlib.sha256(
        true_key((namespace, tokens[:-P])) + struct.pack(f"<{P}i", *tokens[-P:])
    ).digest()


class World:
    """The operations, each followed by the comparisons that concern it alone; :meth:`check` has
    those that always hold. Arguments that choose are taken modulo what there is to choose from."""

    def __init__(
        self,
        schema: Schema,
        device: Sequence[int],
        host: Sequence[int],
        missing: str = "strict",
        select: float = 0.4,
        every: int | None = None,
    ) -> None:
        kvkeep.core.victims._SELECT = (
            select  # so that tiny pools, too, are evicted in several batches
        )
        self.schema, self.device, self.host = schema, list(device), list(host)
        self.missing, self.every = missing, every
        self.groups = range(len(schema.groups))
        self.vital = [grp.required and grp.tail is None for grp in schema.groups]
        self.store = DictStore()
        self.lost: set[Key] = set()
        self.names: dict[bytes, Path] = {}  # chained key -> the page it must belong to
        self.happened: Counter[str] = Counter()  # so that a run can show that it did something
        self.reads: int | None = None  # bytes of one read, or as many as the cache likes
        self.restart()

    # --- what may happen

    def restart(self) -> None:
        """A new process on the same store."""
        self.lanes: dict[str, ManualLane] = {}
        self.requests: list[Request] = []
        self.media = TruthMedia(self.device, self.host)
        self.cache = Cache(
            self.schema,
            self.device,
            self.host,
            self.store,
            Policy(missing=self.missing, snapshot_pages=self.every, prefetch_min_tokens=0),
            self.media,
            self._lane,
        )
        self.cache.transfers.breaker = Switch()
        if self.reads is not None:
            self.cache.transfers.read_bytes = lambda total: self.reads
        self.table = self.cache.residency.table
        self.oracle = Oracle()

    def _lane(self, name: str, work: Callable, report: Callable) -> ManualLane:
        """Questions to storage wait in line with reads."""
        lane = "read" if name == "probe" else name
        self.lanes.setdefault(lane, ManualLane(report)).work[name] = work
        return self.lanes[lane]

    def arrive(self, tokens: Sequence[int], namespace: str = "", ask: bool = True) -> Request:
        request = Request(namespace, tuple(tokens))
        for page in range(len(tokens) // P):
            path = request.path(page)
            self.names[true_key(path)] = path
        if ask:
            before = self.table.pins[0].copy()
            request.prefetch = self.cache.prefetch(request.array, namespace)
            assert np.array_equal(before, self.table.pins[0]), "a prefetch pins the device"
        self.requests.append(request)
        return request

    def admit(self, request: Request, chunk: int = P) -> bool:
        prefetch = request.prefetch
        if request.lease or (prefetch and not self.cache.ready(prefetch)):
            return False
        tree, pages = self.tree(), self.hit(request)
        fresh, roomy = self._room(request, tree, pages, chunk)
        pins = self.table.pins[0].copy()
        lease = self.cache.admit(request.array, request.namespace, chunk, prefetch)
        if lease is None:
            assert np.array_equal(pins, self.table.pins[0]), "a refused request keeps pins"
            assert not roomy, "refused despite room"
            self.happened["refused"] += 1
            return False
        assert roomy, "admitted without room"
        assert not lease.ready or lease.pages == pages
        assert lease.path.tolist() == [tree[request.path(i)] for i in range(lease.pages)]
        if not lease.ready:
            assert lease.pages == pages, "the hit is not the longest"
        for grp in self.schema.groups:
            assert len(lease.slots(grp.name)) == lease.pages + fresh
            assert len(lease.working(grp.name)) == grp.working
        request.lease, request.prefetch, request.computed = lease, None, None
        whole = (len(request.tokens) - 1) // P
        known = next((i for i in range(whole) if request.path(i) not in tree), whole)
        request.snapshots, request.cuts = [], {n for n in (whole, known) if n > pages}
        self._check_cuts(request)
        if pages:
            self._stamp(request, pages)
            told = self.cache._touches or not self.cache.transfers.storage
            assert told, "storage will not be told"
            for g in self.groups:
                self.oracle.hits.update((g, request.path(i)) for i in self.needed(g, pages))
        self.happened["hit" if pages else "admitted"] += 1
        self.happened["loading"] += not lease.ready
        return True

    def _room(self, request, tree, pages, chunk) -> tuple[int, bool]:
        """Fresh pages, and whether each group can have what it must. Snapshots it need not."""
        tokens = min(len(request.tokens), pages * P + chunk)
        fresh = -(-tokens // P) - pages
        roomy = True
        for g, grp in enumerate(self.schema.groups):
            valid = self.valid_from(g, request, pages)
            mine = [tree[request.path(i)] for i in self.needed(g, pages) if i >= valid]
            short = sum(self.table.state[0, g, page] == ABSENT for page in mine)
            short += grp.working or fresh
            idle = set(self._evictable(0, g, tree)) - {self._name(tree, page) for page in mine}
            used = sum(self.table.state[0, g] != ABSENT) + self._private(g)
            roomy &= short <= self.device[g] - used + len(idle)
        return fresh, roomy

    def _check_cuts(self, request: Request) -> None:
        """Snapshots are planned where hits are expected to end, and as often as the policy says;
        only there have they slots."""
        lease, interim = request.lease, set()
        keeps = [grp for grp in self.schema.groups if grp.working]
        if not keeps:
            assert not lease.cuts
            return
        planned = {cut // P for cut in lease.cuts}
        assert lease.cuts == sorted(n * P for n in planned), "cuts are not in order"
        if self.every:
            last = len(lease.slots(keeps[0].name))
            interim = {n for n in range(lease.pages + 1, last + 1) if n % self.every == 0}
            planned = {n for n in planned if n % self.every or n in request.cuts | interim}
        assert planned == request.cuts | interim
        for grp in keeps:
            share = lease.shares[grp.name]
            at = np.flatnonzero(share.owned).tolist()
            assert all((i + 1) * P in lease.cuts for i in at), "a snapshot that nobody planned"

    def run(
        self, request: Request, count: int, ahead: int = 0, commit: bool = True, stop: bool = True
    ) -> bool:
        """One step: grow, compute ``count`` tokens and speculate ``ahead`` more, commit.

        ``stop``: end where a snapshot is due, if that is before."""
        lease = request.lease
        if not lease or not self._arrived(lease):
            return False
        start = lease.pages * P if request.computed is None else request.computed
        final = min(len(request.tokens), start + count)
        cut = lease.next_cut(start)
        if stop and cut is not None:
            final = min(final, cut)
        before = {g.name: len(lease.slots(g.name)) for g in self.schema.groups}
        if not self.cache.grow(lease, final + ahead):
            assert before == {g.name: len(lease.slots(g.name)) for g in self.schema.groups}
            self.happened["no room to grow"] += 1
            return False
        self._check_cuts(request)
        request.computed = start
        self._compute(request, final, ahead)
        request.computed = final
        if commit:
            self.commit(request)
        return True

    def _arrived(self, lease: Lease) -> bool:
        """Whether a step would neither wait nor fail. The cache may not have heard of it yet."""
        if any(ticket.arrival in lease.arriving for ticket in self.lanes["load"].queue):
            return False
        try:
            for arrival in lease.arriving:
                arrival.wait()
        except LoadFailed:
            return False
        self.happened["ahead"] += not lease.ready
        return True

    def _compute(self, request: Request, final: int, ahead: int) -> None:
        """What a model's step does to the device: all it writes is the request's own."""
        for g, grp in enumerate(self.schema.groups):
            slots, owners = request.lease.slots(grp.name), self._owners(0, g)
            pages = range(request.computed // P, -(-(final + ahead) // P))
            if grp.working:
                for slot in request.lease.working(grp.name).tolist():
                    assert owners[slot] == [request], "running state is somebody else's"
                    self.media.tiers[0][g][slot] = ("running", id(request), final)
                pages = [final // P - 1] if final % P == 0 and final > request.computed else []
                pages = [page for page in pages if slots[page] >= 0]
                request.snapshots += [page for page in pages if page not in request.snapshots]
            for page in pages:
                slot = int(slots[page])
                assert owners[slot] == [request], f"a page is written where {owners[slot]} reads"
                whole = (page + 1) * P <= final
                self.media.tiers[0][g][slot] = (request.path(page), grp.name) if whole else JUNK

    def commit(self, request: Request) -> None:
        lease, oracle = request.lease, self.oracle
        first, last = lease.pages, request.computed // P
        detached = lease.detached or (first and bool(self.table.dying[lease.path[-1]]))
        tree = self.tree()
        oracle.forget(lambda path: path not in tree)  # to grow may have evicted it
        own = {
            (g, i): bool(lease.shares[grp.name].owned[i])
            for g, grp in enumerate(self.schema.groups)
            for i in range(last)
            if not grp.working or i in request.snapshots
        }
        moving = {
            at
            for at in own
            if at[1] >= first and self._state(tree, 0, at[0], request.path(at[1])) == WRITING
        }
        pinned = {
            (g, i)
            for g, grp in enumerate(self.schema.groups)
            for i in range(first)
            if lease.slots(grp.name)[i] >= 0 and not lease.shares[grp.name].owned[i]
        }
        self.cache.commit(lease, request.array[: request.computed], request.snapshots)
        if detached or last <= first:
            assert lease.pages == first
            self.happened["detached"] += bool(detached)
            return
        self.happened["committed"] += 1
        request.snapshots = []
        tree = self.tree()
        assert lease.path.tolist() == [tree[request.path(i)] for i in range(last)], "not findable"
        self._stamp(request, last)
        for g, grp in enumerate(self.schema.groups):
            share, reach = lease.shares[grp.name], self.needed(g, last)
            new = [i for i in range(first, last) if own.get((g, i))]
            if not share.whole:
                assert all(share.owned[i] for i in new if i in reach)
                pinned -= {(g, i) for i in range(reach.start, last)}
            else:
                for i in new:
                    assert self._state(tree, 0, g, request.path(i)) != ABSENT, "a row is left empty"
                    if i in reach:
                        assert share.owned[i] == ((g, i) in moving), "a duplicate is kept"
                pinned |= {(g, i) for i in new if (g, i) not in moving}
            assert (share.slots[: reach.start] == -1).all(), "the window did not slide"
            for i in range(reach.start):
                at = g, request.path(i)
                lasts = grp.working and i + 1 in request.cuts
                if grp.name in lease.coming and i in lease.coming[grp.name][0]:
                    request.outrun.add((g, i))
                elif (g, i) in pinned and oracle.hits[at] < 2 and not lasts:
                    oracle.used[at] = 0

    def release(self, request: Request, again: bool = False) -> None:
        """The request ends, in the middle of anything; ``again``: preempted, to come back."""
        for _ in range(2):
            if request.lease:
                self.cache.release(request.lease)
            if request.prefetch and not again:
                self.cache.cancel(request.prefetch)
        request.lease, request.snapshots, request.outrun = None, [], set()
        if not again:
            self.requests.remove(request)

    def step(self, lane: str, first: int = 0, count: int = 1, fault: str = "") -> None:
        """A lane moves some of its queue."""
        queue = self.lanes[lane]
        if not queue.queue:
            return
        self.happened[f"{lane} {fault or 'lands'}"] += 1
        self.media.failing, self.store.fault = bool(fault), fault
        queue.step(first % len(queue.queue), count)
        self.media.failing, self.store.fault = False, ""

    def tick(self) -> None:
        self.cache.tick()
        for request in self.requests:
            if request.lease and request.lease.ready:
                for g, i in request.outrun:
                    if self.oracle.hits[g, request.path(i)] < 2:
                        self.oracle.used[g, request.path(i)] = 0
                request.outrun = set()
        tree = self.tree()  # a page may have left and come back, with fresh clocks
        past = [self.table.used, self.table.hits]
        fresh = {path for path, page in tree.items() if not any(c[:, page].any() for c in past)}
        self.oracle.forget(lambda path: path in fresh)

    def evict(self, tier: int, g: int, count: int) -> None:
        """Drop some pages, and compare with a leaf-first LRU of dicts: which, and what follows."""
        tree, residency = self.tree(), self.cache.residency
        order = sorted(self._evictable(tier, g, tree), key=lambda path: self._rank(g, path))
        gone = residency.evict((residency.device, residency.host)[tier], g, count)
        names = [self._name(tree, page) for page in gone]
        ranks = [self._rank(g, path) for path in names]
        assert ranks == [self._rank(g, path) for path in order[:count]], "not leaf-first LRU"
        heads = [p for p in names if self.vital[g] and self._state(tree, 1 - tier, g, p) == ABSENT]
        rest = {path for path in tree if not any(_follows(path, head) for head in heads)}
        if not any(self.vital):
            rest = self._in_use(tree)
        assert rest == set(self.tree()), "not what was lost, and all below it, leaves the tree"
        self.happened["evicted"] += len(names)

    def empty(self, tier: int) -> None:
        """What an operator may ask for: all that is not in use goes."""
        before = {g: self._evictable(tier, g, self.tree()) for g in self.groups}
        count = self.cache.evict(("device", "host")[tier])
        tree = self.tree()
        assert not any(self._evictable(tier, g, tree) for g in self.groups)
        lost = sum(self._state(tree, tier, g, path) == ABSENT for g in before for path in before[g])
        assert count <= lost  # the rest went with a subtree

    def lose(self, index: int) -> None:
        """A record goes from storage behind the cache's back."""
        if self.store.records:
            key = sorted(self.store.records)[index % len(self.store.records)]
            del self.store.records[key]
            self.lost.add(key)

    def outage(self, on: bool) -> None:
        self.cache.transfers.breaker.open = on

    # --- what the oracle knows

    def needed(self, g: int, pages: int) -> range:
        tail = self.schema.groups[g].tail
        return range(max(0, pages - (pages if tail is None else tail)), pages)

    def tree(self) -> dict[Path, int]:
        """All findable pages, as a dict; names must agree with keys."""
        found: dict[Path, int] = {}
        above: dict[int, tuple[int, ...]] = {}
        for namespace, node in self.cache.residency.tree.walk():  # parents first
            tokens = above.get(id(node.parent), ())
            run = tuple(np.frombuffer(bytes(node.raw), "<i4").tolist())
            above[id(node)] = tokens + run
            for i, page in enumerate(node.ids.tolist()):
                found[namespace, tokens + run[: (i + 1) * P]] = page
        return found

    def hit(self, request: Request) -> int:
        """The longest hit, the slow way."""
        tree, path = self.tree(), []
        for i in range((len(request.tokens) - 1) // P):
            if request.path(i) not in tree:
                break
            path.append(tree[request.path(i)])
        for pages in range(len(path), 0, -1):
            if all(
                self._present(g, path[i])
                for g, grp in enumerate(self.schema.groups)
                if self.missing == "strict" or grp.required
                for i in self.needed(g, pages)
            ):
                return pages
        return 0

    def valid_from(self, g: int, request: Request, pages: int) -> int:
        """First page of a group from which all that a hit needs is there."""
        tree = self.tree()
        gaps = [i for i in self.needed(g, pages) if not self._present(g, tree[request.path(i)])]
        assert not gaps or self.missing == "lenient"
        return gaps[-1] + 1 if gaps else 0

    def _in_use(self, tree: dict[Path, int]) -> set[Path]:
        """Pages with a slot or a hold, and all above them: where no group is vital, the rest go."""
        used = set()
        for (namespace, tokens), page in tree.items():
            if self.table.holds[page] or (self.table.state[:, :, page] != ABSENT).any():
                used |= {(namespace, tokens[:end]) for end in range(P, len(tokens) + 1, P)}
        return used

    def _present(self, g: int, page: int) -> bool:
        return bool(self.table.state[0, g, page] != ABSENT or self.table.state[1, g, page] == LIVE)

    def _state(self, tree: dict[Path, int], tier: int, g: int, path: Path) -> Residence:
        return Residence(self.table.state[tier, g, tree[path]]) if path in tree else ABSENT

    def _evictable(self, tier: int, g: int, tree: dict[Path, int]) -> list[Path]:
        state, pins = self.table.state[tier, g], self.table.pins[tier, g]
        return [path for path, page in tree.items() if state[page] == LIVE and not pins[page]]

    def _rank(self, g: int, path: Path) -> tuple[int, int]:
        return self.oracle.used.get((g, path), 0), -len(path[1])

    def _name(self, tree: dict[Path, int], page: int) -> Path:
        return next(path for path, other in tree.items() if other == page)

    def _private(self, g: int) -> int:
        name = self.schema.groups[g].name
        shares = [r.lease.shares[name] for r in self.requests if r.lease]
        return sum(int(share.owned.sum()) + len(share.working) for share in shares)

    def _stamp(self, request: Request, pages: int) -> None:
        self.oracle.clock += 1
        for g in self.groups:
            for i in self.needed(g, pages):
                self.oracle.used[g, request.path(i)] = self.oracle.clock

    def _owners(self, tier: int, g: int) -> dict[int, list]:
        """Who has each slot: rows by page id, requests for what is their own."""
        owners: dict[int, list] = {}
        for page in np.flatnonzero(self.table.state[tier, g] != ABSENT).tolist():
            owners.setdefault(int(self.table.slot[tier, g, page]), []).append(page)
        for request in self.requests if tier == 0 else []:
            if request.lease:
                share = request.lease.shares[self.schema.groups[g].name]
                for slot in [*share.slots[share.owned].tolist(), *share.working.tolist()]:
                    owners.setdefault(slot, []).append(request)
        return owners

    # --- what always holds

    def check(self) -> None:
        self.cache.check()
        assert not self.cache.counts["invariant_errors_total"]
        tree = self.tree()
        self.oracle.forget(lambda path: path not in tree)
        self._check_names(tree)
        self._check_bytes(tree)
        assert any(self.vital) or set(tree) == self._in_use(tree), "an empty page is in the tree"
        self._check_storage()
        self._check_tickets()
        for request in self.requests:
            if request.lease and (request.lease.ready or request.computed is not None):
                self._check_lease(request)

    def _check_names(self, tree: dict[Path, int]) -> None:
        ids = np.array(list(tree.values()), np.int32)
        for path, key in zip(tree, self.table.keys(ids), strict=True):
            assert key == true_key(path), "a page has another page's key"
        for path, page in tree.items():
            namespace, tokens = path
            assert len(tokens) == P or (namespace, tokens[:-P]) in tree
            for g in self.groups:
                want = self.oracle.used.get((g, path), 0)
                assert self.table.used[self.table.clocks[g], page] == want, "a clock went wrong"
                hits = 0 if self.schema.groups[g].tail is None else self.oracle.hits[g, path]
                assert self.table.hits[g, page] == min(hits, 2), "a hit was not counted"

    def _check_bytes(self, tree: dict[Path, int]) -> None:
        for tier, pools in enumerate(self.media.tiers):
            for g, grp in enumerate(self.schema.groups):
                for owners in self._owners(tier, g).values():
                    assert len(owners) == 1, f"a slot is shared by {owners}"
                for path, page in tree.items():
                    if self.table.state[tier, g, page] == LIVE:
                        value = pools[g][self.table.slot[tier, g, page]]
                        assert value == (path, grp.name), f"wrong bytes: {value} in {path}"

    def _check_storage(self) -> None:
        prints = {self.schema.fingerprint(grp): grp.name for grp in self.schema.groups}
        for key, value in self.store.records.items():
            assert value == (self.names[key.page], prints[key.group]), "wrong bytes in storage"

    def _check_tickets(self) -> None:
        """A ticket owns where it writes, and nothing is read twice at once."""
        reading: Counter[Key] = Counter()
        for ticket in self.cache.transfers.pending:
            for move in ticket.moves:
                tier = 0 if ticket.kind == "load" else 1
                if len(move.target):
                    rows = self.table.slot[tier, move.group, move.pages]
                    assert (rows == move.target).all(), "somebody else got a ticket's slot"
                if ticket.kind == READ:
                    alive = ~self.table.dying[move.pages]
                    reading.update(key for key, ok in zip(move.keys, alive, strict=True) if ok)
        assert max(reading.values(), default=0) <= 1, "a record is read twice at once"

    def _check_lease(self, request: Request) -> None:
        lease = request.lease
        computed = lease.pages if request.computed is None else request.computed // P
        if request.computed is None:
            assert sum(lease.explanation.tokens.values()) == lease.pages * P
        for g, grp in enumerate(self.schema.groups):
            slots, valid = lease.slots(grp.name), lease.valid_from(grp.name)
            assert valid == 0 or (self.missing == "lenient" and not grp.required)
            assert valid <= lease.pages
            if grp.working and request.computed is not None:  # it has read its snapshot
                running = {self.media.tiers[0][g][slot] for slot in lease.working(grp.name)}
                assert running == {("running", id(request), request.computed)}, "state is lost"
                continue
            for i in self.needed(g, computed):
                if i >= valid:
                    assert slots[i] >= 0, f"a running request lost {grp.name} of page {i}"
                    value = self.media.tiers[0][g][slots[i]]
                    assert value == (request.path(i), grp.name), f"it reads {value}"

    # --- the end

    def settle(self) -> None:
        """Everything under way lands."""
        for _ in range(200):
            self.tick()
            if not self.cache.transfers.pending:
                return  # what waits in line now, waits for requests
            for lane in self.lanes:
                self.step(lane, 0, 99)
        raise AssertionError("transfers never end")

    def finish(self) -> None:
        """All requests end, one by one; nothing is left behind, and the cache still serves."""
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
        table = self.table
        assert self.cache.idle
        assert not table.holds.any()
        assert not table.pins.any()
        assert len(table) == len(self.tree())
        figures = self.cache.figures()
        for tier, (name, sizes) in enumerate((("device", self.device), ("host", self.host))):
            for g, grp in enumerate(self.schema.groups):
                rows = np.count_nonzero(table.state[tier, g] != ABSENT)
                free = figures[f"free_slots{{tier={name},group={grp.name}}}"]
                assert free == sizes[g] - rows, "a private slot is left"
        self._check_written()
        self._check_serves()

    def _check_written(self) -> None:
        """What memory has, storage has, but for what was lost and what was counted."""
        missing = 0
        for path, page in self.tree().items():
            for g, grp in enumerate(self.schema.groups):
                key = Key(self.schema.fingerprint(grp), true_key(path))
                kept = self.host[g] and self.table.state[:, g, page].any()
                if kept and key not in self.lost:
                    missing += key not in self.store.records
        counts = self.cache.counts
        assert missing <= counts["unsaved_pages_total"] + counts["unwritten_pages_total"]

    def _check_serves(self) -> None:
        sizes = zip(self.schema.groups, self.device, strict=True)
        pages = min((size for grp, size in sizes if not grp.working), default=1)
        last = self.arrive([1, 1, 0, 0] * pages, "last")
        last.tokens = last.tokens[: pages * P]
        self.settle()
        assert self.cache.ready(last.prefetch), "a prefetch waits for nobody"
        assert self.admit(last, chunk=pages * P), "an idle cache has no room"
        self.release(last)
        self.check()


def _follows(path: Path, head: Path) -> bool:
    return path[0] == head[0] and path[1][: len(head[1])] == head[1]
