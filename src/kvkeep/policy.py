"""Eviction orders, and the settings that operators choose between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .pages import PageTable
from .schema import ConfigError

Ids = NDArray[np.int32]
Order = Callable[[PageTable, int, Ids], NDArray[np.int64]]
"""``order(table, group, ids) -> [len(ids)]`` int64: the lowest is evicted first. An ancestor must
never be lower than its descendants, for groups that need every page."""

_DEPTH_BITS = 24


def lru(table: PageTable, group: int, ids: Ids) -> NDArray[np.int64]:
    """Least recently used first, deeper first among equals.

    Admit and commit stamp whole paths with one clock value, so an ancestor is never older than
    its descendant: this order *is* leaf-first, without any set of leaves.
    """
    used: NDArray[np.int64] = table.used[group, ids] << _DEPTH_BITS
    return used + ((1 << _DEPTH_BITS) - 1 - table.depth[ids])


@dataclass(frozen=True, slots=True)
class Policy:
    """What the cache does where there is a choice.

    Raises:
        ConfigError: a name is not known.
    """

    eviction: Order = lru
    prefetch: str = "wait_complete"  # a request waits for its prefetch
    write: str = "write_through"  # every committed page goes to host and storage
    missing: str = "strict"  # "strict": an absent group shortens the hit; "lenient": serve without
    # optional groups; "stale": as lenient, over slots with somebody else's bytes (a control)
    snapshot_pages: int | None = None  # interim snapshots of running state every so many pages
    prefetch_share: float = 0.5  # of host slots that prefetches may hold
    stall_seconds: float = 10.0  # a storage call that takes longer counts as a failure

    def __post_init__(self) -> None:
        if not 0 < self.prefetch_share <= 1 or self.stall_seconds <= 0:
            raise ConfigError("prefetch_share must be in (0, 1], stall_seconds above 0")
        for name, known in (
            ("prefetch", ("wait_complete",)),
            ("write", ("write_through",)),
            ("missing", ("strict", "lenient", "stale")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} policy must be one of {', '.join(known)}")
