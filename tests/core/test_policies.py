"""Write policies and eviction orders."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from insides import Insides
from request import Request
from schemas import FIVE, FOUR, LIVE, TWO, WRITING, P, group
from walks import STEPS, one, watch
from world import World

from kvkeep.core import pages as pages_room
from kvkeep.core import residency as residency_room
from kvkeep.core.cache import Cache
from kvkeep.core.pages import Retention
from kvkeep.core.policy import EVICTION, WRITE, Policy, lru
from kvkeep.core.storage import Breaker
from kvkeep.schema import ConfigError, Identity, RequestError, Residence, Schema
from kvkeep.testing.fakes import DictStore, TruthMedia

ONE = Schema(Identity("m"), P, (group("full"),))


class PolicyWorld(World):
    """A world under another policy; its oracle does not predict how much room there is."""

    policy: ClassVar = Policy()
    min_tokens = 0  # prompts are short here

    def settings(self) -> Policy:
        return replace(self.policy, prefetch_min_tokens=self.min_tokens)

    def admit(self, request: Request, chunk: int = P) -> bool:
        """A refusal may leave pins on pages that must be copied first; ``check`` counts them."""
        try:
            return super().admit(request, chunk)
        except AssertionError as error:
            if "a refused request keeps pins" not in str(error):
                raise
            self.check()
            return False

    def _room(self, request, tree, pages, chunk):
        fresh, _ = super()._room(request, tree, pages, chunk)
        return fresh, Granted(self.cache)

    def _check_written(self) -> None: ...

    def _check_serves(self) -> None:
        """An idle cache has room once copies that make room have landed."""
        sizes = zip(self.schema.groups, self.device, strict=True)
        pages = min((size for grp, size in sizes if not grp.working), default=1)
        last = self.arrive(([1, 1, 0, 0] * pages)[: pages * P], "last", ask=False)
        for _ in range(2):  # one round of copies is enough
            if self.admit(last, chunk=pages * P):
                break
            self.settle()
        assert last.lease, "an idle cache has no room"
        self.release(last)
        self.settle()
        self.check()


class Granted:
    """Truth value: whether a lease was granted since."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.before = cache, Insides(cache).leases

    def __bool__(self) -> bool:
        return Insides(self.cache).leases > self.before

    def __rand__(self, other: object) -> Granted:
        return self


def world_of(policy: Policy, schema: Schema, *sizes: Sequence[int]) -> PolicyWorld:
    kind = type("Chosen", (PolicyWorld,), {"policy": policy})
    return kind(schema, *sizes, missing=policy.missing)


def serve(w: World, tokens: Sequence[int], land: bool = True) -> Request:
    """Run a whole request."""
    request = w.arrive(tokens, ask=False)
    assert w.admit(request, chunk=len(tokens))
    if land:
        w.settle()
    w.run(request, len(tokens))
    w.release(request)
    if land:
        w.settle()
    w.check()
    return request


def pages(w: World, tier: int, request: Request, state: Residence = LIVE) -> list[int]:
    """Pages of a request's first group that are in this state in a tier."""
    tree = w.tree()
    path = [tree.get(request.path(i)) for i in range(len(request.tokens) // P)]
    return [
        i
        for i, page in enumerate(path)
        if page is not None and w.inside.state[tier, 0, page] == state
    ]


A, B = [1, 1, 2, 2, 3, 3, 9], [4, 4, 5, 5, 6, 6, 9]


# --- write_through_selective


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_selective_saves_a_page_at_its_nth_hit(hits: int) -> None:
    w = world_of(Policy(write="write_through_selective", write_hits=hits), TWO, [8, 8], [8, 8])
    serve(w, A)
    for _ in range(hits):
        assert not pages(w, 1, serve_nothing(w, A))
        serve(w, [*A[:4], 9])
    assert pages(w, 1, serve_nothing(w, A)) == [0, 1]
    assert len(w.store.records) == 4  # two pages of two groups


def serve_nothing(w: World, tokens: Sequence[int]) -> Request:
    """A request that is never served; it names the pages of ``tokens``."""
    return Request("", tuple(tokens))


# --- the line to storage

EITHER = pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(write="write_through_selective", write_hits=1)],
    ids=["write through", "selective"],
)


def in_line(w: World) -> int:
    """Pages of the first group that wait for storage."""
    return sum(map(len, w.inside.unwritten(0)))


