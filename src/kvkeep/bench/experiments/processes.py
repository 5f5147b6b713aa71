"""Memory, files and processor time of processes, from ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Process:
    """A process that runs."""

    pid: int

    @property
    def rss_mib(self) -> float:
        """Resident memory."""
        return int(self._text("statm").split()[1]) * _PAGE / _MIB

    @property
    def files(self) -> int:
        """Open file descriptors, sockets included."""
        return len(list(self._at("fd").iterdir()))

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        return sum(map(int, self._stat()[11:13])) / _TICKS

    @property
    def parent(self) -> int:
        """Process id of its parent."""
        return int(self._stat()[1])

    def pin(self, cores: set[int]) -> None:
        """Run all its threads on these cores; threads that they start inherit that."""
        for thread in self._at("task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)

    def _at(self, name: str) -> Path:
        return Path("/proc", str(self.pid), name)

    def _text(self, name: str) -> str:
        return self._at(name).read_text()

    def _stat(self) -> list[str]:
        """The fields after the command's name, which may have spaces."""
        return self._text("stat").rpartition(")")[2].split()


def engine_of(server: int) -> Process:
    """The process of a server's engine: its child of that name.

    Raises:
        ProcessLookupError: it has none.
    """
    for each in Path("/proc").glob("[0-9]*"):
        child = Process(int(each.name))
        try:
            if child.parent == server and b"kvkeep.engine.child" in (each / "cmdline").read_bytes():
                return child
        except OSError:  # it has just ended
            continue
    raise ProcessLookupError(f"process {server} has no engine's process")


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line through points in the sense of least squares; 0 of fewer than two."""
    return float(np.polyfit(times, values, 1)[0]) if len(times) > 1 else 0.0
