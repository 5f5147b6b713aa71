"""Prefetches: their share of the host, the size of their reads, and joined reads."""

from __future__ import annotations

import numpy as np
import pytest
from request import Request
from schemas import TWO, WRITING, P, group
from test_policies import serve, world_of
from world import World

from kvkeep.core import prefetch
from kvkeep.core.policy import Policy
from kvkeep.schema import Identity, InvariantError, Schema


def in_storage(*prompts: list[int], policy: str = "wait_complete") -> World:
    """A world with these prompts only in storage."""
    w = world_of(Policy(prefetch=policy), TWO, [64, 64], [16, 16])
    roomy = world_of(Policy(), TWO, [200, 200], [200, 200])
    for tokens in prompts:
        serve(roomy, tokens)
    w.store.records, w.names = roomy.store.records, roomy.names
    return w


def answered(w: World, tokens: list[int]) -> Request:
    """A request whose lookup was answered."""
    request = w.arrive(tokens)
    w.step("read", len(w.lanes["read"].queue) - 1)
    w.tick()
    return request


def taken(w: World) -> int:
    """Host slots of a group that prefetches hold."""
    return int(np.count_nonzero((w.table.state[1, 0] == WRITING) | (w.table.pins[1, 0] > 0)))


@pytest.mark.parametrize("waits", [True, False])
def test_the_share_holds_until_a_read_is_back(waits: bool) -> None:
    """Whether its request still waits or is gone."""
    prompts = [[token] * 17 for token in (1, 2, 3)]  # 8 pages each, the share
    w = in_storage(*prompts)
    for tokens in prompts:
        request = answered(w, tokens)
        if not waits:
            w.release(request)
        assert taken(w) == 8
    w.finish()


def test_who_joins_a_read_keeps_its_pages_within_the_share() -> None:
    first, second = [1] * 17, [2] * 17
    w = in_storage(first, second)
    one, two = answered(w, first), answered(w, first)
    w.settle()
    w.release(one)
    other = answered(w, second)
    w.settle()
    assert taken(w) == 8
    assert not w.cache.ready(other.prefetch)
    w.release(two)
    w.settle()
    assert w.admit(other)
    assert other.lease.pages == 8
    w.finish()


def test_a_prefetch_waits_for_room_for_all_of_it() -> None:
    """Its pages that are already on the host count too."""
    first, second = [1] * 9, [2] * 15  # 4 pages; 7, of which 3 are on the host
    w = in_storage(first, second)
    serve(w, second[:7])
    w.empty(0)
    one, two = answered(w, first), answered(w, second)
    w.settle()
    assert not w.cache.ready(two.prefetch)
    assert w.admit(one)
    w.settle()
    assert w.admit(two)
    assert two.lease.pages == 7
    w.finish()


def test_who_waits_long_lets_nobody_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = [1] * 25, [2] * 3  # 12 pages, more than the share; one, on the host
    w = in_storage(long)
    serve(w, short)
    w.empty(0)
    before, waiting = w.arrive(short), answered(w, long)
    w.settle()
    after = w.arrive(short)
    assert before.prefetch.pinned
    assert after.prefetch.pinned
    w.release(after)
    monkeypatch.setattr(prefetch, "_PATIENCE", -1.0)
    after = w.arrive(short)
    assert w.cache.ready(after.prefetch)
    w.release(before)
    w.settle()
    assert w.cache.ready(waiting.prefetch)
    w.release(after)
    w.finish()


