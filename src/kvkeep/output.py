"""Files for the figures of a command."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from .schema import ConfigError


def writable(path: Path) -> Path:
    """Check before any work that a file can be written at ``path``; return ``path``.

    Raises:
        ConfigError: no file can be written there; the message says why.
    """
    try:
        if not path.parent.is_dir():
            why = f"there is no directory {path.parent}"
        elif path.is_dir():
            why = "it is a directory"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = "permission denied"
        else:
            return path
    except OSError as error:
        why = str(error.strerror)
    raise ConfigError(f"cannot write {path}: {why}")


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON with a final newline.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_json_lines(path: Path, values: Iterable[object]) -> None:
    """Write each value as JSON on a line of its own.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, "".join(f"{json.dumps(value)}\n" for value in values))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
