"""Lookups find which records of a prompt storage has, with as few probes as possible."""

import pytest
from real_lanes import Gate
from schemas import FOUR, P

from kvkeep.core import storage as storage_room
from kvkeep.schema import Identity, Schema


def calls_of(monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    monkeypatch.setattr(storage_room, "CALL_RECORDS", records)


def test_a_probe_goes_on_to_the_first_gap(bench) -> None:
    """Groups that need every page are probed together; other groups up to their first gap."""
    b = bench(schema=Schema(Identity("m"), P, FOUR.groups[:2]))
    b.store.records = dict.fromkeys(b.names(0, 0, 1, 3) + b.names(1, 0, 1, 2, 3, 4), 1)
    lookup = b.lookup([False] * 5, [False] * 5)
    b.landed(1)
    assert lookup.found.mask[0][:3].tolist() == [True, True, False]
    assert lookup.found.mask[1].tolist() == [True, True, False, False, False]


def test_what_a_hit_may_do_without_ends_no_probe(bench, monkeypatch) -> None:
    calls_of(monkeypatch, 2)
    b = bench(schema=Schema(Identity("m"), P, FOUR.groups[::3]))
    b.store.records = dict.fromkeys(b.names(0, 0, 1, 2, 3) + b.names(1, 3), 1)
    lookup = b.lookup([False] * 5, [False] * 5)
    b.landed(1)
    assert lookup.found.mask[0].tolist() == [True] * 4 + [False]
    assert lookup.found.mask[1].tolist() == [False] * 3 + [True, False]


def test_a_probe_asks_only_for_what_is_missing(bench) -> None:
    store = Gate()
    store.open.set()
    b = bench(store)
    lookup = b.lookup([True, False, True], [True, True, True])
    b.landed(1)
    assert store.calls[:1] == [1]
    assert lookup.found.mask[0].tolist() == [True, False, True]
    assert lookup.found.mask[1].tolist() == [True, True, True]


def test_a_long_probe_stops_at_a_gap(bench, monkeypatch) -> None:
    calls_of(monkeypatch, 4)
    store = Gate()
    store.open.set()
    b = bench(store)
    store.records = dict.fromkeys(b.names(0, *range(5)) + b.names(1, *range(9)), 1)
    b.lookup([False] * 100, [False] * 100)
    b.landed(1)
    assert store.calls == [4, 4] * 2
