"""Prefetch: storage to host, from a request's arrival until it is scheduled.

A request asks storage which of its pages are there, waits in line for host memory, and reads what
is missing in memory, if that is long enough and faster than to compute it. Pages that are on their
way already are joined, not read again. What a prefetch brought, or found on the host, stays pinned
there until the request is admitted or gone.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from .lease import Prefetch
from .pages import HOST
from .policy import Policy
from .recompute import Recompute
from .residency import Residency
from .schema import NO_IDS, NO_SLOTS, Ids, Residence, chain_keys, root_key
from .transfer import PROBE, READ, Move, Ticket, Transfers

_TRIAL_BYTES = 1 << 20  # to read of a store that was slow when last seen


class Prefetcher:
    """All prefetches under way. The scheduler's thread only."""

    def __init__(
        self,
        residency: Residency,
        transfers: Transfers,
        recompute: Recompute,
        policy: Policy,
        counts: Counter[str],
    ) -> None:
        self._residency, self._transfers, self._recompute = residency, transfers, recompute
        self._policy, self._counts = policy, counts
        self._claimed = [0] * len(residency.schema.groups)  # host slots that prefetches keep
        self.open: dict[int, Prefetch] = {}

    def begin(self, raw: bytes, namespace: str) -> Prefetch:
        """Ask storage for what memory lacks of a prompt's whole pages ``raw``."""
        prefetch = Prefetch(namespace, raw, claims=[0] * len(self._claimed))
        self.open[prefetch.serial] = prefetch
        pages = len(raw) // self._residency.tree.page_bytes
        path = self._residency.tree.match(namespace, raw)
        present = self._in_memory(path, pages)
        prefetch.present = present
        prefetch.reach = self._usable(present)
        prefetch.gain = (pages - prefetch.reach) * self._residency.schema.page_tokens
        if self._short(prefetch.gain) or not self._transfers.storage:
            self._start(prefetch)
            return prefetch
        keys = self._residency.table.keys(path)
        rest = memoryview(raw)[len(path) * self._residency.tree.page_bytes :]
        parent = keys[-1] if keys else root_key(namespace)
        keys += chain_keys(parent, rest, self._residency.schema.page_tokens)
        prefetch.keys = keys
        prefetch.names = [self._transfers.names(g, keys) for g in range(len(present))]
        moves = [Move(g, NO_IDS, NO_SLOTS, NO_SLOTS, mine) for g, mine in enumerate(prefetch.names)]
        self._transfers.submit(Ticket(PROBE, moves, [prefetch], present))
        return prefetch

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
            if prefetch.done:
                continue
            if prefetch.queued:
                self._start(prefetch)
            elif self._recompute.beats(self._left(prefetch), prefetch.gain):
                self._give_up(prefetch)

    def _left(self, prefetch: Prefetch) -> float | None:
        """Seconds that its reads still take; of a question to storage, as many as it took yet."""
        if prefetch.reads:
            return self._transfers.seconds(READ, last=prefetch.reads[-1])
        return time.monotonic() - prefetch.begun

    def _give_up(self, prefetch: Prefetch) -> None:
        """Do not wait for it. Reads end early unless somebody else waits for them; what has come
        by then is there for others."""
        self._counts["skipped_tokens_total{why=slow}"] += prefetch.gain
        prefetch.done = True
        for ticket in prefetch.reads:
            ticket.abandoned |= all(other.done for other in ticket.waiters)

    def read(self, ticket: Ticket) -> None:
        """A storage-to-host ticket came back: pages that landed are there for everybody."""
        residency, table = self._residency, self._residency.table
        for move in ticket.moves:
            landed = move.pages[move.landed]
            residency.host.publish(move.group, landed)
            table.stored[move.group, landed] = True
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
        prefetch.closed = prefetch.done = True
        del self.open[prefetch.serial]
        for group, count in enumerate(prefetch.claims):
            self._claimed[group] -= count
        for group, pages in prefetch.pinned:
            self._residency.host.unpin(group, pages)
        self._residency.unhold(prefetch.path)

    def _start(self, prefetch: Prefetch) -> None:
        """Reserve host slots for what ``[0, reach)`` lacks in memory, and read it; of what is not
        worth it at most a little, for which nobody waits."""
        residency, table = self._residency, self._residency.table
        raw = prefetch.raw[: prefetch.reach * residency.tree.page_bytes]
        path = residency.tree.match(prefetch.namespace, raw)
        missing = [
            there[: prefetch.reach] & ~has
            for there, has in zip(
                prefetch.present, self._in_memory(path, prefetch.reach), strict=True
            )
        ]
        known = self._usable([self._pad(has, prefetch.reach) for has in residency.present(path)])
        prefetch.gain = (prefetch.reach - known) * residency.schema.page_tokens
        if not self._worth(prefetch.gain, self._wanted(prefetch.reach, missing)):
            prefetch.done = True
            prefetch.reach = min(prefetch.reach, known + self._trial(prefetch.gain))
            path = path[: prefetch.reach]
            missing = [lacks[: prefetch.reach] for lacks in missing]
            for lacks in missing:
                lacks[:known] = False
        share = [int(self._policy.prefetch_share * n) for n in residency.host.capacity]
        left = [cap - used for cap, used in zip(share, self._claimed, strict=True)]
        if any(self._claimed) and not self._fits(prefetch.reach, missing, left):
            return  # until requests before it were scheduled
        prefetch.queued = False
        table.hold(path)
        prefetch.path = path
        loose = []
        for group in range(len(missing)):
            needed = self._needed(group, prefetch.reach)[: len(path)]
            live = path[table.where(HOST, group, path, Residence.LIVE) & needed]
            if len(live) <= left[group]:
                self._pin(prefetch, group, live)
                self._claim(prefetch, group, len(live))
                left[group] -= len(live)
            else:  # to keep more would keep everybody else from the host
                residency.host.pin(group, live)
                loose.append((group, live))
        room = [
            min(cap, residency.make_room(residency.host, g, min(cap, count)))
            for g, (cap, count) in enumerate(
                zip(left, self._wanted(prefetch.reach, missing), strict=True)
            )
        ]
        for group, live in loose:  # not before: to make room must not end the path itself
            residency.host.unpin(group, live)
        pages = prefetch.reach
        while pages and not self._fits(pages, missing, room):
            pages = self._usable([has[: pages - 1] for has in prefetch.present])
        self._read(prefetch, pages, missing)

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
        for other in self._transfers.pending:  # joined before this one's own ticket is there
            if other.kind == READ and other.touches(prefetch.path):
                self._wait(prefetch, other)
        moves = []
        for group, lacks in enumerate(missing):
            at = np.flatnonzero(lacks[:pages] & self._needed(group, pages))
            if len(at):
                ids = prefetch.path[at]
                slots = residency.host.reserve(group, len(ids))
                assert slots is not None  # room was made, and nobody else ran
                residency.host.adopt(group, ids, slots, Residence.WRITING)
                table.hold(ids)
                self._claim(prefetch, group, len(ids))
                names = [prefetch.names[group][i] for i in at.tolist()]
                moves.append(Move(group, ids, NO_SLOTS, slots, names))
        if moves:
            self._wait(prefetch, self._transfers.submit(Ticket(READ, moves)))
        prefetch.done |= not prefetch.reads

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
        if self._short(gain) or not self._transfers.speeds[READ].retry():
            return 0
        page = sum(group.record_bytes for group in self._residency.schema.groups)
        return max(1, _TRIAL_BYTES // page)

    def _claim(self, prefetch: Prefetch, group: int, slots: int) -> None:
        self._claimed[group] += slots
        prefetch.claims[group] += slots

    def _wait(self, prefetch: Prefetch, ticket: Ticket) -> None:
        ticket.waiters.append(prefetch)
        ticket.abandoned &= prefetch.done
        prefetch.reads.append(ticket)
        coming = (move.pages for move in ticket.moves)
        prefetch.fetched = np.concatenate((prefetch.fetched, *coming))

    def _pin(self, prefetch: Prefetch, group: int, pages: Ids) -> None:
        self._residency.host.pin(group, pages)
        prefetch.pinned.append((group, pages))

    def _in_memory(self, path: Ids, pages: int) -> list[NDArray[np.bool_]]:
        """Per group ``[pages]``: in a memory tier or on the way there."""
        table = self._residency.table
        return [self._pad(table.resident(g, path), pages) for g in range(table.groups)]

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
