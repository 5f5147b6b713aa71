"""The tests find every listed mistake, and find nothing where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

import kvkeep.schema

HERE = Path(__file__).parent
SOURCE = Path(kvkeep.schema.__file__).parent
SEEDS = 10

STUB = "class Memory: ...\n"
"""Stands for ``media/memory.py`` where tests bring media of their own: no torch to import."""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A copy of the core, in a place of its own."""
    package = tmp_path / "kvkeep"
    package.mkdir()
    for file in SOURCE.glob("*.py"):
        shutil.copy(file, package)
    for room in ("core", "stores", "media", "testing"):
        shutil.copytree(SOURCE / room, package / room)
    (package / "__init__.py").write_text("")
    return package


def run(core: Path, *killers: str) -> subprocess.CompletedProcess[str]:
    """All these killers, in one process that imports this copy."""
    if killers == ("walk",):
        command = [str(HERE / "walks.py"), "0", str(SEEDS)]
    else:
        modules, names = zip(*(killer.split(": ") for killer in killers), strict=True)
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=verdict"]
        options += ["-o", f"pythonpath={core.parent}"]
        files = [str((HERE / module).resolve()) for module in sorted(set(modules))]
        chosen = " or ".join(f"({name})" for name in sorted(set(names)))
        command = ["-m", "pytest", *options, *files, "-k", chosen]
    if not any("test_memory" in killer for killer in killers):
        (core / "media" / "memory.py").write_text(STUB)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(core.parent), str(HERE)))}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120
    )


def test_no_mutant_is_listed_twice() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)


def test_every_mutant_applies() -> None:
    """Also those that are slow to be found."""
    counts = {m.name: (SOURCE / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_nothing_is_found_in_the_core_itself(core: Path) -> None:
    """Else a killer would prove nothing."""
    tests = {mutant.killer for mutant in MUTANTS} - {"walk"}
    for killers in (tests, {"walk"}):
        done = run(core, *killers)
        assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"


EACH = [pytest.param(m, id=m.name, marks=[pytest.mark.slow] * m.slow) for m in MUTANTS]


@pytest.mark.parametrize("mutant", EACH)
def test_a_mutant_is_killed(mutant: Mutant, core: Path) -> None:
    """With a failure of a test or a check, not by failing to start."""
    assert mutant.old in (core / mutant.file).read_text(), "the code has changed: adapt the mutant"
    file = core / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))
    done = run(core, mutant.killer)
    assert done.returncode == 1, f"it survives\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert "walk(" in done.stderr or "FAILED" in done.stdout
