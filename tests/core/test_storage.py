"""The store as lanes see it: bounded calls, failures, hangs, and the circuit breaker."""

from collections import Counter

import pytest
from real_lanes import Gate, ids, nothing, until
from schemas import TWO

from kvkeep.core import storage as storage_room
from kvkeep.core.storage import Breaker, Storage
from kvkeep.core.ticket import READ, SAVE, WRITE, Move, Ticket
from kvkeep.core.touches import Touches
from kvkeep.core.transfer import Transfers
from kvkeep.testing.fakes import DictStore, TruthMedia


def test_a_store_that_raises_is_left_alone_for_a_while(bench) -> None:
    """Three failures open the breaker; after the wait, one success closes it."""
    b = bench()
    b.transfers.storage.breaker = Breaker(failures=3, wait=0.2)
    b.store.fault = "raise"
    for _ in range(3):
        assert b.transfers.storage.usable
        b.submit(WRITE, b.move(0, 1))
        assert not b.landed(1)[0].moves[0].landed.any()
    assert not b.transfers.storage.usable
    assert b.transfers.storage.breaker.trips == 1
    b.store.fault = ""
    b.submit(WRITE, b.move(0, 1))
    assert not b.landed(1)[0].moves[0].landed.any(), "an open breaker lets nothing through"
    assert not b.store.records
    b.submit(SAVE, b.move(0, 1))
    assert b.landed(1)[0].moves[0].landed.all(), "memory does not depend on storage"
    until(lambda: b.transfers.storage.usable)
    b.submit(WRITE, b.move(0, 1))
    assert b.landed(1)[0].moves[0].landed.all()
    assert b.transfers.faults[WRITE.name] == 3


def test_what_a_store_raises_is_said_ever_more_rarely(bench, caplog) -> None:
    b = bench()
    b.transfers.storage.breaker = Breaker(failures=1000)
    b.store.fault = "raise"
    for _ in range(9):
        b.submit(WRITE, b.move(0, 1))
        b.landed(1)
    said = [line for line in caplog.messages if line.startswith("storage write failed")]
    assert [line.split("(")[1].split()[0] for line in said] == ["1", "2", "4", "8"]


def test_failures_with_a_success_between_them_are_not_in_a_row(bench) -> None:
    b = bench()
    b.transfers.storage.breaker = Breaker(failures=2)
    for fault in ("raise", "", "raise"):
        b.store.fault = fault
        b.submit(WRITE, b.move(0, 1))
        b.landed(1)
    assert b.transfers.storage.usable


def test_a_store_that_hangs_trips_the_breaker_and_frees_the_queue(bench) -> None:
    """Jobs behind a hung call fail at once; the hung job itself lands when its call returns."""
    b = bench(Gate(), stall=0.05)
    first = b.submit(READ, b.move(0, 1))
    until(lambda: b.store.calls)
    b.submit(READ, b.move(0, 2))
    (second,) = b.landed(1)
    assert second.moves[0].pages.tolist() == [2]
    assert not second.moves[0].landed.any()
    assert not b.transfers.storage.usable
    assert b.transfers.faults["stall"] == 1
    b.submit(WRITE, b.move(0, 3))
    assert not b.landed(1)[0].moves[0].landed.any()
    assert b.transfers.tickets == [first], "its slots are still its own"
    b.store.open.set()
    assert b.landed(1) == [first]
    until(lambda: b.transfers.storage.usable)


def test_a_hanging_touch_is_a_stall_too(bench) -> None:
    b = bench(Gate(), stall=0.05)
    touches = Touches(b.transfers)
    touches.add(b.keys(1), [0])
    touches.send()
    until(lambda: b.store.calls)
    until(lambda: (list(b.transfers.landed()), not b.transfers.storage.usable)[1])
    b.store.open.set()
    b.landed(1)
    assert len(b.store.touched) == 1


