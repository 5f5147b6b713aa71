"""The tests find every listed mutant, and pass on the core itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import overlay, run
from mutants import Mutant, every_mutant

import kvkeep.schema

SOURCE = Path(kvkeep.schema.__file__).parent
MUTANTS = every_mutant()

STUBS = {"media/memory.py": "class Memory: ...\n"}
"""Stand for what imports torch, where tests bring media of their own."""


def stubs(*killers: str) -> dict[str, str]:
    """The stubs that suffice for these killers."""
    return {} if any("test_memory" in killer for killer in killers) else STUBS


def test_no_mutant_is_listed_twice() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)


def test_every_mutant_applies() -> None:
    """Also the slow ones."""
    counts = {m.name: (SOURCE / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_nothing_is_found_in_the_core_itself(tmp_path: Path) -> None:
    """Otherwise a killer would prove nothing."""
    killers = {mutant.killer for mutant in MUTANTS}
    overlay(tmp_path, SOURCE, stubs(*killers))
    done = run(tmp_path, killers)
    assert done.status == 0, done.output[-3000:]


EACH = [pytest.param(m, id=m.name, marks=[pytest.mark.slow] * m.slow) for m in MUTANTS]


@pytest.mark.parametrize("mutant", EACH)
def test_a_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    """A test or check must fail; failing to start does not count."""
    text = (SOURCE / mutant.file).read_text()
    assert mutant.old in text, "the code has changed: adapt the mutant"
    changed = {mutant.file: text.replace(mutant.old, mutant.new)}
    overlay(tmp_path, SOURCE, stubs(mutant.killer) | changed)
    done = run(tmp_path, {mutant.killer})
    assert done.killed, f"it survives, status {done.status}\n{done.output[-4000:]}"