def begin_to_write(w: World, tokens: Sequence[int]) -> None:
    """Run a whole request until its write is in flight."""
    serve(w, tokens, land=False)
    w.tick()
    w.step("save")
    w.tick()
    assert w.lanes["write"].queue


def test_what_waits_for_storage_waits_while_it_is_out() -> None:
    w = world_of(Policy(), TWO, [8, 8], [8, 8])
    w.outage(True)
    serve(w, A)
    assert in_line(w) == 3
    assert not w.inside.pins.any(), "it may still be evicted"
    assert w.cache.idle, "nobody is kept busy by what cannot go on"
    line = w.inside.unwritten(0)
    w.tick()
    assert w.inside.unwritten(0) is line, "it is not looked through in vain"
    assert w.cache.figures()["transfers_pending"] == 0
    w.outage(False)
    assert not w.cache.idle
    w.settle()
    assert len(w.store.records) == 6
    assert not w.cache.counts["unwritten_pages_total"]
    w.check()


def test_what_is_still_to_be_saved_is_no_rest_while_storage_is_out() -> None:
    w = world_of(Policy(), ONE, [8], [8])
    w.outage(True)
    serve(w, A, land=False)
    assert not w.cache.idle


def test_a_line_is_no_longer_than_the_host() -> None:
    """Pages that the host evicts meanwhile leave the line."""
    w = world_of(Policy(), ONE, [8], [4])
    w.outage(True)
    for token in range(6):
        serve(w, [token] * 5)
        assert in_line(w) <= 4
    assert w.cache.counts["unwritten_pages_total"] == 12 - 4
    w.outage(False)
    w.settle()
    assert len(w.store.records) == 4


def test_what_could_not_be_written_when_storage_went_out_is_first_in_line() -> None:
    w = world_of(Policy(), ONE, [8], [8])
    begin_to_write(w, A)
    serve(w, B, land=False)
    w.tick()
    w.step("save")
    w.step("write", fault="raise")
    w.outage(True)
    w.tick()
    w.check()
    assert in_line(w) == 6
    assert not w.inside.pins[1].any()
    w.outage(False)
    w.tick()
    w.step("write")  # as much as half of the host
    assert sorted(w.names[key.page][1][0] for key in w.store.records) == [1, 1, 1, 4]
    w.settle()
    assert len(w.store.records) == 6
    assert not w.cache.counts["unwritten_pages_total"]


def test_a_store_that_says_no_is_not_asked_again() -> None:
    """The store is full, and its breaker stays closed."""
    w = world_of(Policy(), ONE, [8], [8])
    begin_to_write(w, A)
    w.step("write", fault="partial")
    w.settle()
    assert w.cache.counts["unwritten_pages_total"] == 1
    assert w.cache.idle
    assert len(w.store.records) == 2


@EITHER
def test_what_storage_lacks_is_written_when_it_is_hit(policy: Policy) -> None:
    w = world_of(policy, TWO, [8, 8], [8, 8])
    serve(w, A)
    serve(w, A)
    w.store.records.clear()
    w.inside.stored[:] = False  # as if that had failed

    def hit() -> int:
        request = w.arrive(A, ask=False)
        assert w.admit(request, 0)
        w.release(request)
        return in_line(w)

    assert hit() == 3
    assert hit() == 3, "each once"
    w.tick()
    assert hit() == 0, "it is being written"
    w.settle()
    assert len(w.store.records) == 6
    assert hit() == 0, "storage has it"
    w.check()


def test_what_storage_lacks_is_written_though_it_is_being_loaded() -> None:
    w = world_of(Policy(), TWO, [8, 8], [8, 8])
    serve(w, A)
    w.store.records.clear()
    w.inside.stored[:] = False
    w.empty(0)
    assert w.admit(w.arrive(A, ask=False))
    assert w.lanes["load"].queue
    assert in_line(w) == 3
    w.finish()


def test_under_write_back_a_hit_writes_nothing() -> None:
    w = world_of(BACK, ONE, [4], [4])
    serve(w, A)
    w.cache.make_room([4])
    w.settle()
    w.inside.stored[:] = False
    assert w.admit(w.arrive(A, ask=False), 0)
    assert in_line(w) == 0


