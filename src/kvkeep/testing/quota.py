"""The rules of a store with a quota as a pytest suite; see :mod:`kvkeep.testing.stores`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ..stores.base import Store
from .stores import SIZES, KeyConformance, key

ROOM = 16
"""Records of the group ``SMALL`` that the ``small`` store of :class:`QuotaConformance` holds."""


class QuotaConformance(KeyConformance):
    """Which records stay when there is not room for all: the newest."""

    @pytest.fixture
    def small(self) -> Store:
        """A store that is open, empty, for the groups of ``SIZES``, with room for exactly
        :data:`ROOM` records of the group ``SMALL``, and for some of ``LARGE`` instead."""
        raise NotImplementedError

    def kept(self, store: Store, numbers: Sequence[int]) -> list[int]:
        """Those pages of ``numbers`` whose ``SMALL`` record the store has."""
        hits = self.read(store, [key(n) for n in numbers])
        assert store.probe([key(n) for n in numbers]) == hits
        return [n for n, hit in zip(numbers, hits, strict=True) if hit]

    def fill(self, store: Store) -> list[int]:
        """Write pages 0 to ``ROOM - 1`` in one call, 0 as the newest; return them, oldest first."""
        numbers = list(range(ROOM))[::-1]
        assert all(self.write(store, [key(n) for n in numbers]))
        return numbers

    def test_the_last_key_of_a_write_is_the_newest(self, small: Store) -> None:
        oldest = self.fill(small)
        assert all(self.write(small, [key(100), key(101)]))
        assert self.kept(small, [*oldest, 100, 101]) == [*oldest[2:], 100, 101]

    def test_writing_a_record_that_is_there_makes_it_the_newest(self, small: Store) -> None:
        oldest = self.fill(small)
        assert all(self.write(small, [key(oldest[1]), key(oldest[0])]))
        assert all(self.write(small, [key(n) for n in range(100, 99 + ROOM)]))
        assert self.kept(small, oldest) == oldest[:1]

    def test_touched_records_are_recycled_last(self, small: Store) -> None:
        oldest = self.fill(small)
        small.touch([key(oldest[0])])
        assert all(self.write(small, [key(100), key(101)]))
        assert self.kept(small, oldest) == [oldest[0], *oldest[3:]]

    def test_the_last_key_of_a_touch_is_the_newest(self, small: Store) -> None:
        oldest = self.fill(small)
        small.touch([key(n) for n in reversed(oldest)])
        assert all(self.write(small, [key(100), key(101)]))
        assert self.kept(small, oldest) == oldest[:-2]

    def test_touching_what_is_absent_takes_no_room(self, small: Store) -> None:
        oldest = self.fill(small)
        small.touch([key(n) for n in range(100, 100 + ROOM)])
        assert self.kept(small, [*oldest, *range(100, 100 + ROOM)]) == oldest

    def test_a_deleted_record_leaves_its_room(self, small: Store) -> None:
        oldest = self.fill(small)
        small.delete([key(oldest[5]), key(oldest[9])])
        assert all(self.write(small, [key(100), key(101)]))
        assert self.kept(small, oldest) == [n for n in oldest if n not in (oldest[5], oldest[9])]

    def test_the_last_keys_of_a_write_get_what_room_there_is(self, small: Store) -> None:
        for first in (0, 100):  # into an empty store, and over what is there
            numbers = list(range(first, first + ROOM + 4))
            stored = self.write(small, [key(n) for n in numbers])
            assert stored == [False] * 4 + [True] * ROOM
            assert self.kept(small, numbers) == numbers[4:]

    def test_the_last_keys_get_it_whatever_their_groups(self, small: Store) -> None:
        """Else one group would be there whole, and not one page with all of its groups."""
        keys = [key(n, group) for n in range(ROOM + 4) for group in SIZES]
        stored = self.write(small, keys)
        assert stored == sorted(stored)
        assert stored[-2:] == [True, True]
        assert self.read(small, keys) == stored

    def test_a_write_answers_what_a_read_finds(self, small: Store) -> None:
        for numbers in ([*range(ROOM), 0], [3, *range(50, 50 + ROOM)], [7, 7, *range(90, 130), 7]):
            keys = [key(n) for n in numbers]
            assert self.write(small, keys) == self.read(small, keys)
