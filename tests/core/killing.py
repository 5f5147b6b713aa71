"""Runs killers on a changed copy of the package, each in a fork of one prepared process.

The prepared process has imported what the killers need, but nothing of kvkeep: a fork imports the
changed copy as a new interpreter would, without importing numpy, hypothesis and pytest again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PATIENCE = 240.0  # seconds for one run of killers

FORKS = multiprocessing.get_context("forkserver")
PLUGINS = ["_hypothesis_pytestplugin", "pytest_timeout"]  # those that our configuration needs
LIBRARIES = ["concurrent.futures.thread", "hypothesis.stateful", "numpy.ma", "numpy.typing"]
LIBRARIES += ["packaging.version", "pdb", "pytest", "sqlite3", "tomllib", "xxhash"]
FORKS.set_forkserver_preload([*LIBRARIES, *PLUGINS])
IDLE = ["cacheprovider", "doctest", "junitxml", "stepwise", "unittest"]


class Verdict(NamedTuple):
    status: int  # exit status of the run: pytest's, or 1 if a walk failed
    output: str

    @property
    def killed(self) -> bool:
        """A test or a walk's check failed. False: all passed, or nothing ran."""
        return self.status == 1 and ("walk(" in self.output or "FAILED" in self.output)


def overlay(root: Path, source: Path, changed: Mapping[str, str]) -> None:
    """Make ``root / "kvkeep"`` a package that has these files, and all others from ``source``.

    Every directory with a changed file becomes a package of its own, whose path goes on in the
    directory of ``source`` that it stands for.
    """
    for room in {Path(), *(room for file in changed for room in Path(file).parents)}:
        (root / "kvkeep" / room).mkdir(parents=True, exist_ok=True)
        start = (source / room / "__init__.py").read_text()
        start += f"\n__path__.append({str(source / room)!r})\n"
        (root / "kvkeep" / room / "__init__.py").write_text(start)
    for file, text in changed.items():
        (root / "kvkeep" / file).write_text(text)


def run(root: Path, killers: Collection[str], compiled: Path | None = None) -> Verdict:
    """Run all these killers in one process that imports kvkeep from ``root``, and kill
    whatever they started.

    ``compiled``: a directory in which forks leave bytecode for each other, also where Python is
    told to write none. Everything that a fork imports is compiled into it once.

    Raises:
        TimeoutError: They took longer than ``PATIENCE``.
    """
    output = root / "output"
    process = FORKS.Process(target=_fork, args=(root, sorted(killers), output, compiled))
    process.start()
    process.join(PATIENCE)
    status, text = process.exitcode, output.read_text(errors="replace")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also processes that a failed test left behind
    process.join()
    if status is None:
        raise TimeoutError(f"no verdict after {PATIENCE} s\n{text[-2000:]}")
    return Verdict(status, text)


def _fork(root: Path, killers: list[str], output: Path, compiled: Path | None) -> None:
    """Run the killers in a fork and exit with their status."""
    os.setsid()  # so that all that it started can be killed with it
    with output.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    assert "kvkeep" not in sys.modules, "a fork must import the changed copy"
    gc.freeze()  # what was imported before the fork: no collection need look at it
    if compiled:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(compiled)
    paths = [str(root), str(HERE)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of what a killer starts
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    modules, names = zip(*(killer.split(": ") for killer in killers), strict=True)
    options = ["-x", "-q", "--assert=plain", "--tb=native", "--hypothesis-profile=verdict"]
    options += [f"-p{name}" for name in PLUGINS] + [f"-pno:{name}" for name in IDLE]
    options += ["-o", f"pythonpath={root}", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    files = sorted({(HERE / module).resolve() for module in modules})
    chosen = " or ".join(f"({name})" for name in sorted(set(names)))
    run = [*options, *map(str, files), "-k", chosen]
    sys.exit(pytest.main(run, plugins=[Only(files, chosen)]))


class Only:
    """Skips what cannot be a killer before pytest makes items of it, from which ``-k`` selects."""

    def __init__(self, files: list[Path], chosen: str) -> None:
        self.files, self.words = files, re.findall(r"\w+", chosen)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return (collection_path.is_file() and collection_path not in self.files) or None

    def pytest_pycollect_makeitem(self, name: str) -> list[object] | None:
        """An empty list: no item. None: pytest decides."""
        known = not name.startswith("test_") or any(word in name for word in self.words)
        return None if known else []
