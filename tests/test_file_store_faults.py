"""The file store while things break. Real breakage: killed processes, flipped bits, full disks.

Whatever happens, no wrong byte is served, the worst is a miss, and what was lost is counted."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import store_worker as worker

from kvkeep.schema import ConfigError, Key, StoreError
from kvkeep.stores.file import FileStore
from kvkeep.stores.index import Index
from kvkeep.testing.stores import LARGE, SIZES, SMALL, body, key, read, write
from kvkeep.testing.wrappers import Faults, FaultyStore

KEYS = [key(i, group) for i in range(16) for group in SIZES]
ROUNDS = 1000  # of each process that hammers on one directory


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    """A store with ``KEYS`` in it and room for a few more."""
    with_keys = FileStore(tmp_path, SIZES, 1 << 20)
    assert all(write(with_keys, KEYS))
    yield with_keys
    with_keys.close()


def recovers(store: FileStore) -> None:
    """After a fault: reads are right, writes store what is missing, and all is well again."""
    for _ in range(3):  # a damaged index may show at any step, and is made anew there
        write(store, KEYS)
        if all(read(store, KEYS)):
            return
    pytest.fail(f"still missing records: {store.faults}")


def files(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))


def start(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, worker.__file__, *map(str, arguments)]
    path = os.pathsep.join(sys.path)
    pipe = subprocess.PIPE
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env)


def answer(process: subprocess.Popen[bytes]) -> dict[str, object]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output)


class TestProcesses:
    @pytest.mark.parametrize(("slots", "times"), [(16, 200), (worker.KEYS, 100)])
    def test_killed_in_the_middle_of_writes(self, tmp_path: Path, slots: int, times: int) -> None:
        seen = answer(start("kill", tmp_path, 1, slots, times))
        assert seen["crashed"] == 0
        assert len(seen["stored"]) > 16
        store = FileStore(tmp_path, {worker.GROUP: worker.SIZE}, slots * worker.SLOT)
        hits, wrong = worker.read(store, list(range(worker.KEYS)))
        assert not wrong
        if slots == worker.KEYS:  # there was room for all: what was published is there
            assert set(seen["stored"]) <= set(hits)
        assert not store.faults  # and nothing else ever was
        report = store.fsck()
        assert (report.corrupt, report.orphaned, report.writing) == (0, 0, 0)
        assert report.good + report.free == report.bytes // worker.SLOT <= slots
        assert report.good == len(hits)
        store.close()
        assert not files(tmp_path, "owner-*")

    def test_three_on_one_directory_of_16_slots(self, tmp_path: Path) -> None:
        processes = [start("hammer", tmp_path, seed, 16, ROUNDS) for seed in range(3)]
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write(b"go\n")
            process.stdin.flush()
        for seen in map(answer, processes):
            assert seen["wrong"] == 0
            assert seen["hits"] > 50
            assert seen["written"] > 50
            assert seen["faults"].keys() <= {"recycled"}
        store = FileStore(tmp_path, {worker.GROUP: worker.SIZE}, 16 * worker.SLOT)
        report = store.fsck()
        assert report.good + report.free == 16
        assert report.corrupt == report.orphaned == report.missing == report.writing == 0
        assert not store.faults
        store.close()

    def test_a_slot_that_its_dead_writer_held_is_used_again(self, tmp_path: Path) -> None:
        process = start("hold", tmp_path, 2)
        assert process.stdout
        assert process.stdout.readline() == b"2\n"
        store = FileStore(tmp_path, {worker.GROUP: worker.SIZE}, 2 * worker.SLOT)
        assert worker.write(store, [8, 9]) == [False, False]
        assert store.faults == {"no_room": 2}
        assert store.fsck().writing == 2
        process.kill()
        process.communicate()
        assert worker.write(store, [8, 9]) == [True, True]
        assert store.fsck(repair=True).good == 2
        store.close()


class TestBits:
    @pytest.mark.untraced
    def test_a_thousand_flips(self, tmp_path: Path) -> None:
        pick = random.Random(7)
        faults: Counter[str] = Counter()
        store = FileStore(tmp_path, SIZES, 1 << 20)
        recovers(store)
        for flip in range(1000):
            pattern = ("*.slab", "index-*.sqlite", "index-*.sqlite*")[flip % 3]
            flip_a_bit(pick.choice(files(tmp_path, pattern)), pick)
            if flip % 4 == 0:  # else damage is found while open, and a cached page may hide it
                faults += store.faults
                store.close()
                store = FileStore(tmp_path, SIZES, 1 << 20)
            read(store, KEYS)
            recovers(store)
        faults += store.faults
        store.close()
        assert faults["corrupt"] > 50
        assert faults["index"] > 10

    def test_each_part_of_a_record(self, store: FileStore, tmp_path: Path) -> None:
        parts = {0: "corrupt", 8: "other_version", 40: "other_key", 80: "corrupt", -96: "corrupt"}
        for offset, fault in parts.items():
            flip_at(slab(tmp_path, SMALL), 4096 + offset)  # slot 0: a body of 4096, the footer
            before = store.faults[fault]
            assert read(store, KEYS[::2]).count(False) == 1
            assert store.faults[fault] == before + 1
            recovers(store)
        assert store.faults.total() == len(parts)

    def test_fsck_finds_and_repairs(self, store: FileStore, tmp_path: Path) -> None:
        flip_at(slab(tmp_path, SMALL), 5)
        with slab(tmp_path, SMALL).open("r+b") as file:
            file.seek(8192)
            file.write(bytes(8192))
        slab(tmp_path, LARGE).unlink()
        store.delete([KEYS[4]])
        report = store.fsck()
        assert (report.good, report.corrupt, report.orphaned, report.missing) == (13, 1, 1, 16)
        knows_no_group = FileStore(tmp_path, {})
        assert knows_no_group.fsck(repair=True) == report
        knows_no_group.close()
        report = store.fsck()
        assert (report.good, report.free) == (13, 18)
        assert report.corrupt == report.orphaned == report.missing == 0
        recovers(store)


class TestSlabs:
    def test_truncated(self, store: FileStore, tmp_path: Path) -> None:
        for size in (8192 * 7 + 100, 8192 * 3 + 4150, 0):
            os.truncate(slab(tmp_path, SMALL), size)
            assert sum(read(store, KEYS)) == 16 + size // 8192
            recovers(store)
        assert store.faults == {"empty": 9 + 12 + 16, "other_key": 1}  # half a footer has no key

    def test_deleted(self, store: FileStore, tmp_path: Path) -> None:
        slab(tmp_path, SMALL).unlink()
        assert sum(read(store, KEYS)) == 16
        assert store.faults == {"missing": 16}
        recovers(store)

    def test_deleted_before_its_slots_are_given_back(
        self, store: FileStore, tmp_path: Path
    ) -> None:
        slab(tmp_path, SMALL).unlink()
        store.gc(0)
        assert store.fsck().bytes == 0
        recovers(store)

    def test_swapped(self, store: FileStore, tmp_path: Path) -> None:
        small, large, aside = slab(tmp_path, SMALL), slab(tmp_path, LARGE), tmp_path / "aside"
        small.rename(aside)
        large.rename(small)
        aside.rename(large)
        assert not any(read(store, KEYS))
        assert store.faults.total() == 32
        recovers(store)

    def test_another_directory_s(self, store: FileStore, tmp_path: Path) -> None:
        other = FileStore(tmp_path / "other", SIZES)
        write(other, [key(i) for i in range(100, 116)])
        other.close()
        shutil.copy(slab(tmp_path / "other", SMALL), tmp_path / "new")
        (tmp_path / "new").rename(slab(tmp_path, SMALL))
        assert sum(read(store, KEYS)) == 16
        assert store.faults == {"other_key": 16}
        recovers(store)

    def test_unreadable_blocks(self, store: FileStore, tmp_path: Path) -> None:
        slab(tmp_path, SMALL).unlink()
        slab(tmp_path, SMALL).symlink_to("/proc/self/mem")  # nothing is mapped at its beginning
        assert write(store, [key(100)]) == [False]
        assert store.faults == {"io": 1}
        assert not any(read(store, KEYS[:16:2]))
        assert store.faults == {"io": 9}
        slab(tmp_path, SMALL).unlink()
        recovers(store)

    def test_something_else_by_its_name(self, store: FileStore, tmp_path: Path) -> None:
        slab(tmp_path, SMALL).unlink()
        slab(tmp_path, SMALL).mkdir()
        assert sum(read(store, KEYS)) == 16
        assert store.gc(0) == 16 * 16384
        assert write(store, KEYS[:2]) == [False, True]
        assert store.faults == {"io": 17}
        assert store.fsck().good == 1
        lose_index(tmp_path)
        assert read(store, KEYS[:2]) == [False, True]


class TestIndexFile:
    def test_lost(self, store: FileStore, tmp_path: Path) -> None:
        store.touch([KEYS[0]])
        store.close()
        lose_index(tmp_path)
        store = FileStore(tmp_path, SIZES, 1 << 20)
        assert all(read(store, KEYS))
        assert store.faults == {"index": 1}
        store.gc((15 * 8192) + 16 * 16384)
        assert read(store, KEYS[:2]) == [False, True]  # uses are forgotten, the order is not
        store.close()

    def test_lost_while_open(self, store: FileStore, tmp_path: Path) -> None:
        other = FileStore(tmp_path, SIZES, 1 << 20)
        lose_index(tmp_path)
        assert all(read(store, KEYS))
        assert all(write(other, [key(100)]))
        assert all(read(store, [key(100), *KEYS]))
        assert store.faults + other.faults == {"index": 1}
        other.close()

    def test_a_store_that_still_has_the_lost_one_does_no_harm(
        self, store: FileStore, tmp_path: Path
    ) -> None:
        other = FileStore(tmp_path, SIZES, 1 << 20)
        lose_index(tmp_path)
        write(store, [key(100)])
        other.close()
        write(store, [key(101)])
        other = FileStore(tmp_path, SIZES, 1 << 20)
        assert all(read(other, [key(100), key(101)]))
        assert not other.faults
        other.close()

    @pytest.mark.parametrize("step", ["register", "heal", "shrink"])
    def test_one_that_was_refused_once_is_not_damaged(
        self, store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """Another store has made it anew; to join it fails once, as on a full disk."""

        def full(*_: object) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        other = FileStore(tmp_path, SIZES, 1 << 20)
        other._catalog.distrust()
        healthy = files(tmp_path, "index-*.sqlite")
        with monkeypatch.context() as patch:
            patch.setattr(Index, step, full)
            with pytest.raises(StoreError, match="is unusable"):
                store.probe(KEYS)
        assert all(store.probe(KEYS))
        assert files(tmp_path, "index-*.sqlite") == healthy
        assert not store.faults
        other.close()

    def test_a_schema_that_is_no_text(self, store: FileStore, tmp_path: Path) -> None:
        store.close()
        edit_index(
            tmp_path,
            "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = CAST(x'ec41' AS TEXT)",
        )
        store = FileStore(tmp_path, SIZES, 1 << 20)
        assert all(read(store, KEYS))
        assert store.faults == {"index": 1}
        store.close()

    def test_a_row_that_is_found_and_is_not_there(self, store: FileStore, tmp_path: Path) -> None:
        store.close()
        edit_only_the_table(tmp_path, "UPDATE slot SET page = NULL WHERE number = 0")
        flip_at(slab(tmp_path, SMALL), 5)
        store = FileStore(tmp_path, SIZES, 1 << 20)
        assert read(store, KEYS[:2]) == [False, True]
        assert store.faults["index"] == 1
        recovers(store)
        store.close()

    def test_a_page_that_is_taken_by_no_row(self, store: FileStore, tmp_path: Path) -> None:
        store.close()
        edit_only_the_table(tmp_path, "UPDATE slot SET page = NULL, state = 0 WHERE number < 2")
        store = FileStore(tmp_path, SIZES, 1 << 20)
        assert read(store, KEYS[2:3]) == write(store, KEYS[2:3]) == [False]
        assert store.faults["index"] == 1
        recovers(store)
        store.close()

    @pytest.mark.parametrize("content", [b"", b"garbage" * 1000])
    def test_replaced(self, store: FileStore, tmp_path: Path, content: bytes) -> None:
        (index,) = files(tmp_path, "index-*.sqlite")
        store.close()
        index.write_bytes(content)
        store = FileStore(tmp_path, SIZES, 1 << 20)
        assert all(read(store, KEYS))
        assert store.faults == {"index": 1}
        store.close()

    @pytest.mark.parametrize(
        "damage",
        [
            "DELETE FROM clock",
            "UPDATE clock SET tick = 1 << 62",
            "UPDATE slot SET number = 'x' || number",
            "UPDATE slot SET sequence = -1",
            "UPDATE slab SET fingerprint = 7 || id",
            "DROP TABLE owner",
        ],
    )
    def test_rows_make_no_sense(self, store: FileStore, tmp_path: Path, damage: str) -> None:
        edit_index(tmp_path, damage)
        recovers(store)
        write(store, [key(100)])
        assert all(read(store, [*KEYS, key(100)]))
        assert store.faults == {"index": 1}

    @pytest.mark.parametrize(
        "damage",
        [
            "UPDATE slot SET number = number + (1 << 40)",
            "UPDATE slot SET number = number + (1 << 60)",
            "UPDATE slot SET state = 9",
            "UPDATE slot SET state = 2, page = NULL, owner = 'nobody'",
            "UPDATE slab SET held = 1 << 50",
        ],
    )
    def test_rows_are_wrong(self, store: FileStore, tmp_path: Path, damage: str) -> None:
        edit_index(tmp_path, damage)
        store.fsck()
        read(store, KEYS)
        write(store, KEYS)
        store.close()
        store = FileStore(tmp_path, SIZES, 1 << 20)
        recovers(store)
        store.close()

    def test_locked_for_long(self, store: FileStore, tmp_path: Path) -> None:
        store._catalog.ask(lambda index: index._db.execute("PRAGMA busy_timeout=0"))
        (path,) = files(tmp_path, "index-*.sqlite")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert write(store, [key(100)]) == [False]
        assert store.faults == {"busy": 1}
        assert all(read(store, KEYS))
        other.execute("ROLLBACK")
        other.close()
        assert write(store, [key(100)]) == [True]

    def test_claims_that_could_not_be_published_are_ended_later(self, tmp_path: Path) -> None:
        def refuse(on: bool) -> None:
            store._catalog.ask(lambda index: index._db.execute(f"PRAGMA query_only={on:d}"))

        store = FileStore(tmp_path, {SMALL: 4096}, 2 * 8192)
        landed = store._allocate([key(1), key(2)]).claims
        refuse(True)
        assert store._publish(landed, []) == set()
        refuse(False)
        assert store.faults == {"read_only": 1}
        assert write(store, [key(1), key(2)]) == [False, False]
        assert write(store, [key(1), key(2)]) == [True, True]
        store.close()

    def test_the_directory_is_gone(self, store: FileStore, tmp_path: Path) -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        tmp_path.rmdir()
        with pytest.raises(StoreError, match="is unusable"):
            store.read([KEYS[0]], [memoryview(bytearray(4096))])
        tmp_path.mkdir()
        recovers(store)


class TestDisks:
    """A file system of 2 MiB of our own."""

    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True
        )
        if mounted.returncode:
            pytest.skip(f"may not mount: {mounted.stderr.decode().strip()}")
        yield tmp_path
        subprocess.run(["umount", "--lazy", tmp_path], check=True)  # a failed test may have it open

    def test_full(self, disk: Path) -> None:
        store = FileStore(disk, SIZES)
        answers = [write(store, [key(i)])[0] for i in range(400)]
        assert not all(answers)
        assert store.faults["full"]
        assert answers.count(True) > 300  # after the first refusal, old records make room
        hits = read(store, [key(i) for i in range(400)])
        assert hits.count(True) > 100
        assert hits[-1] == answers[-1]
        assert store.faults.keys() == {"full"}
        store.close()

    def test_full_before_it_opens(self, disk: Path) -> None:
        store = FileStore(disk, SIZES, 1 << 20)
        write(store, KEYS)
        store.close()
        fill(disk)
        store = FileStore(disk, SIZES, 1 << 20)
        assert all(read(store, KEYS))
        assert write(store, [*KEYS[:2], key(100)]) == [True, True, False]
        store.close()
        (disk / "filler").unlink()

    def test_read_only(self, disk: Path) -> None:
        store = FileStore(disk, SIZES, 1 << 20)
        write(store, KEYS)
        store.close()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        serves_only(disk)
        with pytest.raises(ConfigError, match="Read-only"):
            FileStore(disk / "new", SIZES)

    def test_may_not_be_written_to(self, tmp_path: Path) -> None:
        if not os.getuid():
            pytest.skip("root may write anywhere")
        store = FileStore(tmp_path, SIZES, 1 << 20)
        write(store, KEYS)
        store.close()
        tmp_path.chmod(0o555)
        serves_only(tmp_path)
        tmp_path.chmod(0o755)


def serves_only(directory: Path) -> None:
    before = sorted(directory.iterdir())
    store = FileStore(directory, SIZES, 1 << 20)
    assert store.faults == {"read_only": 1}
    assert all(read(store, KEYS))
    store.touch(KEYS)
    assert write(store, [*KEYS[:2], key(100)]) == [True, True, False]
    assert store.faults == {"read_only": 2}
    store.delete([KEYS[0]])
    assert store.fsck().good >= len(KEYS) - 1
    store.close()
    assert sorted(directory.iterdir()) == before


class TestWrappers:
    """The stores that other tests break."""

    def test_without_a_plan_nothing_happens(self, store: FileStore) -> None:
        faulty = FaultyStore(store, Faults())
        assert all(faulty.probe(KEYS) + read(faulty, KEYS) + write(faulty, KEYS))
        faulty.touch(KEYS)
        faulty.delete(KEYS[:1])
        assert read(faulty, KEYS[:2]) == [False, True]
        faulty.close()

    def test_failing(self, store: FileStore) -> None:
        faulty = FaultyStore(store, Faults(fail=1.0))
        calls: list[Callable[[list[Key]], object]] = [faulty.probe, faulty.touch, faulty.delete]
        for call in calls:
            with pytest.raises(StoreError, match="as planned"):
                call(KEYS)
        assert all(read(store, KEYS))

    def test_the_same_seed_fails_the_same(self, store: FileStore) -> None:
        def outcomes(seed: int) -> list[bool]:
            faulty = FaultyStore(store, Faults(corrupt=0.5), seed)
            return read(faulty, KEYS) + read(faulty, KEYS)

        assert outcomes(1) == outcomes(1) != outcomes(2)
        assert 0 < sum(outcomes(1)) < 2 * len(KEYS)

    def test_corrupt_reads_are_misses_with_garbage(self, store: FileStore) -> None:
        faulty = FaultyStore(store, Faults(corrupt=1.0))
        buffer = memoryview(bytearray(4096))
        assert faulty.read(KEYS[:1], [buffer]) == [False]
        assert buffer not in (bytes(4096), body(KEYS[0]))
        assert faulty.faults["corrupt"] == 1

    def test_lost_writes(self, store: FileStore) -> None:
        faulty = FaultyStore(store, Faults(lose=1.0))
        assert write(faulty, [key(100)]) == [True]
        assert faulty.probe([key(100)]) == [False]
        faulty.plan = Faults()
        assert write(faulty, [key(100)]) == faulty.probe([key(100)]) == [True]

    def test_stalling(self, store: FileStore) -> None:
        faulty = FaultyStore(store, Faults(delay=0.001))
        faulty.stall()
        reading = threading.Thread(target=faulty.probe, args=(KEYS,))
        reading.start()
        reading.join(0.05)
        assert reading.is_alive()
        faulty.resume()
        reading.join()


def slab(directory: Path, group: bytes) -> Path:
    return directory / f"{group.hex()}-{SIZES[group]}.slab"


def lose_index(directory: Path) -> None:
    for path in directory.glob("index-*"):
        path.unlink()


def edit_index(directory: Path, statement: str) -> None:
    """As a process would that does not know what it does."""
    (path,) = files(directory, "index-*.sqlite")
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, path, statement], check=True)


def edit_only_the_table(directory: Path, statement: str) -> None:
    """Leave the index over the pages as it was: as flipped bits in the table would."""
    (path,) = files(directory, "index-*.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        hidden = db.execute("SELECT * FROM sqlite_schema WHERE name = 'slot_page'").fetchone()
        db.execute("PRAGMA writable_schema = 1")
        db.execute("DELETE FROM sqlite_schema WHERE name = 'slot_page'")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)
        db.execute("PRAGMA writable_schema = 1")
        db.execute("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", hidden)


def flip_a_bit(path: Path, pick: random.Random) -> None:
    if size := path.stat().st_size:
        offset = pick.randrange(size)
        # Half of the flips of a slab are to hit footers, which are mostly padding.
        if path.suffix == ".slab" and pick.random() < 0.5:
            offset = offset // 8192 * 8192 + 4096 + pick.randrange(96)
        flip_at(path, offset, 1 << pick.randrange(8))


def flip_at(path: Path, offset: int, bits: int = 1) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
