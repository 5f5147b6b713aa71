"""Lanes: threads that carry out jobs in order, and who listens to them."""

import threading

import pytest
from real_lanes import nothing

from kvkeep.core.lanes import ThreadLane
from kvkeep.core.ticket import LOAD, READ, SAVE, Route, Ticket


def test_withdrawn_tickets_have_not_begun() -> None:
    begun, go, reported = threading.Event(), threading.Event(), []

    def work(batch) -> None:
        begun.set()
        assert go.wait(10)

    lane = ThreadLane("test", work, reported.append)
    first, second = Ticket(SAVE, [], nothing), Ticket(SAVE, [], nothing)
    lane.submit(first)
    assert begun.wait(10)
    lane.submit(second)
    assert lane.withdraw() == [second]
    go.set()
    lane.close(10)
    assert reported == [first]


@pytest.mark.parametrize(("route", "together"), [(READ, [1, 1, 1]), (LOAD, [1, 2])])
def test_a_lane_of_storage_takes_one_ticket_at_a_time(route: Route, together: list[int]) -> None:
    """Who came first does not wait for all who came while somebody else was served."""
    begun, go, batches = threading.Event(), threading.Event(), []

    def work(batch) -> None:
        batches.append(len(batch))
        begun.set()
        assert go.wait(10)

    lane = ThreadLane(route.name, work, lambda ticket: None)
    lane.submit(Ticket(route, [], nothing))
    assert begun.wait(10)
    lane.submit(Ticket(route, [], nothing))
    lane.submit(Ticket(route, [], nothing))
    go.set()
    lane.close(10)
    assert batches == together
