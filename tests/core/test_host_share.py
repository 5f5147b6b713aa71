"""The share of host memory that prefetches may hold."""

from __future__ import annotations

import numpy as np
from schemas import TWO

from kvkeep.core.host_share import HostShare
from kvkeep.core.policy import lru
from kvkeep.core.residency import Residency


def share_of(*host: int) -> HostShare:
    """Half of these host slots."""
    return HostShare(Residency(TWO, [8, 8], list(host), lru), 0.5)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.intp)


def test_a_page_counts_once_however_many_keep_it() -> None:
    share = share_of(8, 8)
    share.keep(0, ids(0, 1))
    assert share.loose(0, ids(0, 1, 2)) == 1
    share.keep(0, ids(1, 2))
    assert share.left == [1, 4]
    share.give_back(0, ids(0, 1))
    assert share.left == [2, 4], "another keeps the second"
    assert share.loose(0, ids(0, 1, 2)) == 1
    share.give_back(0, ids(1, 2))
    assert share.empty
    share.keep(0, ids(0, 1))
    assert share.left == [2, 4]


def test_groups_have_shares_of_their_own() -> None:
    share = share_of(8, 4)
    share.keep(1, ids(0, 1))
    assert share.left == [4, 0]
    assert share.loose(0, ids(0, 1)) == 2
    share.keep(0, ids(0))
    assert share.left == [3, 0]


def test_a_page_table_that_grows_forgets_nobody() -> None:
    residency = Residency(TWO, [2000, 2000], [2000, 2000], lru)
    share = HostShare(residency, 0.5)
    share.keep(0, ids(0, 1))
    last = residency.table.allocate(ids(), residency.table.rows + 1, [])[-1:]
    share.keep(0, last)
    assert share.loose(0, ids(0, 1, 2, int(last[0]))) == 1
    share.give_back(0, ids(0, 1))
    assert share.left == [999, 1000]


def test_what_is_kept_can_be_counted_anew() -> None:
    share = share_of(8, 8)
    share.keep(0, ids(0, 1, 2))
    share.reset([(0, ids(2)), (0, ids(2)), (1, ids(2))])
    assert share.left == [3, 3]
    assert share.loose(0, ids(0, 1, 2)) == 2
    share.reset([])
    assert share.empty
