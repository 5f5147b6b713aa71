"""Flights: a ticket owns the bytes that it moves.

From departure to landing its sources are pinned, its targets WRITING and its pages held: nobody
else can get these slots, whatever happens to the request or the page. Backup, prefetch and loading
decide what moves; this file pins, adopts and publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..schema import Ids, InvariantError, Residence
from .pages import WRITING
from .residency import Residency
from .ticket import Move, Route, Ticket
from .transfer import Transfers


class Flights:
    """All transfers between tiers. Scheduler's thread only."""

    def __init__(self, residency: Residency, transfers: Transfers) -> None:
        self.residency, self.transfers = residency, transfers

    def depart(self, route: Route, moves: list[Move], then: Callable[[Ticket], None]) -> Ticket:
        """Start moving pages along a route.

        Args:
            moves: pages that are LIVE in the source tier and absent from the target tier, which has
                room; with keys if one end of the route is storage.
            then: called with the ticket that came back; must end it in :meth:`landing`.
        """
        residency = self.residency
        for move in moves:
            residency.table.hold(move.pages)
            if route.source is not None:
                move.source = residency.tiers[route.source].pin(move.group, move.pages)
            if route.target is not None:
                target = residency.tiers[route.target]
                slots = target.reserve(move.group, len(move.pages))
                if slots is None:
                    raise InvariantError("pages depart for a tier that has no room")
                target.adopt(move.group, move.pages, slots, Residence.WRITING)
                move.target = slots
        ticket = Ticket(route, moves, then)
        self.transfers.submit(ticket)
        return ticket

    @contextmanager
    def landing(self, ticket: Ticket) -> Iterator[None]:
        """End a flight. In the block waiters pin what landed; then pages that were lost are dropped
        and the ticket's holds released."""
        residency, route = self.residency, ticket.route
        for move in ticket.moves:
            if route.target is not None:
                residency.tiers[route.target].publish(move.group, move.arrived)
            if route.source is not None:
                residency.tiers[route.source].unpin(move.group, move.pages)
            if route.stores:
                residency.table.stored[move.group, move.arrived] = True
        yield
        for move in ticket.moves:
            if route.target is not None:
                residency.drop(residency.tiers[route.target], move.group, move.lost)
            residency.unhold(move.pages)

    def filling(self, route: Route, path: Ids) -> list[Ticket]:
        """Tickets on a route, to a memory tier, that fill slots of these pages, in order."""
        if not (tickets := self.transfers.on(route)):
            return []
        writing = self.residency.table.state[route.target].take(path, axis=1) == WRITING
        pages = path[writing.any(axis=0)]
        return [ticket for ticket in tickets if len(pages) and ticket.overlaps(pages)]

    def count(self, route: Route, group: int) -> int:
        """Pages of a group in flight on a route."""
        return sum(ticket.count(group) for ticket in self.transfers.on(route))
