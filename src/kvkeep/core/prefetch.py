"""Prefetch: storage to host, from a request's arrival until it is scheduled.

A request asks storage which of its pages are there, waits in line for host memory, and reads what
is missing in memory, if that is long enough and faster than to compute it. Pages that are on their
way already are joined, not read again. What a prefetch brought, or found on the host, stays pinned
there until the request is admitted or gone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ..schema import (
    NO_IDS,
    NO_SLOTS,
    Ids,
    InvariantError,
    Residence,
    Slots,
    chain_keys,
    root_key,
)
from .lease import Prefetch
from .pages import HOST
from .policy import Policy
from .recompute import Recompute
from .residency import Residency
from .transfer import CALL_RECORDS, PROBE, READ, Move, Ticket, Transfers

_TRIAL_BYTES = 1 << 20  # to read of a store that was slow when last seen
_PATIENCE = 1.0  # seconds in line for host memory, until those who came later have to wait, too


class Prefetcher:
    """All prefetches under way. The scheduler's thread only."""

    def __init__(
        self,
        residency: Residency,
        transfers: Transfers,
        recompute: Recompute,
        policy: Policy,
        counts: Counter[str],
        broke: Callable[[Ids], None],
    ) -> None:
        """``broke``: hears of pages whose bookkeeping raised InvariantError."""
        self._residency, self._transfers, self._recompute = residency, transfers, recompute
        self._policy, self._counts, self._broke = policy, counts, broke
        self._mine: list[NDArray[np.bool_]] | None = None  # see _kept; None: to be counted again
        self.open: dict[int, Prefetch] = {}

    def begin(self, raw: bytes, namespace: str) -> Prefetch:
        """Ask storage for what memory lacks of a prompt's whole pages ``raw``."""
        prefetch = Prefetch(namespace, raw)
        self.open[prefetch.serial] = prefetch
        self._contained(self._ask, prefetch)
        return prefetch

    def _ask(self, prefetch: Prefetch) -> None:
        raw, namespace = prefetch.raw, prefetch.namespace
        pages = len(raw) // self._residency.tree.page_bytes
        path = self._residency.tree.match(namespace, raw)
        present = self._in_memory(path, pages)
        prefetch.present = present
        prefetch.reach = self._usable(present)
        prefetch.gain = (pages - prefetch.reach) * self._residency.schema.page_tokens
        if self._short(prefetch.gain) or not self._transfers.storage:
            prefetch.queued = True
            self._start(prefetch)
            return
        keys = self._residency.table.keys(path)
        rest = memoryview(raw)[len(path) * self._residency.tree.page_bytes :]
        parent = keys[-1] if keys else root_key(namespace)
        keys += chain_keys(parent, rest, self._residency.schema.page_tokens)
        prefetch.keys = keys
        prefetch.names = [self._transfers.names(g, keys) for g in range(len(present))]
        moves = [Move(g, NO_IDS, NO_SLOTS, NO_SLOTS, mine) for g, mine in enumerate(prefetch.names)]
        self._transfers.submit(Ticket(PROBE, moves, [prefetch], present))

    def _contained(self, step: Callable[[Prefetch], None], prefetch: Prefetch) -> None:
        """Take a step; if bookkeeping breaks on the way, nobody waits for the rest of it."""
        try:
            step(prefetch)
        except InvariantError:
            prefetch.done, prefetch.queued = True, False
            self._broke(prefetch.path)

    def late(self, prefetch: Prefetch) -> bool:
        """Whether the policy is not to wait for it, or not any longer."""
        policy = self._policy
        tokens = len(prefetch.raw) / 4
        limit = {
            "best_effort": 0.0,
            "timeout": policy.prefetch_seconds + policy.prefetch_seconds_per_1k * tokens / 1000,
        }.get(policy.prefetch, float("inf"))
        return time.monotonic() - prefetch.begun >= limit

    def probed(self, ticket: Ticket) -> None:
        """Storage answered: the prefetch knows how far it may reach and gets in line."""
        for prefetch in ticket.waiters:
            if not prefetch.closed and not prefetch.done:
                prefetch.reach = self._usable(ticket.present)
                prefetch.queued = True

    def advance(self) -> None:
        """Start whatever now fits into host memory, not only the first in line, and give up what
        turns out to be slower than computing."""
        for prefetch in self.open.values():
            if prefetch.queued:
                self._contained(self._start, prefetch)
            elif not prefetch.done and self._hopeless(prefetch):
                self._give_up(prefetch)

    def _hopeless(self, prefetch: Prefetch) -> bool:
        """Its reads still take longer than computing, or the answer of storage took as long."""
        seconds: float | None = time.monotonic() - prefetch.begun
        if prefetch.reads:
            seconds = self._transfers.seconds(READ, last=prefetch.reads[-1])
        return self._recompute.beats(seconds, prefetch.gain)

    def _give_up(self, prefetch: Prefetch) -> None:
        """Compute instead. What storage has not even answered for counts as nothing."""
        if prefetch.reads:
            self._counts["skipped_tokens_total{why=slow}"] += prefetch.gain
        self._leave(prefetch)

    def _leave(self, prefetch: Prefetch) -> None:
        """Wait no longer. What has come is there for others; what has not begun is not read, unless
        somebody else waits for it."""
        prefetch.done = True
        for ticket in prefetch.reads:
            ticket.abandoned |= all(other.done for other in ticket.waiters)

    def read(self, ticket: Ticket) -> None:
        """A storage-to-host ticket came back: pages that landed are there for everybody."""
        residency, table = self._residency, self._residency.table
        self._mine = None
        for move in ticket.moves:
            landed = move.pages[move.landed]
            residency.host.publish(move.group, landed)
            table.stored[move.group, landed] = True
            if not ticket.abandoned:
                self._counts["missed_reads_total"] += len(move.pages) - len(landed)
            for prefetch in ticket.waiters:  # before what did not land ends pages below it
                if not prefetch.closed:
                    whole = prefetch is ticket.waiters[0]  # it asked for them
                    mine = landed if whole else landed[np.isin(landed, prefetch.path)]
                    self._pin(prefetch, move.group, mine)
            residency.drop(residency.host, move.group, move.pages[~move.landed])
        for prefetch in ticket.waiters:
            prefetch.reads.remove(ticket)
            prefetch.done |= not prefetch.reads
        for move in ticket.moves:
            residency.unhold(move.pages)

    def close(self, prefetch: Prefetch) -> None:
        """The request was admitted or is gone. Idempotent; reads under way come back by
        themselves."""
        if prefetch.closed:
            return
        if not prefetch.done:
            self._leave(prefetch)
        prefetch.closed = prefetch.done = True
        self._mine = None
        del self.open[prefetch.serial]
        for group, pages in prefetch.pinned:
            self._residency.host.unpin(group, pages)
        self._residency.unhold(prefetch.path)

    def _start(self, prefetch: Prefetch) -> None:
        """Read what ``[0, reach)`` lacks in memory, as soon as the host has room for it; of what is
        not worth it at most a little, for which nobody waits."""
        residency = self._residency
        raw = prefetch.raw[: prefetch.reach * residency.tree.page_bytes]
        path = residency.tree.match(prefetch.namespace, raw)
        if prefetch.keys and any(read.abandoned and read.touches(path) for read in self._reads()):
            return  # they are back soon, and cannot be joined: perhaps they are not made
        memory = self._in_memory(path, prefetch.reach)
        both = zip(prefetch.present, memory, strict=True)
        missing = [there[: prefetch.reach] & ~has for there, has in both]
        known = self._usable([self._pad(has, prefetch.reach) for has in residency.present(path)])
        prefetch.gain = (prefetch.reach - known) * residency.schema.page_tokens
        if not self._worth(prefetch.gain, self._wanted(prefetch.reach, missing)):
            prefetch.done = True
            prefetch.reach = min(prefetch.reach, known + self._trial(prefetch.gain))
            path = path[: prefetch.reach]
            missing = [lacks[: prefetch.reach] for lacks in missing]
            for lacks in missing:
                lacks[:known] = False
        pages = self._reserve(prefetch, path, missing)
        if pages is not None:
            self._read(prefetch, pages, missing)

    def _reserve(
        self, prefetch: Prefetch, path: Ids, missing: list[NDArray[np.bool_]]
    ) -> int | None:
        """Keep what the host has of ``path``, and make room for what is missing.

        Returns:
            For how many pages there is room; None if it is to wait for those before it.
        """
        host, table = self._residency.host, self._residency.table
        wanted, kept, left = self._wanted(prefetch.reach, missing), self._kept(), self._left()
        if passes := self._passes(prefetch):
            left = [0] * len(left)
        live, more = [], []  # by group: pages on the host, and how many nobody keeps yet
        for group, mine in enumerate(kept):
            needed = self._needed(group, prefetch.reach)[: len(path)]
            live.append(path[table.where(HOST, group, path, Residence.LIVE) & needed])
            more.append(int(np.count_nonzero(~mine[live[-1]])))
        full = any(n + m > cap for n, m, cap in zip(wanted, more, left, strict=True))
        if full and any(wanted) and any(mine.any() for mine in kept) and not prefetch.done:
            return None
        prefetch.queued = False
        table.hold(path)
        prefetch.path = path
        loose = []
        for group, pages in enumerate(live):
            if more[group] <= left[group] and not passes:
                self._pin(prefetch, group, pages)
                left[group] -= more[group]
            else:  # to keep more would keep everybody else from the host
                host.pin(group, pages)
                loose.append((group, pages))
        room = [
            min(cap, self._residency.make_room(host, group, min(cap, count)))
            for group, (cap, count) in enumerate(zip(left, wanted, strict=True))
        ]
        for group, pages in loose:  # not before: to make room must not end the path itself
            host.unpin(group, pages)
        reach = prefetch.reach
        while reach and not self._fits(reach, missing, room):
            reach = self._usable([has[: reach - 1] for has in prefetch.present])
        return reach

    def _read(self, prefetch: Prefetch, pages: int, missing: list[NDArray[np.bool_]]) -> None:
        """Start reading what ``[0, pages)`` lacks; host slots for it are free."""
        residency, table = self._residency, self._residency.table
        size = residency.tree.page_bytes
        known = len(prefetch.path)
        fresh = residency.add(
            prefetch.namespace,
            prefetch.path,
            prefetch.raw[known * size : pages * size],
            prefetch.keys[known:pages],
        )
        table.hold(fresh)
        prefetch.path = np.concatenate((prefetch.path, fresh))
        for other in self._reads():  # joined before this one's own tickets are there
            if other.touches(prefetch.path) and not other.abandoned:
                self._wait(prefetch, other)
        lacking = [
            np.flatnonzero(lacks[:pages] & self._needed(group, pages))
            for group, lacks in enumerate(missing)
        ]
        targets = [self._take(group, prefetch.path[at]) for group, at in enumerate(lacking)]
        for first, end in self._parts(pages, lacking):
            moves = []
            for group, at in enumerate(lacking):
                part = slice(*np.searchsorted(at, (first, end)))
                if len(at[part]):
                    names = [prefetch.names[group][i] for i in at[part].tolist()]
                    ids, slots = prefetch.path[at[part]], targets[group][part]
                    moves.append(Move(group, ids, NO_SLOTS, slots, names))
            self._wait(prefetch, self._transfers.submit(Ticket(READ, moves)))
        self._mine = None
        prefetch.done |= not prefetch.reads

    def _take(self, group: int, pages: Ids) -> Slots:
        """Host slots for pages that are going to be read; there is room."""
        host = self._residency.host
        slots = host.reserve(group, len(pages))
        assert slots is not None  # room was made, and nobody else ran
        host.adopt(group, pages, slots, Residence.WRITING)
        self._residency.table.hold(pages)
        return slots

    def _parts(self, pages: int, lacking: list[Ids]) -> Iterator[tuple[int, int]]:
        """``[0, pages)`` in parts that are read by a ticket each, in one short call of the store:
        what has come is of use at once, with all its groups, and how fast it goes is seen early."""
        size, records = np.zeros((2, pages), dtype=np.int64)
        for group, at in zip(self._residency.schema.groups, lacking, strict=True):
            size[at] += group.record_bytes
            records[at] += 1
        wanted = np.flatnonzero(records)
        sizes, counts = (
            np.concatenate(([0], column[wanted].cumsum())) for column in (size, records)
        )
        most = self._transfers.read_bytes(int(sizes[-1]))
        start = 0
        while start < len(wanted):
            fit = sizes.searchsorted(sizes[start] + most, side="right") - 1
            few = counts.searchsorted(counts[start] + CALL_RECORDS, side="right") - 1
            end = max(start + 1, int(min(fit, few)))
            yield int(wanted[start]), int(wanted[end - 1]) + 1
            start = end

    def _worth(self, gain: int, wanted: list[int]) -> bool:
        """Whether ``gain`` tokens are enough to be read, and come faster than they are computed.

        Args:
            wanted: pages of each group to be read for them.
        """
        groups = self._residency.schema.groups
        size = sum(n * group.record_bytes for n, group in zip(wanted, groups, strict=True))
        if self._short(gain):
            self._counts["skipped_tokens_total{why=short}"] += gain
        elif self._recompute.beats_moving(READ, size, gain):
            self._counts["skipped_tokens_total{why=slow}"] += gain
        else:
            return True
        return False

    def _short(self, gain: int) -> bool:
        return gain < max(1, self._policy.prefetch_min_tokens)

    def _trial(self, gain: int) -> int:
        """Pages to read all the same: a few now and then, to see whether storage is fast again."""
        if self._short(gain) or not self._transfers.speeds[READ].stale:
            return 0
        page = sum(group.record_bytes for group in self._residency.schema.groups)
        return max(1, _TRIAL_BYTES // page)

    def _reads(self) -> list[Ticket]:
        return [ticket for ticket in self._transfers.pending if ticket.kind == READ]

    def _kept(self) -> list[NDArray[np.bool_]]:
        """Per group ``[rows]``: whose host slots prefetches have, to be filled or as a pin."""
        table = self._residency.table
        if self._mine is None or len(self._mine[0]) < table.rows:
            self._mine = [np.zeros(table.rows, dtype=bool) for _ in range(table.groups)]
            for prefetch in self.open.values():
                for group, pages in prefetch.pinned:
                    self._mine[group][pages] = True
            for ticket in self._reads():
                for move in ticket.moves:
                    self._mine[move.group][move.pages] = True
        return self._mine

    def _left(self) -> list[int]:
        """Host slots of each group that prefetches may still take."""
        share = [int(self._policy.prefetch_share * n) for n in self._residency.host.capacity]
        used = (int(np.count_nonzero(mine)) for mine in self._kept())
        return [max(0, most - count) for most, count in zip(share, used, strict=True)]

    def _passes(self, prefetch: Prefetch) -> bool:
        """Somebody before it has waited in line for long."""
        first = next((one for one in self.open.values() if one.queued), prefetch)
        return first is not prefetch and time.monotonic() - first.begun > _PATIENCE

    def _wait(self, prefetch: Prefetch, ticket: Ticket) -> None:
        ticket.waiters.append(prefetch)
        prefetch.reads.append(ticket)
        coming = (move.pages for move in ticket.moves)
        prefetch.fetched = np.concatenate((prefetch.fetched, *coming))

    def _pin(self, prefetch: Prefetch, group: int, pages: Ids) -> None:
        self._residency.host.pin(group, pages)
        prefetch.pinned.append((group, pages))
        self._mine = None

    def _in_memory(self, path: Ids, pages: int) -> list[NDArray[np.bool_]]:
        """Per group ``[pages]``: in a memory tier or on the way there."""
        table = self._residency.table
        has = [self._pad(table.resident(g, path), pages) for g in range(table.groups)]
        for move in (move for read in self._reads() if read.abandoned for move in read.moves):
            has[move.group][: len(path)] &= ~np.isin(path, move.pages)  # perhaps it is not made
        return has

    def _pad(self, has: NDArray[np.bool_], pages: int) -> NDArray[np.bool_]:
        """``[pages]``: False beyond."""
        return np.concatenate((has, np.zeros(pages - len(has), dtype=bool)))

    def _usable(self, present: list[NDArray[np.bool_]]) -> int:
        return self._residency.schema.usable(present, self._policy.missing == "strict")

    def _needed(self, group: int, pages: int) -> NDArray[np.bool_]:
        needed = self._residency.schema.groups[group].needed(pages)
        return np.arange(pages) >= needed.start

    def _fits(self, pages: int, missing: list[NDArray[np.bool_]], room: list[int]) -> bool:
        """Whether what ``[0, pages)`` needs and lacks is at most ``room`` slots of each group."""
        wanted = self._wanted(pages, missing)
        return all(count <= free for count, free in zip(wanted, room, strict=True))

    def _wanted(self, pages: int, missing: list[NDArray[np.bool_]]) -> list[int]:
        """Pages of each group that ``[0, pages)`` needs and lacks."""
        return [
            int(np.count_nonzero(lacks[:pages] & self._needed(group, pages)))
            for group, lacks in enumerate(missing)
        ]
