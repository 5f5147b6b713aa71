"""What people call the groups of a directory: a small file beside the records of each.

Records are found by hashes, and nothing but a :class:`Label` says which model they are of. Losing a
label loses no record. Directories that were made without labels stay as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec


class Label(msgspec.Struct, frozen=True):
    """A group in an operator's words."""

    model: str  # as it was served, and what else its state depends on
    group: str  # "full", "window", ...
    page_tokens: int


def save(directory: Path, labels: Mapping[bytes, Label]) -> None:
    """Keep ``labels``, by fingerprint. A disk that refuses them costs nothing but names."""
    for fingerprint, label in labels.items():
        file, text = _file(directory, fingerprint), msgspec.json.encode(label)
        fresh = file.with_suffix(f".{os.getpid()}.new")
        with contextlib.suppress(OSError):
            if load(directory, fingerprint) != label:
                fresh.write_bytes(text)
                fresh.rename(file)


def load(directory: Path, fingerprint: bytes) -> Label | None:
    """The label of a group; None: it has none."""
    try:
        return msgspec.json.decode(_file(directory, fingerprint).read_bytes(), type=Label)
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def _file(directory: Path, fingerprint: bytes) -> Path:
    return directory / f"{fingerprint.hex()}.json"
