"""What every storage backend has to do: subclass :class:`StoreConformance` and run pytest.

::

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return MyStore(sizes=self.sizes)
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from ..schema import Closed, ConfigError, Key
from ..stores.base import Store

SMALL, LARGE = b"small group 16 b", b"large group 16 b"
SIZES: Mapping[bytes, int] = {SMALL: 4096, LARGE: 12288}
"""Group fingerprint -> body bytes."""


def key(number: int, group: bytes = SMALL) -> Key:
    """The key of a page that goes by ``number``."""
    return Key(group, hashlib.sha256(b"page %d" % number).digest())


def body(key: Key, size: int | None = None) -> memoryview:
    """The one right body of ``key``: ``size`` bytes (None: as :data:`SIZES` says)."""
    size = SIZES[key.group] if size is None else size
    return memoryview(hashlib.shake_128(key.group + key.page).digest(size))


def write(store: Store, keys: Sequence[Key]) -> list[bool]:
    """Write the right body of each key."""
    return store.write(keys, [body(key) for key in keys])


def read(store: Store, keys: Sequence[Key]) -> list[bool]:
    """Read keys, and insist that what was read is right."""
    out = [memoryview(bytearray(SIZES[key.group])) for key in keys]
    hits = store.read(keys, out)
    for key, hit, buffer in zip(keys, hits, out, strict=True):
        assert not hit or buffer == body(key), f"wrong bytes for {key}"
    return hits


class Machine(RuleBasedStateMachine):
    """A store beside a set that is assumed to be perfect: it may lose, it may never make up."""

    numbers = st.lists(st.integers(0, 11), min_size=1, max_size=6)
    groups = st.sampled_from(list(SIZES))

    def __init__(self, store: Store, lossy: bool, example: int) -> None:
        super().__init__()
        self.store = store
        self.lossy = lossy
        self.example = example  # keys differ between examples, which share a store
        self.perfect: set[Key] = set()
        self.used: set[Key] = set()

    def keys(self, numbers: list[int], group: bytes) -> list[Key]:
        """This example's keys."""
        keys = [key(100 * self.example + number, group) for number in numbers]
        self.used.update(keys)
        return keys

    def compare(self, keys: list[Key], answers: list[bool]) -> None:
        """Hits must be perfect's; misses too, unless the store may lose records."""
        for key, answer in zip(keys, answers, strict=True):
            assert key in self.perfect or not answer
            assert answer or key not in self.perfect or self.lossy

    @rule(numbers=numbers, group=groups)
    def write(self, numbers: list[int], group: bytes) -> None:
        """Also duplicates, and keys that are there."""
        keys = self.keys(numbers, group)
        answers = write(self.store, keys)
        assert all(answers) or self.lossy
        self.perfect.update(key for key, stored in zip(keys, answers, strict=True) if stored)

    @rule(numbers=numbers, group=groups)
    def read(self, numbers: list[int], group: bytes) -> None:
        """Also the same key into two buffers."""
        keys = self.keys(numbers, group)
        self.compare(keys, read(self.store, keys))

    @rule(numbers=numbers, group=groups)
    def probe(self, numbers: list[int], group: bytes) -> None:
        """While nobody interferes, a probe is no worse than a read."""
        keys = self.keys(numbers, group)
        self.compare(keys, self.store.probe(keys))

    @rule(numbers=numbers, group=groups)
    def touch(self, numbers: list[int], group: bytes) -> None:
        """Changes nothing that a read could see."""
        self.store.touch(self.keys(numbers, group))

    @rule(numbers=numbers, group=groups)
    def delete(self, numbers: list[int], group: bytes) -> None:
        """Also what is not there."""
        keys = self.keys(numbers, group)
        self.store.delete(keys)
        self.perfect.difference_update(keys)

    def teardown(self) -> None:
        """Leave room for the next example."""
        self.store.delete(sorted(self.used))