@EITHER
def test_without_a_store_nothing_waits_for_it(policy: Policy) -> None:
    cache = Cache(ONE, [8], [8], None, policy, TruthMedia([8], [8]))
    for _ in range(3):
        compute(cache)
        assert cache.drain(60.0)
    assert cache.counts["unwritten_pages_total"] == 3, "once, when they were on the host"
    cache.close()


def compute(cache: Cache) -> None:
    tokens = np.array(A, np.int32)
    lease = cache.admit(tokens, chunk=7)
    cache.commit(lease, tokens)
    cache.release(lease)


def test_a_line_is_not_looked_through_in_vain() -> None:
    w = world_of(Policy(), ONE, [8], [4])
    serve(w, [0] * 9)
    w.inside.pin_host(0)
    request = w.arrive(A, ask=False)
    assert w.admit(request, 7)
    w.run(request, 7)
    line = w.inside.unsaved(0)
    w.tick()
    assert w.inside.unsaved(0) is line
    assert len(line) == 1


class Failing(DictStore):
    """A store whose next writes fail."""

    left = 0

    def write(self, keys, records):
        self.fault = "raise" if self.left else ""
        self.left = max(0, self.left - 1)
        return super().write(keys, records)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("out", [False, True], ids=["goes out", "is out for long"])
@pytest.mark.parametrize(("left", "lands"), [(1, True), (99, False)], ids=["comes back", "is gone"])
def test_a_drain_has_storage_tried_twice(write: str, out: bool, left: int, lands: bool) -> None:
    """Drain retries it at once, however long its breaker would stay open, and once more later."""
    store = Failing()
    store.left = left
    cache = Cache(ONE, [8], [8], store, Policy(write=write), TruthMedia([8], [8]))
    breaker = Breaker(failures=1, wait=0.05)
    Insides(cache).switch_breaker(breaker)
    if out:
        breaker._wait = 60.0
        breaker.failure()
    compute(cache)
    assert cache.drain(4.0) == lands
    assert len(store.records) == 3 * lands
    assert lands or left - store.left == 2
    cache.close(4.0)
    assert lands or left - store.left == 2 * 2  # drains


# --- write_back

BACK = Policy(write="write_back", write_ahead=0.0)


def test_write_back_saves_what_the_device_evicts() -> None:
    w = world_of(BACK, ONE, [4], [4])
    first = serve(w, A)
    assert pages(w, 1, first) == []
    assert not w.admit(second := w.arrive(B, ask=False), 6), "evicted before its copy is there"
    assert pages(w, 1, first, WRITING) == [1, 2]  # ancestors stay
    assert pages(w, 0, first) == [0, 1, 2]
    assert w.cache.making_room
    w.settle()
    assert not w.cache.making_room
    assert (pages(w, 0, first), pages(w, 1, first)) == ([0], [1, 2])
    assert w.admit(second, 6)


def test_a_hit_promotes_and_gives_the_host_slot_back() -> None:
    w = world_of(BACK, ONE, [4], [4])
    first = serve(w, A)
    w.cache.make_room([4])
    w.settle()
    assert (pages(w, 0, first), pages(w, 1, first)) == ([], [0, 1, 2])
    serve(w, A)
    assert (pages(w, 0, first), pages(w, 1, first)) == ([0, 1, 2], [])


def test_a_hit_leaves_on_the_host_what_others_wait_with() -> None:
    w = world_of(BACK, ONE, [4], [8])
    first = serve(w, A)
    w.cache.make_room([4])
    w.settle()
    waiting = w.arrive(A)
    w.settle()
    assert waiting.prefetch.pinned
    serve(w, A)
    assert (pages(w, 0, first), pages(w, 1, first)) == ([0, 1, 2], [0, 1, 2])
    w.finish()


def test_what_is_hit_while_it_leaves_stays() -> None:
    w = world_of(BACK, ONE, [4], [4])
    first = serve(w, A)
    w.cache.make_room([4])
    again = w.arrive(A, ask=False)
    assert w.admit(again, 0)
    w.settle()
    assert (pages(w, 0, first), pages(w, 1, first)) == ([0, 1, 2], [])
    w.check()


