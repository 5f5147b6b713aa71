"""Engines without a model that run in a process of their own; see tests/test_link.py."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from fake_engine import FakeEngine

from kvkeep.engine.messages import Ask, Done, Evict, Figures, Request

MAKE = f"{__name__}:make"


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


class RemoteFake(FakeEngine):
    """Does to its process what the tier of an Evict names; ``home`` is where it leaves traces."""

    home: Path

    def _take(self, message: Request) -> None:
        match message:
            case Evict(_, "exit"):
                os._exit(3)
            case Evict(_, "segfault"):
                ctypes.string_at(0)
            case Evict(_, "hang"):
                threading.Event().wait()
            case Evict(name, "pause"):
                self._callback(Done(name))
                wait_for(self.home / "go on")
            case Ask(name):
                heavy = sys.modules.keys() & {"torch", "transformers"}
                facts = {"heavy": float(len(heavy)), "frozen": float(gc.get_freeze_count())}
                self._callback(Figures(name, facts))
            case _:
                super()._take(message)

    def close(self, timeout: float = 30.0) -> None:
        super().close(timeout)
        (self.home / "closed").write_text(f"{timeout}")


def make(options: dict[str, Any]) -> RemoteFake:
    """A :class:`RemoteFake` with a ``home`` and other options; waits while ``home/wait`` exists."""
    home = options.pop("home")
    atexit.register(lambda: (home / "frozen").write_text(str(gc.get_freeze_count())))
    while (home / "wait").exists():
        time.sleep(0.01)
    engine = RemoteFake(**options)
    engine.home = home
    return engine


def broken(error: Exception) -> NoReturn:
    raise error


def leaving(status: int) -> NoReturn:
    os._exit(status)
