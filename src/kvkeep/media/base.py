"""What media are to those who move bytes. No tensors here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ..schema import Slots

LAYOUTS = ("page_first", "layer_first", "page_first_direct")
"""Of host arenas; the last is SGLang's name of the first where a copy engine moves it."""

BACKENDS = ("direct", "kernel")
"""What moves bytes between device and host: plain copies, or one kernel for all pages and groups of
a transfer, launched for each layer of a load."""


class Copy(NamedTuple):
    """Pages of one group to move from slots of one medium to slots of the other."""

    group: int  # index in the schema
    source: Slots
    target: Slots


class Mark(Protocol):
    """A point in what a device is told to do."""

    def wait(self) -> None:
        """What the calling thread tells the device from now on is done after it."""

    def synchronize(self) -> None:
        """Return when the device has come to it."""


class _Now:
    def wait(self) -> None: ...
    def synchronize(self) -> None: ...


NOW: Mark = _Now()
"""The mark of a device that does at once what it is told."""

Reached = Callable[[int, Mark], None]


class Media(Protocol):
    """Device and host bytes, such as :class:`~kvkeep.media.memory.Memory`.

    Calls block. Two lanes may call at once, since they never share a target slot.
    """

    def mark(self) -> Mark:
        """All that the calling thread has told the device to do until now."""

    def save(self, copies: Sequence[Copy], after: Iterable[Mark] = ()) -> None:
        """Device to host, when the device has come to the marks ``after``."""

    def load(
        self,
        copies: Sequence[Copy],
        after: Iterable[Mark] = (),
        reached: Reached = lambda layer, mark: None,
    ) -> None:
        """Host to device, when the device has come to the marks ``after``.

        Layer by layer of the groups that every hit needs, in order of number, then all others.
        ``reached`` is told of each of those layers: what layers up to it need is there after the
        mark.
        """

    def bodies(self, group: int, slots: Slots) -> list[memoryview]:
        """Record bodies of host slots, to be read or written."""

    def keep(self, group: int, slots: Slots, bodies: Sequence[memoryview]) -> None:
        """What was written into ``bodies`` of these slots is theirs now."""
