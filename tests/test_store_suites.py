"""The suites for authors of stores: the example of their docstring passes, broken stores fail."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.testing import stores
from kvkeep.testing.quota import ROOM
from kvkeep.testing.stores import SIZES

_, _, _after = (stores.__doc__ or "").partition("run ``pytest``::\n")
_example, _, _ = _after.partition("\nA test double")
EXAMPLE: dict[str, Any] = {"__name__": __name__}
exec(textwrap.dedent(_example), EXAMPLE)
MemoryStore, TestMemoryStore = EXAMPLE["MemoryStore"], EXAMPLE["TestMemoryStore"]


class HeadsLast(MemoryStore):
    def write(self, keys, records):
        return super().write(keys[::-1], records[::-1])[::-1]


class TouchesHeadsLast(MemoryStore):
    def touch(self, keys):
        super().touch(keys[::-1])


class Untouched(MemoryStore):
    def touch(self, keys):
        pass


class InsertsWhatIsTouched(MemoryStore):
    def touch(self, keys):
        absent = [key for key in keys if key not in self.records]
        super().write(absent, [memoryview(bytes(SIZES[key.group])) for key in absent])


class FirstComeFirstServed(MemoryStore):
    def write(self, keys, records):
        room = ROOM - len(self.records)
        return super().write(keys[:room], records[:room]) + [False] * len(keys[room:])


class GroupByGroup(MemoryStore):
    def write(self, keys, records):
        order = sorted(range(len(keys)), key=lambda i: keys[i].group)
        super().write([keys[i] for i in order], [records[i] for i in order])
        return self.probe(keys)


class SaysYes(MemoryStore):
    def write(self, keys, records):
        super().write(keys, records)
        return [True] * len(keys)


class KeepsNoOrder(MemoryStore):
    def write(self, keys, records):
        new = [(k, r) for k, r in zip(keys, records, strict=True) if k not in self.records]
        super().write([k for k, _ in new], [r for _, r in new])
        return self.probe(keys)


class DeletesTheName(MemoryStore):
    def delete(self, keys):
        for key in keys:
            if key in self.records:
                self.records[key] = (b"", None)

    def probe(self, keys):
        return [self.records.get(key, (b"", None))[1] is not None for key in keys]


class TrustsItsBytes(MemoryStore):
    def _read(self, key, buffer):
        if key in self.records:
            buffer[:] = self.records[key][1]
        return key in self.records


class KeepsTheBuffer(MemoryStore):
    def write(self, keys, records):
        stored = super().write(keys, records)
        for key, record in zip(keys, records, strict=True):
            self.records[key] = (self.records[key][0], record)
        return stored


class ForgetsFaults(MemoryStore):
    def touch(self, keys):
        super().touch(keys)
        self.faults.clear()


class TakesEveryGroup(MemoryStore):
    def write(self, keys, records):
        for key in keys:
            self._sizes = self._sizes | {key.group: SIZES.get(key.group, 4096)}
        return super().write(keys, records)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (HeadsLast, "the_last_key_of_a_write_is_the_newest"),
        (HeadsLast, "the_last_keys_of_a_write_get_what_room_there_is"),
        (TouchesHeadsLast, "the_last_key_of_a_touch_is_the_newest"),
        (Untouched, "touched_records_are_recycled_last"),
        (InsertsWhatIsTouched, "touching_what_is_absent_takes_no_room"),
        (FirstComeFirstServed, "the_last_keys_of_a_write_get_what_room_there_is"),
        (GroupByGroup, "the_last_keys_get_it_whatever_their_groups"),
        (SaysYes, "a_write_answers_what_a_read_finds"),
        (KeepsNoOrder, "writing_a_record_that_is_there_makes_it_the_newest"),
        (DeletesTheName, "a_deleted_record_leaves_its_room"),
        (TrustsItsBytes, "a_damaged_record_is_a_miss_and_can_be_written_anew"),
        (KeepsTheBuffer, "buffers_are_the_caller_s_again_when_a_call_returns"),
        (ForgetsFaults, "faults_only_grow"),
        (TakesEveryGroup, "keys_of_unknown_groups_are_misses"),
    ],
)
def test_a_store_that_breaks_a_rule_fails_its_test(broken: Callable[..., Any], rule: str) -> None:
    suite = TestMemoryStore()
    test = getattr(suite, f"test_{rule}")
    test(MemoryStore(dict(SIZES), ROOM))
    with pytest.raises(AssertionError):
        test(broken(dict(SIZES), ROOM))
