"""Errors of an engine and its server, besides those of :mod:`kvkeep.schema`."""

from __future__ import annotations

from ..schema import Closed, KvkeepError


class Overloaded(KvkeepError):
    """Too many requests wait; try again later."""


class DeadlineExceeded(KvkeepError):
    """A request was not done in the time that it allows."""


class Aborted(KvkeepError):
    """An operator aborted the request."""


class EngineDied(Closed):
    """The engine's process ended, and with it all requests that it ran."""


def error_named(kind: str, message: str) -> KvkeepError:
    """The error whose class is called ``kind``; KvkeepError if no class here is."""
    return _by_name(KvkeepError).get(kind, KvkeepError)(message)


def _by_name(root: type[KvkeepError]) -> dict[str, type[KvkeepError]]:
    """``root`` and all its subclasses, by name."""
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _by_name(child)
    return found
