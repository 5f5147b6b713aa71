"""What published models keep per page, from their configs alone: a table for planning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..schema import ConfigError, Group, UnsupportedModel
from .checkpoint import KV_DTYPES
from .drafts.decoder import Sizes
from .drafts.loading import EAGLE3
from .target.hf import survey_config

HEADER = ("model", "group", "keeps", "layers", "a hit needs", "KiB per page", "KiB per token")


def state_groups(config: dict[str, Any], page_tokens: int, kv_dtype: str) -> tuple[Group, ...]:
    """Groups of a target's ``config.json``, or of an EAGLE-3 draft's.

    Args:
        kv_dtype: of keys and values, such as "bfloat16" or "fp8_e4m3".

    Raises:
        ConfigError: an unknown dtype, or a model that cannot be served.
    """
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"dtype {kv_dtype!r} is none of {', '.join(KV_DTYPES)}")
    dtype = KV_DTYPES[kv_dtype]
    if config.get("architectures") == [EAGLE3]:
        return (Sizes.of(config, config.get("vocab_size", 0)).group(1, 1, page_tokens, dtype),)
    groups = survey_config(config).groups(page_tokens, dtype)
    if not groups:
        raise UnsupportedModel(f"{config['model_type']} keeps no state where pages could find it")
    return groups


def read_groups(file: Path, page_tokens: int, kv_dtype: str) -> tuple[Group, ...]:
    """:func:`state_groups` of a config file, or of the ``config.json`` in a directory.

    Raises:
        ConfigError: it cannot be read, or as there; the message is one line.
    """
    file = _file(file)
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: not a JSON object")
    try:
        return state_groups(config, page_tokens, kv_dtype)
    except (ArithmeticError, TypeError, ConfigError) as error:
        # Values that are no sizes break in many places; transformers names all models it knows.
        raise ConfigError(f"{file}: {shorten(str(error), 300, placeholder=' ...')}") from error


def _file(path: Path) -> Path:
    """The config file that ``path`` is, or holds."""
    return path / "config.json" if path.is_dir() else path


def _name(path: Path) -> str:
    """Of a model: its directory's, or what its config file is called in place of config.json."""
    file = _file(path)
    return file.parent.resolve().name if file.name == "config.json" else file.stem


def rows(files: Sequence[Path], page_tokens: int, kv_dtype: str) -> Iterator[tuple[str, ...]]:
    """One row of :data:`HEADER` per group of each config file; raises as :func:`read_groups`."""
    for file in files:
        for group in read_groups(file, page_tokens, kv_dtype):
            layers = {layer for component in group.components for layer in component.layers}
            tail = "every page" if group.tail is None else f"the last {group.tail}"
            yield (
                _name(file),
                group.name,
                ", ".join(component.name for component in group.components),
                str(len(layers)),
                "a snapshot" if group.working else tail,
                f"{group.page_bytes / 1024:,.0f}",
                "" if group.working else f"{group.page_bytes / 1024 / page_tokens:,.1f}",
            )


def show(found: Sequence[tuple[str, ...]]) -> None:
    """Print :func:`rows` as a table."""
    table = Table(Column(HEADER[0], overflow="fold"), *HEADER[1:], box=None)
    for row in found:
        table.add_row(*map(Text, row))
    Console().print(table)


def as_markdown(found: Sequence[tuple[str, ...]]) -> None:
    """Print :func:`rows` as a Markdown table."""
    for row in [HEADER, ("---",) * 3 + ("---:",) * 4, *found]:
        print(f"| {' | '.join(row)} |")
