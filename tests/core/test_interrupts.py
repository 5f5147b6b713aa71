"""A KeyboardInterrupt propagates from a call; the next use mends the bookkeeping first."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from schemas import FIVE, TWO, P
from test_cache import A, lease_of, serve, world
from test_mend import land
from test_mend import world as midst
from world import World

from kvkeep.core.policy import Policy

PLACES = {
    "device": ("reserve", "free", "adopt", "publish", "drop", "pin", "unpin"),
    "host": ("reserve", "free", "adopt", "publish", "drop", "pin", "unpin"),
    "table": ("hold", "unhold", "rank"),
    "residency": ("extend", "add", "stamp", "present", "unhold", "drop", "make_room"),
    "transfers": ("submit", "ask"),
    "audit": ("mend",),
}


def places(w: World) -> Iterator[tuple[object, str]]:
    """Inner calls of a cache to interrupt."""
    residency = w.cache.residency
    owners = {
        "device": residency.device,
        "host": residency.host,
        "table": residency.table,
        "residency": residency,
        "transfers": w.cache.transfers,
        "audit": w.inside.audit,
    }
    for name, verbs in PLACES.items():
        for verb in verbs:
            yield owners[name], verb


class Interrupts:
    """Raises at the n-th inner call, before or after it is done; counts them."""

    def __init__(self, w: World, at: int, late: bool) -> None:
        self.left, self.late, self.happened = at, late, False
        self._places = list(places(w))

    @contextmanager
    def armed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, verb in self._places:
                patch.setattr(owner, verb, self._wrap(getattr(owner, verb)))
            try:
                yield
            except KeyboardInterrupt:
                assert self.happened

    def _wrap(self, call: Callable) -> Callable:
        def run(*args: object, **more: object) -> object:
            self.left -= 1
            now = self.left == 0
            if now and not self.late:
                self._interrupt()
            answer = call(*args, **more)
            if now and self.late:
                self._interrupt()
            return answer

        return run

    def _interrupt(self) -> None:
        self.happened = True
        raise KeyboardInterrupt


def loading(w: World) -> World:
    serve(w, A)
    w.empty(0)
    return w


def stored(w: World) -> World:
    serve(w, A)
    w.restart()
    return w


def prefetch(w: World) -> None:
    w.cache.cancel(w.cache.prefetch(np.array([*A, 5, 5, 5], np.int32)))


def admit(w: World) -> None:
    lease = w.cache.admit(np.array([*A, 5, 5, 5], np.int32), chunk=4)
    if lease is not None:  # its caller got the lease
        w.cache.release(lease)


def admit_fetched(w: World) -> None:
    request = w.arrive([*A, 5, 5, 5])
    w.settle()
    w.admit(request, 4)
    w.release(request)


def run(w: World) -> None:
    (request,) = w.requests
    assert w.run(request, 4)


def release(w: World) -> None:
    w.release(w.requests[0])


def tick(w: World) -> None:
    for _ in range(6):
        w.cache.tick()
        for lane in w.lanes:
            w.step(lane, 0, 99)


def asking(w: World) -> World:
    stored(w).arrive([*A, 5, 5, 5])
    return w


def running(w: World) -> World:
    serve(w, A)
    lease_of(w, [*A, 5, 5, 5, 5])
    return w


def ran(w: World) -> World:
    (request,) = running(w).requests
    w.run(request, 4)
    return w


def began(w: World) -> World:
    request = loading(w).arrive([*A, 5, 5, 5], ask=False)
    assert w.admit(request, 2)
    return w


SCENES: dict[str, tuple[Callable[[World], World], Callable[[World], None]]] = {
    "prefetch": (stored, prefetch),
    "admit": (loading, admit),
    "admit what was fetched": (stored, admit_fetched),
    "grow and commit": (running, run),
    "release": (ran, release),
    "release what is loading": (began, release),
    "tick on the way down": (ran, tick),
    "tick on the way up": (asking, tick),
    "tick of a load": (began, tick),
}


@pytest.mark.untraced
@pytest.mark.parametrize("scene", list(SCENES))
def test_an_interrupt_leaves_books_that_are_mended(scene: str) -> None:
    """Whichever call it interrupts, before or after its work: no leaks, and requests go on."""
    before, act = SCENES[scene]
    at, late, hits = 1, False, 0
    while True:
        w = before(world(FIVE))
        interrupts = Interrupts(w, at, late)
        with interrupts.armed():
            act(w)
        after(w)
        if not interrupts.happened:
            break
        at, late, hits = at + 1 + at // 8, not late, hits + 1
    assert hits > 2, "hardly anything was interrupted"


def after(w: World) -> None:
    """The next tick mends everything."""
    w.cache.tick()
    w.cache.check()
    requests, w.requests = w.requests, []
    for request in requests:  # they end; a request whose lease was lost asks again
        if request.prefetch:
            w.cache.cancel(request.prefetch)
        if request.lease:
            w.cache.release(request.lease)
    w.settle()
    w.cache.check()
    assert not w.cache.figures()["leases"], "a lease that nobody has"
    assert not w.cache.figures()["prefetches"], "a prefetch that nobody has"
    w.trust()
    w._check_idle()
    assert w.cache.counts["invariant_errors_total"] == 0
    w.cache.evict("device")
    assert [w.cache.residency.device.free_slots(g) for g in w.groups] == w.device
    serve(w, [8] * 7)


@pytest.mark.untraced
def test_interrupts_in_the_midst_of_anything() -> None:
    """Random work that sooner or later interrupts every call that a server makes."""
    happened = 0
    for seed in range(20):
        w, rng = midst(seed)
        for _ in range(5):
            interrupts = Interrupts(w, rng.randrange(1, 30), rng.random() < 0.5)
            with interrupts.armed():
                any_call(w, rng)
            happened += interrupts.happened
            w.cache.tick()
            w.cache.check()
        land(w, rng)
        w.cache.check()
    assert happened > 30


def any_call(w: World, rng: random.Random) -> None:
    tokens = np.array([int(rng.random() < 0.3) for _ in range(rng.randrange(1, 14))], np.int32)
    for _ in range(3):
        w.step(rng.choice(list(w.lanes)), 0, 99)
        w.cache.tick()
    lease = w.cache.admit(tokens, chunk=rng.randrange(5))
    if lease is None:
        return
    try:
        if w.cache.grow(lease, len(tokens) + P) and lease.ready:
            w.cache.commit(lease, tokens)
    finally:
        w.cache.release(lease)


def test_a_write_back_that_is_interrupted_is_mended() -> None:
    """While copies make room."""
    for late in (False, True):
        for at in range(1 + late, 60, 3):
            w = world(device=4)
            w.lanes.clear()
            back = Policy(write="write_back", write_ahead=0.0, prefetch_min_tokens=0)
            w.cache = type(w.cache)(TWO, [4, 4], [16, 16], w.store, back, w.media, w._lane)
            w.table = w.cache.residency.table
            request = lease_of(w, A)
            w.run(request, 7)
            w.release(request)
            interrupts = Interrupts(w, at, late)
            with interrupts.armed():
                for _ in range(4):
                    w.cache.make_room([3, 3])
                    w.step("save", 0, 99)
                    w.cache.tick()
            w.cache.tick()
            w.cache.check()
            w.settle()
            w.cache.check()
            assert w.cache.admit(np.array([9] * 3, np.int32), chunk=1)
            w.cache.check()
            assert not w.cache.making_room
