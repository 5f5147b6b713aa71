"""Files that a command writes when its work is done."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .schema import ConfigError


def writable(path: Path) -> Path:
    """``path``, before any work is done for it.

    Raises:
        ConfigError: no file can be written there.
    """
    place = path if os.path.exists(path) else f"{path.parent}/"  # which only a directory can be
    if os.path.isdir(path) or not os.access(place, os.W_OK):
        raise ConfigError(f"cannot write {path}")
    return path


def write_json(path: Path, value: object) -> None:
    """Write ``value``, for people to read as well."""
    path.write_text(json.dumps(value, indent=1) + "\n")
