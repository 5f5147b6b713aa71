"""The interface of media to the code that moves bytes. No tensors here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ..schema import Slots

LAYOUTS = ("page_first", "layer_first", "page_first_direct")
"""Layouts of host arenas. ``page_first_direct`` is SGLang's name for ``page_first`` where a copy
engine moves the bytes."""

BACKENDS = ("direct", "kernel")
"""Backends that copy between device and host. ``direct``: plain copies. ``kernel``: one launch for
all pages and groups of a transfer, or one for each layer of a load."""


class Copy(NamedTuple):
    """Pages of one group to copy from slots of one medium to slots of the other."""

    group: int  # index in the schema
    source: Slots
    target: Slots


class Mark(Protocol):
    """A point in the command queue of a device, such as a CUDA event."""

    def wait(self) -> None:
        """Order this thread's later device commands after the mark. Does not block the thread."""

    def synchronize(self) -> None:
        """Block until the device has reached the mark."""


class _Now:
    def wait(self) -> None: ...
    def synchronize(self) -> None: ...


NOW: Mark = _Now()
"""The mark of a device that runs every command at once."""

Reached = Callable[[int, Mark], None]
"""``reached(layer, mark)``: the state of layers up to ``layer`` is on the device after ``mark``."""


class Media(Protocol):
    """Device and host slots and the copies between them, such as
    :class:`~kvkeep.media.memory.Memory`.

    Calls block until the bytes have moved. Two lanes may call at once: they never share a target
    slot.
    """

    def mark(self) -> Mark:
        """A mark after all commands that this thread has queued on the device so far."""

    def save(self, copies: Sequence[Copy], after: Iterable[Mark] = ()) -> None:
        """Copy from device to host once the device has reached the marks ``after``."""

    def load(
        self,
        copies: Sequence[Copy],
        after: Iterable[Mark] = (),
        reached: Reached = lambda layer, mark: None,
    ) -> None:
        """Copy from host to device once the device has reached the marks ``after``.

        First the groups that every hit needs, layer by layer in ascending order, with a call of
        ``reached`` for each layer; then all other groups.
        """

    def bodies(self, group: int, slots: Slots) -> list[memoryview]:
        """The record body of each host slot: write it to storage, or read storage into it."""

    def keep(self, group: int, slots: Slots, bodies: Sequence[memoryview]) -> None:
        """Take over what was read into ``bodies`` of these slots."""
