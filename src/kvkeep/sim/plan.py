"""Capacity planning: a replay's pages as GiB of a model's state, and its hits as saved tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..models.state_sizes import state_groups
from ..schema import ConfigError
from .replay import Result

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Answers:
    """What a replay tells of a deployment."""

    prompt_tokens: int
    saved_tokens: int  # of these, not to be computed
    moved_bytes: dict[str, int]  # by lane


@dataclass(frozen=True, slots=True)
class Plan:
    """What a page of a trace stands for."""

    page_tokens: int
    page_bytes: int  # of all groups that a hit needs every page of

    def pages(self, gib: float) -> int:
        """Whole pages that fit; ConfigError if ``gib`` is negative."""
        if gib < 0:
            raise ConfigError(f"a tier cannot have {gib:g} GiB")
        return int(gib * GIB) // self.page_bytes

    def gib(self, pages: int) -> float:
        """What so many pages take."""
        return pages * self.page_bytes / GIB

    def answers(self, result: Result) -> Answers:
        """The figures of a replay, in tokens and bytes."""
        return Answers(
            result.pages * self.page_tokens,
            result.hits["total"] * self.page_tokens,
            {lane: count * self.page_bytes for lane, count in result.moved.items()},
        )


def read_plan(configs: Sequence[Path], page_tokens: int, kv_dtype: str) -> Plan:
    """A deployment's plan.

    Sliding windows and recurrent states have pools of their own, of which a hit needs a tail; they
    are not counted.

    Args:
        configs: a target's ``config.json``, and its EAGLE-3 draft's if there is one.
        page_tokens: tokens of a block of the trace.

    Raises:
        ConfigError: a file cannot be read, or is of a model that keeps no state for every page.
    """
    size = 0
    for file in configs:
        try:
            config = msgspec.json.decode(file.read_bytes(), type=dict)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file}: {error}") from error
        groups = state_groups(config, page_tokens, kv_dtype)
        size += sum(group.page_bytes for group in groups if group.tail is None)
    if not size:
        raise ConfigError("none of these models keeps state that a hit needs every page of")
    return Plan(page_tokens, size)
