"""Processes that are no children of the test's."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from pathlib import Path


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # each thread has its own
    return [int(child) for one in lists for child in one.read_text().split()]


def ended(pid: int) -> Callable[[], bool]:
    """A function that waits for the end of a process that runs now, and says whether it came."""
    number = os.pidfd_open(pid)

    def wait() -> bool:
        with contextlib.closing(os.fdopen(number)):
            return bool(select.select([number], [], [], 60)[0])

    return wait
