"""Progress of one load: a step that needs its first layers does not wait for the last."""

from __future__ import annotations

import threading
from bisect import bisect_left

from ..schema import LoadFailed
from .base import Mark


class Arrival:
    """One load on its way to the device. The lane's thread reports; readers' threads wait."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._layers: list[int] = []  # ascending: the state of layers up to this one is there ...
        self._marks: list[Mark] = []  # ... after this mark
        self._landed = self._failed = False

    def reach(self, layer: int, mark: Mark) -> None:
        """Report that the state of all layers up to ``layer`` is there after ``mark``."""
        with self._change:
            self._layers.append(layer)
            self._marks.append(mark)
            self._change.notify_all()

    def land(self) -> None:
        """Report that all of it is on the device."""
        with self._change:
            self._landed = True
            self._change.notify_all()

    def fail(self) -> None:
        """Report that the load failed: every wait raises from now on."""
        with self._change:
            self._failed = True
            self._change.notify_all()

    @property
    def failed(self) -> bool:
        """The load failed."""
        return self._failed

    def wait(self, layer: int | None = None) -> None:
        """Order this thread's later device commands after the state of layers up to ``layer``.

        Blocks until the lane has reported that layer. None: block until all has landed.

        Raises:
            LoadFailed: the load failed.
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