def test_calls_are_of_bounded_size(bench, monkeypatch) -> None:
    """So that a stall, an error or a closing lane affects few records."""
    monkeypatch.setattr(storage_room, "CALL_RECORDS", 100)
    store = Gate()
    store.open.set()
    b = bench(store)
    b.submit(WRITE, b.move(0, *range(250)))
    assert b.landed(1)[0].moves[0].landed.all()
    assert store.calls == [100, 100, 50]
    assert len(store.records) == 250


def test_calls_before_the_breaker_opened_count(bench, monkeypatch) -> None:
    """One ticket of several calls: records of the first calls stay written."""
    monkeypatch.setattr(storage_room, "CALL_RECORDS", 2)
    b = bench()
    b.transfers.storage.breaker = Breaker(failures=1)
    write = b.store.write
    b.store.write = lambda keys, bodies: (
        write(keys, bodies) if len(b.store.records) < 2 else write(keys, None)
    )
    b.submit(WRITE, b.move(0, 1, 2, 3, 4, 5, 6))
    assert b.landed(1)[0].moves[0].landed.tolist() == [True] * 2 + [False] * 4
    assert b.transfers.faults[WRITE.name] == 1, "after the second call none is made"


def test_within_a_call_ancestors_are_written_last(bench, monkeypatch) -> None:
    """A store keeps the last key of a call longest. The first call may be the only one."""
    monkeypatch.setattr(storage_room, "CALL_RECORDS", 2)
    b = bench()
    b.media.tiers[1][0][:4] = 1, 2, 3, 4
    b.store.fault = "partial"  # the second record of each call fails
    ticket = b.submit(WRITE, b.move(0, *range(4)))
    b.landed(1)
    _, second, _, fourth = ticket.moves[0].keys
    assert list(b.store.records.items()) == [(second, 2), (fourth, 4)]
    assert ticket.moves[0].landed.tolist() == [False, True, False, True]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_an_answer_of_the_wrong_length_is_a_failure(bench, length: int) -> None:
    b = bench()
    b.store.write = lambda keys, bodies: [True] * length
    for count in range(1, 4):
        assert b.transfers.storage.usable
        b.submit(WRITE, b.move(0, 1, 2))
        assert not b.landed(1)[0].moves[0].landed.any()
        assert b.transfers.faults[WRITE.name] == count
    assert not b.transfers.storage.usable, "a store that always answers so is left alone"


def test_no_store_means_no_storage() -> None:
    transfers = Transfers(TWO, TruthMedia([1, 1], [1, 1]), None)
    assert not transfers.storage.exists
    assert not transfers.storage.usable
    transfers.submit(Ticket(WRITE, [Move(0, ids(0), source=ids(0))], nothing))
    (ticket,) = transfers.landed()
    assert not ticket.moves[0].landed.any()
    transfers.close()


@pytest.fixture
def now(monkeypatch):
    """A clock that the test advances."""
    clock = [0.0]
    monkeypatch.setattr(storage_room.time, "monotonic", lambda: clock[0])
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
        breaker.failure()  # of a call in flight: the wait does not grow
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
    """After ``retry``, one failure opens it again, for the first wait."""
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


def test_a_call_that_takes_long_is_noticed_and_counts_once(now) -> None:
    faults: Counter[str] = Counter()
    store, hung = DictStore(), []
    storage = Storage(TWO, store, 10.0, faults)

    def touch(keys) -> None:
        for _ in range(3):
            now[0] += 6.0
            hung.append(storage.hung())
            now[0] -= 6.0 if len(hung) > 1 else 0.0  # the breaker stays open

    store.touch = touch
    storage.touch(storage.names(0, [bytes(32)]))
    assert hung == [[], ["touch"], ["touch"]]
    assert faults == {"stall": 1}
    assert storage.breaker.trips == 1
    now[0] += 60.0
    assert storage.hung() == [], "it has ended"
    assert storage.usable
