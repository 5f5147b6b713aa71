"""Prefetch: storage to host, from a request's arrival until it is scheduled.

A request asks storage which of its pages it has (:class:`~kvkeep.core.storage.Lookup`), waits in
line for a share of host memory (:mod:`~kvkeep.core.host_share`), and reads the pages that memory
lacks if they are many enough and faster to read than to compute. It joins reads in flight instead
of reading a page twice. Its pages on the host stay pinned until the request is admitted or gone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..schema import Ids, chain_keys
from .audit import Audit
from .flight import Flights
from .host_share import HostShare
from .lane_work import Inquiry
from .lease import Phase, Prefetch
from .pages import ABSENT, DEVICE, HOST, LIVE
from .policy import Policy
from .presence import Mask, Presence
from .storage import CALL_RECORDS, Lookup
from .ticket import READ, Move, Ticket
from .transfer import Recompute

_TRIAL_BYTES = 1 << 20  # to read of a store that was slow, to measure it again
_PATIENCE = 1.0  # seconds in line for host memory until later prefetches must wait too
_TRIES = 16  # prefetches in line that one tick tries, besides the first


class Prefetcher:
    """All open prefetches, by serial, the oldest first. Scheduler's thread only."""

    def __init__(
        self,
        flights: Flights,
        recompute: Recompute,
        policy: Policy,
        counts: Counter[str],
        audit: Audit,
        share: HostShare,
    ) -> None:
        self._flights, self._recompute = flights, recompute
        self._transfers, self._residency = flights.transfers, (residency := flights.residency)
        self._policy, self._counts = policy, counts
        self._audit, self._share, self._open = audit, share, audit.prefetches
        self._table, self._host, self._tree = residency.table, residency.host, residency.tree
        self._groups, self._page_tokens = residency.schema.groups, residency.schema.page_tokens
        self._first: Prefetch | None = None  # of the line, at the last try
        self._last = -1  # serial of the last prefetch in line that was tried
        self._least = max(1, policy.prefetch_min_tokens)

    # --- ask storage

    def begin(self, root: bytes, raw: bytes) -> Prefetch:
        """Ask storage for the pages that memory lacks; ``raw``: token bytes of whole pages."""
        pages = len(raw) // self._tree.page_bytes
        path = self._tree.match(root, raw)
        memory = self._in_memory(path, pages)
        prefetch = Prefetch(root, raw, memory, reach=memory.usable())
        prefetch.gain = (pages - prefetch.reach) * self._page_tokens
        if prefetch.gain < self._least or not self._transfers.storage.usable:
            prefetch.phase = Phase.WAITING
            self._try(prefetch, path[: prefetch.reach])
        else:
            self._ask(prefetch, path, memory)
        self._open[prefetch.serial] = prefetch  # last: nobody has one that was interrupted
        return prefetch

    def _ask(self, prefetch: Prefetch, path: Ids, memory: Presence) -> None:
        known, raw, root = self._table.keys(path), prefetch.raw, prefetch.root
        rest = memoryview(raw)[len(path) * self._tree.page_bytes :]
        prefetch.keys = known + chain_keys(known[-1] if known else root, rest, self._page_tokens)
        names = self._transfers.storage.names
        prefetch.names = [names(g, prefetch.keys) for g in range(len(self._groups))]

        lookup = Lookup(prefetch.names, memory)

        def answered() -> None:
            if prefetch.phase is Phase.ASKING:
                prefetch.found, prefetch.phase = lookup.found, Phase.WAITING
                prefetch.reach = lookup.found.usable()

        self._transfers.ask(Inquiry(lookup.ask, answered))

    # --- wait

    def late(self, prefetch: Prefetch) -> bool:
        """Whether the policy lets the request wait no longer."""
        policy = self._policy
        tokens = len(prefetch.raw) / 4
        limit = {
            "best_effort": 0.0,
            "timeout": policy.prefetch_seconds + policy.prefetch_seconds_per_1k * tokens / 1000,
        }.get(policy.prefetch, float("inf"))
        return time.monotonic() - prefetch.begun >= limit

    def advance(self) -> None:
        """Start prefetches that fit into host memory, not only the first in line, and give up those
        that are slower than computing. A tick tries only some of a long line."""
        line = [one for one in self._open.values() if one.phase is Phase.WAITING]
        later = [one for one in line[1:] if one.serial > self._last] or line[1:]
        for prefetch in (*line[:1], *later[:_TRIES]):
            self._last = prefetch.serial
            self._first = next((one for one in line if one.phase is Phase.WAITING), None)
            raw = prefetch.raw[: prefetch.reach * self._tree.page_bytes]
            self._try(prefetch, self._tree.match(prefetch.root, raw))
        behind = self._transfers.behind(READ)
        for prefetch in self._open.values() if self._recompute.possible else ():
            if prefetch.phase in (Phase.ASKING, Phase.READING) and self._hopeless(prefetch, behind):
                if prefetch.reads:  # before storage answers, nothing is known to be there
                    self._counts["skipped_tokens_total{why=slow}"] += prefetch.gain
                self._leave(prefetch)

    def _hopeless(self, prefetch: Prefetch, behind: dict[Ticket, int]) -> bool:
        """Its remaining reads, or the lookup so far, take longer than computing.

        Args:
            behind: see :meth:`Transfers.behind`.
        """
        seconds: float | None = time.monotonic() - prefetch.begun
        if prefetch.reads:
            seconds = self._transfers.speeds[READ].seconds(behind[prefetch.reads[-1]])
        return self._recompute.beats(seconds, prefetch.gain)

    def _leave(self, prefetch: Prefetch) -> None:
        """Stop waiting; lanes skip reads that have not begun and that nobody else waits for."""
        prefetch.phase = Phase.DONE
        for ticket in prefetch.reads:
            ticket.abandoned |= not any(one.waits for one in self._waiters(ticket))

    def close(self, prefetch: Prefetch) -> None:
        """End a prefetch whose request was admitted or is gone. Idempotent."""
        if self._open.pop(prefetch.serial, None) is None:
            return
        if prefetch.waits:
            self._leave(prefetch)
        prefetch.phase = Phase.CLOSED
        for group, pages in prefetch.pinned:
            self._host.unpin(group, pages)
            self._share.give_back(group, pages)
        self._residency.unhold(prefetch.path)

    # --- read

    def _try(self, prefetch: Prefetch, path: Ids) -> None:
        """Start reading; if that raises, the request waits no longer."""
        with self._audit.guard(path):
            try:
                self._start(prefetch, path)
            except BaseException:
                prefetch.phase = Phase.DONE
                raise

    def _start(self, prefetch: Prefetch, path: Ids) -> None:
        """Read what memory lacks of ``[0, reach)``, once the host has room. If that is not worth
        it, read at most a few pages, for which no request waits."""
        abandoned = (read for read in self._transfers.on(READ) if read.abandoned)
        if prefetch.keys and any(read.overlaps(path) for read in abandoned):
            return  # wait for them: their lane may skip them, so they cannot be joined
        reach = prefetch.reach
        memory = self._in_memory(path, reach)
        missing = prefetch.found.mask[:, :reach] & ~memory.mask
        known = self._residency.present(path, self._table.states(DEVICE, path)).usable()
        prefetch.gain = (reach - known) * self._page_tokens
        skip = self._skip(prefetch.gain, self._wanted(reach, missing))
        if skip:
            self._counts[f"skipped_tokens_total{{why={skip}}}"] += prefetch.gain
            prefetch.reach = reach = min(reach, known + self._trial(skip))
            path, missing = path[:reach], missing[:, :reach].copy()
            missing[:, :known] = False
        pages = self._reserve(prefetch, path, missing, waits=not skip)
        if pages is not None:
            self._read(prefetch, pages, missing)
            prefetch.phase = Phase.READING if prefetch.reads and not skip else Phase.DONE

    def _reserve(self, prefetch: Prefetch, path: Ids, missing: Mask, waits: bool) -> int | None:
        """Pin what the host has of ``path`` and make room for what is missing; returns for how many
        pages there is room.

        None, if it ``waits`` in line: its share of host memory is not free. A prefetch that wants
        more than the whole share gets what there is once no other holds any."""
        # If another has been first in line for long, this one may pin nothing, not even shared
        # pages, or the first would wait for it too.
        first = self._first if self._first and self._first.phase is Phase.WAITING else prefetch
        passes = first is not prefetch and time.monotonic() - first.begun > _PATIENCE
        left = [0] * len(self._groups) if passes else self._share.left
        wanted = self._wanted(prefetch.reach, missing)
        here = self._table.states(HOST, path) == LIVE
        here &= self._residency.rule.needed(prefetch.reach)[:, : len(path)]
        live = [path[row] for row in here]
        more = [self._share.loose(g, pages) for g, pages in enumerate(live)]
        full = any(n + m > most for n, m, most in zip(wanted, more, left, strict=True))
        if waits and full and any(wanted) and not self._share.empty:
            return None
        self._table.hold(path)
        prefetch.path = path
        loose = []
        for g, pages in enumerate(live):
            if more[g] <= left[g] and not passes:
                self._pin(prefetch, g, pages)
                left[g] -= more[g]
            else:  # beyond its share: pinned only while room is made
                self._host.pin(g, pages)
                loose.append((g, pages))
        room = [
            min(most, self._residency.make_room(self._host, g, min(most, count)))
            for g, (most, count) in enumerate(zip(left, wanted, strict=True))
        ]
        for g, pages in loose:  # not before: to make room must not end the path itself
            self._host.unpin(g, pages)
        reach = most = prefetch.reach
        for g in self._residency.rule.whole:  # they alone allow no more: no need to try it
            most = min(most, int(missing[g].cumsum().searchsorted(room[g], side="right")))
        while reach and any(n > m for n, m in zip(self._wanted(reach, missing), room, strict=True)):
            reach = prefetch.found.first(min(reach - 1, most)).usable()
        return reach

    def _read(self, prefetch: Prefetch, pages: int, missing: Mask) -> None:
        """Read what ``[0, pages)`` lacks; the host has room."""
        size, known = self._tree.page_bytes, len(prefetch.path)
        fresh = self._residency.add(
            prefetch.root,
            prefetch.path,
            prefetch.raw[known * size : pages * size],
            prefetch.keys[known:pages],
        )
        self._table.hold(fresh)
        prefetch.path = np.concatenate((prefetch.path, fresh))
        for other in self._flights.filling(READ, prefetch.path):  # before its own are there
            if not other.abandoned:
                self._wait(prefetch, other)
        wanted = missing[:, :pages] & self._residency.rule.needed(pages)
        lacking = [np.flatnonzero(row) for row in wanted]
        for first, end in self._parts(pages, lacking):
            moves = []
            for g, at in enumerate(lacking):
                part = at[slice(*np.searchsorted(at, (first, end)))]
                if len(part):
                    names = [prefetch.names[g][i] for i in part.tolist()]
                    moves.append(Move(g, prefetch.path[part], names))
                    self._share.keep(g, prefetch.path[part])
            self._wait(prefetch, self._flights.depart(READ, moves, self._landed))

    def _landed(self, ticket: Ticket) -> None:
        """Land a read: every prefetch that waits pins its pages."""
        waiters = self._waiters(ticket)
        with self._flights.landing(ticket):
            for move in ticket.moves:
                if not ticket.abandoned:
                    self._counts["missed_reads_total"] += len(move.lost)
                at, ids = self._table.depth[move.arrived], move.arrived
                for prefetch in waiters:
                    inside = at < len(prefetch.path)
                    mine = ids[inside]
                    self._pin(prefetch, move.group, mine[prefetch.path[at[inside]] == mine])
                self._share.give_back(move.group, move.pages)
        for prefetch in waiters:
            prefetch.reads.remove(ticket)
            if prefetch.phase is Phase.READING and not prefetch.reads:
                prefetch.phase = Phase.DONE

    def _parts(self, pages: int, lacking: list[NDArray[np.intp]]) -> Iterator[tuple[int, int]]:
        """Split ``[0, pages)`` into parts, one ticket and short store call each, with all groups of
        a page: pages are of use as they land, and a slow store shows early."""
        totals = np.zeros((2, pages + 1), dtype=np.int64)  # bytes and records before each page
        for group, at in zip(self._groups, lacking, strict=True):
            totals[:, at + 1] += [[group.record_bytes], [1]]
        sizes, counts = totals.cumsum(axis=1)
        most, start = self._transfers.read_bytes(int(sizes[-1])), 0
        while counts[start] < counts[-1]:
            fit = sizes.searchsorted(sizes[start] + most, side="right") - 1
            few = counts.searchsorted(counts[start] + CALL_RECORDS, side="right") - 1
            end = max(start + 1, int(min(fit, few)))
            if counts[start] < counts[end]:
                yield start, end
            start = end

    # --- helpers

    def _skip(self, gain: int, wanted: list[int]) -> str:
        """Why it does not pay to read ``wanted`` pages of each group for ``gain`` tokens, or ""."""
        if gain < self._least:
            return "short"
        return "slow" if self._recompute.beats_moving(READ, wanted, gain) else ""

    def _trial(self, skip: str) -> int:
        """Pages to read all the same, now and then, to measure storage again."""
        if skip == "short" or not self._transfers.speeds[READ].stale:
            return 0
        return max(1, _TRIAL_BYTES // sum(group.record_bytes for group in self._groups))

    def _waiters(self, ticket: Ticket) -> list[Prefetch]:
        """Open prefetches that wait for a read."""
        return [one for one in self._open.values() if ticket in one.reads]

    def _wait(self, prefetch: Prefetch, ticket: Ticket) -> None:
        prefetch.reads.append(ticket)
        prefetch.fetched = np.concatenate((prefetch.fetched, *ticket.touched()))

    def _pin(self, prefetch: Prefetch, group: int, pages: Ids) -> None:
        self._host.pin(group, pages)
        self._share.keep(group, pages)
        prefetch.pinned.append((group, pages))

    def _in_memory(self, path: Ids, pages: int) -> Presence:
        """Of ``pages`` pages that begin with ``path``: LIVE or WRITING in a memory tier."""
        device, host = (self._table.states(tier, path) for tier in (DEVICE, HOST))
        mask = np.zeros((len(self._groups), pages), dtype=bool)
        mask[:, : len(path)] = (device | host) != ABSENT
        for read in self._transfers.on(READ):
            for move in read.moves if read.abandoned else ():  # its lane may skip it
                mask[move.group, : len(path)] &= ~np.isin(path, move.pages)
        return Presence(self._residency.rule, mask)

    def _wanted(self, pages: int, missing: Mask) -> list[int]:
        """By group, how many pages ``[0, pages)`` needs and lacks."""
        lacks = missing[:, :pages] & self._residency.rule.needed(pages)
        counts: list[int] = np.count_nonzero(lacks, axis=1).tolist()
        return counts
