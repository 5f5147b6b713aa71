"""Lookup: ask storage which records of a prompt it has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..schema import Key
from .presence import Mask, Presence
from .storage import CALL_RECORDS, Storage


class Lookup:
    """A question to storage, asked on the "ask" lane.

    It asks about groups that need every page up to the first gap of a required one, then about the
    other groups up to there; never about pages that memory has.

    Args:
        names: by group, storage keys of the prompt's pages.
        memory: what memory has of them.
    """

    def __init__(self, names: list[list[Key]], memory: Presence) -> None:
        self._names, self._rule = names, memory.rule
        self._mask: Mask = memory.mask.copy()

    @property
    def found(self) -> Presence:
        """What memory and storage have together; valid once :meth:`ask` has returned."""
        return Presence(self._rule, self._mask)

    def ask(self, storage: Storage) -> None:
        """Call the store. Lane's thread."""
        rule, pages = self._rule, self._mask.shape[1]
        for start in range(0, pages if rule.whole else 0, CALL_RECORDS):
            end = min(start + CALL_RECORDS, pages)
            self._complete(storage, rule.whole, start, end)
            if not self._mask[rule.vital, start:end].all():
                break
        vital = self._mask[rule.vital].all(axis=0)
        reach = pages if vital.all() else int(vital.argmin())
        tails = [g for g in range(len(self._mask)) if g not in rule.whole]
        self._complete(storage, tails, 0, reach)

    def _complete(self, storage: Storage, groups: Sequence[int], start: int, end: int) -> None:
        """Ask about pages ``[start, end)`` that these groups lack."""
        lacking = [start + np.flatnonzero(~self._mask[g, start:end]) for g in groups]
        keys = [self._names[g][i] for g, at in zip(groups, lacking, strict=True) for i in at]
        flags = storage.probe(keys)
        for g, at in zip(groups, lacking, strict=True):
            self._mask[g, at], flags = flags[: len(at)], flags[len(at) :]
