"""Eviction orders, and the settings that operators choose between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema import ConfigError, Ids
from .pages import PageTable

Order = Callable[[PageTable, int, Ids | slice], NDArray[np.int64]]
"""``order(table, group, ids)``: int64 keys of these ids, or of all in a slice; the lowest goes
first. An ancestor must never be lower than its descendants, for groups that need every page."""

_DEPTH_BITS, _RANK_BITS = 20, 8
"""Of 63: prompts have up to a million pages; the clock has 35, a year of 1,000 ticks a second."""


def lru(table: PageTable, group: int, ids: Ids | slice) -> NDArray[np.int64]:
    """Least recently used first, deeper first among equals.

    Admit and commit stamp whole paths with one clock value, so an ancestor is never older than
    its descendant: this order *is* leaf-first, without any set of leaves.
    """
    used: NDArray[np.int64] = table.used[table.clocks[group]][ids] << _DEPTH_BITS
    return used + ((1 << _DEPTH_BITS) - 1 - table.depth[ids])


def lfu(table: PageTable, group: int, ids: Ids | slice) -> NDArray[np.int64]:
    """Least often hit first, then as :func:`lru`. Hits count up to 255, and are never forgotten
    while the page is there.

    A hit counts for its whole path, so an ancestor's count is the maximum over all below it.
    """
    return _ranked(np.minimum(table.reused[ids], (1 << _RANK_BITS) - 1), table, group, ids)


def priority(table: PageTable, group: int, ids: Ids | slice) -> NDArray[np.int64]:
    """Lowest priority of a request first, then as :func:`lru`.

    A page has the highest priority of all requests whose path it was on, so an ancestor's is the
    maximum over all below it.
    """
    return _ranked(table.priority[ids], table, group, ids)


def _ranked(
    rank: NDArray[Any], table: PageTable, group: int, ids: Ids | slice
) -> NDArray[np.int64]:
    """By ``rank`` in [0, 255], then as :func:`lru`."""
    high: NDArray[np.int64] = rank.astype(np.int64) << (63 - _RANK_BITS)
    return high + lru(table, group, ids)


EVICTION: dict[str, Order] = {"lru": lru, "lfu": lfu, "priority": priority}
"""Eviction orders by name. To add one, put a function of type :data:`Order` here before the cache
is made; it may read any column of the table. What is counted for whole paths at once is leaf-first
by itself; what is not must take the maximum over a page and its descendants."""


def eviction_order(name: str) -> Order:
    """The order of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in EVICTION:
        raise ConfigError(f"eviction must be one of {', '.join(EVICTION)}, not {name!r}")
    return EVICTION[name]


WRITE = ("write_through", "write_through_selective", "write_back")
"""When pages go down a tier: as soon as computed; when hit ``Policy.write_hits`` times; or when
the device evicts them, which keeps the memory tiers exclusive."""

PREFETCH = ("wait_complete", "best_effort", "timeout")
"""What a request waits for: all that storage has; nothing, it takes what came while it was in line
for other reasons; or all, but only so long. A read that is under way then ends for others; one that
has not begun is not made."""

RECOMPUTE = ("auto", "never")
"""Whether to compute what would take longer to load, by the speeds that were measured."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the cache does where there is a choice.

    Raises:
        ConfigError: a name is not known.
    """

    eviction: Order = lru
    prefetch: str = "wait_complete"  # one of PREFETCH
    prefetch_seconds: float = 1.0  # that timeout waits at most, ...
    prefetch_seconds_per_1k: float = 0.25  # ... and so much more per 1,000 tokens of the prompt
    prefetch_min_tokens: int = 256  # a shorter part of a prompt is not read from storage
    recompute: str = "auto"  # one of RECOMPUTE
    write: str = "write_through"  # one of WRITE
    write_hits: int = 2  # of a page, until write_through_selective takes it down
    write_ahead: float = 0.02  # of device slots: what write_back keeps free, evicting early
    missing: str = "strict"  # "strict": an absent group shortens the hit; "lenient": serve without
    # optional groups; "stale": as lenient, over slots with somebody else's bytes (a control)
    snapshot_pages: int | None = None  # interim snapshots of running state every so many pages
    prefetch_share: float = 0.5  # of host slots that prefetches may hold
    stall_seconds: float = 10.0  # a storage call that takes longer counts as a failure

    @property
    def strict(self) -> bool:
        """An absent group shortens the hit, also one that is not required."""
        return self.missing == "strict"

    def __post_init__(self) -> None:
        if not 0 < self.prefetch_share <= 1 or self.stall_seconds <= 0:
            raise ConfigError("prefetch_share must be in (0, 1], stall_seconds above 0")
        if min(self.prefetch_seconds, self.prefetch_seconds_per_1k) < 0:
            raise ConfigError("prefetch_seconds and prefetch_seconds_per_1k must be at least 0")
        if self.prefetch_min_tokens < 0:
            raise ConfigError("prefetch_min_tokens must be at least 0")
        if self.write_hits < 1 or not 0 <= self.write_ahead < 1:
            raise ConfigError("write_hits must be at least 1, write_ahead in [0, 1)")
        for name, known in (
            ("prefetch", PREFETCH),
            ("recompute", RECOMPUTE),
            ("write", WRITE),
            ("missing", ("strict", "lenient", "stale")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} policy must be one of {', '.join(known)}")
