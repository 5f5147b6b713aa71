"""Traces of prefix reuse: which blocks the prompts of real users were made of.

The format is Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release): one JSON object a line,
of which ``hash_ids`` is read: an id for each block of the prompt, which names the block's content
*and everything before it*. The last block may be partial and counts like any other.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..schema import ConfigError


class _Line(msgspec.Struct):
    hash_ids: list[int]
    priority: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, in order."""

    name: str
    blocks: NDArray[np.int32]  # of all requests, one after another; ids from 0, as they come
    ends: NDArray[np.int64]  # [requests]: where in ``blocks`` each ends
    priorities: list[int]  # of each request, 0 to 255
    distinct: int  # blocks that differ

    def __len__(self) -> int:
        """Requests."""
        return len(self.ends)

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """The blocks of each request."""
        start = 0
        for end in self.ends.tolist():
            yield self.blocks[start:end]
            start = end

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return int(np.diff(self.ends, prepend=0).max(initial=0))


def read_trace(files: Sequence[Path]) -> Trace:
    """One stream of requests from ``.jsonl`` files, also ``.xz``: parts of one trace, in order.

    Raises:
        ConfigError: a file cannot be read, or a line is no request; the message says which.
    """
    lines = [line for file in files for line in _lines(file)]
    names: dict[int, int] = {}
    blocks = [names.setdefault(name, len(names)) for line in lines for name in line.hash_ids]
    return Trace(
        name=", ".join(file.name for file in files),
        blocks=np.array(blocks, dtype=np.int32),
        ends=np.cumsum([len(line.hash_ids) for line in lines], dtype=np.int64),
        priorities=[line.priority for line in lines],
        distinct=len(names),
    )


def _lines(file: Path) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    number = 1
    try:
        with cast(BinaryIO, (lzma.open if file.suffix == ".xz" else open)(file, "rb")) as lines:
            for line in lines:
                if line.strip():
                    yield decode(line)
                number += 1
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (EOFError, lzma.LZMAError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}, line {number}: {error}") from error
