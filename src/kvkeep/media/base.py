"""What media are to those who move bytes. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..schema import Slots

LAYOUTS = ("page_first", "layer_first", "page_first_direct")
"""Of host arenas; the last is SGLang's name of the first where a copy engine moves it."""

BACKENDS = ("direct", "kernel")
"""What moves bytes between device and host: plain copies, or one kernel for all of a transfer."""


class Copy(NamedTuple):
    """Pages of one group to move from slots of one medium to slots of the other."""

    group: int  # index in the schema
    source: Slots
    target: Slots


class Mark(Protocol):
    """A point in what a device is told to do."""

    def wait(self) -> None:
        """What the calling thread tells the device from now on is done after it."""


class Media(Protocol):
    """Device and host bytes, such as :class:`~kvkeep.media.memory.Memory`.

    Calls block. Two lanes may call at once, since they never share a target slot.
    """

    def save(self, copies: Sequence[Copy]) -> None:
        """Device to host."""

    def load(self, copies: Sequence[Copy]) -> None:
        """Host to device."""

    def bodies(self, group: int, slots: Slots) -> list[memoryview]:
        """Record bodies of host slots, to be read or written."""

    def keep(self, group: int, slots: Slots, bodies: Sequence[memoryview]) -> None:
        """What was written into ``bodies`` of these slots is theirs now."""
