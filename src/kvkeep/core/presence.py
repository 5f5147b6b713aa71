"""Presence: which state of a prompt's pages exists, and how long a prefix hit that allows.

A mask has a row per group and a column per page, from the first page on; docs/design.md draws one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schema import Group

Mask = NDArray[np.bool_]  # [groups, pages]


class HitRule:
    """What a hit needs of each group. Unless ``strict``, only ``required`` groups count."""

    def __init__(self, groups: Sequence[Group], strict: bool) -> None:
        self.groups = tuple(groups)
        counted = [strict or group.required for group in groups]
        self.whole = [g for g, group in enumerate(groups) if group.tail is None]
        self.vital = [g for g in self.whole if groups[g].required]
        self.counted = [g for g, counts in enumerate(counted) if counts]
        self.every = [g for g in self.whole if counted[g]]
        self._tails = [(g, group.tail) for g, group in enumerate(groups) if group.tail is not None]
        self.counted_tails = [(g, tail) for g, tail in self._tails if counted[g]]

    def needed(self, pages: int) -> Mask:
        """``[groups, pages]``: what a hit of ``pages`` pages needs."""
        mask = np.ones((len(self.groups), pages), dtype=bool)
        for g, tail in self._tails:
            mask[g, : max(0, pages - tail)] = False
        return mask


class Presence(NamedTuple):
    """A mask and the rule for hits on it."""

    rule: HitRule
    mask: Mask

    def usable(self) -> int:
        """The longest hit in pages: every group that counts has all it needs; 0 if none counts."""
        rule, mask, pages = self.rule, self.mask, self.mask.shape[1]
        if not rule.counted:
            return 0  # or every known prefix were a hit, with no state at all
        if np.count_nonzero(mask) == mask.size:
            return int(pages)
        every = np.asarray(mask[rule.every].all(axis=0))
        if not every.all():
            pages = int(every.argmin())
        fits = np.ones(pages + 1, dtype=bool)
        for g, tail in rule.counted_tails:
            missing = np.concatenate(([0], np.cumsum(~mask[g, :pages])))  # [n]: gaps in [0, n)
            fits &= missing == missing[np.maximum(np.arange(pages + 1) - tail, 0)]
        return int(np.flatnonzero(fits)[-1])  # n = 0 always fits

    def limit(self, pages: int) -> str | None:
        """The first group that keeps a hit from one page more; None: the mask ends."""
        if pages == self.mask.shape[1]:
            return None
        needed = self.rule.needed(pages + 1)
        lacking = set((needed & ~self.mask[:, : pages + 1]).nonzero()[0].tolist())
        return next((self.rule.groups[g].name for g in self.rule.counted if g in lacking), None)

    def first(self, pages: int) -> Presence:
        """The presence of the first ``pages`` pages."""
        return Presence(self.rule, self.mask[:, :pages])
