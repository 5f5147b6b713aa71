"""Storage backends by name. A new one needs no change here: an installed package may bring it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name

from ..schema import ConfigError
from .base import Store
from .labels import Label

OpenBackend = Callable[[Path, Mapping[bytes, int], int, Mapping[bytes, Label]], Store]
"""``open(directory, sizes, quota_bytes, labels)``: sizes are body bytes and labels people's names,
by group fingerprint, as in :class:`~kvkeep.stores.file.FileStore`. What a directory is, the backend
says. It may ignore the labels."""

ENTRY_POINTS = "kvkeep.stores"
"""Packages list backends in this group of entry points, as ``name = "module:object"``."""


def backends() -> dict[str, str]:
    """``module:object`` of each backend, by name."""
    found = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
    return found | {"file": "kvkeep.stores.file:FileStore"}


def backend(name: str) -> OpenBackend:
    """What opens a backend of this name, or one that is named as ``module:object``.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    known = backends()
    where = known.get(name, name)
    if ":" not in where:
        raise ConfigError(
            f"--hicache-storage-backend must be one of {', '.join(known)}, or module:object, "
            f"not {name!r}"
        )
    try:
        found: OpenBackend = resolve_name(where)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--hicache-storage-backend {name!r} cannot be imported: {error}"
        ) from error
    return found