def test_what_has_come_is_of_use_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is read in parts of a few pages each, with all their groups."""
    tokens = [1] * 17
    w = in_storage(tokens, policy="timeout")
    size = sum(group.record_bytes for group in TWO.groups)
    monkeypatch.setattr(w.cache.transfers, "read_bytes", lambda total: 3 * size)
    request = answered(w, tokens)
    queue = w.lanes["read"].queue
    assert [[len(move.pages) for move in ticket.moves] for ticket in queue] == [[3, 3]] * 2 + [
        [2, 2]
    ]
    w.step("read")
    w.tick()
    assert not w.cache.ready(request.prefetch)
    request.prefetch.begun -= 2.0
    assert w.admit(request)
    assert request.lease.pages == 3
    w.settle()
    assert len(w.store.reads) == 6, "the rest is read, and nobody waits for it"
    w.finish()


def test_a_read_is_one_call_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CALL_RECORDS", 5)
    w = in_storage([1] * 17)
    answered(w, [1] * 17)
    records = [sum(len(m.pages) for m in t.moves) for t in w.lanes["read"].queue]
    assert records == [4, 4, 4, 4]


def test_a_prefetch_that_breaks_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    w = in_storage([1] * 9)
    request = w.arrive([1] * 9)

    def raises(*_: object) -> None:
        raise InvariantError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(w.cache.residency.host, "adopt", raises)
        w.settle()
        other = w.arrive([2] * 9)
    assert w.cache.counts["invariant_errors_total"] == 1
    assert w.cache.ready(request.prefetch)
    w.settle()
    w.cache.check()
    for each in (request, other):
        assert w.admit(each)


def test_nobody_waits_for_storage_that_goes_out() -> None:
    """Whether it is asked or read; what comes of that later is there for others."""
    w = in_storage([1] * 9, [2] * 9)
    reading = answered(w, [1] * 9)
    asking = w.arrive([2] * 9)
    for request in (reading, asking):
        assert not w.cache.ready(request.prefetch)
    w.outage(True)
    for request in (reading, asking):
        assert w.cache.ready(request.prefetch)


def test_after_damage_the_share_is_what_prefetches_keep() -> None:
    """What they pinned and still have, and what is being read for them."""
    first, second = [1] * 17, [2] * 17  # 8 pages each, the share
    w = in_storage(first, second)
    one = answered(w, first)
    w.inside.stumble(InvariantError("planted"))
    other = answered(w, second)
    assert taken(w) == 8, "more is read than prefetches may keep"
    w.settle()
    w.table.slot[1, 1, w.tree()["", (1, 1)]] = -1
    w.inside.stumble(InvariantError("planted"))
    w.cache.cancel(one.prefetch)
    w.settle()
    assert w.cache.ready(other.prefetch), "it waits for room that nobody has"
    assert w.admit(other)
    assert other.lease.pages == 8


def test_what_a_prefetch_lost_is_free_for_others() -> None:
    """The bookkeeping is mended while its request still waits to be admitted."""
    first, second = [1] * 17, [2] * 17  # 8 pages each, the share
    w = in_storage(first, second)
    one = answered(w, first)
    w.settle()
    other = answered(w, second)
    w.table.slot[1, 1, w.tree()["", (1, 1)]] = -1
    w.inside.stumble(InvariantError("planted"))
    w.tick()
    w._check_share()
    w.cache.cancel(one.prefetch)
    w.settle()
    assert w.cache.ready(other.prefetch), "it waits for room that nobody has"


@pytest.mark.parametrize(("host", "hit"), [(40, 8), (8, 4)])
def test_a_prefetch_reads_what_its_hit_needs(host: int, hit: int) -> None:
    """Of a window only the end of the hit, also if the host has room for only a part of what
    storage has."""
    schema = Schema(Identity("m"), P, (group("full"), group("window", 2)))
    w = world_of(Policy(), schema, [40, 40], [40, 40])
    tokens = [1] * 17  # 8 pages
    serve(w, tokens)
    w.host = [host, host]
    w.restart()
    answered(w, tokens)
    w.settle()
    read = [(w.prints[key.group], len(w.names[key.page][1]) // P - 1) for key in w.store.reads]
    assert sorted(read) == [*((0, i) for i in range(hit)), (1, hit - 2), (1, hit - 1)]


def test_nobody_waits_for_a_question_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood in line behind a call that hangs; once that returns, storage is asked again."""
    w = in_storage([1] * 9)
    request = w.arrive([1] * 9)
    with monkeypatch.context() as patch:
        patch.setattr(w.cache.transfers.storage, "hung", lambda: ["probe"])
        w.tick()
    assert w.cache.ready(request.prefetch)
    assert w.cache.idle
    w.release(request)
    again = answered(w, [1] * 9)
    w.settle()
    assert w.admit(again)
    assert again.lease.pages == 4
    w.finish()
