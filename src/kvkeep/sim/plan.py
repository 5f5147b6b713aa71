"""Capacity planning: the pages of a replay as GiB of a model's state, its hits as saved tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.ticket import LOAD, READ, SAVE, WRITE
from ..engine.config import GIB, EngineConfig
from ..engine.sizing import pool_share
from ..models.state_sizes import read_groups
from ..schema import ConfigError, Group
from ..stores.record import footer_bytes
from .replay import TIERS, Capacity, Hits, Result
from .traces import Trace


@dataclass(frozen=True, slots=True)
class Answers:
    """The figures of a replay for one deployment."""

    prompt_tokens: int
    saved_tokens: int  # of these, hit and so not computed
    moved_bytes: dict[str, int]  # by lane

    def __add__(self, other: Answers) -> Answers:
        """The sums of both."""
        return Answers(
            self.prompt_tokens + other.prompt_tokens,
            self.saved_tokens + other.saved_tokens,
            {lane: size + other.moved_bytes[lane] for lane, size in self.moved_bytes.items()},
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a page of a trace, in tokens and bytes.

    A page has all groups. A group with a sliding window has slots for a share of the pages, on the
    device and so on the host, and a page counts with that share there. Storage keeps every page of
    every group. The plan assumes that the tiers still have the windows that a hit needs, as they do
    under LRU eviction.
    """

    page_tokens: int
    groups: tuple[Group, ...]
    shares: tuple[float, ...]  # of each group: slots in memory per page

    @property
    def page_bytes(self) -> dict[str, int]:
        """Bytes of one page, by tier."""
        parts = list(zip(self.groups, self.shares, strict=True))
        records = [group.record_bytes for group in self.groups]
        sizes = (
            sum(group.page_bytes * share for group, share in parts),
            sum(group.record_bytes * share for group, share in parts),
            sum(size + footer_bytes(size) for size in records),
        )
        return dict(zip(TIERS, map(round, sizes), strict=True))

    def capacity(self, *gib: float) -> Capacity:
        """The pages that tiers of these sizes hold.

        Args:
            gib: GiB of device, host and storage.

        Raises:
            ConfigError: a size is not a number from 0 up, or holds no page.
        """
        return Capacity(*(self._pages(*tier) for tier in zip(TIERS, gib, strict=True)))

    def _pages(self, tier: str, gib: float) -> int:
        if not 0 <= gib < math.inf:
            raise ConfigError(f"a tier cannot have {gib:g} GiB")
        size = self.page_bytes[tier]
        pages = int(gib * GIB) // size
        if gib and not pages:
            raise ConfigError(f"{gib:g} GiB hold no page: on the {tier} it is {size / GIB:.4f} GiB")
        return pages

    def gib(self, pages: int) -> float:
        """GiB that ``pages`` take on the device."""
        return pages * self.page_bytes["device"] / GIB

    def answers(self, trace: Trace, result: Result, hits: Iterable[Hits]) -> Answers:
        """The figures of a replay, in tokens and bytes.

        Args:
            hits: the hits of each request.
        """
        by_tier = np.array([*hits], np.int64).reshape(len(trace), len(TIERS))
        tokens = trace.tokens(self.page_tokens)
        saved = np.minimum(by_tier.sum(axis=1) * self.page_tokens, tokens)
        record = sum(group.record_bytes for group in self.groups)
        return Answers(
            int(tokens.sum()),
            int(saved.sum()),
            {
                SAVE.name: result.moved[SAVE.name] * record,
                LOAD.name: self._brought(by_tier[:, 1:].sum(axis=1)),
                WRITE.name: result.moved[WRITE.name] * record,
                READ.name: self._brought(by_tier[:, 2]),
            },
        )

    def _brought(self, pages: NDArray[np.int64]) -> int:
        """Bytes of the last ``pages`` of each request's hit, as far as each group needs them.

        Args:
            pages: ``[requests]``.
        """
        most = [math.inf if group.tail is None else group.tail for group in self.groups]
        counts = [int(np.minimum(pages, tail).sum()) for tail in most]
        return sum(n * group.record_bytes for n, group in zip(counts, self.groups, strict=True))


def read_plan(configs: Sequence[Path], page_tokens: int, kv_dtype: str) -> Plan:
    """The plan of a deployment.

    Args:
        configs: a target's ``config.json``, and its EAGLE-3 draft's if there is one.
        page_tokens: tokens of a block of the trace.

    Raises:
        ConfigError: a file cannot be read, or its model keeps snapshots of recurrent state.
    """
    groups: list[Group] = []
    for file in configs:
        groups += read_groups(file, page_tokens, kv_dtype)
        if any(group.working for group in groups):
            raise ConfigError(
                f"{file}: the model's recurrent layers keep snapshots, and a hit ends only where "
                "there is one; a trace does not tell where"
            )
    engine = EngineConfig(model=configs[0])
    shares = [pool_share(engine, group) for group in groups]
    # If no group has a slot for each page, count the pages for which the largest has slots.
    return Plan(page_tokens, tuple(groups), tuple(share / max(shares) for share in shares))
