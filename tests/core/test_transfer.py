"""Lanes and tickets, on real threads; and the circuit breaker."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from schemas import FOUR, TWO, P

from kvkeep.core import transfer
from kvkeep.core.transfer import (
    LOAD,
    PROBE,
    READ,
    SAVE,
    TOUCH,
    WRITE,
    Breaker,
    Move,
    ThreadLane,
    Ticket,
    Transfers,
)
from kvkeep.schema import Closed, Identity, Schema
from kvkeep.testing.fakes import JUNK, DictStore, TruthMedia

NONE = np.empty(0, np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for another thread, but not forever."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


class Gate(DictStore):
    """A store whose calls wait at a gate, and which counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.calls: list[int] = []
        self.inside = 0

    def _works(self, count: int) -> list[bool]:
        self.calls.append(count)
        self.inside += 1
        assert self.open.wait(60)
        self.inside -= 1
        return super()._works(count)

    def touch(self, keys) -> None:
        self._works(len(keys))
        super().touch(keys)


class Bench:
    """Transfers over a medium of meanings, on real threads."""

    def __init__(self, store=None, stall: float = 60.0, schema: Schema = TWO) -> None:
        self.media = TruthMedia([600, 600], [600, 600])
        self.store = DictStore() if store is None else store
        self.transfers = Transfers(schema, self.media, self.store, stall_seconds=stall)
        self.back: list[Ticket] = []

    def landed(self, count: int) -> list[Ticket]:
        """The next ``count`` tickets to come back."""

        def enough() -> bool:
            self.back += self.transfers.landed()
            return len(self.back) >= count

        until(enough)
        taken, self.back = self.back[:count], self.back[count:]
        return taken

    def move(self, group: int, *slots: int) -> Move:
        """Pages that are in slots of their own number, on every side."""
        keys = self.transfers.names(group, [bytes([i % 251, i // 251]) * 16 for i in slots])
        return Move(group, ids(*slots), ids(*slots), ids(*slots), keys)

    def submit(self, kind: str, *moves: Move) -> Ticket:
        return self.transfers.submit(Ticket(kind, list(moves)))

    def probe(self, *present: list[bool]) -> Ticket:
        moves = []
        for g, has in enumerate(present):
            moves.append(Move(g, NONE, NONE, NONE, self.move(g, *range(len(has))).keys))
        return self.transfers.submit(
            Ticket(PROBE, moves, present=[np.array(has, bool) for has in present])
        )


@pytest.fixture
def bench():
    benches = []

    def make(*args, **kwargs) -> Bench:
        benches.append(Bench(*args, **kwargs))
        return benches[-1]

    yield make
    for made in benches:
        if isinstance(made.store, Gate):
            made.store.open.set()
        made.transfers.close()


def test_around_all_tiers(bench) -> None:
    """Device, host, storage and back; two groups in every ticket."""
    b = bench()
    for group in range(2):
        b.media.tiers[0][group][:3] = [10 * group + i + 1 for i in range(3)]
    for kind in (SAVE, WRITE):
        ticket = b.submit(kind, b.move(0, 0, 1, 2), b.move(1, 2))
        assert b.landed(1) == [ticket]
        assert [move.landed.tolist() for move in ticket.moves] == [[True] * 3, [True]]
    b.media.tiers[:] = JUNK
    for kind in (READ, LOAD):
        b.submit(kind, b.move(0, 2, 0), b.move(1, 2))
        b.landed(1)
    assert b.media.tiers[0, :, :3].tolist() == [[1, JUNK, 3], [JUNK, JUNK, 13]]
    size = TWO.groups[0].record_bytes
    moved = {SAVE: 4 * size, WRITE: 4 * size, READ: 3 * size, LOAD: 3 * size}
    assert dict(b.transfers.moved) == moved
    assert b.transfers.pending == []


def test_what_is_queued_is_moved_as_one(bench) -> None:
    """A lane that was busy hands all it finds to one copy, one piece per group."""
    b = bench()
    copies, busy, go = [], threading.Event(), threading.Event()

    def save(batch, after) -> None:
        busy.set()
        assert go.wait(60)
        copies.append([(g, a.tolist(), z.tolist()) for g, a, z in batch])

    b.media.save = save
    b.submit(SAVE, b.move(0, 0))
    assert busy.wait(60)
    b.submit(SAVE, b.move(0, 1, 2), b.move(1, 1))
    b.submit(SAVE, b.move(1, 5))
    go.set()
    b.landed(3)
    assert copies == [[(0, [0], [0])], [(0, [1, 2], [1, 2]), (1, [1, 5], [1, 5])]]


@pytest.mark.parametrize("kind", [SAVE, LOAD, WRITE, READ])
def test_who_listens_hears_of_every_ticket_that_comes_back(bench, kind: str) -> None:
    b, heard = bench(), threading.Semaphore(0)
    b.transfers.listen(heard.release)
    b.submit(kind, b.move(0, 1))
    assert heard.acquire(timeout=20)
    assert len(list(b.transfers.landed())) == 1
    b.transfers.breaker.failure(trip=True)
    b.submit(kind, b.move(0, 2))  # storage is not asked now, and its ticket comes back at once
    assert heard.acquire(timeout=20)


def test_who_listens_cannot_end_a_lane(bench) -> None:
    b = bench()
    b.transfers.listen(lambda: 1 / 0)
    for slot in range(3):
        b.submit(SAVE, b.move(0, slot))
        assert b.landed(1)[0].moves[0].landed.all()


@pytest.mark.parametrize("kind", [SAVE, LOAD])
def test_a_copy_that_raises_lands_nothing_and_ends_nothing(bench, kind: str) -> None:
    b = bench()
    b.media.failing = True
    b.submit(kind, b.move(0, 1), b.move(1, 1, 2))
    (ticket,) = b.landed(1)
    assert [move.landed.tolist() for move in ticket.moves] == [[False], [False, False]]
    assert b.transfers.faults[kind] == 1
    b.media.failing = False
    b.submit(kind, b.move(0, 1))
    assert b.landed(1)[0].moves[0].landed.all()


def test_a_store_that_raises_is_left_alone_for_a_while(bench) -> None:
    """After three failures nothing is asked; when the time is over, one success heals it."""
    b = bench()
    b.transfers.breaker = Breaker(failures=3, wait=0.2)
    b.store.fault = "raise"
    for _ in range(3):
        assert b.transfers.storage
        b.submit(WRITE, b.move(0, 1))
        assert not b.landed(1)[0].moves[0].landed.any()
    assert not b.transfers.storage
    assert b.transfers.breaker.trips == 1
    b.store.fault = ""
    b.submit(WRITE, b.move(0, 1))
    assert not b.landed(1)[0].moves[0].landed.any(), "an open breaker lets nothing through"
    assert not b.store.records
    b.submit(SAVE, b.move(0, 1))
    assert b.landed(1)[0].moves[0].landed.all(), "memory does not depend on storage"
    until(lambda: b.transfers.storage)
    b.submit(WRITE, b.move(0, 1))
    assert b.landed(1)[0].moves[0].landed.all()
    assert b.transfers.faults[WRITE] == 3


def test_a_store_that_hangs_trips_the_breaker_and_frees_the_queue(bench) -> None:
    """Who queues behind a call that hangs is told at once; the call itself ends when it ends."""
    b = bench(Gate(), stall=0.05)
    first = b.submit(READ, b.move(0, 1))
    until(lambda: b.store.calls)
    b.submit(READ, b.move(0, 2))
    (second,) = b.landed(1)
    assert second.moves[0].pages.tolist() == [2]
    assert not second.moves[0].landed.any()
    assert not b.transfers.storage
    assert b.transfers.faults["stall"] == 1
    b.submit(WRITE, b.move(0, 3))
    assert not b.landed(1)[0].moves[0].landed.any()
    assert b.transfers.pending == [first], "its slots are still its own"
    b.store.open.set()
    assert b.landed(1) == [first]
    until(lambda: b.transfers.storage)


def test_a_hanging_touch_is_a_stall_too(bench) -> None:
    b = bench(Gate(), stall=0.05)
    b.submit(TOUCH, b.move(0, 1))
    until(lambda: b.store.calls)
    until(lambda: (list(b.transfers.landed()), not b.transfers.storage)[1])
    b.store.open.set()
    b.landed(1)
    assert len(b.store.touched) == 1


def test_calls_are_of_bounded_size(bench, monkeypatch) -> None:
    """So that a stall, an error or a closing lane concerns few records."""
    monkeypatch.setattr(transfer, "CALL_RECORDS", 100)
    store = Gate()
    store.open.set()
    b = bench(store)
    b.submit(WRITE, b.move(0, *range(250)))
    assert b.landed(1)[0].moves[0].landed.all()
    assert store.calls == [100, 100, 50]
    assert len(store.records) == 250


def test_calls_before_the_breaker_opened_count(bench, monkeypatch) -> None:
    """One ticket of several calls: what was written stays written."""
    monkeypatch.setattr(transfer, "CALL_RECORDS", 2)
    b = bench()
    b.transfers.breaker = Breaker(failures=1)
    write = b.store.write
    b.store.write = lambda keys, bodies: (
        write(keys, bodies) if len(b.store.records) < 2 else write(keys, None)
    )
    b.submit(WRITE, b.move(0, 1, 2, 3, 4, 5, 6))
    assert b.landed(1)[0].moves[0].landed.tolist() == [True] * 2 + [False] * 4


def test_within_a_call_ancestors_are_written_last(bench, monkeypatch) -> None:
    """A store keeps the last of a call longest. Of all calls, the first may be the only one."""
    monkeypatch.setattr(transfer, "CALL_RECORDS", 2)
    b = bench()
    b.media.tiers[1][0][:4] = 1, 2, 3, 4
    b.store.fault = "partial"  # the second one of a call
    ticket = b.submit(WRITE, b.move(0, *range(4)))
    b.landed(1)
    _, second, _, fourth = ticket.moves[0].keys
    assert list(b.store.records.items()) == [(second, 2), (fourth, 4)]
    assert ticket.moves[0].landed.tolist() == [False, True, False, True]


def test_groups_are_written_page_by_page(bench) -> None:
    """So that a store that runs full keeps whole pages."""
    b = bench()
    for cells, names in zip(b.media.tiers[1], ((1, 2, 3), (4, 5, 6)), strict=True):
        cells[:3] = names
    moves = [b.move(0, 0, 1, 2), b.move(1, 0, 1, 2)]
    b.submit(WRITE, *moves)
    assert all(move.landed.all() for move in b.landed(1)[0].moves)
    assert list(b.store.records.values()) == [6, 3, 5, 2, 4, 1], "the last is kept longest"
    assert [b.store.records[key] for move in moves for key in move.keys] == [1, 2, 3, 4, 5, 6]
    b.store.touched = []
    b.store.touch = b.store.touched.extend
    b.submit(TOUCH, *moves)
    b.landed(1)
    assert b.store.touched == [
        key for both in zip(*(m.keys for m in moves), strict=True) for key in both
    ]


def test_an_answer_of_the_wrong_length_is_a_failure(bench) -> None:
    b = bench()
    b.store.write = lambda keys, bodies: [True] * 3
    b.submit(WRITE, b.move(0, 1, 2))
    assert not b.landed(1)[0].moves[0].landed.any()
    assert b.transfers.faults[WRITE] == 1


def test_a_probe_goes_on_to_the_first_gap(bench) -> None:
    """Groups that need every page, together; the others as far as those reach."""
    b = bench(schema=Schema(Identity("m"), P, FOUR.groups[:2]))
    b.store.records = dict.fromkeys(b.move(0, 0, 1, 3).keys + b.move(1, 0, 1, 2, 3, 4).keys, 1)
    ticket = b.probe([False] * 5, [False] * 5)
    b.landed(1)
    assert ticket.present[0][:3].tolist() == [True, True, False]
    assert ticket.present[1].tolist() == [True, True, False, False, False]


def test_what_a_hit_may_do_without_ends_no_probe(bench, monkeypatch) -> None:
    monkeypatch.setattr(transfer, "CALL_RECORDS", 2)
    b = bench(schema=Schema(Identity("m"), P, FOUR.groups[::3]))
    b.store.records = dict.fromkeys(b.move(0, 0, 1, 2, 3).keys + b.move(1, 3).keys, 1)
    ticket = b.probe([False] * 5, [False] * 5)
    b.landed(1)
    assert ticket.present[0].tolist() == [True] * 4 + [False]
    assert ticket.present[1].tolist() == [False] * 3 + [True, False]


def test_a_probe_asks_only_for_what_is_missing(bench) -> None:
    store = Gate()
    store.open.set()
    b = bench(store)
    ticket = b.probe([True, False, True], [True, True, True])
    b.landed(1)
    assert store.calls[:1] == [1]
    assert ticket.present[0].tolist() == [True, False, True]
    assert ticket.present[1].tolist() == [True, True, True]


def test_a_long_probe_stops_at_a_gap(bench, monkeypatch) -> None:
    monkeypatch.setattr(transfer, "CALL_RECORDS", 4)
    store = Gate()
    store.open.set()
    b = bench(store)
    store.records = dict.fromkeys(b.move(0, *range(5)).keys + b.move(1, *range(9)).keys, 1)
    b.probe([False] * 100, [False] * 100)
    b.landed(1)
    assert store.calls == [4, 4] * 2


def test_no_store_means_no_storage() -> None:
    transfers = Transfers(TWO, TruthMedia([1, 1], [1, 1]), None)
    assert not transfers.has_store
    assert not transfers.storage
    transfers.submit(Ticket(WRITE, [Move(0, ids(0), ids(0), NONE)]))
    (ticket,) = transfers.landed()
    assert not ticket.moves[0].landed.any()
    transfers.close()


def test_closing_carries_out_what_is_queued(bench) -> None:
    b = bench()
    for slot in range(20):
        b.submit(SAVE, b.move(0, slot))
    b.transfers.close()
    assert len(b.landed(20)) == 20
    with pytest.raises(Closed):
        b.submit(SAVE, b.move(0, 1))


def test_closing_does_not_wait_for_a_call_that_hangs(bench) -> None:
    b = bench(Gate())
    b.submit(READ, b.move(0, 1))
    until(lambda: b.store.calls)
    b.transfers.close(timeout=0.05)
    assert b.store.inside == 1, "it waited for the call"


def test_withdrawn_tickets_have_not_begun() -> None:
    begun, go, reported = threading.Event(), threading.Event(), []

    def work(batch) -> None:
        begun.set()
        assert go.wait(60)

    lane = ThreadLane("test", work, reported.append)
    first, second = Ticket(SAVE, []), Ticket(SAVE, [])
    lane.submit(first)
    assert begun.wait(60)
    lane.submit(second)
    assert lane.withdraw() == [second]
    go.set()
    lane.close(10)
    assert reported == [first]


# --- reads and loads, and how fast they are


def test_an_abandoned_read_is_not_made_unless_it_has_begun(bench) -> None:
    gate = Gate()
    b = bench(gate)
    moves = [b.move(0, n) for n in range(2)]
    gate.records = dict.fromkeys((key for move in moves for key in move.keys), 1)
    begun, waiting = (b.submit(READ, move) for move in moves)
    until(lambda: gate.calls)
    size = TWO.groups[0].record_bytes
    b.transfers.speeds[READ].observe(size, 1e6)
    assert b.transfers.seconds(READ, last=waiting) == pytest.approx(2e6)
    begun.abandoned = waiting.abandoned = True
    assert b.transfers.seconds(READ, size) == pytest.approx(1e6), "what is not made takes no time"
    gate.open.set()
    b.landed(2)
    assert [ticket.moves[0].landed.tolist() for ticket in (begun, waiting)] == [[True], [False]]
    assert len(gate.calls) == 1


def test_what_a_device_does_first_is_no_part_of_how_fast_it_loads(bench, monkeypatch) -> None:
    b, clock = bench(), [0.0]

    class Busy:
        def wait(self) -> None: ...

        def synchronize(self) -> None:
            clock[0] += 60.0

    def load(copies, after, reached) -> None:
        clock[0] += 1.0

    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    b.media.mark, b.media.load = Busy, load
    b.submit(LOAD, b.move(0, 1))
    b.landed(1)
    assert b.transfers.seconds(LOAD, TWO.groups[0].record_bytes) == 1.0


def test_the_speed_of_reads_is_measured_and_bounds_them(bench) -> None:
    b = bench()
    b.store.records = dict.fromkeys(b.move(0, *range(300)).keys, 1)
    b.submit(READ, b.move(0, *range(300)))
    b.landed(1)
    assert b.transfers.seconds(READ, 1) > 0
    assert b.transfers.seconds(LOAD, 1) is None
    b.submit(LOAD, b.move(0, 1))
    b.landed(1)
    assert b.transfers.seconds(LOAD, 1) > 0


@pytest.mark.parametrize(
    ("pace", "total", "most"),  # pace: bytes per second, None: nothing was read yet
    [
        (None, 400 << 20, 1 << 20),
        (1e9, 1 << 30, 1e8),  # a tenth of a second
        (1e9, 40_000_000, 1e7),  # a quarter
        (1e9, 10_000_000, 5e6),  # five milliseconds
        (1e6, 10_000_000, 1e5),
    ],
)
def test_a_read_is_short_and_not_too_short(bench, pace, total: int, most: float) -> None:
    b = bench()
    if pace:
        b.transfers.speeds[READ].observe(pace, 1.0)
    assert b.transfers.read_bytes(total) == pytest.approx(most)


@pytest.mark.parametrize(("name", "together"), [(READ, [1, 1, 1]), (LOAD, [1, 2])])
def test_a_lane_of_storage_takes_one_ticket_at_a_time(name: str, together: list[int]) -> None:
    """Who came first does not wait for all who came while somebody else was served."""
    begun, go, batches = threading.Event(), threading.Event(), []

    def work(batch) -> None:
        batches.append(len(batch))
        begun.set()
        assert go.wait(60)

    lane = ThreadLane(name, work, lambda ticket: None)
    lane.submit(Ticket(name, []))
    assert begun.wait(60)
    lane.submit(Ticket(name, []))
    lane.submit(Ticket(name, []))
    go.set()
    lane.close(10)
    assert batches == together


# --- the breaker alone


@pytest.fixture
def now(monkeypatch):
    """A clock that is moved by hand."""
    clock = [0.0]
    monkeypatch.setattr(transfer.time, "monotonic", lambda: clock[0])
    return clock


def test_failures_in_a_row_open_the_breaker(now) -> None:
    breaker = Breaker(failures=2, wait=1.0)
    breaker.failure()
    breaker.success()
    breaker.failure()
    assert not breaker.open
    breaker.failure()
    assert breaker.open
    now[0] = 1.0
    assert not breaker.open


def test_it_waits_longer_after_each_failed_retry_but_at_most_a_minute(now) -> None:
    breaker, waits = Breaker(failures=1, wait=16.0), []
    for _ in range(4):
        breaker.failure()
        breaker.failure()  # of a call that was under way: no further wait
        began = now[0]
        while breaker.open:
            now[0] += 1.0
        waits.append(now[0] - began)
    assert waits == [16, 32, 60, 60]
    assert breaker.trips == 4
    breaker.success()
    breaker.failure()
    now[0] += 16.0
    assert not breaker.open


def test_it_can_be_told_to_try_again(now) -> None:
    """As if it had failed for the first time: one more failure opens it, for as long as then."""
    breaker = Breaker(failures=2, wait=1.0)
    for _ in range(5):
        breaker.failure(trip=True)
        now[0] += 99.0
    breaker.failure()
    assert breaker.open
    breaker.retry()
    assert not breaker.open
    breaker.failure()
    assert breaker.open
    now[0] += 1.0
    assert not breaker.open


def test_a_trip_opens_it_at_once(now) -> None:
    breaker = Breaker(failures=99)
    breaker.failure(trip=True)
    assert breaker.open
