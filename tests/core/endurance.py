"""Endurance: a million random operations, with every group there is, in pools a twentieth of the
working set.

``python tests/core/endurance.py --operations 1000000`` runs them on two processes: half in worlds
of up to 64 pages, compared with an oracle after every operation, and half on stages of thousands of
pages, whose invariants are checked after one operation in a hundred.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from insides import SELECT
from request import Request
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from schemas import group
from stage import Stage
from world import World

from kvkeep.schema import Identity, Schema

P = 4
SMALL = 64  # slots: up to this size, everything is checked after every operation
SAMPLED = 100  # on a large pool, one in so many operations is checked
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


def stories(rng: random.Random, total: int, pages: int) -> list[tuple[int, ...]]:
    """Conversations at their full length, which branch from each other at random places:
    ``total`` different pages in all, ``pages`` in each."""
    told: list[tuple[int, ...]] = []
    while total > 0:
        shared = rng.randrange(pages) if told and rng.random() < 0.7 else 0
        fresh = [rng.randrange(1 << 30) for _ in range((pages - shared) * P)]
        told.append((*(rng.choice(told)[: shared * P] if shared else ()), *fresh))
        total -= pages - shared
    return told


class Engine:
    """Runs random operations, one at a time, on a world or stage of ``pages`` device slots."""

    def __init__(self, seed: int, pages: int) -> None:
        self.rng = rng = random.Random(seed)
        self.small = pages <= SMALL
        what = schema(draft=rng.random() < 0.7, tail=rng.choice([2, 3]))
        length = 12 if self.small else 64  # of a conversation, in pages
        self.many = 4 if self.small else 16  # requests at once
        self.chunk = (4 if self.small else 16) * P
        weights = WEIGHTS | ({} if self.small else {"empty": 0.001, "restart": 0.001})
        self.choices = list(weights), list(weights.values())
        sizes = [pages if grp.tail is None else pages // 2 for grp in what.groups]
        self.stories = stories(rng, 20 * pages, length)
        missing, every = rng.choice(["strict", "strict", "lenient"]), rng.choice([None, 2, 5])
        kind = World if self.small else Stage
        self.stage = kind(what, sizes, sizes, missing, SELECT, every)
        self.happened: Counter[str] = Counter()
        self.checks = 0

    def operate(self, number: int) -> None:
        """Do one operation that is possible now, and check after it."""
        running = [r for r in self.stage.requests if r.lease]
        waiting = [r for r in self.stage.requests if not r.lease]
        while not self._one(*self.rng.choices(*self.choices), running, waiting):
            pass
        if self.small or number % SAMPLED == 0:
            self.check()

    def check(self) -> None:
        self.checks += 1
        self.stage.check()

    def _one(self, kind: str, running: list[Request], waiting: list[Request]) -> bool:
        """Do an operation of this kind; False: it is not possible now."""
        rng, stage = self.rng, self.stage
        if kind == "arrive":
            if len(stage.requests) >= self.many:
                return False
            story = self.stories[int(len(self.stories) * rng.random() ** 3)]  # some are popular
            stage.arrive(story[: rng.randrange(1, len(story) + 1)], ask=rng.random() < 0.8)
        elif kind == "admit":
            if not (waiting := [r for r in waiting if stage.may_come(r)]):
                return False
            self.admit(rng.choice(waiting))
        elif kind == "grow":
            if not (running := [r for r in running if stage.arrived(r.lease)]):
                return False
            self.grow(rng.choice(running))
        elif kind == "commit":
            if not (running := [r for r in running if r.computed is not None]):
                return False
            stage.commit(rng.choice(running))
        elif kind == "release":
            if not (done := [r for r in running if r.computed == len(r.tokens)]):
                return False
            stage.release(rng.choice(done))
        elif kind == "abort":
            if not stage.requests:
                return False
            stage.release(rng.choice(stage.requests))
        elif kind == "preempt":
            if not running:
                return False
            stage.release(rng.choice(running), again=True)
        elif kind == "step":
            if not (queued := [name for name, lane in stage.lanes.items() if lane.queue]):
                return False
            fault = rng.choice([""] * 10 + ["partial", "raise"])
            first, count = rng.randrange(1 << 20), rng.randrange(1, 6)
            stage.step(rng.choice(queued), first, count, fault)
        elif kind == "tick":
            stage.tick()
        elif kind.startswith("evict"):
            stage.evict(int(kind == "evict host"), rng.choice(stage.groups), rng.randrange(1, 4))
        elif kind == "empty":
            stage.empty(rng.choice([0, 0, 1]))
        elif kind == "lose":
            if not stage.store.records:
                return False
            stage.lose(rng.randrange(1 << 30))
        elif kind == "outage":
            stage.outage(rng.random() < 0.3)
        else:
            self.count()
            stage.restart()
        self.happened[kind] += 1
        return True

    def admit(self, request: Request) -> None:
        stage = self.stage
        if not stage.admit(request, self.rng.randrange(self.chunk)) and (
            request.prefetch and len(stage.requests) == self.many
        ):
            stage.release(request)  # others may wait for what it keeps on the host

    def grow(self, request: Request) -> None:
        rng, stage = self.rng, self.stage
        count, stop = rng.randrange(self.chunk), rng.random() < 0.95
        ahead = rng.choice([0, 0, rng.randrange(2 * P)])
        if not stage.run(request, count, ahead, commit=False, stop=stop) and (
            all(r.lease for r in stage.requests) or rng.random() < 0.1
        ):
            stage.release(request, again=True)

    def count(self) -> None:
        """Add up what the cache counted, before it ends or restarts."""
        figures = self.stage.cache.figures()
        evicted = (n for name, n in figures.items() if name.startswith("evicted_pages_total"))
        self.happened["evicted pages"] += int(sum(evicted))

    def finish(self) -> None:
        self.stage.finish()
        self.checks += 1
        self.count()


@dataclass(frozen=True)
class Report:
    """The outcome of some operations."""

    operations: int
    checks: int
    happened: Counter[str]
    violations: list[str]  # where, and which


def endure(seed: int, pages: int, operations: int) -> Report:
    """Run so many operations on one stage; stop at a violation."""
    engine, done, violations = Engine(seed, pages), 0, []
    try:
        for done in range(1, operations + 1):
            engine.operate(done - 1)
        engine.finish()
    except Exception as error:
        violations = [f"seed {seed}, {pages} pages, operation {done} of {operations}: {error!r}"]
    return Report(done, engine.checks, engine.stage.happened + engine.happened, violations)


def jobs(operations: int, seed: int) -> list[tuple[int, int, int]]:
    """Half of the operations on small pools, half on large ones, each job with its own seed."""
    large, small = max(1, operations // 125_000), max(1, operations // 20_000)
    sizes = [(4096, operations // 2 // large)] * large
    sizes += [((16, 32, SMALL)[i % 3], operations // 2 // small) for i in range(small)]
    return [(seed + i, *size) for i, size in enumerate(sizes)]


def main() -> int:
    """Run all jobs and print a summary."""
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
    """Print the operations and violations; returns the exit status."""
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
