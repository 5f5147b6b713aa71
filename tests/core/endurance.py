"""Endurance: a million random operations, with every group there is, in pools a twentieth of the
working set.

``python tests/core/endurance.py --operations 1000000`` runs them on two processes: half on pools of
up to 64 pages, where everything is checked after every operation, half on pools of thousands, where
everything is checked after one in a hundred. Slots hold, instead of bytes, the name of what the
bytes would be, so that a wrong byte anywhere is a wrong number.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from worlds import ManualLane, Switch, group

from kvkeep.core.cache import Cache
from kvkeep.core.lease import Lease, Prefetch
from kvkeep.core.pages import NO_SLOT
from kvkeep.core.policy import Policy
from kvkeep.media.base import NOW, Mark
from kvkeep.schema import Identity, Key, Residence, Schema, StoreError, root_key

P = 4
LIVE = int(Residence.LIVE)
JUNK = 0
SMALL = 64  # slots: up to here, everything is checked after every operation
SAMPLED = 100  # of so many operations on a large pool, one is checked
WEIGHTS = {
    "arrive": 4, "admit": 6, "grow": 9, "commit": 6, "release": 1.5, "abort": 0.7, "preempt": 0.4,
    "step": 9, "tick": 7, "evict": 0.6, "evict host": 0.4, "lose": 0.4, "outage": 0.1,
    "empty": 0.02, "restart": 0.02,
}  # fmt: skip


def schema(*, draft: bool, tail: int) -> Schema:
    """All kinds of groups together."""
    groups = [group("full"), group("window", tail), group("state", 1, working=1)]
    if draft:
        groups += [group("draft", required=False), group("near draft", 3, required=False)]
    return Schema(Identity("m"), P, tuple(groups))


def names(key: np.ndarray, g: int) -> np.ndarray:
    """What the bytes of pages with these chained keys are, in a group."""
    head: np.ndarray = np.ascontiguousarray(key[..., :8]).view(np.int64)[..., 0]
    return head ^ g


@dataclass(frozen=True)
class Story:
    """A conversation as long as it will ever be: its tokens, and its pages' keys."""

    tokens: np.ndarray
    keys: np.ndarray  # [pages, 32] uint8, the schema's chaining written down a second time


