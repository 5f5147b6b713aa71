"""Prefetches in line for host memory: the work of a tick, and fairness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from schemas import P, group

from kvkeep.core import cache as cache_room
from kvkeep.core import prefetch as prefetch_room
from kvkeep.core.cache import Cache
from kvkeep.core.lease import Prefetch
from kvkeep.core.policy import Policy
from kvkeep.schema import Identity, Schema, root_key
from kvkeep.testing.fakes import AtOnce, DictStore, ManualQueue, NoBytes

ONE = Schema(Identity("m"), P, (group("full"),))
LOOKS = 1 + prefetch_room._TRIES


class Everything(DictStore):
    """A store that has all records."""

    def probe(self, keys):
        return [True] * len(keys)

    def read(self, keys, out):
        return [True] * len(keys)

    def touch(self, keys) -> None: ...


class Line:
    """A cache whose prefetch share one prompt of ``pages`` fills."""

    def __init__(self, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = Policy(prefetch_min_tokens=0)
        slots = [2 * pages]
        self.cache = Cache(ONE, slots, slots, Everything(), policy, NoBytes(), AtOnce)
        self.looks: Counter[bytes] = Counter()  # by key of the namespace
        match = self.cache.residency.tree.match

        def counted(root: bytes, raw):
            self.looks[root] += 1
            return match(root, raw)

        monkeypatch.setattr(self.cache.residency.tree, "match", counted)

    def arrive(self, name: str, pages: int) -> Prefetch:
        """Prefetch a prompt in its own namespace."""
        return self.cache.prefetch([1] * (pages * P + 1), name)

    def tick(self) -> Counter[bytes]:
        """Tick; returns how often each prompt was matched."""
        self.looks.clear()
        self.cache.tick()
        return self.looks.copy()


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Line]:
    return lambda pages: Line(pages, monkeypatch)


@pytest.mark.untraced
def test_a_tick_looks_at_some_of_a_long_line(line) -> None:
    """With 300 prompts of 2,000 pages in line a tick tries a few, and all get their turn."""
    here, names = line(2000), [f"n{i}" for i in range(300)]
    waiting = [here.arrive(name, 2000) for name in names]
    here.tick()
    here.tick()
    ready = [one for one in waiting if here.cache.ready(one)]
    assert ready == waiting[:1], "the first has all the room there is"
    seen: Counter[bytes] = Counter()
    for _ in range(-(-len(names) // prefetch_room._TRIES)):
        looks = here.tick()
        assert 0 < looks.total() <= LOOKS
        assert max(looks.values()) == 1, "a prompt is looked at once in a tick"
        seen += looks
    assert set(seen) == {root_key(name) for name in names[1:]}, "somebody had no turn"
    here.cache.check()


def test_a_line_is_served_in_order(line) -> None:
    here = line(20)
    waiting = [here.arrive(f"n{i}", 20) for i in range(60)]
    here.tick()
    for one in waiting:
        here.tick()
        here.tick()
        assert [other for other in waiting if here.cache.ready(other)] == [one]
        here.cache.cancel(one)
        waiting = waiting[1:]
    here.cache.check()


def test_whoever_fits_has_its_turn_behind_many_that_do_not(line) -> None:
    """Wherever in line it is, and however many arrive after it."""
    here = line(20)
    first = here.arrive("first", 5)
    here.tick()
    here.tick()
    assert here.cache.ready(first)
    large = [here.arrive(f"large {i}", 20) for i in range(70)]
    small = here.arrive("small", 5)
    large += [here.arrive(f"later {i}", 20) for i in range(70)]
    here.tick()
    for turn in range(-(-len(large) // prefetch_room._TRIES) + 1):
        assert here.tick().total() <= LOOKS
        large.append(here.arrive(f"last {turn}", 20))
    assert here.cache.ready(small)
    assert not any(here.cache.ready(one) for one in large)
    here.cache.check()


def test_a_line_that_shrinks_is_still_gone_round(line) -> None:
    """The prefetches tried last are gone: the next tick goes on with those behind them."""
    here = line(20)
    here.arrive("first", 20)
    names = [f"n{i}" for i in range(80)]
    waiting = {root_key(name): here.arrive(name, 20) for name in names}
    here.tick()
    seen: set[bytes] = set()
    for _ in range(40):
        looks = here.tick()
        assert looks.total() <= LOOKS
        seen |= set(looks)
        for root in list(looks)[-2:]:
            here.cache.cancel(waiting[root])
    assert seen == {root_key(name) for name in names}
    here.cache.check()


# --- a loop on tick


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(cache_room.time, "sleep", slept.append)
    return slept


def test_a_tight_loop_lets_lanes_run(sleeps: list[float]) -> None:
    """A tick that finds nothing while transfers are in flight releases the GIL."""
    lanes: dict[str, ManualQueue] = {}

    def lane(name, work, report):
        return lanes.setdefault(name, ManualQueue()).lane(work, report)

    policy = Policy(prefetch_min_tokens=0)
    cache = Cache(ONE, [8], [8], Everything(), policy, NoBytes(), lane)
    cache.tick()
    assert not sleeps, "nothing is under way"
    prefetch = cache.prefetch([1] * 9)
    for count in range(1, 4):
        cache.tick()
        assert sleeps == [0] * count, "while storage is asked"
    lanes["ask"].step()
    cache.tick()
    assert sleeps == [0] * 3, "it had something to do"
    for count in range(4, 7):
        cache.tick()
        assert sleeps == [0] * count, "while storage is read"
    lanes["read"].step(count=9)
    cache.tick()
    assert cache.ready(prefetch)
    assert sleeps == [0] * 6
    cache.tick()
    assert sleeps == [0] * 6, "nothing is under way"
    lease = cache.admit([1] * 9, prefetch=prefetch)
    cache.tick()
    assert sleeps == [0] * 7, "while state is loaded"
    lanes["load"].step()
    cache.tick()
    assert lease.ready
