"""How far a load has come: who needs its first layers need not wait for the last."""

from __future__ import annotations

import threading
from bisect import bisect_left

from ..schema import LoadFailed
from .base import Mark


class Arrival:
    """One load on its way to the device. A lane's thread reports, a reader's thread waits."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._layers: list[int] = []  # what layers up to this one need is there ...
        self._marks: list[Mark] = []  # ... after this mark
        self._landed = self._failed = False

    def reach(self, layer: int, mark: Mark) -> None:
        """All that layers up to ``layer`` need is there after ``mark``."""
        with self._change:
            self._layers.append(layer)
            self._marks.append(mark)
            self._change.notify_all()

    def land(self) -> None:
        """All of it is there, and nothing can happen to it any more."""
        with self._change:
            self._landed = True
            self._change.notify_all()

    def fail(self) -> None:
        """No more will come."""
        with self._change:
            self._failed = True
            self._change.notify_all()

    def wait(self, layer: int | None = None) -> None:
        """Until what the calling thread tells the device sees all that layers up to ``layer``
        need; None: until all has landed.

        Raises:
            LoadFailed: it will not.
        """
        with self._change:
            self._change.wait_for(lambda: self._landed or self._failed or self._covers(layer))
            if self._failed:
                raise LoadFailed("state on its way to the device was lost")
            if self._landed or layer is None:
                return
            mark = self._marks[bisect_left(self._layers, layer)]
        mark.wait()

    def _covers(self, layer: int | None) -> bool:
        return layer is not None and bool(self._layers) and self._layers[-1] >= layer
