"""Promises that a review of the core found broken."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from schemas import TWO, P, group
from stage import Stage

import kvkeep.core.cache as cache_module
from kvkeep.core import storage
from kvkeep.core.cache import Cache
from kvkeep.core.lane_work import Inquiry
from kvkeep.core.lease import Lease
from kvkeep.core.policy import Policy
from kvkeep.core.prefetch import Prefetcher
from kvkeep.core.presence import Presence
from kvkeep.core.residency import Residency
from kvkeep.core.storage import Storage
from kvkeep.core.ticket import Ticket
from kvkeep.core.transfer import Transfers
from kvkeep.schema import Identity, Key, Schema
from kvkeep.testing.fakes import DictStore, TruthMedia

TOKENS = np.array([1, 1, 2, 2, 3, 3, 9], np.int32)


class Closing(DictStore):
    """A store that knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def cache_on(store: DictStore | None, policy: Policy | None = None) -> Cache:
    return Cache(TWO, [8, 8], [8, 8], store, policy, TruthMedia([8, 8], [8, 8]))


def serve(w: Stage, tokens: Sequence[int], chunk: int = 99) -> None:
    """A whole request, and everything under way."""
    request = w.arrive(tokens, ask=False)
    assert w.admit(request, chunk)
    w.settle()
    w.run(request, len(tokens))
    w.release(request)
    w.settle()


# --- what storage is told first


def test_the_first_call_of_a_write_has_the_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The breaker may open after it, or the store be full; within a call the ancestors are last."""
    monkeypatch.setattr(storage, "CALL_RECORDS", 2)
    store, calls = DictStore(), []

    def write(keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        calls.append([key.page for key in keys])
        return [key.page != b"1" for key in keys]

    store.write = write
    keys = [Key(b"", page) for page in (b"0", b"1", b"2", b"3")]
    flags = Storage(TWO, store, 10.0, Counter()).write(keys, [memoryview(b"")] * 4)
    assert calls == [[b"1", b"0"], [b"3", b"2"]]
    assert flags.tolist() == [True, False, True, True]


# --- the end


def test_a_cache_can_be_closed_after_its_lanes_were_at_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exit handler that was registered before ours runs after it."""
    monkeypatch.setattr(cache_module, "_open", weakref.WeakSet())
    store = Closing()
    cache = cache_on(store)
    lease = cache.admit(TOKENS, chunk=7)
    cache.commit(lease, TOKENS)
    cache.release(lease)
    cache_module._close_lanes()
    cache.close(1.0)
    assert store.closed