def test_room_for_a_hit_costs_not_the_hit() -> None:
    """It is on the host, which is full: what makes room on the device has no place there."""
    w = world_of(BACK, ONE, [4], [3])
    first = serve(w, A)
    w.cache.make_room([4])
    w.settle()
    serve(w, B)
    assert pages(w, 1, first) == [0, 1, 2]
    again = w.arrive(A, ask=False)
    assert w.admit(again)
    w.settle()
    assert again.lease.pages == 3
    assert w.cache.counts["unsaved_pages_total"] == 3, "all of the other prompt"
    w.finish()


def test_what_ends_as_the_host_makes_room_does_not_leave_twice() -> None:
    """The host alone has the first page: with it all that is to leave the device is of no use."""
    w = world_of(BACK, ONE, [4], [1])
    w.outage(True)
    first = serve(w, A)
    w.inside.flush()
    w.tick()
    w.step("save")
    w.tick()
    assert pages(w, 1, first) == [0]
    device = w.cache.residency.device
    w.cache.residency.drop(device, 0, np.array([w.tree()[first.path(0)]]))
    w.cache.make_room([4])
    w.settle()
    assert w.inside.free(0, 0) == 4
    assert not w.tree()
    assert not w.cache.counts["invariant_errors_total"]
    w.check()


def test_nothing_is_demoted_twice_for_the_same_room() -> None:
    w = world_of(BACK, ONE, [7], [6])
    first, second = serve(w, A), serve(w, B)
    for _ in range(3):
        assert not w.admit(w.arrive([7, 7, 8, 8, 9], ask=False), 4)
    w.settle()
    assert (pages(w, 0, first), pages(w, 0, second)) == ([0, 1], [0, 1, 2])


def test_where_the_host_lacks_room_ancestors_come_first() -> None:
    w = world_of(BACK, ONE, [4], [2])
    first = serve(w, A)
    w.cache.make_room([4])
    w.settle()
    assert (pages(w, 0, first), pages(w, 1, first)) == ([], [0, 1])
    assert w.cache.counts["unsaved_pages_total"] == 1


def test_without_a_host_what_leaves_is_lost() -> None:
    w = world_of(BACK, ONE, [4], [0])
    first = serve(w, A)
    w.cache.make_room([4])
    assert pages(w, 0, first) == []
    assert w.cache.counts["unsaved_pages_total"] == 3
    assert w.inside.free(0, 0) == 4
    w.check()


def fail_to_leave(w: World) -> None:
    w.cache.make_room([4])
    w.step("save", fault="raise")
    w.tick()
    w.check()


def test_what_could_not_be_copied_stays_and_is_copied_again() -> None:
    w = world_of(BACK, ONE, [4], [4])
    first = serve(w, A)
    fail_to_leave(w)
    assert (pages(w, 0, first), pages(w, 1, first)) == ([0, 1, 2], [])
    w.cache.make_room([4])
    w.settle()
    assert (pages(w, 0, first), pages(w, 1, first)) == ([], [0, 1, 2])
    assert w.cache.counts["unsaved_pages_total"] == 0


def test_a_copy_engine_that_keeps_failing_does_not_keep_the_device_full() -> None:
    w = world_of(BACK, ONE, [4], [4])
    first = serve(w, A)
    for _ in range(3):
        fail_to_leave(w)
        assert pages(w, 0, first) == [0, 1, 2]
    w.cache.make_room([4])
    assert (pages(w, 0, first), pages(w, 1, first)) == ([], [])
    assert w.cache.counts["unsaved_pages_total"] == 3
    assert w.inside.free(0, 0) == 4
    w.check()


def test_some_room_is_made_ahead() -> None:
    w = world_of(Policy(write="write_back", write_ahead=0.5), ONE, [4], [4])
    first = serve(w, A)
    assert (pages(w, 0, first), pages(w, 1, first)) == ([0, 1], [2])


def test_where_one_group_has_no_room_nothing_leaves_for_the_others() -> None:
    w = world_of(BACK, TWO, [8, 4], [8, 8])
    serve(w, A)
    running = w.arrive(B, ask=False)
    assert w.admit(running, 0)
    assert w.cache.grow(running.lease, 2)
    assert not w.admit(w.arrive([7] * 8, ask=False), 8)
    assert not w.cache.making_room
    w.check()


def test_all_groups_make_room_at_once() -> None:
    w = world_of(BACK, TWO, [4, 4], [4, 4])
    serve(w, A)
    second = w.arrive(B, ask=False)
    assert not w.admit(second, 6)
    w.settle()
    assert w.admit(second, 6)


