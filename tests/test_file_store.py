"""The file store while all is well: the protocol, the quota, what is recycled, and neighbours."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvkeep.schema import ConfigError, Key
from kvkeep.stores.base import Store
from kvkeep.stores.directory import Directory
from kvkeep.stores.file import FileStore
from kvkeep.stores.index import Index
from kvkeep.stores.rows import Found, SlabRow
from kvkeep.testing.quota import ROOM, QuotaConformance
from kvkeep.testing.stores import LARGE, SIZES, SMALL, StoreConformance, key, read, write
from kvkeep.testing.wrappers import Faults, FaultyStore, ThrottledStore

SMALL_SLOT, LARGE_SLOT = 8192, 16384

Open = Callable[..., FileStore]


class FileStoreConformance(StoreConformance):
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        self.directory_of_store = tmp_path / "made" / "for it"
        return self.directory_of_store

    def damage(self, store: Store) -> None:
        for file in self.directory_of_store.glob("*.slab"):
            raw = bytearray(file.read_bytes())
            for at in range(0, len(raw), 4096):  # some block of each record; zeros are none
                raw[at] ^= bool(any(raw[at : at + 4096]))
            file.write_bytes(raw)


class TestFileStore(FileStoreConformance, QuotaConformance):
    @pytest.fixture
    def store(self, directory: Path) -> FileStore:
        return FileStore(directory, SIZES, 4 << 20)

    @pytest.fixture
    def small(self, directory: Path) -> FileStore:
        return FileStore(directory, SIZES, ROOM * SMALL_SLOT)


class TestFileStoreWithoutAQuota(FileStoreConformance):
    @pytest.fixture
    def store(self, directory: Path) -> FileStore:
        return FileStore(directory, SIZES)


class TestFileStoreOfFewSlots(FileStoreConformance):
    lossy = True

    @pytest.fixture
    def store(self, directory: Path) -> FileStore:
        return FileStore(directory, SIZES, 5 * LARGE_SLOT)


class TestWrappers(TestFileStore):
    """Wrappers that add nothing pass what the store inside passes."""

    test_against_a_perfect_one = None  # as slow as without wrappers, which keep no records

    @pytest.fixture
    def store(self, directory: Path) -> Store:
        inner = FileStore(directory, SIZES, 4 << 20)
        return FaultyStore(ThrottledStore(inner, math.inf), Faults())

    @pytest.fixture
    def small(self, directory: Path) -> Store:
        inner = FileStore(directory, SIZES, ROOM * SMALL_SLOT)
        return FaultyStore(ThrottledStore(inner, math.inf), Faults())


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens stores in one directory, of small records and 16 slots unless said otherwise."""
    stores = []

    def open_store(slots: int | None = 16, *groups: bytes) -> FileStore:
        sizes = {group: SIZES[group] for group in groups or (SMALL,)}
        quota = None if slots is None else slots * SMALL_SLOT
        stores.append(FileStore(tmp_path, sizes, quota))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def keys(*numbers: int, group: bytes = SMALL) -> list[Key]:
    return [key(n, group) for n in numbers]


def kept(store: FileStore, numbers: range, group: bytes = SMALL) -> list[int]:
    """Those of the numbers that the store has, whole."""
    hits = read(store, keys(*numbers, group=group))
    return [n for n, hit in zip(numbers, hits, strict=True) if hit]


