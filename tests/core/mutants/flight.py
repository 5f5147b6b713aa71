"""Mutants of ``core/flight.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "the source is not pinned",
        "the tier evicts what is being copied from it",
        "core/flight.py",
        "residency.tiers[route.source].pin(move.group, move.pages)",
        "residency.table.slot[route.source, move.group, move.pages]",
        killer="test_cache.py: are_strangers",
    ),
    Mutant(
        "the source is not unpinned",
        "whatever was copied once stays forever",
        "core/flight.py",
        "                residency.tiers[route.source].unpin(move.group, move.pages)\n",
        "                pass\n",
        killer="test_cache.py: comes_back_from_every_tier and two and device",
    ),
    Mutant(
        "what departs is not held",
        "a page that ends in flight comes back as another page under its ticket",
        "core/flight.py",
        "            residency.table.hold(move.pages)\n",
        "",
        killer="test_cache.py: one_token",
    ),
    Mutant(
        "what has landed is still held",
        "no page that was ever copied is recycled",
        "core/flight.py",
        "            residency.unhold(move.pages)\n",
        "",
        killer="test_cache.py: comes_back_from_every_tier and two and device",
    ),
    Mutant(
        "what departs is believed to be there",
        "it is read before its bytes came",
        "core/flight.py",
        "                target.adopt(move.group, move.pages, slots, Residence.WRITING)\n",
        "                target.adopt(move.group, move.pages, slots, Residence.LIVE)\n",
        killer="test_cache.py: one_token",
    ),
    Mutant(
        "what was lost is dropped before its waiters know",
        "whoever waited shortens a hit whose pages have ended already",
        "core/flight.py",
        "        yield\n        for move in ticket.moves:\n"
        "            if route.target is not None:\n"
        "                residency.drop(residency.tiers[route.target], move.group, move.lost)\n",
        "        for move in ticket.moves:\n            if route.target is not None:\n"
        "                residency.drop(residency.tiers[route.target], move.group, move.lost)\n"
        "        yield\n        for move in ticket.moves:\n",
        killer="test_cache.py: record_that_is_gone",
    ),
    Mutant(
        "pages are let go before whoever waited took them",
        "those that nobody else holds are gone when they are pinned",
        "core/flight.py",
        "        yield\n        for move in ticket.moves:\n"
        "            if route.target is not None:\n"
        "                residency.drop(residency.tiers[route.target], move.group, move.lost)\n"
        "            residency.unhold(move.pages)\n",
        "        for move in ticket.moves:\n            if route.target is not None:\n"
        "                residency.drop(residency.tiers[route.target], move.group, move.lost)\n"
        "            residency.unhold(move.pages)\n"
        "        yield\n",
        killer="test_cache.py: record_that_is_gone",
    ),
    Mutant(
        "what was lost keeps its slot",
        "it is waited for forever, and its slot is of no use to anybody",
        "core/flight.py",
        "                residency.drop(residency.tiers[route.target], move.group, move.lost)\n",
        "                pass\n",
        killer="test_cache.py: load_that_fails_shortens",
    ),
    Mutant(
        "what was lost is published",
        "wrong bytes reach a model",
        "core/flight.py",
        ".publish(move.group, move.arrived)",
        ".publish(move.group, move.pages)",
        killer="test_cache.py: load_that_fails_shortens",
    ),
    Mutant(
        "nobody notes what storage has",
        "each hit writes it once more",
        "core/flight.py",
        "                residency.table.stored[move.group, move.arrived] = True\n",
        "                pass\n",
        killer="test_policies.py: storage_lacks",
    ),
    Mutant(
        "storage is believed to have what it refused",
        "it is never written again, and all that is below it is out of reach after a restart",
        "core/flight.py",
        "residency.table.stored[move.group, move.arrived] = True",
        "residency.table.stored[move.group, move.pages] = True",
        killer="test_policies.py: when_storage_went_out",
    ),
    Mutant(
        "every route counts as any other",
        "loads under way keep what they load from being written",
        "core/flight.py",
        "for ticket in self.transfers.on(route))",
        "for ticket in self.transfers.tickets)",
        killer="test_policies.py: though_it_is_being_loaded",
    ),
]
