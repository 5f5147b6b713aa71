"""Eviction orders, and the settings that operators choose between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema import Ids
from ..settings import MEMORY, STORAGE, check, setting
from .pages import PageTable

Order = Callable[[PageTable, int, Ids | slice], NDArray[np.int64]]
"""``order(table, group, ids)``: int64 keys of ids or of a slice; the lowest is evicted first. In
groups that need every page, an ancestor's key must not be below its descendants'."""

_DEPTH_BITS, _RANK_BITS = 20, 8
"""Of 63 bits: prompts of 2^20 pages; 35 are left for the clock, a year of 1,000 ticks/s."""


def lru(table: PageTable, group: int, ids: Ids | slice) -> NDArray[np.int64]:
    """Least recently used first, deeper first among equals.

    Admit and commit stamp whole paths with one clock value, so an ancestor is never older than its
    descendant: the order is leaf-first without a set of leaves."""
    used: NDArray[np.int64] = table.used[table.clocks[group]][ids] << _DEPTH_BITS
    return used + ((1 << _DEPTH_BITS) - 1 - table.depth[ids])


def lfu(table: PageTable, group: int, ids: Ids | slice) -> NDArray[np.int64]:
    """Least often hit first, then as :func:`lru`. Hits count up to 255 and do not decay.

    A hit counts for its whole path, so an ancestor's count is the maximum over its subtree."""
    return _ranked(np.minimum(table.reused[ids], (1 << _RANK_BITS) - 1), table, group, ids)


def priority(table: PageTable, group: int, ids: Ids | slice) -> NDArray[np.int64]:
    """Lowest request priority first, then as :func:`lru`. A request raises the priority of its
    whole path, so an ancestor's is the maximum over its subtree."""
    return _ranked(table.priority[ids], table, group, ids)


def _ranked(
    rank: NDArray[Any], table: PageTable, group: int, ids: Ids | slice
) -> NDArray[np.int64]:
    """By ``rank`` in [0, 255], then as :func:`lru`."""
    high: NDArray[np.int64] = rank.astype(np.int64) << (63 - _RANK_BITS)
    return high + lru(table, group, ids)


EVICTION: dict[str, Order] = {"lru": lru, "lfu": lfu, "priority": priority}
"""Eviction orders by name. To add one, put an :data:`Order` here before making a cache; it may read
any column of the table. Columns that change for whole paths are leaf-first by themselves; for
others the order must take the maximum over a page and its descendants."""

WRITE = ("write_through", "write_through_selective", "write_back")


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the cache; raises ConfigError for a value that is not allowed.

    Under write_back, a page is on the device or the host, not both. When a prefetch times out, its
    reads in flight finish for others; reads that have not begun are skipped."""

    eviction: str = setting(
        "lru", MEMORY, "What goes first: the least recently used, the least often hit, or pages of "
        "the lowest priority.", "--eviction-policy", "--eviction", "--radix-eviction-policy",
        choices=EVICTION,
    )  # fmt: skip
    prefetch: str = setting(
        "wait_complete", STORAGE, "What a request waits for: all that storage has; nothing, so it "
        "takes what came while it was in line; or all, but only so long.",
        "--hicache-storage-prefetch-policy", choices=("wait_complete", "best_effort", "timeout"),
    )  # fmt: skip
    prefetch_seconds: float = setting(
        1.0, STORAGE, "Seconds that the timeout policy waits at most, ...",
        "--prefetch-timeout-base", least=0,
    )  # fmt: skip
    prefetch_seconds_per_1k: float = setting(
        0.25, STORAGE, "... and so many more per 1,000 tokens of the prompt.",
        "--prefetch-timeout-per-1k", least=0,
    )  # fmt: skip
    prefetch_min_tokens: int = setting(
        256, STORAGE, "A shorter part of a prompt is not worth a read from storage.", least=0
    )
    recompute: str = setting(
        "auto", STORAGE, "What happens to state that is slower to load than to recompute, by "
        "measured speeds: auto recomputes it, never loads it all the same.",
        "--recompute-policy", choices=("auto", "never"),
    )  # fmt: skip
    write: str = setting(
        "write_through", STORAGE, "When pages go down a tier: as soon as they are computed; when "
        "they are hit again; or when the device evicts them.",
        "--hicache-write-policy", "--write-policy", choices=WRITE,
    )  # fmt: skip
    write_hits: int = setting(
        2, STORAGE, "Hits of a page until write_through_selective takes it down.",
        "--write-through-threshold", least=1,
    )  # fmt: skip
    write_ahead: float = setting(
        0.02, STORAGE, "Share of device slots that write_back keeps free by evicting early.",
        "--write-back-ahead", least=0, below=1,
    )  # fmt: skip
    missing: str = setting(
        "strict", MEMORY, "Without state that is not required: strict shortens the hit; lenient "
        "serves without it; stale reads what lies there, as a control for measurements.",
        "--missing-policy", choices=("strict", "lenient", "stale"),
    )  # fmt: skip
    snapshot_pages: int | None = setting(
        None, MEMORY, "Keep recurrent state every so many pages too, not only where prompts end.",
        least=1,
    )  # fmt: skip
    prefetch_share: float = setting(
        0.5, STORAGE, "Share of host memory that prefetches may hold.", "--prefetch-host-share",
        above=0, most=1,
    )  # fmt: skip
    stall_seconds: float = setting(
        10.0, STORAGE, "A storage call that takes longer counts as a failure.",
        "--storage-stall-seconds", above=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)

    @property
    def order(self) -> Order:
        """The eviction order by name."""
        return EVICTION[self.eviction]