def stories(rng: random.Random, total: int, pages: int) -> list[Story]:
    """Conversations that part from each other at random places, of so many pages in all."""
    told: list[Story] = []
    while total > 0:
        shared = rng.randrange(pages) if told and rng.random() < 0.7 else 0
        fresh = [rng.randrange(1 << 30) for _ in range((pages - shared) * P)]
        old = rng.choice(told) if shared else None
        head = old.tokens[: shared * P].tolist() if old else []
        keys = [bytes(key) for key in old.keys[:shared]] if old else []
        for page in range(len(fresh) // P):
            above = keys[-1] if keys else root_key("")
            run = struct.pack(f"<{P}i", *fresh[page * P : (page + 1) * P])
            keys.append(hashlib.sha256(above + run).digest())
        table = np.frombuffer(b"".join(keys), np.uint8).reshape(pages, 32)
        told.append(Story(np.array(head + fresh, np.int32), table))
        total -= pages - shared
    return told


class Cell:
    """What a memoryview of a host slot is to a store, where bytes are numbers."""

    __slots__ = ("slot", "slots")

    def __init__(self, slots: np.ndarray, slot: int) -> None:
        self.slots, self.slot = slots, slot


class Numbers:
    """Slots of numbers. A copy that fails has spoilt its targets."""

    def __init__(self, device: Sequence[int], host: Sequence[int]) -> None:
        most = max(*device, *host)
        self.tiers = np.full((2, len(device), most), JUNK, np.int64)  # [tiers, groups, slots]
        self.failing = False

    def mark(self) -> Mark:
        return NOW

    def save(self, copies, after=()) -> None:
        self._copy(copies, *self.tiers)

    def load(self, copies, after=(), reached=None) -> None:
        self._copy(copies, *reversed(self.tiers))

    def bodies(self, group: int, slots) -> list[Cell]:
        return [Cell(self.tiers[1][group], slot) for slot in slots.tolist()]

    def keep(self, group: int, slots, bodies) -> None: ...

    def _copy(self, copies, source, target) -> None:
        for g, froms, tos in copies:
            target[g][tos] = JUNK if self.failing else source[g][froms]
        if self.failing:
            raise RuntimeError("the copy engine failed")


class Records:
    """Storage that outlives caches; ``fault`` as in :class:`worlds.DictStore`. What is written is
    checked as it is written: it does not change afterwards."""

    def __init__(self, schema: Schema) -> None:
        self.group = {schema.fingerprint(grp): g for g, grp in enumerate(schema.groups)}
        self.records: dict[Key, int] = {}
        self.faults: Counter[str] = Counter()
        self.fault = ""

    def _works(self, count: int) -> list[bool]:
        if self.fault == "raise":
            raise StoreError("the disk is gone")
        return [not (self.fault and i % 2) for i in range(count)]

    def probe(self, keys):
        works = self._works(len(keys))
        return [ok and key in self.records for ok, key in zip(works, keys, strict=True)]

    def read(self, keys, out):
        works = self._works(len(keys))
        landed = []
        for ok, key, cell in zip(works, keys, out, strict=True):
            value = self.records.get(key, JUNK) if ok else JUNK
            cell.slots[cell.slot] = value
            landed.append(value != JUNK)
        return landed

    def write(self, keys, records):
        works = self._works(len(keys))
        for key, cell, ok in zip(keys, records, works, strict=True):
            if ok:
                value = int(cell.slots[cell.slot])
                (name,) = struct.unpack("=q", key.page[:8])
                assert value == name ^ self.group[key.group], "wrong bytes go to storage"
                self.records[key] = value
        return works

    def touch(self, keys) -> None: ...
    def delete(self, keys) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class Request:
    """One request of an engine that writes true numbers, and junk where it speculates."""

    serial: int
    story: Story
    length: int
    prefetch: Prefetch | None = None
    lease: Lease | None = None
    computed: int | None = None
    snapshots: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        return self.story.tokens[: self.length]


class Field:
    """A cache, an engine and their requests. Lanes move when they are told to, in any order."""

    def __init__(self, seed: int, pages: int) -> None:
        self.rng = rng = random.Random(seed)
        self.schema = schema(draft=rng.random() < 0.7, tail=rng.choice([2, 3]))
        self.groups = range(len(self.schema.groups))
        small = pages <= SMALL
        length = 12 if small else 64  # of a conversation, in pages
        self.many = 4 if small else 16  # requests at once
        self.chunk = (4 if small else 16) * P
        weights = WEIGHTS | ({} if small else {"empty": 0.001, "restart": 0.001})
        self.choices = list(weights), list(weights.values())
        full = [grp.tail is None for grp in self.schema.groups]
        self.device = [pages if whole else pages // 2 for whole in full]
        self.host = [pages if whole else pages // 2 for whole in full]
        self.stories = stories(rng, 20 * pages, length)
        self.missing = rng.choice(["strict", "strict", "lenient"])
        self.every = rng.choice([None, 2, 5])
        self.store = Records(self.schema)
        self.happened: Counter[str] = Counter()
        self.serial = 0
        self.evicted = 0
        self.restart()

    # --- operations

    def restart(self) -> None:
        """A new process on the same store."""
        self.lanes: dict[str, ManualLane] = {}
        self.requests: list[Request] = []
        self.media = Numbers(self.device, self.host)
        policy = Policy(missing=self.missing, snapshot_pages=self.every, prefetch_min_tokens=0)
        self.cache = Cache(
            self.schema, self.device, self.host, self.store, policy, self.media, self._lane
        )
        self.cache.transfers.breaker = Switch()
        self.table = self.cache.residency.table

    def _lane(self, name: str, work: Callable, report: Callable) -> ManualLane:
        """Questions to storage wait in line with reads."""
        lane = "read" if name == "probe" else name
        self.lanes.setdefault(lane, ManualLane(report)).work[name] = work
        return self.lanes[lane]

    def operate(self) -> None:
        """One operation that can be done now."""
        running = [r for r in self.requests if r.lease]
        waiting = [r for r in self.requests if not r.lease]
        while not self._one(*self.rng.choices(*self.choices), running, waiting):
            pass

    def _one(self, kind: str, running: list[Request], waiting: list[Request]) -> bool:
        """False: there is nothing to do this to."""
        rng = self.rng
        if kind == "arrive":
            if len(self.requests) >= self.many:
                return False
            self.arrive()
        elif kind == "admit":
            waiting = [r for r in waiting if not r.prefetch or self.cache.ready(r.prefetch)]
            if not waiting:
                return False
            self.admit(rng.choice(waiting))
        elif kind in ("grow", "commit"):
            running = [r for r in running if r.lease.ready]
            if not running:
                return False
            (self.grow if kind == "grow" else self.commit)(rng.choice(running))
        elif kind == "release":
            done = [r for r in running if r.computed == r.length]
            if not done:
                return False
            self.release(rng.choice(done))
        elif kind == "abort":
            if not self.requests:
                return False
            self.release(rng.choice(self.requests))
        elif kind == "preempt":
            if not running:
                return False
            self.release(rng.choice(running), again=True)
        elif kind == "step":
            if not (queued := [lane for lane in self.lanes.values() if lane.queue]):
                return False
            self.step(rng.choice(queued))
        elif kind == "tick":
            self.cache.tick()
        elif kind.startswith("evict"):
            residency = self.cache.residency
            tier = residency.host if kind == "evict host" else residency.device
            residency.evict(tier, rng.choice(self.groups), rng.randrange(1, 4))
        elif kind == "empty":
            self.cache.evict(rng.choice(["device", "device", "host"]))
        elif kind == "lose":
            if not self.store.records:
                return False
            self.lose()
        elif kind == "outage":
            self.cache.transfers.breaker.open = rng.random() < 0.3
        else:
            self.count_evicted()
            self.restart()
        self.happened[kind] += 1
        return True

    def arrive(self) -> None:
        story = self.stories[int(len(self.stories) * self.rng.random() ** 3)]  # some are dear
        self.serial += 1
        request = Request(self.serial, story, self.rng.randrange(1, len(story.tokens) + 1))
        if self.rng.random() < 0.8:
            request.prefetch = self.cache.prefetch(request.tokens)
        self.requests.append(request)

    def admit(self, request: Request) -> None:
        chunk = self.rng.randrange(self.chunk)
        request.lease = self.cache.admit(request.tokens, "", chunk, request.prefetch)
        if request.lease is None:
            self.happened["refused"] += 1
            if request.prefetch and len(self.requests) == self.many:
                self.release(request)  # what it keeps on the host may be what others wait for
            return
        request.prefetch, request.computed, request.snapshots = None, None, []
        self._check_path(request)
        self.happened["hits"] += request.lease.pages > 0
        self.happened["hit pages"] += request.lease.pages

    def grow(self, request: Request) -> None:
        """Slots for the next tokens, and what a model's step does to them."""
        rng, lease = self.rng, request.lease
        start = lease.pages * P if request.computed is None else request.computed
        final = min(request.length, start + rng.randrange(self.chunk))
        cut = lease.next_cut(start)
        if cut is not None and rng.random() < 0.95:
            final = min(final, cut)
        ahead = rng.choice([0, 0, rng.randrange(2 * P)])
        if not self.cache.grow(lease, final + ahead):
            self.happened["no room to grow"] += 1
            if all(r.lease for r in self.requests) or rng.random() < 0.1:
                self.release(request, again=True)
            return
        request.computed = final
        whole, last = final // P, -(-(final + ahead) // P)
        for g, grp in enumerate(self.schema.groups):
            slots, pool = lease.slots(grp.name), self.media.tiers[0][g]
            truth = names(request.story.keys[start // P : whole], g)
            if grp.working:
                pool[lease.working(grp.name)] = -request.serial
                at = whole - 1
                if final % P == 0 and final > start and slots[at] >= 0:
                    pool[slots[at]] = truth[-1]
                    request.snapshots.append(at)
            else:
                pool[slots[whole:last]] = JUNK
                pool[slots[start // P : whole]] = truth

    def commit(self, request: Request) -> None:
        if request.computed is not None:
            before = request.lease.pages
            self.cache.commit(request.lease, request.tokens[: request.computed], request.snapshots)
            if request.lease.pages > before:
                request.snapshots = []
            self._check_path(request)

    def release(self, request: Request, again: bool = False) -> None:
        if request.lease:
            self.cache.release(request.lease)
        if request.prefetch and not again:
            self.cache.cancel(request.prefetch)
        request.lease, request.computed = None, None
        if not again:
            self.requests.remove(request)

    def step(self, lane: ManualLane) -> None:
        fault = self.rng.choice([""] * 10 + ["partial", "raise"])
        self.media.failing, self.store.fault = bool(fault), fault
        lane.step(self.rng.randrange(len(lane.queue)), self.rng.randrange(1, 6))
        self.media.failing, self.store.fault = False, ""

    def lose(self) -> None:
        """A record goes from storage behind the cache's back: any, or else the oldest."""
        story, grp = self.rng.choice(self.stories), self.rng.choice(self.schema.groups)
        key = Key(self.schema.fingerprint(grp), bytes(self.rng.choice(story.keys)))
        if self.store.records.pop(key, None) is None:
            del self.store.records[next(iter(self.store.records))]

    def count_evicted(self) -> None:
        tiers = (self.cache.residency.device, self.cache.residency.host)
        self.evicted += sum(sum(tier.evicted) for tier in tiers)

    # --- what always holds

    def _check_path(self, request: Request) -> None:
        path = request.lease.path
        want = request.story.keys[: len(path)]
        assert np.array_equal(self.table.key[path], want), "a path of another prompt's pages"

    def check(self) -> None:
        """Every invariant there is, in this state."""
        self.cache.check()
        assert not self.cache.counts["invariant_errors_total"], "bookkeeping went wrong"
        self._check_bytes()
        self._check_tickets()
        for request in self.requests:
            if request.lease and request.lease.ready:
                self._check_lease(request)

    def _check_bytes(self) -> None:
        """Where a page's bytes are said to be, there they are."""
        table = self.table
        tier, g, page = live = (table.state == LIVE).nonzero()
        right = self.media.tiers[tier, g, table.slot[live]] == names(table.key, 0)[page] ^ g
        assert right.all(), "wrong bytes"

    def _check_tickets(self) -> None:
        """Where a ticket writes is its own until it came back."""
        for ticket in self.cache.transfers.pending:
            tier = 0 if ticket.kind == "load" else 1
            for move in ticket.moves:
                if len(move.target):
                    rows = self.table.slot[tier, move.group, move.pages]
                    assert (rows == move.target).all(), "somebody else got a ticket's slot"

    def _check_lease(self, request: Request) -> None:
        """What the next step reads is there, and is right."""
        lease = request.lease
        pages = lease.pages if request.computed is None else request.computed // P
        for g, grp in enumerate(self.schema.groups):
            share, pool = lease.shares[grp.name], self.media.tiers[0][g]
            if grp.working and request.computed is not None:
                assert (pool[share.working] == -request.serial).all(), "running state is lost"
                continue
            first = max(grp.needed(pages).start, share.valid_from)
            slots = share.slots[first:pages]
            assert (slots != NO_SLOT).all(), "a running request lost a page"
            right = pool[slots] == names(request.story.keys[first:pages], g)
            assert right.all(), "a running request reads wrong bytes"

    def finish(self) -> None:
        """All requests end; nothing is left behind."""
        self.cache.transfers.breaker.open = False
        for request in list(self.requests):
            self.release(request)
        for _ in range(1000):
            self.cache.tick()
            if self.cache.idle:
                break
            for lane in self.lanes.values():
                lane.step(0, 99)
        self.check()
        assert self.cache.idle, "transfers never end"
        assert not self.table.holds.any(), "a hold is left"
        assert not self.table.pins.any(), "a pin is left"
        tiers = self.cache.residency.device, self.cache.residency.host
        assert not any(tier.private(g) for tier in tiers for g in self.groups), "a slot is left"
        self.count_evicted()


@dataclass(frozen=True)
class Report:
    """What came of some operations."""

    operations: int
    checks: int
    happened: Counter[str]
    violations: list[str]  # where, and what


def endure(seed: int, pages: int, operations: int) -> Report:
    """So many operations on one field; a violation ends it."""
    small, field, checks = pages <= SMALL, Field(seed, pages), 0
    for number in range(operations):
        try:
            field.operate()
            if small or number % SAMPLED == 0:
                field.check()
                checks += 1
        except Exception as error:
            what = f"seed {seed}, {pages} pages, operation {number}: {error!r}"
            return Report(number + 1, checks, field.happened, [what])
    try:
        field.finish()
    except Exception as error:
        what = f"seed {seed}, {pages} pages, at the end: {error!r}"
        return Report(operations, checks, field.happened, [what])
    field.happened["evicted pages"] = field.evicted
    return Report(operations, checks + 1, field.happened, [])


def jobs(operations: int, seed: int) -> list[tuple[int, int, int]]:
    """Half of the operations on small pools, half on large ones, each job with its own seed."""
    large, small = max(1, operations // 125_000), max(1, operations // 20_000)
    sizes = [(4096, operations // 2 // large)] * large
    sizes += [((16, 32, SMALL)[i % 3], operations // 2 // small) for i in range(small)]
    return [(seed + i, *size) for i, size in enumerate(sizes)]


def main() -> int:
    """Endure, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    todo, console, began = jobs(given.operations, given.seed), Console(), time.monotonic()
    reports: dict[bool, list[Report]] = {True: [], False: []}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(given.processes, initializer=logging.disable) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("operations", total=sum(job[2] for job in todo))
        under_way = {pool.submit(endure, *job): job for job in todo}
        for done in as_completed(under_way):
            report, (_, pages, _) = done.result(), under_way[done]
            reports[pages <= SMALL].append(report)
            progress.advance(bar, report.operations)
            if not console.is_terminal:
                console.print(f"{pages} pages: {report.operations:,} operations")
            for violation in report.violations:
                console.print(f"[red]{violation}")
    return summary(console, reports, time.monotonic() - began)


def summary(console: Console, reports: dict[bool, list[Report]], seconds: float) -> int:
    """Print what was done and found; the exit status."""
    every = f"up to {SMALL} pages, each operation checked"
    table = Table("", every, f"4096 pages, 1 in {SAMPLED} checked", "both")
    halves = [reports[True], reports[False], reports[True] + reports[False]]

    def row(name: str, count: Callable[[Report], int]) -> None:
        table.add_row(name, *(f"{sum(map(count, half)):,}" for half in halves))

    row("operations", lambda report: report.operations)
    row("times that everything was checked", lambda report: report.checks)
    row("violations", lambda report: len(report.violations))
    for kind in sorted(set().union(*(report.happened for report in halves[2]))):
        row(f"  {kind}", lambda report, kind=kind: report.happened[kind])
    console.print(table)
    used = os.times().children_user
    console.print(f"{seconds:.0f} seconds; {used:.0f} seconds of processor time, all together")
    return int(any(report.violations for report in halves[2]))


if __name__ == "__main__":
    raise SystemExit(main())
