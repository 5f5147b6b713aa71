"""Touches: hits are reported to storage, and nothing waits for that."""

from __future__ import annotations

import pytest
from real_lanes import Bench, Gate, until
from schemas import TWO
from test_policies import A, serve, world_of

from kvkeep.core import storage as storage_room
from kvkeep.core import touches as touches_room
from kvkeep.core.cache import Cache
from kvkeep.core.policy import Policy
from kvkeep.core.touches import Touches
from kvkeep.testing.fakes import DictStore, TruthMedia


class Calls(DictStore):
    """A store that notes each touch call."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list] = []

    def touch(self, keys) -> None:
        self.told.append(list(keys))


class Verbs(DictStore):
    """A store that notes which questions it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.verbs: list[str] = []

    def probe(self, keys) -> list[bool]:
        self.verbs.append("probe")
        return super().probe(keys)

    def touch(self, keys) -> None:
        self.verbs.append("touch")


def calls_of(monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    for room in (touches_room, storage_room):
        monkeypatch.setattr(room, "CALL_RECORDS", records)


def tell_all(b: Bench, touches: Touches) -> list:
    """Send until every hit is reported; returns all keys in the order of their calls."""

    def told() -> bool:
        for job in b.transfers.landed():
            job.finish()
        touches.send()
        return touches.idle

    until(told)
    return [key for keys in b.store.told for key in keys]


def test_ancestors_are_touched_last(bench) -> None:
    """A page's groups are adjacent, and each group has only what the hit needed."""
    b = bench(Calls())
    touches = Touches(b.transfers)
    touches.add(b.keys(0, 1, 2), [0, 2])
    g0, g1 = b.names(0, 0, 1, 2), b.names(1, 0, 1, 2)
    assert tell_all(b, touches) == [g0[2], g1[2], g0[1], g0[0]]


def test_hits_that_wait_are_merged(bench) -> None:
    """Each record is reported once, in the place of its newest hit."""
    b = bench(Calls())
    touches = Touches(b.transfers)
    for path in ((0, 1, 2), (0, 3), (0, 1, 2), (7,), (0, 3)):
        touches.add(b.keys(*path), [0, 2])
    told = [key for key in tell_all(b, touches) if key in b.names(0, *range(8))]
    assert told == b.names(0, 2, 1, 7, 3, 0)
    assert len(b.store.told) == 1


def test_calls_are_of_bounded_size_and_one_at_a_time(bench, monkeypatch) -> None:
    calls_of(monkeypatch, 4)
    b = bench(store := Gate())
    touches = Touches(b.transfers)
    for path in ((0, 1, 2, 3), (5, 6)):
        touches.add(b.keys(*path), [0, 0])
    for _ in range(9):
        touches.send()
    until(lambda: store.calls)
    assert b.transfers.inquiries == 1
    assert store.calls == [4]
    touches.add(b.keys(8), [0, 0])
    for _ in range(9):
        touches.send()
    assert b.transfers.inquiries == 1
    assert not touches.idle
    store.open.set()

    def told() -> bool:
        for job in b.transfers.landed():
            job.finish()
        touches.send()
        assert b.transfers.inquiries <= 1
        return touches.idle

    until(told)
    assert store.calls == [4, 4, 4, 2], "those that came meanwhile are told of then"


def test_a_question_waits_for_one_call_of_touches(bench, monkeypatch) -> None:
    """However many hits are to be reported."""
    calls_of(monkeypatch, 4)
    b = bench(Verbs())
    touches = Touches(b.transfers)
    touches.add(b.keys(*range(8)), [0, 0])
    touches.send()
    b.lookup([False], [False])
    b.landed(2)
    assert b.store.verbs == ["touch", "probe"]


def test_the_oldest_hits_are_dropped(bench, monkeypatch) -> None:
    monkeypatch.setattr(touches_room, "_MOST_PAGES", 6)
    b = bench(Calls())
    touches = Touches(b.transfers)
    for first in range(0, 300, 3):
        touches.add(b.keys(first, first + 1, first + 2), [0, 9])
    assert tell_all(b, touches) == b.names(0, 296, 295, 294, 299, 298, 297)


def test_what_waits_is_bounded_while_a_call_is_under_way(bench, monkeypatch) -> None:
    monkeypatch.setattr(touches_room, "_MOST_PAGES", 6)
    calls_of(monkeypatch, 2)
    b = bench(store := Gate())
    touches = Touches(b.transfers)
    for turn in range(200):
        touches.add(b.keys(turn, turn + 200, turn + 400), [0, 0])
        touches.send()
    until(lambda: store.calls)
    assert b.transfers.inquiries == 1
    assert len(touches._hits) <= 2
    assert len(touches._merged) <= 6 * 2, "what a page has, by group"


def test_one_long_hit_is_told_of_whatever_the_bound(bench, monkeypatch) -> None:
    monkeypatch.setattr(touches_room, "_MOST_PAGES", 2)
    b = bench(Calls())
    touches = Touches(b.transfers)
    touches.add(b.keys(*range(5)), [0, 9])
    assert tell_all(b, touches) == b.names(0, 4, 3, 2, 1, 0)


def test_what_storage_cannot_hear_is_forgotten(bench) -> None:
    b = bench(Calls())
    touches = Touches(b.transfers)
    touches.add(b.keys(1), [0, 0])
    b.transfers.storage.breaker.failure(trip=True)
    touches.send()
    assert touches.idle
    b.transfers.storage.breaker.success()
    touches.send()
    assert not tell_all(b, touches)


def test_a_touch_that_raises_is_not_the_last(bench) -> None:
    b = bench(Calls())
    touches = Touches(b.transfers)
    good, b.store.touch = b.store.touch, None
    touches.add(b.keys(1), [0, 9])
    assert not tell_all(b, touches)
    assert b.transfers.faults["touch"] == 1
    b.store.touch = good
    touches.add(b.keys(2), [0, 9])
    assert tell_all(b, touches) == b.names(0, 2)


class SlowTouch(DictStore):
    """A store whose touches return only when the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def touch(self, keys) -> None:
        self.gate.touch(keys)


def test_a_write_does_not_wait_for_touches() -> None:
    """A new prompt is stored while hits keep coming and a touch never returns."""
    store = SlowTouch()
    w = world_of(Policy(), TWO, [16, 16], [16, 16])
    with Cache(TWO, [16, 16], [16, 16], store, w.settings(), TruthMedia([16] * 2, [16] * 2)) as c:

        def compute(tokens: list[int]) -> None:
            lease = c.admit(tokens, chunk=len(tokens))
            c.commit(lease, tokens)
            c.release(lease)
            c.tick()

        compute(A)
        compute(A)
        until(lambda: (c.tick(), store.gate.calls)[1])
        for _ in range(300):
            compute(A)
        assert c.transfers.inquiries == 1
        compute([8, 8, 7, 7, 6, 6, 9])
        until(lambda: (compute(A), len(store.records) == 12)[1])
        assert store.gate.calls == [6], "still the first call"
        assert c.transfers.inquiries == 1
        store.gate.open.set()
        assert c.drain(60.0)
    assert len(store.gate.calls) > 1


def test_a_hit_in_memory_is_told_of() -> None:
    w = world_of(Policy(), TWO, [8, 8], [8, 8])
    serve(w, A)
    w.store.touched.clear()
    again = serve(w, A)
    told = list(w.store.touched)
    assert {key.page for key in told} == {key.tobytes() for key in again.keys[:3]}
    assert len(told) == 6
    assert told[-1].page == told[-2].page == again.keys[0].tobytes()


def test_a_cache_is_not_idle_until_storage_knows_of_its_hits() -> None:
    w = world_of(Policy(), TWO, [8, 8], [8, 8])
    serve(w, A)
    request = w.arrive(A, ask=False)
    assert w.admit(request)
    w.release(request)
    assert not w.cache.idle
    w.settle()
    assert w.cache.idle
