"""The core knows no kind of model, stays small, and has no circles among its rooms."""

import re
from collections import deque
from collections.abc import Iterator
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import pytest
from schemas import FIVE

import kvkeep.schema
from kvkeep.core.cache import Cache
from kvkeep.core.lane_work import Inquiry
from kvkeep.core.lease import Lease, Prefetch
from kvkeep.core.policy import Policy
from kvkeep.core.presence import Presence
from kvkeep.core.storage import Lookup
from kvkeep.core.ticket import Ticket
from kvkeep.testing.fakes import DictStore, TruthMedia

SOURCE = Path(kvkeep.schema.__file__).parent
CORE = sorted((SOURCE / "core").glob("*.py"))
ROOMS = [
    f"{room}/{file.name}"
    for room in ("core", "media", "stores")
    for file in sorted((SOURCE / room).glob("*.py"))
]


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


@pytest.mark.parametrize("room", ROOMS)
def test_no_kind_of_model_is_named(room: str) -> None:
    """Not even within a word."""
    text = (SOURCE / room).read_text()
    found = re.findall(r"\w*(?:draft|mamba|swa|mla|eagle)\w*", text, re.IGNORECASE)
    assert found == []


def test_the_core_fits_into_a_head() -> None:
    assert sum(map(lines, [SOURCE / "schema.py", *CORE])) <= 4600  # the goal is 3,500


def test_no_file_of_the_core_is_long() -> None:
    assert {f.name: n for f in CORE if (n := lines(f)) > 400} == {}


def test_no_file_is_long() -> None:
    assert {f.name: n for f in SOURCE.rglob("*.py") if (n := lines(f)) > 500} == {}


def test_nothing_in_the_core_asks_what_class_a_value_has() -> None:
    """One line does: a context manager must tell an error that it contains from one that it does
    not, and gets both as an exception."""
    found = {file.name: re.findall(r".*\bisinstance\(.*", file.read_text()) for file in CORE}
    assert {name: len(hits) for name, hits in found.items() if hits} == {"audit.py": 1}
    assert "InvariantError" in found["audit.py"][0]


# --- rooms at run time

PASSED = Ticket, Inquiry, Lookup, Lease, Prefetch, Presence
"""What rooms hand to each other. A job knows who applies its outcome, until it has come back."""


def room(thing: object) -> str | None:
    """The module of the core that its class is in."""
    package, _, name = type(thing).__module__.rpartition(".")
    return name if package == "kvkeep.core" else None


def inside(thing: Any) -> list[Any]:
    """What it refers to: attributes, elements, and what a callback is bound to."""
    found: list[Any] = []
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        found += thing
    elif isinstance(thing, dict):
        found += [*thing, *thing.values()]
    elif isinstance(thing, MethodType):
        found.append(thing.__self__)
    elif isinstance(thing, partial):
        found += [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, FunctionType):
        found += [cell.cell_contents for cell in thing.__closure__ or ()]
    if room(thing):
        found += vars(thing).values() if hasattr(thing, "__dict__") else ()
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        found += [getattr(thing, name) for name in slots if hasattr(thing, name)]
    return found


def references(cache: Cache) -> dict[str, set[str]]:
    """Rooms by room: whose objects an object of a room can reach without asking a third one."""
    rooms: dict[str, set[str]] = {}
    todo: list[tuple[Any, str]] = [(cache, "cache")]
    seen: dict[tuple[int, str], Any] = {}  # keeps all of them alive, so that no id comes twice
    while todo:
        thing, owner = todo.pop()
        here = room(thing) or owner
        if (id(thing), here) in seen or isinstance(thing, PASSED):
            continue
        seen[id(thing), here] = thing
        mine = rooms.setdefault(here, set())
        for one in inside(thing):
            to = room(one)
            if to not in (None, here) and not isinstance(one, PASSED):
                mine.add(str(to))
            todo.append((one, here))
    return rooms


@pytest.fixture
def cache() -> Iterator[Cache]:
    """One on threads, that has stored, evicted, loaded and read."""
    slots, policy = [6] * len(FIVE.groups), Policy(prefetch_min_tokens=0)
    with Cache(FIVE, slots, slots, DictStore(), policy, TruthMedia(slots, slots)) as made:
        for start in range(3):
            tokens = start + np.arange(8)
            prefetch = made.prefetch(tokens)
            while not made.ready(prefetch):
                made.tick()
            lease = made.admit(tokens, chunk=8, prefetch=prefetch)
            assert lease
            made.commit(lease, tokens)
            made.release(lease)
            assert made.drain()
        yield made


def order(rooms: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(rooms).static_order())


def test_no_circle_at_run_time(cache: Cache) -> None:
    rooms = references(cache)
    assert order(rooms)[-1] == "cache"
    passed = {kind.__module__.rpartition(".")[2] for kind in PASSED}
    assert rooms.keys() | passed == {file.stem for file in CORE} - {"__init__"}


def test_a_circle_would_be_seen(cache: Cache) -> None:
    """A residency that calls into backup, as a hook, is one."""
    cache.residency.table.hook = partial(map, cache._backup.make_room)  # type: ignore[attr-defined]
    with pytest.raises(CycleError, match="nodes are in a cycle"):
        order(references(cache))
