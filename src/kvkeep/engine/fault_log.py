"""Says in the log what fails in storage and on the lanes, which no request shows."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_SECONDS, MOST_SECONDS = 60.0, 3600.0  # between two lines about one kind: it doubles
HEALED_SECONDS = 300.0  # a kind that has failed for long is healed after so long without
LOOK_SECONDS = 1.0  # between two looks

_COUNTER = re.compile(
    r"(storage_faults|transfer_faults|storage_breaker_trips)_total(?:{\w+=(.*)})?"
)

_WORDS = {
    "busy": "the index stayed locked, so calls did nothing",
    "corrupt": "records were torn or damaged, and are dropped",
    "empty": "records were gone from their slots",
    "full": "the disk is full, so records are not written",
    "index": "the index was lost or damaged, and is rebuilt",
    "io": "the disk failed to read or write",
    "missing": "files of records are gone",
    "no_room": "all slots are being written, so records are not",
    "read_only": "the directory may not be written to, so records are not written",
    "stall": "calls took longer than --storage-stall-seconds",
    "storage_breaker_trips": "storage failed too often and is left alone for a while",
}
_NO_FAULT = "recycled"  # a writer took a slot that was being read: a plain miss


@dataclass(slots=True)
class _Kind:
    """One counter. Times are monotonic seconds."""

    count: int = 0  # now
    said: int = 0  # when the last line was logged
    changed: float = 0.0  # when the count grew last
    due: float = 0.0  # when the next line may be logged
    wait: float = FIRST_SECONDS  # until the line after it
    failing: bool = False


class FaultLog:
    """One line when a kind of fault appears, one with a count at growing intervals while it goes
    on, and one when it has stopped. Engine's thread only."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self.due = 0.0  # monotonic seconds: when to look again

    def look(self, figures: Mapping[str, float], now: float) -> None:
        """Log what is new.

        Args:
            figures: :meth:`Cache.figures`.
            now: monotonic seconds.
        """
        self.due = now + LOOK_SECONDS
        for name, value in figures.items():
            if (found := _COUNTER.fullmatch(name)) and found[2] != _NO_FAULT:
                self._look(found[2] or found[1], name, int(value), now)

    def _look(self, kind: str, name: str, count: int, now: float) -> None:
        one = self._kinds.setdefault(name, _Kind())
        if count > one.count:
            one.count, one.changed = count, now
        what = _WORDS.get(kind, f"{kind} failed")
        new = one.count - one.said
        if not one.failing and new:
            log.warning("%s (%d times; counted as %s)", what, new, name)
            one.failing, one.said, one.due = True, one.count, now + one.wait
        elif one.failing and now - one.changed >= min(one.wait, HEALED_SECONDS):
            log.warning("over: %s (%d times in all)", what, one.count)
            one.failing, one.said = False, one.count
        elif one.failing and new and now >= one.due:
            log.warning("still: %s (%d times more, %d in all)", what, new, one.count)
            one.wait = min(MOST_SECONDS, 2 * one.wait)
            one.said, one.due = one.count, now + one.wait
