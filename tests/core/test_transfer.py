"""Transfers, on real threads."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from real_lanes import Gate, nothing, until
from schemas import TWO

from kvkeep.core import lane_work
from kvkeep.core.lane_work import Inquiry
from kvkeep.core.presence import HitRule, Presence
from kvkeep.core.storage import Lookup
from kvkeep.core.ticket import LOAD, READ, SAVE, WRITE, Move, Route, Ticket
from kvkeep.core.touches import Touches
from kvkeep.core.transfer import Transfers
from kvkeep.schema import Closed
from kvkeep.testing.fakes import JUNK, DictStore, ManualQueue, TruthMedia


def test_around_all_tiers(bench) -> None:
    """Device, host, storage and back; two groups in every ticket."""
    b = bench()
    for group in range(2):
        b.media.tiers[0][group][:3] = [10 * group + i + 1 for i in range(3)]
    for route in (SAVE, WRITE):
        ticket = b.submit(route, b.move(0, 0, 1, 2), b.move(1, 2))
        assert b.landed(1) == [ticket]
        assert [move.landed.tolist() for move in ticket.moves] == [[True] * 3, [True]]
    b.media.tiers[:] = JUNK
    for route in (READ, LOAD):
        b.submit(route, b.move(0, 2, 0), b.move(1, 2))
        b.landed(1)
    assert b.media.tiers[0, :, :3].tolist() == [[1, JUNK, 3], [JUNK, JUNK, 13]]
    size = TWO.groups[0].record_bytes
    moved = {"save": 4 * size, "write": 4 * size, "read": 3 * size, "load": 3 * size}
    assert dict(b.transfers.moved) == moved
    assert b.transfers.tickets == []


def test_what_is_queued_is_moved_as_one(bench) -> None:
    """A lane that was busy makes one copy of its whole queue, one piece per group."""
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


@pytest.mark.parametrize("route", [SAVE, LOAD, WRITE, READ])
def test_who_listens_hears_of_every_ticket_that_comes_back(bench, route: Route) -> None:
    b, heard = bench(), threading.Semaphore(0)
    b.transfers.listen(heard.release)
    b.submit(route, b.move(0, 1))
    assert heard.acquire(timeout=20)
    assert len(list(b.transfers.landed())) == 1
    b.transfers.storage.breaker.failure(trip=True)
    b.submit(route, b.move(0, 2))  # the breaker is open: its ticket fails at once
    assert heard.acquire(timeout=20)


def fails() -> None:
    raise ZeroDivisionError


def exits() -> None:
    raise SystemExit


@pytest.mark.parametrize("listener", [fails, exits])
def test_who_listens_cannot_end_a_lane(bench, listener) -> None:
    b = bench()
    b.transfers.listen(listener)
    for slot in range(3):
        b.submit(SAVE, b.move(0, slot))
        assert b.landed(1)[0].moves[0].landed.all()


@pytest.mark.parametrize("route", [SAVE, LOAD])
def test_a_copy_that_raises_lands_nothing_and_ends_nothing(bench, route: Route) -> None:
    b = bench()
    b.media.failing = True
    b.submit(route, b.move(0, 1), b.move(1, 1, 2))
    (ticket,) = b.landed(1)
    assert [move.landed.tolist() for move in ticket.moves] == [[False], [False, False]]
    assert b.transfers.faults[route.name] == 1
    b.media.failing = False
    b.submit(route, b.move(0, 1))
    assert b.landed(1)[0].moves[0].landed.all()


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
    touches = Touches(b.transfers)
    touches.add(b.keys(2, 1, 0), [0, 0])  # the end of the path is reported first
    touches.send()
    b.landed(1)
    assert b.store.touched == [
        key for both in zip(*(m.keys for m in moves), strict=True) for key in both
    ]


def test_each_page_learns_what_became_of_it(bench) -> None:
    """Though a store gets the records of a write in another order than the ticket has them."""
    b = bench()
    moves = [b.move(0, 0, 1, 2), b.move(1, 0, 1, 2)]
    b.store.fault = "partial"
    b.submit(WRITE, *moves)
    b.landed(1)
    for move in moves:
        assert move.landed.tolist() == [key in b.store.records for key in move.keys]
    assert len(b.store.records) == 3


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


def by_hand() -> tuple[Transfers, ManualQueue]:
    """Transfers whose lanes are stepped by hand."""
    queue = ManualQueue()
    media = TruthMedia([4, 4], [4, 4])
    transfers = Transfers(TWO, media, DictStore(), lambda _, *both: queue.lane(*both))
    return transfers, queue


def asks(transfers: Transfers) -> tuple[Inquiry, Lookup]:
    """A question about one page."""
    names = [transfers.storage.names(g, [bytes(32)]) for g in range(2)]
    memory = Presence(HitRule(TWO.groups, strict=True), np.zeros((2, 1), dtype=bool))
    lookup = Lookup(names, memory)
    transfers.ask(inquiry := Inquiry(lookup.ask, nothing))
    return inquiry, lookup


def test_what_waits_behind_a_call_that_hangs_is_given_up(monkeypatch) -> None:
    """And comes back; what waits for other calls goes on."""
    transfers, queue = by_hand()
    pages = np.zeros(1, np.int32)
    read, write = (
        Ticket(route, [Move(0, pages, [], pages, pages)], nothing) for route in (READ, WRITE)
    )
    for ticket in (read, write):
        transfers.submit(ticket)
    question, _ = asks(transfers)
    monkeypatch.setattr(transfers.storage, "hung", lambda: ["read"])
    assert list(transfers.landed()) == [read]
    assert not read.moves[0].landed.any()
    monkeypatch.setattr(transfers.storage, "hung", lambda: ["touch"])
    assert list(transfers.landed()) == [question]
    assert transfers.tickets == queue.queue == [write]
    assert transfers.inquiries == 0


def test_a_question_that_storage_cannot_answer_comes_back_at_once() -> None:
    transfers, queue = by_hand()
    transfers.storage.breaker.failure(trip=True)
    question, lookup = asks(transfers)
    assert not queue.queue
    assert list(transfers.landed()) == [question]
    assert lookup.found.usable() == 0


# --- speeds of reads and loads


def test_an_abandoned_read_is_not_made_unless_it_has_begun(bench) -> None:
    gate = Gate()
    b = bench(gate)
    moves = [b.move(0, n) for n in range(2)]
    gate.records = dict.fromkeys((key for move in moves for key in move.keys), 1)
    begun, waiting = (b.submit(READ, move) for move in moves)
    until(lambda: gate.calls)
    size = TWO.groups[0].record_bytes
    b.transfers.speeds[READ].observe(size, 1e6)
    behind = b.transfers.speeds[READ].seconds(b.transfers.behind(READ)[waiting])
    assert behind == pytest.approx(2e6)
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

    monkeypatch.setattr(lane_work, "time", SimpleNamespace(monotonic=lambda: clock[0]))
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


def test_a_record_that_is_not_there_tells_no_speed(bench) -> None:
    """Else a store that lacks what it seems to have looks fast."""
    b = bench()
    b.submit(READ, b.move(0, 1))
    assert not b.landed(1)[0].moves[0].landed.any()
    assert b.transfers.seconds(READ, 1) is None


@pytest.mark.parametrize(
    ("pace", "total", "most"),  # pace: bytes per second; None: nothing was read yet
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