class TestRecycling:
    def test_the_oldest_goes_first(self, opened: Open) -> None:
        store = opened()
        assert all(write(store, keys(*range(16))))
        assert all(write(store, keys(16, 17, 18)))
        assert kept(store, range(19)) == list(range(3, 19))
        assert not store.faults

    def test_touched_records_stay(self, opened: Open) -> None:
        store = opened()
        write(store, keys(*range(16)))
        store.touch(keys(0, 2))
        write(store, keys(16, 17))
        assert kept(store, range(18)) == [0, 2, *range(4, 18)]

    def test_the_last_of_a_touch_is_the_newest(self, opened: Open) -> None:
        store = opened()
        write(store, keys(*range(16)))
        store.touch(keys(*range(15, -1, -1)))
        write(store, keys(16, 17))
        assert kept(store, range(18)) == [*range(14), 16, 17]

    def test_reading_and_probing_do_not_count_as_use(self, opened: Open) -> None:
        store = opened()
        write(store, keys(*range(16)))
        assert all(read(store, keys(0)) + store.probe(keys(0)))
        write(store, keys(16))
        assert kept(store, range(2)) == [1]

    def test_writing_what_is_there_counts_as_use(self, opened: Open) -> None:
        store = opened()
        write(store, keys(*range(16)))
        write(store, keys(0))
        write(store, keys(16))
        assert kept(store, range(2)) == [0]

    def test_of_a_batch_that_is_too_large_the_last_are_stored(self, opened: Open) -> None:
        store = opened()
        assert write(store, keys(*range(20))) == [False] * 4 + [True] * 16
        assert store.faults == {"no_room": 4}
        assert kept(store, range(20)) == list(range(4, 20))

    def test_what_a_batch_finds_there_is_not_recycled_for_the_rest(self, opened: Open) -> None:
        store = opened()
        write(store, keys(*range(16)))
        assert write(store, keys(0, *range(20, 36))) == [True, False] + [True] * 15
        assert kept(store, range(40)) == [0, *range(21, 36)]

    def test_a_record_that_moved_since_it_was_probed(self, opened: Open) -> None:
        """It is looked up once more, and nobody's fault."""
        mine, other = opened(), opened()
        for mover in (mine, other):
            write(mine, keys(0))
            assert mine.probe(keys(0)) == [True]
            mover.delete(keys(0))
            write(mover, keys(1, 0))
            assert read(mine, keys(0)) == [True]
            mine.delete(keys(0, 1))
        assert not mine.faults

    def test_a_record_that_is_gone_since_it_was_probed(self, opened: Open) -> None:
        mine, other = opened(), opened()
        for who in (mine, other):
            write(mine, keys(0))
            assert mine.probe(keys(0)) == [True]
            who.delete(keys(0))
            assert read(mine, keys(0)) == [False]
        assert not mine.faults

    def test_freed_slots_are_used_again(self, opened: Open, tmp_path: Path) -> None:
        store = opened()
        write(store, keys(*range(16)))
        store.delete(keys(3, 4))
        assert disk_bytes(tmp_path) == 14 * SMALL_SLOT
        write(store, keys(20, 21))
        assert kept(store, range(22)) == [0, 1, 2, *range(5, 16), 20, 21]
        assert slab(tmp_path, SMALL).stat().st_size == 16 * SMALL_SLOT