def test_a_close_that_is_interrupted_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Closing()
    cache = cache_on(store)

    def interrupt(timeout: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "drain", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    assert store.closed


def test_a_store_is_not_closed_between_two_calls_of_a_busy_lane() -> None:
    """What hangs may be the lane, not the store."""
    begun, go = threading.Event(), threading.Event()

    class Slow(TruthMedia):
        def bodies(self, group: int, slots: np.ndarray) -> list[memoryview]:
            begun.set()
            go.wait(10.0)
            return super().bodies(group, slots)

    store = Closing()
    cache = Cache(TWO, [8, 8], [8, 8], store, None, Slow([8, 8], [8, 8]))
    lease = cache.admit(TOKENS, chunk=7)
    cache.commit(lease, TOKENS)
    while not begun.wait(0.001):
        cache.tick()
    assert not cache.transfers.close(0.01)
    go.set()
    assert cache.transfers.close(10.0)
    cache.release(lease)
    cache.close(0.0)


# --- interruptions


def test_an_admission_that_is_interrupted_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could release it."""
    cache = cache_on(None)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache._slots, "extend", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.admit(TOKENS, chunk=7)
    cache.tick()
    cache.check()
    assert cache.figures()["leases"] == 0
    assert all(cache.residency.device.free_slots(g) == 8 for g in range(2))
    cache.close()


class Interrupted(dict):
    """Leases of which an interrupt hits each one right after it was added."""

    def __setitem__(self, serial: int, lease: Lease) -> None:
        super().__setitem__(serial, lease)
        raise KeyboardInterrupt


def test_a_lease_that_was_granted_but_not_returned_ends() -> None:
    """Nobody could release it either."""
    cache = cache_on(None)
    cache._leases = cache._audit.leases = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        cache.admit(TOKENS, chunk=7)
    cache.tick()
    cache.check()
    assert cache.figures()["leases"] == 0
    assert all(cache.residency.device.free_slots(g) == 8 for g in range(2))
    cache.close()


# --- stale


def test_under_stale_a_snapshot_that_has_no_room_is_done_without() -> None:
    state = group("state", 1, required=False, working=1)
    schema = Schema(Identity("m"), P, (group("full"), state))
    w = Stage(schema, [8, 1], [8, 1], missing="stale")
    serve(w, [1, 1, 2, 2, 9])
    again = w.arrive([1, 1, 2, 2, 9], ask=False)
    assert w.admit(again, 1)
    assert again.lease.pages == 2
    assert not w.cache.counts["invariant_errors_total"]
    w.cache.check()


def test_under_stale_what_was_lost_on_the_way_is_a_gap() -> None:
    schema = Schema(Identity("m"), P, (group("full"), group("draft", required=False)))
    w = Stage(schema, [8, 8], [8, 8], missing="stale")
    serve(w, [1, 1, 2, 2, 9])
    assert len(w.inside.evict(0, 1, 2)) == 2
    again = w.arrive([1, 1, 2, 2, 9], ask=False)
    assert w.admit(again, 1)
    w.step("load", fault="raise")
    w.tick()
    assert again.lease.ready
    assert again.lease.pages == 2
    assert not w.cache.counts["invariant_errors_total"]
    w.cache.check()


# --- work per tick


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """Grows with each call of a method."""
    calls: list[None] = []
    method = getattr(owner, name)

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(None)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)
    return calls


def test_a_request_searches_no_transfers_for_pages_that_are_not_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = Stage(TWO, [40, 40], [40, 40])
    prompts = [[n, n, n, n, 9] for n in range(8)]
    for prompt in prompts:
        serve(w, prompt)
    w.empty(0)
    looks = count_calls(monkeypatch, Ticket, "overlaps")
    for prompt in prompts:
        assert w.admit(w.arrive(prompt, ask=False), 1)
    assert len(w.lanes["load"].queue) == len(prompts)
    assert not looks
    w.empty(1)
    w.restart()
    for prompt in prompts:
        w.arrive(prompt)
    w.step("read", 0, 99)
    w.tick()
    assert len(w.lanes["read"].queue) == len(prompts)
    assert not looks


def test_reads_are_looked_through_once_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Stage(TWO, [40, 40], [40, 40])
    for n in range(8):
        serve(w, [n, n, n, n, 9])
    w.restart()
    for n in range(8):
        w.arrive([n, n, n, n, 9])
    w.step("read", 0, 99)
    w.tick()
    w.cache.observe_prefill(1, 1e9)
    looks = count_calls(monkeypatch, Transfers, "behind")
    w.tick()
    assert len(w.lanes["read"].queue) == 8
    assert len(looks) == 1


def test_a_prompt_far_longer_than_the_host_is_cut_in_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = Stage(TWO, [99, 99], [99, 99])
    long = [1] * 180 + [9]
    serve(w, long)
    w.host = [8, 8]
    w.restart()
    request = w.arrive(long)
    w.step("read")
    looks = count_calls(monkeypatch, Presence, "usable")
    w.tick()
    assert len(looks) < 10
    assert w.cache._prefetches[request.prefetch.serial].path.size == 4, "half of the host"


def test_pages_that_wait_many_times_are_let_go_of_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = Stage(TWO, [8, 8], [8, 8])
    serve(w, [1, 1, 2, 2, 9])
    line, pages = w.cache._backup.lines[0], np.array([1, 0])
    for _ in range(3):
        line.add(0, pages)
    calls = count_calls(monkeypatch, Residency, "unhold")
    assert line.take(0).tolist() == [1, 0]
    assert len(calls) == 2
    w.cache.residency.unhold(pages)
    w.cache.check()


# --- interruptions of what lanes report


@pytest.mark.parametrize("nth", range(4))
def test_an_answer_whose_end_is_interrupted_comes_again(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the request would wait forever, and storage would hear of no more hits."""
    w = Stage(TWO, [8, 8], [8, 8])
    serve(w, [1, 1, 2, 2, 9])
    request = w.arrive([1, 1, 2, 2, 3, 3, 9])
    assert w.cache.transfers.inquiries == 1
    w.step("read")
    owner, name = [
        (w.cache._audit, "guard"),
        (Inquiry, "touched"),
        (Inquiry, "finish"),
        (Prefetcher, "advance"),
    ][nth]

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            w.tick()
    w.tick()
    assert w.cache.ready(request.prefetch)
    w.settle()
    assert w.cache.idle
    w.cache.check()


def test_a_ticket_whose_end_is_interrupted_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Stage(TWO, [8, 8], [8, 8])
    request = w.arrive([1, 1, 2, 2, 9], ask=False)
    assert w.admit(request, 99)
    w.run(request, 5)
    w.tick()
    w.step("save")

    def interrupt(self: Ticket) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "touched", interrupt)
        with pytest.raises(KeyboardInterrupt):
            w.tick()
    w.release(request)
    w.settle()
    w.check()
    assert w.cache.idle
    assert not w.inside.holds.any()


def test_a_prefetch_that_is_interrupted_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Stage(TWO, [8, 8], [8, 8])

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transfers, "ask", interrupt)
        with pytest.raises(KeyboardInterrupt):
            w.arrive([1, 1, 2, 2, 9])
    assert w.cache.figures()["prefetches"] == 0


# --- bytes


def test_what_the_host_could_not_keep_did_not_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout whose records are read beside its slots may fail to take them over."""
    w = Stage(TWO, [8, 8], [8, 8])
    serve(w, [1, 1, 2, 2, 9])
    w.restart()
    request = w.arrive([1, 1, 2, 2, 9])

    def keep(group: int, slots: np.ndarray, bodies: Sequence[memoryview]) -> None:
        w.media.tiers[1, group][slots] = 0
        raise RuntimeError("no memory for the copy")

    monkeypatch.setattr(w.media, "keep", keep)
    w.settle()
    w.check()
    assert w.cache.ready(request.prefetch)
    assert not w.inside.state[1].any()


def test_a_tick_merges_some_of_many_long_hits() -> None:
    w = Stage(TWO, [900, 900], [900, 900])
    long = [1] * 1600 + [9]
    serve(w, long)
    for _ in range(8):
        request = w.arrive(long, ask=False)
        assert w.admit(request, 1)
        w.release(request)
    w.tick()
    assert len(w.cache._touches._hits) == 7
    w.settle()
    assert w.cache.idle
