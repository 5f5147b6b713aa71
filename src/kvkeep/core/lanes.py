"""Lanes: threads that run jobs in order and put each finished job into an inbox."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from ..schema import Closed
from .ticket import LOAD, SAVE, Job

log = logging.getLogger(__name__)

J = TypeVar("J", bound=Job)

_MERGING = (SAVE.name, LOAD.name)


class Lane(Protocol[J]):
    """Runs jobs and reports each once. Scheduler's thread unless noted."""

    def submit(self, job: J) -> None:
        """Queue a job; raises Closed if the lane is closed."""

    def withdraw(self) -> list[J]:
        """Take back jobs that have not begun; they are not reported."""
        ...

    def close(self, timeout: float) -> bool:
        """Finish the queue, then stop. False: not done after ``timeout`` seconds. Any thread."""
        ...


class MakeLane(Protocol):
    """Makes lanes; tests pass lanes that they step by hand."""

    def __call__(
        self, name: str, work: Callable[[list[J]], None], report: Callable[[J], None]
    ) -> Lane[J]:
        """``work`` runs a batch of jobs and never raises; ``report`` takes each finished job."""
        ...


class Listener:
    """The callback that lanes call when a job is done."""

    callback: Callable[[], None] | None = None

    def wake(self) -> None:
        """Call back; log whatever it raises, so that no lane ends."""
        try:
            if self.callback is not None:
                self.callback()
        except BaseException:
            log.exception("the listener of transfers failed")


class Inbox(Generic[J]):
    """Finished jobs. Lanes put them in, the scheduler's thread takes them out."""

    def __init__(self, listener: Listener) -> None:
        self._jobs: deque[J] = deque()
        self._listener = weakref.ref(listener)  # or a lane would keep alive whom it wakes

    def put(self, job: J) -> None:
        """Add a finished job."""
        self._jobs.append(job)
        if (listener := self._listener()) is not None:
            listener.wake()

    def taken(self) -> Iterator[J]:
        """Yield the jobs that are in it now, and remove each when the next is asked for: a job
        whose end was interrupted comes again."""
        for _ in range(len(self._jobs)):
            yield self._jobs[0]
            self._jobs.popleft()


class ThreadLane(Generic[J]):
    """A lane on a daemon thread of its own.

    Copies between memory tiers are merged: one call of ``work`` gets the whole queue. Other lanes
    take one job at a time, so that the first does not wait for the last.
    """

    def __init__(
        self, name: str, work: Callable[[list[J]], None], report: Callable[[J], None]
    ) -> None:
        self._work, self._report = work, report
        self._merges = name in _MERGING
        self._queue: deque[J] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvkeep-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: J) -> None:
        with self._wake:
            if self._closed:
                raise Closed("the transfer lanes are closed")
            self._queue.append(job)
            self._wake.notify()

    def withdraw(self) -> list[J]:
        with self._wake:
            taken = list(self._queue)
            self._queue.clear()
            return taken

    def close(self, timeout: float) -> bool:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                count = len(self._queue) if self._merges else 1
                batch = [self._queue.popleft() for _ in range(count)]
            self._work(batch)
            for job in batch:
                self._report(job)
            del batch, job  # a lane that waits keeps nothing alive