@pytest.mark.parametrize("host", [1, 2, 8])
def test_a_drain_leaves_nothing_on_the_device_alone(host: int) -> None:
    """At any host size: page by page, never evicting what storage still lacks."""
    w = world_of(BACK, TWO, [8, 8], [host, host])
    first, second = serve(w, A), serve(w, B)
    flush(w)
    assert len(w.store.records) == 12
    assert pages(w, 0, first) == pages(w, 0, second) == [0, 1, 2], "the device keeps its own"
    assert not w.cache.counts["unsaved_pages_total"] + w.cache.counts["unwritten_pages_total"]
    w.check()
    w.restart()
    again = w.arrive(A)
    w.settle()
    assert w.admit(again)
    assert again.lease.pages == min(3, host // 2)  # the prefetch share


def test_a_drain_writes_ancestors_first() -> None:
    w = world_of(BACK, ONE, [8], [1])
    serve(w, A)
    w.inside.flush()
    for _ in range(2):  # saved, then written
        w.tick()
        w.step("save")
        w.tick()
        w.step("write", 0, 99)
    assert [w.names[key.page] for key in w.store.records] == [("", (1, 1)), ("", (1, 1, 2, 2))]


def test_a_drain_ends_without_a_host() -> None:
    w = world_of(BACK, ONE, [8], [0])
    first = serve(w, A)
    flush(w)
    assert pages(w, 0, first) == [0, 1, 2]
    assert not w.store.records
    w.check()


@pytest.mark.parametrize("host", [1, 4])
def test_a_drain_goes_on_when_storage_is_back(host: int) -> None:
    w = world_of(BACK, ONE, [8], [host])
    first = serve(w, A)
    w.outage(True)
    flush(w)
    assert pages(w, 0, first) == [0, 1, 2]
    assert not w.store.records
    w.check()
    w.outage(False)
    assert not w.cache.idle
    flush(w)
    assert len(w.store.records) == 3
    w.check()


def test_what_is_there_at_a_close_under_write_back_is_found_by_the_next() -> None:
    store = DictStore()
    media = TruthMedia([8, 8], [8, 8])
    cache = Cache(TWO, [8, 8], [8, 8], store, BACK, media)
    tokens = np.array(A, np.int32)
    lease = cache.admit(tokens, chunk=7)
    cache.commit(lease, tokens)
    cache.release(lease)
    cache.close()
    assert len(store.records) == 6


def flush(w: World) -> None:
    """Like :meth:`Cache.drain`, with lanes that are stepped by hand."""
    w.inside.flush()
    for _ in range(50):
        w.settle()
    assert w.cache.idle


WALKS = {
    "back": (Policy(write="write_back"), FOUR, [8, 7, 6, 8], [9, 8, 7, 9]),
    "back, lenient": (
        Policy(write="write_back", missing="lenient"), FOUR, [8, 7, 6, 7], [5, 6, 0, 8],
    ),
    "back, ahead": (
        Policy(write="write_back", write_ahead=0.2), FIVE, [14, 10, 6, 14, 10], [9, 8, 5, 9, 8],
    ),
    "selective": (
        Policy(write="write_through_selective", write_hits=1), FOUR, [8, 7, 6, 8], [9, 8, 7, 9],
    ),
}  # fmt: skip
MIX = STEPS | {
    "demote": 2,
    "flush": 0.5,
    "evict": 0.5,
    "empty": 0.3,
    "restart": 0.1,
    "arrive": 7,
    "run": 14,
}


def walk(name: str, seed: int, steps: int = 150) -> Counter[str]:
    rng = random.Random(seed)
    w = world_of(*WALKS[name])
    for n, step in enumerate(rng.choices(list(MIX), list(MIX.values()), k=steps)):
        if step == "demote":  # as requests do, but more often
            g, count = rng.choice(w.groups), rng.randrange(1, 6)
            count = min(count, w.inside.available(0, g))  # more than there can be frees nothing
            w.cache.make_room([count if g == other else 0 for other in w.groups])
        elif step == "flush":
            w.inside.flush()
        else:
            one(w, step, rng)
        watch(w, n)
    w.finish()
    return w.happened


@pytest.mark.untraced
@pytest.mark.parametrize("name", WALKS)
def test_random_walks(name: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(12):
        happened += walk(name, seed)
    for event in ("save lands", "hit", "committed", "evicted"):
        assert happened[event], event


# --- eviction


def order_of(w: World, requests: Sequence[Request]) -> list[tuple[int, int]]:
    """All pages as (request, page), in the device's eviction order."""
    tree, gone = w.tree(), []
    names = {tree[r.path(i)]: (n, i) for n, r in enumerate(requests) for i in range(3)}
    while len(found := w.inside.evict(0, 0, 1)):
        gone.append(names[int(found[0])])
    return gone


def test_lfu_keeps_what_is_hit_often() -> None:
    w = world_of(Policy("lfu"), ONE, [8], [0])
    first = serve(w, A)
    serve(w, [*A[:4], 9])
    second = serve(w, B)
    assert order_of(w, [first, second]) == [(0, 2), (1, 2), (1, 1), (1, 0), (0, 1), (0, 0)]


def test_priority_keeps_what_matters() -> None:
    w = world_of(Policy("priority"), ONE, [8], [0])
    requests = []
    for tokens, priority in ((A, 0), ([*A[:4], 9], 255), (B, 7)):
        array = np.array(tokens, np.int32)
        lease = w.cache.admit(array, chunk=7, retention=Retention(priority))
        w.cache.commit(lease, array)
        w.cache.release(lease)
        requests.append(Request("", tuple(tokens)))
    del requests[1]
    assert order_of(w, requests) == [(0, 2), (1, 2), (1, 1), (1, 0), (0, 1), (0, 0)]


def test_what_a_request_computes_has_its_priority() -> None:
    w = world_of(Policy(eviction="priority"), ONE, [8], [8])
    lease = w.cache.admit(np.array(A, np.int32), chunk=7, retention=Retention(5))
    w.cache.commit(lease, np.array(A, np.int32))
    assert w.table.priority[lease.path].tolist() == [5, 5, 5]


def test_priorities_have_a_range() -> None:
    for priority in (-1, 256):
        with pytest.raises(RequestError, match="priority must be from 0 to 255"):
            Retention(priority)
    for ttl in (-1.0, float("nan")):
        with pytest.raises(RequestError, match="ttl must be at least 0 seconds"):
            Retention(7, ttl)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that priorities go by; tests set ``now``."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    for room in (pages_room, residency_room):
        monkeypatch.setattr(room, "time", clock)
    return clock


def keep(w: World, tokens: Sequence[int], retention: Retention) -> None:
    """Run a whole request at once."""
    array = np.array(tokens, np.int32)
    lease = w.cache.admit(array, chunk=len(tokens), retention=retention)
    w.cache.commit(lease, array)
    w.cache.release(lease)


def test_a_priority_lasts_for_its_ttl_from_the_last_use(clock: SimpleNamespace) -> None:
    w = world_of(Policy("priority"), ONE, [8], [0])
    array = np.array(A, np.int32)
    lease = w.cache.admit(array, chunk=7, retention=Retention(5, ttl=10))
    w.cache.commit(lease, array)
    clock.now += 60  # it runs for long
    w.cache.release(lease)
    path = sorted(w.tree().values())
    for seconds, priority in ((9, 5), (0.9, 5), (0.2, 0)):
        clock.now += seconds
        w.cache.tick()
        assert w.table.priority[path].tolist() == [priority] * 3
    keep(w, A, Retention(3))
    clock.now += 1e6
    w.cache.tick()
    assert w.table.priority[path].tolist() == [3] * 3, "without a ttl it lasts for ever"


def test_a_fresh_page_has_no_time_left_over(clock: SimpleNamespace) -> None:
    w = world_of(Policy("priority"), ONE, [8], [0])
    keep(w, A, Retention(5, ttl=1000))
    w.inside.evict(0, 0, 3)
    keep(w, B, Retention(5, ttl=1))
    clock.now += 2
    w.cache.tick()
    assert not w.table.priority.any()


@pytest.mark.parametrize("seed", range(4))
def test_pages_go_as_their_times_say(seed: int, clock: SimpleNamespace) -> None:
    """Compared with a plain list: the lowest priority that still holds, then least recently used,
    then deepest."""
    rng = random.Random(seed)
    w = world_of(Policy("priority"), ONE, [400], [0])
    known: dict[tuple[int, ...], list[float]] = {}  # priority, until, last use; by tokens
    for use in range(120):
        tokens = [rng.randrange(2) for _ in range(P * rng.randrange(1, 7))]
        retention = Retention(rng.choice([0, 3, 9]), rng.choice([0.0, 5.0, 40.0, np.inf]))
        keep(w, [*tokens, 0], retention)
        for end in range(P, len(tokens) + 1, P):
            page = known.setdefault(tuple(tokens[:end]), [0, 0, 0])
            page[2] = use
            if retention.priority:
                page[0] = max(page[0], retention.priority)
                page[1] = max(page[1], clock.now + retention.ttl)
        clock.now += (passed := rng.choice([0, 1.5, 20]))
        w.cache.tick()
        for page in known.values():
            if passed and page[1] <= clock.now:
                page[:2] = 0, 0
        for _ in range(min(len(known), rng.choice([0, 0, 1, 3, 8]))):
            first = min(known, key=lambda one: (known[one][0], known[one][2], -len(one)))
            names = {number: tokens for (_, tokens), number in w.tree().items()}
            (gone,) = w.inside.evict(0, 0, 1)
            assert names[int(gone)] == first
            del known[first]
    w.cache.check()


@pytest.mark.parametrize("name", EVICTION)
def test_every_order_is_leaf_first(name: str) -> None:
    """No ancestor is evicted before its descendant, whatever happened."""
    rng = random.Random(3)
    w = world_of(Policy(name), ONE, [60], [0])
    for _ in range(60):
        tokens = np.array(
            [rng.randrange(2) for _ in range(P * rng.randrange(1, 7))] + [0], np.int32
        )
        retention = Retention(rng.randrange(256))
        lease = w.cache.admit(tokens, chunk=len(tokens), retention=retention)
        w.cache.commit(lease, tokens)
        w.cache.release(lease)
    tree = w.tree()
    ids = np.array(list(tree.values()), np.int32)
    keys = dict(zip(tree, EVICTION[name](w.table, 0, ids).tolist(), strict=True))
    assert len(set(keys.values())) == len(keys)
    for (namespace, tokens), key in keys.items():
        assert key < keys.get((namespace, tokens[:-P]), 1 << 63)


def test_an_order_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest_first(table, group, ids):
        return lru(table, group, ids) - (table.depth[ids].astype(np.int64) << 40)

    monkeypatch.setitem(EVICTION, "longest_first", longest_first)
    w = world_of(Policy("longest_first"), ONE, [8], [0])
    first, second = serve(w, A), serve(w, B)
    deepest = [(0, 2), (1, 2), (0, 1), (1, 1), (0, 0), (1, 0)]
    assert order_of(w, [first, second]) == deepest


def test_names_are_checked() -> None:
    assert WRITE == ("write_through", "write_through_selective", "write_back")
    with pytest.raises(ConfigError, match="eviction must be one of lru, lfu, priority"):
        Policy("mru")


# --- prefetch


def test_best_effort_waits_for_nothing() -> None:
    w = world_of(Policy(prefetch="best_effort"), TWO, [8, 8], [8, 8])
    request = w.arrive(A)
    assert w.admit(request), "before storage answered"


def test_a_timeout_grows_with_the_prompt() -> None:
    policy = Policy(prefetch="timeout", prefetch_seconds=1e3, prefetch_seconds_per_1k=1e5)
    w = world_of(policy, TWO, [8, 8], [8, 8])
    prefetch = w.arrive(A).prefetch
    for seconds, ready in (
        (1500.0, False),
        (1600.0, True),
    ):  # of 1000, and 100 for each of 6 tokens
        prefetch.begun = time.monotonic() - seconds
        assert w.cache.ready(prefetch) == ready


@pytest.mark.untraced
@pytest.mark.parametrize("prefetch", ["best_effort", "timeout"])
def test_walks_that_do_not_wait(prefetch: str) -> None:
    policy = Policy(prefetch=prefetch, prefetch_seconds=0.001)
    happened: Counter[str] = Counter()
    for seed in range(4):
        rng = random.Random(seed)
        w = world_of(policy, FOUR, [8, 7, 6, 8], [9, 8, 7, 9])
        for step in rng.choices(list(STEPS), list(STEPS.values()), k=150):
            one(w, step, rng)
            w.check()
        w.finish()
        happened += w.happened
    assert happened["read lands"]
