"""Traces of prefix reuse: the blocks of real users' prompts.

The format is Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release): one JSON object a line.
``hash_ids`` has an id for each block of the prompt, which names the block's content *and everything
before it*. A partial last block has an id like any other, or none. ``input_length``, the prompt's
tokens, tells the size of blocks.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..schema import ConfigError

_USUAL = tuple(1 << n for n in range(20))
"""Common block sizes, in tokens."""


class _Line(msgspec.Struct):
    hash_ids: list[int]
    input_length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, in order."""

    name: str  # the paths of its files
    blocks: NDArray[np.int32]  # the blocks of all requests in a row; ids count up from 0
    ends: NDArray[np.int64]  # [requests]: where in ``blocks`` each request ends
    priorities: list[int]  # of each request, 0 to 255
    lengths: list[int | None]  # of each request, in tokens; None: the trace has no input_length
    distinct: int  # number of different blocks

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.ends)

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """The blocks of each request."""
        start = 0
        for end in self.ends.tolist():
            yield self.blocks[start:end]
            start = end

    def tokens(self, page_tokens: int) -> NDArray[np.int64]:
        """``[requests]``: tokens of each. A request without a length has whole blocks of
        ``page_tokens``."""
        whole = (len(blocks) * page_tokens for blocks in self)
        told = zip(self.lengths, whole, strict=True)
        return np.array([most if tokens is None else tokens for tokens, most in told], np.int64)

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return int(np.diff(self.ends, prepend=0).max(initial=0))


def read_trace(files: Sequence[Path]) -> Trace:
    """Read ``.jsonl`` or ``.jsonl.xz`` files as one trace, in this order.

    Raises:
        ConfigError: a file cannot be read or a line is no request; the message says which.
    """
    lines = [line for file in files for line in _lines(file)]
    names: dict[int, int] = {}
    blocks = [names.setdefault(name, len(names)) for line in lines for name in line.hash_ids]
    return Trace(
        name=", ".join(map(str, files)),
        blocks=np.array(blocks, dtype=np.int32),
        ends=np.cumsum([len(line.hash_ids) for line in lines], dtype=np.int64),
        priorities=[line.priority for line in lines],
        lengths=[line.input_length for line in lines],
        distinct=len(names),
    )


def tokens_per_block(traces: Sequence[Trace], said: int | None) -> int:
    """Tokens of a block: ``said``, or else the one common size that the prompts' lengths allow.

    A prompt of n blocks is longer than n - 1 of them and shorter than n + 1.

    Raises:
        ConfigError: the lengths contradict ``said`` or each other, or allow several common sizes.
    """
    known = [
        (tokens, len(blocks))
        for trace in traces
        for tokens, blocks in zip(trace.lengths, trace, strict=True)
        if tokens is not None
    ]
    low = max((tokens // (count + 1) + 1 for tokens, count in known), default=1)
    tops = (-(-tokens // (count - 1)) - 1 for tokens, count in known if count > 1)
    high = min(tops, default=math.inf)
    if low > high:
        raise ConfigError("no --block-tokens fits the prompts' lengths (input_length) in the trace")
    usual = [low] if low == high else [size for size in _USUAL if low <= size <= high]
    if said is None and len(usual) != 1:
        raise ConfigError(
            "give --block-tokens: the prompts' lengths (input_length) in the trace allow "
            f"{low} to {high}"
        )
    if said is not None and not low <= said <= high:
        fitting = usual[0] if len(usual) == 1 else f"{low} to {high}"
        raise ConfigError(
            f"--block-tokens {said} does not fit the prompts' lengths (input_length) in the trace, "
            f"which allow {fitting}"
        )
    return usual[0] if said is None else said


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
