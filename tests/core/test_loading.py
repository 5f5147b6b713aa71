"""Loads that a step uses while they are in flight."""

import threading
from itertools import pairwise

import numpy as np
import pytest
from schemas import FIVE, FOUR, TWO, P
from test_cache import A, serve, world
from world import World

from kvkeep.core.pages import DEVICE
from kvkeep.media.arrival import Arrival
from kvkeep.media.base import NOW
from kvkeep.schema import LoadFailed, Schema


class Told:
    """A mark that notes whether a step waited for it."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


class TestArrival:
    def test_a_layer_waits_for_the_first_mark_that_covers_it(self) -> None:
        arrival, marks = Arrival(), [Told() for _ in range(3)]
        for layer, mark in zip((0, 2, 5), marks, strict=True):
            arrival.reach(layer, mark)
        for layer in (0, 1, 2, 4):
            arrival.wait(layer)
        assert [mark.waited for mark in marks] == [1, 2, 1]

    def test_what_has_landed_needs_no_mark(self) -> None:
        arrival, mark = Arrival(), Told()
        arrival.reach(0, mark)
        arrival.land()
        for layer in (0, 7, None):
            arrival.wait(layer)
        assert not mark.waited

    @pytest.mark.parametrize(
        ("layer", "early", "last"),
        [
            (3, lambda a: a.reach(2, NOW), lambda a: a.reach(3, NOW)),
            (3, lambda a: a.reach(2, NOW), lambda a: a.land()),
            (None, lambda a: a.reach(9, NOW), lambda a: a.land()),
        ],
        ids=["reached", "landed", "all"],
    )
    def test_who_waits_wakes_when_it_is_there(self, layer, early, last) -> None:
        arrival, woken = Arrival(), threading.Event()
        waiter = threading.Thread(target=lambda: (arrival.wait(layer), woken.set()), daemon=True)
        early(arrival)
        waiter.start()
        assert not woken.wait(0.05)
        last(arrival)
        assert woken.wait(60)
        waiter.join()

    def test_a_loss_is_told_to_all_who_wait_or_will(self) -> None:
        arrival, errors = Arrival(), []

        def wait() -> None:
            with pytest.raises(LoadFailed) as caught:
                arrival.wait(3)
            errors.append(caught.value)

        waiter = threading.Thread(target=wait)
        waiter.start()
        arrival.reach(0, NOW)
        arrival.fail()
        waiter.join(60)
        assert len(errors) == 1
        for layer in (0, None):
            with pytest.raises(LoadFailed):
                arrival.wait(layer)


@pytest.fixture(params=[TWO, FOUR, FIVE], ids=["two", "four", "five"])
def loading(request: pytest.FixtureRequest) -> World:
    """Admit a request whose whole prefix is on the host."""
    schema: Schema = request.param
    w = world(schema)
    serve(w, A)
    w.empty(DEVICE)
    again = w.arrive([*A, *range(10, 20)], ask=False)
    assert w.admit(again)
    assert not again.lease.ready
    return w


def test_a_lease_tells_where_its_pages_will_be(loading: World) -> None:
    (request,) = loading.requests
    early = {grp.name: request.lease.slots(grp.name).copy() for grp in loading.schema.groups}
    loading.settle()
    assert request.lease.ready
    for grp in loading.schema.groups:
        assert np.array_equal(request.lease.slots(grp.name), early[grp.name])


def test_who_goes_on_before_the_cache_has_heard_of_it(loading: World) -> None:
    """It commits pages after ones that are still loading, and its windows slide past those."""
    (request,) = loading.requests
    assert not loading.run(request, P), "nothing has come yet"
    loading.step("load")
    for before, after in pairwise([3 * P, 5 * P, 6 * P, 7 * P]):
        assert loading.run(request, after - before, stop=False)
        assert not request.lease.ready
        loading.check()
    loading.settle()
    loading.check()
    assert request.lease.pages == 7
    loading.release(request)
    loading.finish()


def test_who_ends_before_the_cache_has_heard_of_it(loading: World) -> None:
    """The hit is counted all the same."""
    (request,) = loading.requests
    loading.step("load")
    assert loading.run(request, P)
    assert request.lease.explanation.tokens["host"] == 3 * P
    loading.release(request)
    loading.check()
    loading.settle()
    assert loading.cache.figures()["hit_tokens_total{tier=host}"] == 3 * P
    loading.finish()


def test_what_is_lost_on_the_way_is_computed(loading: World) -> None:
    (request,) = loading.requests
    loading.step("load", fault="raise")
    assert not loading.run(request, P), "a step on it is void"
    loading.tick()
    loading.check()
    assert request.lease.ready
    assert request.lease.pages == 0
    assert sum(request.lease.explanation.tokens.values()) == 0
    assert loading.run(request, P)
    loading.check()
    loading.release(request)
    loading.finish()


def test_no_step_runs_while_a_hit_waits_for_other_loads_than_one_that_has_failed() -> None:
    """It would read slots that nothing filled, and commit what it made of them."""
    w = world()
    serve(w, A)
    w.empty(0)
    short, long = (w.arrive(tokens, ask=False) for tokens in ([1, 1, 9], A))
    for request in (short, long):
        assert w.admit(request)
    assert len(w.lanes["load"].queue) == 2, "the long one joins the first, and has one of its own"
    w.step("load", 1, fault="raise")
    w.tick()
    assert not long.lease.ready
    w.step("load")  # the other one has landed, and the cache has not heard of it
    assert long.lease.lost
    assert not short.lease.lost
    assert not w.run(long, P)
    assert w.run(short, 1)
    w.check()
    w.tick()
    assert (long.lease.ready, long.lease.lost, long.lease.pages) == (True, False, 1)
    assert w.run(long, 2 * P)
    w.check()
    w.finish()