class TestQuota:
    def test_records_of_all_groups_count(self, opened: Open, tmp_path: Path) -> None:
        store = opened(16, SMALL, LARGE)
        write(store, keys(*range(8)))
        write(store, keys(*range(4), group=LARGE))
        assert disk_bytes(tmp_path) == 16 * SMALL_SLOT
        write(store, keys(4, group=LARGE))  # two small ones make room
        assert kept(store, range(8)) == list(range(2, 8))
        assert kept(store, range(5), LARGE) == list(range(5))
        assert disk_bytes(tmp_path) == 16 * SMALL_SLOT
        write(store, keys(8, 9))  # two more small ones are older than any large one
        assert kept(store, range(10)) == list(range(4, 10))
        store.touch(keys(*range(4, 10)))
        write(store, keys(10))  # one large one makes room for two
        assert kept(store, range(5), LARGE) == [1, 2, 3, 4]
        write(store, keys(11))
        assert kept(store, range(12)) == list(range(4, 12))

    def test_groups_that_nobody_has_open_go_first(self, opened: Open) -> None:
        store = opened(16, SMALL)
        write(store, keys(*range(8)))
        newer = opened(16, LARGE)
        write(newer, keys(*range(4), group=LARGE))
        newer.close()
        write(store, keys(8, 9, 10))
        assert kept(store, range(11)) == list(range(11))
        assert [(u.records, u.open) for u in store.usage()] == [(2, False), (11, True)]

    def test_the_longest_unused_of_them_before_the_others(self, tmp_path: Path) -> None:
        groups = [b"%16d" % i for i in range(4)]
        for number in (0, 1, 2):
            with_one = FileStore(tmp_path, {groups[number]: 4096}, 6 * SMALL_SLOT)
            with_one.write([key(i, groups[number]) for i in (1, 2)], [memoryview(bytes(4096))] * 2)
            if number == 2:
                first = FileStore(tmp_path, {groups[0]: 4096}, 6 * SMALL_SLOT)
                first.touch([key(1, groups[0])])  # its other record is the oldest of all
                first.close()
            with_one.close()
        store = FileStore(tmp_path, {groups[3]: 4096}, 6 * SMALL_SLOT)
        for i in range(3):
            store.write([key(i, groups[3])], [memoryview(bytes(4096))])
        assert {u.fingerprint: u.records for u in store.usage()} == dict(
            zip(groups, (2, 0, 1, 3), strict=True)
        )
        store.close()

    def test_a_smaller_quota_applies_at_opening(self, opened: Open, tmp_path: Path) -> None:
        opened(16).close()
        store = opened(16)
        write(store, keys(*range(16)))
        store.close()
        store = opened(10)
        assert disk_bytes(tmp_path) == 10 * SMALL_SLOT
        assert kept(store, range(16)) == list(range(6, 16))

    def test_gc(self, opened: Open, tmp_path: Path) -> None:
        store = opened(None, SMALL, LARGE)
        write(store, keys(*range(8)) + keys(0, group=LARGE))
        assert store.gc(16 * SMALL_SLOT) == 0
        assert store.gc(3 * SMALL_SLOT) == 7 * SMALL_SLOT
        assert disk_bytes(tmp_path) == 3 * SMALL_SLOT
        assert kept(store, range(8)) == [7]
        assert kept(store, range(1), LARGE) == [0]


class TestTheDirectory:
    def test_records_survive_their_process(self, opened: Open) -> None:
        write(first := opened(), keys(1, 2, 3))
        first.close()
        assert kept(opened(), range(5)) == [1, 2, 3]

    def test_two_stores_see_each_other(self, opened: Open) -> None:
        one, two = opened(), opened()
        write(one, keys(1))
        write(two, keys(1, 2))
        assert kept(one, range(3)) == kept(two, range(3)) == [1, 2]
        one.delete(keys(1))
        assert kept(two, range(3)) == [2]
        assert one.usage()[0].records == 1

    def test_usage_and_fsck_need_not_know_the_groups(self, opened: Open, tmp_path: Path) -> None:
        write(first := opened(None, SMALL, LARGE), keys(1, 2) + keys(1, 2, 3, group=LARGE))
        first.close()
        store = FileStore(tmp_path, {})
        small, large = store.usage()
        assert (small.fingerprint, small.body_bytes, small.records) == (SMALL, 4096, 2)
        assert (large.fingerprint, large.bytes, large.open) == (LARGE, 3 * LARGE_SLOT, False)
        report = store.fsck()
        assert (report.good, report.bytes) == (5, 2 * SMALL_SLOT + 3 * LARGE_SLOT)
        store.close()

    def test_close_waits_for_those_inside(self, opened: Open) -> None:
        store = opened()
        with store._entered():
            closing = threading.Thread(target=store.close)
            closing.start()
            closing.join(0.05)
            assert closing.is_alive()
        closing.join()

    def test_what_cannot_be_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="does not hold one record"):
            FileStore(tmp_path, {SMALL: 4096}, 8191)
        for group, size in ((SMALL, 0), (SMALL[1:], 4096)):
            with pytest.raises(ConfigError, match="a fingerprint of 16 bytes"):
                FileStore(tmp_path, {group: size})
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="choose a directory"):
            FileStore(tmp_path / "file", {SMALL: 4096})

    def test_what_does_not_belong_there_is_left_alone(self, opened: Open, tmp_path: Path) -> None:
        strangers = [tmp_path / name for name in ("notes.slab", "README", "x-4096.slab")]
        for stranger in strangers:
            stranger.write_text("mine")
        write(store := opened(), keys(1))
        store.gc(0)
        assert [stranger.read_text() for stranger in strangers] == ["mine"] * 3


