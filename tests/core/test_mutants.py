"""The tests find every listed mutant, and pass on the core itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import Verdict, overlay, run
from mutants import Mutant, every_mutant

import kvkeep.schema

SOURCE = Path(kvkeep.schema.__file__).parent
MUTANTS = every_mutant()
Files = dict[str, str]  # text by path in the package

KILLERS: dict[str, set[str]] = {}  # by module
for listed in MUTANTS:
    KILLERS.setdefault(listed.module, set()).add(listed.killer)

STUBS = {"media/memory.py": "class Memory: ...\n"}
"""Stand for what imports torch, where tests bring media of their own."""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where forks leave bytecode."""
    return tmp_path_factory.mktemp("compiled")


def verdict(root: Path, module: str, killers: set[str], changed: Files, compiled: Path) -> Verdict:
    """What these killers of one module say of the package with these changes."""
    if module == "test_memory.py":  # imports torch, which need not be compiled
        overlay(root, SOURCE, changed)
        return run(root, killers)
    overlay(root, SOURCE, STUBS | changed)
    return run(root, killers, compiled)


def test_no_mutant_is_listed_twice() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)


def test_every_mutant_applies() -> None:
    """Also the slow ones."""
    counts = {m.name: (SOURCE / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize("module", sorted(KILLERS))
def test_nothing_is_found_in_the_core_itself(module: str, tmp_path: Path, compiled: Path) -> None:
    """Otherwise a killer would prove nothing."""
    done = verdict(tmp_path, module, KILLERS[module], {}, compiled)
    assert done.status == 0, done.output[-3000:]


EACH = [pytest.param(m, id=m.name, marks=[pytest.mark.slow] * m.slow) for m in MUTANTS]


@pytest.mark.parametrize("mutant", EACH)
def test_a_mutant_is_killed(mutant: Mutant, tmp_path: Path, compiled: Path) -> None:
    """A test or check must fail; failing to start does not count."""
    text = (SOURCE / mutant.file).read_text()
    assert mutant.old in text, "the code has changed: adapt the mutant"
    changed = {mutant.file: text.replace(mutant.old, mutant.new)}
    done = verdict(tmp_path, mutant.module, {mutant.killer}, changed, compiled)
    assert done.killed, f"it survives, status {done.status}\n{done.output[-4000:]}"
