"""Mutants of ``core/ticket.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "what failed has landed",
        "wrong bytes reach a model",
        "core/ticket.py",
        "                move.landed = np.zeros(len(move.pages), dtype=bool)\n",
        "                move.landed = np.ones(len(move.pages), dtype=bool)\n",
        killer="test_cache.py: load_that_fails_shortens",
    ),
    Mutant(
        "a loss is told to nobody",
        "a step waits for ever, or reads what was there before",
        "core/ticket.py",
        "        self.arrival.fail()\n",
        "        self.arrival.land()\n",
        killer="test_loading.py: lost_on_the_way",
    ),
    Mutant(
        "only the first group of a ticket is seen",
        "a request joins a read of its pages, and does not wait for it",
        "core/ticket.py",
        "for move in self.moves)\n\n    def count",
        "for move in self.moves[:1])\n\n    def count",
        killer="test_cache.py: any_group_of_it",
    ),
    Mutant(
        "a write fills slots of the host",
        "what is saved is free again as soon as it is written",
        "core/ticket.py",
        'WRITE = Route("write", HOST, None)',
        'WRITE = Route("write", None, HOST)',
        killer="test_cache.py: comes_back_from_every_tier and two and device",
    ),
    Mutant(
        "a ticket counts the pages of all its groups as one's",
        "writes of one group stop while another is slow",
        "core/ticket.py",
        " for move in self.moves if move.group == group)",
        " for move in self.moves)",
        killer="test_cache.py: half_of_its_own",
    ),
]