class TestIndex:
    """Races between processes, one step at a time."""

    @pytest.fixture
    def index(self) -> Iterator[Index]:
        index = Index(None, ())
        index.register("me", {SMALL: 4096})
        yield index
        index.close()

    def claim(self, index: Index, *wanted: Key, slots: int = 2) -> dict[Key, tuple[int, int, int]]:
        grant = index.allocate(wanted, slots * SMALL_SLOT, "me", no_punch)
        return grant.claims

    def test_a_row_is_cleared_only_as_it_was_seen(self, index: Index) -> None:
        (first,) = keys(1)
        index.publish(claims := self.claim(index, first, slots=1), [], no_punch)
        index.publish(self.claim(index, *keys(2), slots=1), [], no_punch)
        assert index.clear(claims) == set()  # recycled for another key
        assert index.find(keys(2))
        index.publish(again := self.claim(index, first, slots=1), [], no_punch)
        assert index.clear(claims) == set()  # and for the same one again
        assert index.clear(again) == {first}
        assert not index.find([first])

    def test_of_two_writers_of_one_key_one_gives_its_slot_back(self, index: Index) -> None:
        one, two = self.claim(index, *keys(1)), self.claim(index, *keys(1))
        assert one != two
        assert index.publish(one, [], no_punch) == index.publish(two, [], no_punch) == {*keys(1)}
        assert index.find(keys(1)) == one
        assert self.claim(index, *keys(2))[key(2)][1] == two[key(1)][1]

    def test_a_late_writer_cannot_publish_a_slot_that_was_claimed_again(self, index: Index) -> None:
        late = self.claim(index, *keys(1), slots=1)
        assert self.claim(index, *keys(2), slots=1) == {}
        assert index.heal(lambda owner: False) == 1
        index.register("me", {SMALL: 4096})
        claims = self.claim(index, *keys(2), slots=1)
        assert index.publish(late, [], no_punch) == set()
        assert index.publish({}, late.values(), no_punch) == set()
        assert index.publish(claims, [], no_punch) == {*keys(2)}

    def test_without_holes_no_group_takes_from_another(self, index: Index) -> None:
        index.register("other", {LARGE: 12288})
        index.publish(self.claim(index, *keys(1, 2)), [], no_punch)
        assert self.claim(index, *keys(1, group=LARGE)) == {}
        assert index.shrink(0, no_punch) == 0
        assert index.find(keys(1, 2)).keys() == {*keys(1, 2)}
        index.delete(keys(1), no_punch)
        assert index.held_bytes() == 2 * SMALL_SLOT
        assert not index.find(keys(1))

    def test_what_is_decided_on_cannot_change_meanwhile(self, tmp_path: Path) -> None:
        def alive(owner: str) -> bool:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.touch([])
            return True

        index, other = Index(tmp_path / "i.sqlite", ()), Index(tmp_path / "i.sqlite")
        index.register("me", {SMALL: 4096})
        other._db.execute("PRAGMA busy_timeout=0")
        index.heal(alive)
        other.touch([])
        index.close()
        other.close()

    def test_of_two_records_of_one_page_a_scan_keeps_the_newer(self) -> None:
        page = key(1).page
        index = Index(None, [Found(SMALL, 4096, slot, page, 5 + slot) for slot in range(3)])
        index.register("me", {SMALL: 4096})
        assert index.find(keys(1)) == {key(1): (1, 2, 7)}
        index.close()

    def test_an_owner_lives_as_long_as_its_lock(self, tmp_path: Path) -> None:
        one, two = Directory(tmp_path, True), Directory(tmp_path, True)
        assert one.alive(two.owner)
        two.close()
        assert not one.alive(two.owner)
        assert not one.alive("\0")
        one.close()


def no_punch(slab: SlabRow, number: int) -> bool:
    """A file system without holes."""
    return False


def slab(directory: Path, group: bytes) -> Path:
    return directory / f"{group.hex()}-{SIZES[group]}.slab"


def disk_bytes(directory: Path) -> int:
    """What all slabs really take."""
    return sum(512 * path.stat().st_blocks for path in directory.glob("*.slab"))