class StoreConformance:
    """Tests of the protocol. A subclass gives the ``store`` fixture: open, empty, for ``SIZES``,
    with room for at least 64 records of each group."""

    lossy: ClassVar[bool] = False  # True: the backend may drop records at will

    @pytest.fixture
    def store(self) -> Store:
        """The store under test."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _closed_at_last(self, store: Store) -> Iterator[None]:
        yield
        store.close()

    def test_what_was_written_can_be_read(self, store: Store) -> None:
        keys = [key(i, group) for i in range(8) for group in SIZES]
        assert all(write(store, keys)) or self.lossy
        assert all(store.probe(keys)) or self.lossy
        assert all(read(store, keys)) or self.lossy

    def test_what_was_not_written_is_a_miss(self, store: Store) -> None:
        write(store, [key(1)])
        assert read(store, [key(2), key(1, LARGE)]) == [False, False]
        assert store.probe([key(2), key(1, LARGE)]) == [False, False]

    def test_a_batch_answers_key_by_key(self, store: Store) -> None:
        write(store, [key(1), key(3)])
        hits = read(store, [key(0), key(3), key(2), key(1), key(3)])
        assert hits == [False, True, False, True, True] or self.lossy

    def test_empty_batches(self, store: Store) -> None:
        assert store.probe([]) == store.read([], []) == store.write([], []) == []
        store.touch([])
        store.delete([])

    def test_keys_of_unknown_groups_are_misses(self, store: Store) -> None:
        strange = key(1, b"never heard of16")
        buffer = memoryview(bytearray(4096))
        assert store.probe([strange]) == store.read([strange], [buffer]) == [False]
        store.touch([strange])
        store.delete([strange])

    def test_writing_twice_is_as_good_as_once(self, store: Store) -> None:
        for _ in range(2):
            assert all(write(store, [key(1), key(1)])) or self.lossy
        assert read(store, [key(1)]) == [True] or self.lossy

    def test_deleted_is_gone_and_can_come_back(self, store: Store) -> None:
        write(store, [key(1), key(2)])
        store.delete([key(1), key(3)])
        assert read(store, [key(1), key(2)]) == [False, True] or self.lossy
        write(store, [key(1)])
        assert read(store, [key(1)]) == [True] or self.lossy

    def test_touch_takes_anything(self, store: Store) -> None:
        write(store, [key(1)])
        store.touch([key(1), key(2), key(1)])
        assert read(store, [key(1)]) == [True] or self.lossy

    def test_a_large_batch(self, store: Store) -> None:
        keys = [key(i, group) for group in SIZES for i in range(64)]
        assert all(write(store, keys)) or self.lossy
        assert all(read(store, keys[::-1])) or self.lossy

    def test_buffers_may_be_parts_of_something_larger(self, store: Store) -> None:
        keys = [key(1), key(2)]
        write(store, keys)
        arena = memoryview(bytearray(3 * SIZES[SMALL] + 1))
        out = [arena[1 : 1 + SIZES[SMALL]], arena[-SIZES[SMALL] :]]
        for wanted, hit, buffer in zip(keys, store.read(keys, out), out, strict=True):
            assert buffer == body(wanted) if hit else self.lossy

    def test_a_buffer_of_the_wrong_size_is_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError):
            store.read([key(1)], [memoryview(bytearray(8192))])
        with pytest.raises(ConfigError):
            store.write([key(1)], [memoryview(bytes(8192))])
        assert read(store, [key(1)]) == [False]

    def test_faults_are_counted_by_name(self, store: Store) -> None:
        write(store, [key(1)])
        read(store, [key(1), key(2)])
        assert not store.faults.total() or self.lossy

    def test_many_threads(self, store: Store) -> None:
        failures: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                for turn in range(10):
                    keys = [key(5 * turn + (worker + i) % 7) for i in range(5)]
                    assert all(write(store, keys)) or self.lossy
                    assert all(read(store, keys)) or self.lossy
                    store.touch(keys)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    def test_close_is_idempotent_and_final(self, store: Store) -> None:
        store.close()
        store.close()
        calls: list[Any] = [store.probe, store.touch, store.delete]
        for call in calls:
            with pytest.raises(Closed):
                call([key(1)])
        with pytest.raises(Closed):
            read(store, [key(1)])
        with pytest.raises(Closed):
            write(store, [key(1)])

    def test_against_a_perfect_one(self, store: Store) -> None:
        examples = itertools.count()
        lossy = self.lossy

        class OneExample(Machine):
            def __init__(self) -> None:
                super().__init__(store, lossy, next(examples))

        run_state_machine_as_test(
            OneExample,
            settings=settings(
                max_examples=40,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
