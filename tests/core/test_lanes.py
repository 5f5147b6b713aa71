"""Lanes: threads that run jobs in order, and their listener."""

import threading

import pytest
from real_lanes import nothing, until
from schemas import TWO

from kvkeep.core.cache import Cache
from kvkeep.core.lanes import Inbox, Listener, ThreadLane
from kvkeep.core.policy import Policy
from kvkeep.core.ticket import LOAD, READ, SAVE, WRITE, Route, Ticket
from kvkeep.core.touches import Touches
from kvkeep.testing.fakes import DictStore, TruthMedia

TOKENS = [1, 1, 2, 2, 3, 3, 9]


def test_withdrawn_tickets_have_not_begun() -> None:
    begun, go, reported = threading.Event(), threading.Event(), []

    def work(batch) -> None:
        begun.set()
        assert go.wait(60)

    lane = ThreadLane("test", work, reported.append)
    first, second = Ticket(SAVE, [], nothing), Ticket(SAVE, [], nothing)
    lane.submit(first)
    assert begun.wait(60)
    lane.submit(second)
    assert lane.withdraw() == [second]
    go.set()
    lane.close(10)
    assert reported == [first]


@pytest.mark.parametrize(("route", "together"), [(READ, [1, 1, 1]), (LOAD, [1, 2])])
def test_a_lane_of_storage_takes_one_ticket_at_a_time(route: Route, together: list[int]) -> None:
    """The first job does not wait for all that were queued during a call."""
    begun, go, batches = threading.Event(), threading.Event(), []

    def work(batch) -> None:
        batches.append(len(batch))
        begun.set()
        assert go.wait(60)

    lane = ThreadLane(route.name, work, lambda ticket: None)
    lane.submit(Ticket(route, [], nothing))
    assert begun.wait(60)
    lane.submit(Ticket(route, [], nothing))
    lane.submit(Ticket(route, [], nothing))
    go.set()
    lane.close(10)
    assert batches == together


class PanicException(BaseException):
    """Like pyo3's PanicException, a BaseException but no Exception."""


def panics(*_: object) -> None:
    raise PanicException


@pytest.mark.parametrize("error", [PanicException, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("verb", ["read", "write", "probe", "touch"])
def test_whatever_a_store_raises_ends_no_lane(bench, verb: str, error: type) -> None:
    """The call is a miss and counted, and the next call goes through."""

    def raises(*_: object) -> None:
        raise error

    b = bench()
    b.store.records = dict.fromkeys(b.names(0, 0, 1) + b.names(1, 0, 1), 1)
    touches = Touches(b.transfers)

    def go() -> bool:
        """Whether the call returned the expected result."""
        if verb == "probe":
            lookup = b.lookup([False, False], [False, False])
        elif verb == "touch":
            touches.add(b.keys(1), [0, 0])
            touches.send()
        else:
            ticket = b.submit({"read": READ, "write": WRITE}[verb], b.move(0, 1))
        (job,) = b.landed(1)
        job.finish()
        if verb == "probe":
            return lookup.found.usable() == 2
        if verb == "touch":
            assert touches.idle
            return len(b.store.touched) == 2
        return ticket.moves[0].landed.all()

    works = getattr(b.store, verb)
    setattr(b.store, verb, raises)
    assert not go()
    assert b.transfers.faults == {verb: 1}
    setattr(b.store, verb, works)
    assert go()
    assert b.transfers.faults == {verb: 1}


@pytest.mark.parametrize("route", [SAVE, LOAD])
def test_whatever_a_copy_raises_ends_no_lane(bench, route: Route) -> None:
    b = bench()
    works = getattr(b.media, route.name)
    setattr(b.media, route.name, panics)
    b.submit(route, b.move(0, 1))
    assert not b.landed(1)[0].moves[0].landed.any()
    assert b.transfers.faults == {route.name: 1}
    setattr(b.media, route.name, works)
    b.submit(route, b.move(0, 1))
    assert b.landed(1)[0].moves[0].landed.all()


@pytest.mark.parametrize("verb", ["read", "probe"])
def test_a_request_goes_on_whatever_its_store_raises(verb: str) -> None:
    """On real lanes, end to end: the request computes its prompt instead of waiting forever."""
    store = DictStore()
    settings = Policy(prefetch_min_tokens=0)

    def cache() -> Cache:
        return Cache(TWO, [8, 8], [8, 8], store, settings, TruthMedia([8, 8], [8, 8]))

    with cache() as first:
        first.commit(lease := first.admit(TOKENS, chunk=7), TOKENS)
        first.release(lease)
    assert len(store.records) == 6
    setattr(store, verb, panics)
    with cache() as second:
        prefetch = second.prefetch(TOKENS)
        until(lambda: (second.tick(), second.ready(prefetch))[1])
        lease = second.admit(TOKENS, chunk=7, prefetch=prefetch)
        assert lease.pages == 0
        assert second.figures()[f"transfer_faults_total{{lane={verb}}}"] >= 1
        second.commit(lease, TOKENS)
        second.release(lease)
        second.check()
    delattr(store, verb)
    with cache() as third:
        prefetch = third.prefetch(TOKENS)
        until(lambda: (third.tick(), third.ready(prefetch))[1])
        assert third.admit(TOKENS, prefetch=prefetch).pages == 3


def test_a_listener_that_exits_leaves_a_request_be() -> None:
    def exits() -> None:
        heard.release()
        raise SystemExit

    heard = threading.Semaphore(0)
    with Cache(TWO, [8, 8], [8, 8], None, None, TruthMedia([8, 8], [8, 8])) as cache:
        cache.listen(exits)
        for _ in range(3):
            cache.commit(lease := cache.admit(TOKENS, chunk=7), TOKENS)
            cache.release(lease)
            cache.tick()
            until(lambda: (cache.tick(), cache.idle)[1])
            assert cache.evict("device") == 6
            lease = cache.admit(TOKENS)
            assert lease.pages == 3
            until(lambda lease=lease: (cache.tick(), lease.ready)[1])
            assert lease.pages == 3, "it was loaded"
            cache.release(lease)
            assert heard.acquire(timeout=60)
            cache.evict("device")
            cache.evict("host")


def test_an_inbox_wakes_whoever_listens_when_the_job_is_there() -> None:
    listener, found = Listener(), []
    inbox: Inbox[Ticket] = Inbox(listener)
    inbox.put(first := Ticket(SAVE, [], nothing))
    listener.callback = lambda: found.extend(inbox.taken())
    inbox.put(second := Ticket(SAVE, [], nothing))
    assert found == [first, second]


def test_a_listener_that_exits_ends_no_inbox() -> None:
    listener = Listener()
    listener.callback = panics
    inbox: Inbox[Ticket] = Inbox(listener)
    inbox.put(job := Ticket(SAVE, [], nothing))
    assert list(inbox.taken()) == [job]
