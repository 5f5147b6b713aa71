'''The rules of a :class:`~kvkeep.stores.base.Store` as pytest suites, for authors of backends.

- :class:`KeyConformance`: what every store promises of keys.
- :class:`StoreConformance`: that, and what every store promises of bytes: sizes, damage, groups.
- :class:`~kvkeep.testing.quota.QuotaConformance`: which records stay when not all have room.

A backend subclasses the suites that apply and gives each its fixture. This is a whole one; save it
as ``test_memory_store.py`` and run ``pytest``::

    import threading
    from collections import Counter, OrderedDict

    import pytest
    from kvkeep.schema import Closed, ConfigError
    from kvkeep.stores.record import Verdict, seal, verify
    from kvkeep.testing.quota import ROOM, QuotaConformance
    from kvkeep.testing.stores import SIZES, StoreConformance


    class MemoryStore:
        """Sealed records in a dictionary, the newest last."""

        def __init__(self, sizes, room):
            self.faults = Counter()
            self.records = OrderedDict()
            self._sizes, self._room = sizes, room
            self._lock, self._closed = threading.Lock(), False

        def probe(self, keys):
            records = self._opened()
            return [key in records for key in keys]

        def read(self, keys, out):
            self._check(keys, out)
            return [self._read(key, buffer) for key, buffer in zip(keys, out)]

        def write(self, keys, records):
            self._check(keys, records)
            with self._lock:
                for key, record in zip(keys, records):
                    if key.group in self._sizes:
                        self._opened()[key] = (seal(key, 0, record), bytes(record))
                        self.records.move_to_end(key)
                while len(self.records) > self._room:
                    self.records.popitem(last=False)
                return [key in self.records for key in keys]

        def touch(self, keys):
            with self._lock:
                for key in keys:
                    if key in self._opened():
                        self.records.move_to_end(key)

        def delete(self, keys):
            with self._lock:
                for key in keys:
                    self._opened().pop(key, None)

        def close(self):
            self._closed = True

        def _opened(self):
            if self._closed:
                raise Closed("the store is closed")
            return self.records

        def _check(self, keys, buffers):
            for key, buffer in zip(keys, buffers):
                if len(buffer) != self._sizes.get(key.group, len(buffer)):
                    raise ConfigError(f"a buffer of {len(buffer)} bytes does not fit {key}")

        def _read(self, key, buffer):
            footer, body = self._opened().get(key, (None, None))
            if body is None:
                return False
            buffer[:] = body
            if verify(footer, key, buffer) is Verdict.GOOD:
                return True
            self.faults["corrupt"] += 1
            self.delete([key])
            return False


    class TestMemoryStore(StoreConformance, QuotaConformance):
        @pytest.fixture
        def store(self):
            return MemoryStore(SIZES, 1000)

        @pytest.fixture
        def small(self):
            return MemoryStore(SIZES, ROOM)

        def damage(self, store):
            for key, (footer, body) in store.records.items():
                store.records[key] = (footer, bytes(len(body)))

A test double whose buffers are not bytes overrides the hooks ``record``, ``buffer`` and ``holds``
of :class:`KeyConformance`. One that breaks a rule on purpose sets the test of that rule to None and
says why beside it.
'''

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The key of page ``number``."""
    return Key(group, hashlib.sha256(b"page %d" % number).digest())


def body(key: Key, size: int | None = None) -> memoryview:
    """The one right body of ``key``, read-only: ``size`` bytes, or as :data:`SIZES` says."""
    size = SIZES[key.group] if size is None else size
    return memoryview(hashlib.shake_128(key.group + key.page).digest(size))


def write(store: Store, keys: Sequence[Key]) -> list[bool]:
    """Write the right body of each key."""
    return store.write(keys, [body(key) for key in keys])


def read(store: Store, keys: Sequence[Key]) -> list[bool]:
    """Read each key; assert that every hit returned the right body."""
    out = [memoryview(bytearray(SIZES[key.group])) for key in keys]
    hits = store.read(keys, out)
    for key, hit, buffer in zip(keys, hits, out, strict=True):
        assert not hit or buffer == body(key), f"wrong bytes for {key}"
    return hits


class KeyConformance:
    """What every store promises of keys. No test looks at bytes except through the three hooks."""

    lossy: ClassVar[bool] = False
    """True: the backend may drop records at any time; then only what it returns must be right."""

    @pytest.fixture
    def store(self) -> Store:
        """A store that is open, empty, for the groups of ``SIZES``, with room for 64 records of
        each."""
        raise NotImplementedError

    def record(self, key: Key) -> memoryview:
        """What to write for ``key``."""
        return body(key)

    def buffer(self, key: Key) -> memoryview:
        """A buffer to read ``key`` into."""
        return memoryview(bytearray(SIZES[key.group]))

    def holds(self, buffer: memoryview, key: Key) -> bool:
        """Whether ``buffer`` holds what :meth:`record` gives for ``key``."""
        return buffer == body(key)

    def write(self, store: Store, keys: Sequence[Key]) -> list[bool]:
        """Write the record of each key."""
        return store.write(keys, [self.record(key) for key in keys])

    def read(self, store: Store, keys: Sequence[Key]) -> list[bool]:
        """Read each key; assert that every hit returned its record."""
        out = [self.buffer(key) for key in keys]
        hits = store.read(keys, out)
        for key, hit, buffer in zip(keys, hits, out, strict=True):
            assert not hit or self.holds(buffer, key), f"wrong bytes for {key}"
        return hits

    @pytest.fixture(autouse=True)
    def _closed_at_last(self, request: pytest.FixtureRequest) -> Iterator[None]:
        used = {"store", "small"} & set(request.fixturenames)
        stores = [request.getfixturevalue(name) for name in used]
        yield
        for store in stores:
            store.close()

    def test_what_was_written_can_be_read(self, store: Store) -> None:
        keys = [key(i, group) for i in range(8) for group in SIZES]
        assert all(self.write(store, keys)) or self.lossy
        assert all(store.probe(keys)) or self.lossy
        assert all(self.read(store, keys)) or self.lossy

    def test_what_was_not_written_is_a_miss(self, store: Store) -> None:
        self.write(store, [key(1)])
        assert self.read(store, [key(2), key(1, LARGE)]) == [False, False]
        assert store.probe([key(2), key(1, LARGE)]) == [False, False]

    def test_a_batch_answers_key_by_key(self, store: Store) -> None:
        self.write(store, [key(1), key(3)])
        hits = self.read(store, [key(0), key(3), key(2), key(1), key(3)])
        assert hits == [False, True, False, True, True] or self.lossy

    def test_empty_batches(self, store: Store) -> None:
        assert store.probe([]) == store.read([], []) == store.write([], []) == []
        store.touch([])
        store.delete([])

    def test_writing_twice_is_as_good_as_once(self, store: Store) -> None:
        for _ in range(2):
            assert all(self.write(store, [key(1), key(1)])) or self.lossy
        assert self.read(store, [key(1)]) == [True] or self.lossy

    def test_deleted_is_gone_and_can_come_back(self, store: Store) -> None:
        self.write(store, [key(1), key(2)])
        store.delete([key(1), key(3)])
        assert store.probe([key(1)]) == [False]
        assert self.read(store, [key(1), key(2)]) == [False, True] or self.lossy
        self.write(store, [key(1)])
        assert self.read(store, [key(1)]) == [True] or self.lossy

    def test_touch_takes_anything(self, store: Store) -> None:
        self.write(store, [key(1)])
        store.touch([key(1), key(2), key(1)])
        assert self.read(store, [key(1)]) == [True] or self.lossy
        assert self.read(store, [key(2)]) == store.probe([key(2)]) == [False]

    def test_a_large_batch(self, store: Store) -> None:
        keys = [key(i, group) for group in SIZES for i in range(64)]
        assert all(self.write(store, keys)) or self.lossy
        assert all(self.read(store, keys[::-1])) or self.lossy

    def test_faults_are_counted_by_name(self, store: Store) -> None:
        self.write(store, [key(1)])
        self.read(store, [key(1), key(2)])
        assert not store.faults.total() or self.lossy

    def test_many_threads(self, store: Store) -> None:
        failures: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                for turn in range(10):
                    keys = [key(5 * turn + (worker + i) % 7) for i in range(5)]
                    assert all(self.write(store, keys)) or self.lossy
                    assert all(self.read(store, keys)) or self.lossy
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
            self.read(store, [key(1)])
        with pytest.raises(Closed):
            self.write(store, [key(1)])

    def test_against_a_perfect_one(self, store: Store) -> None:
        examples = itertools.count()
        suite = self

        class OneExample(Machine):
            def __init__(self) -> None:
                super().__init__(suite, store, next(examples))

        run_state_machine_as_test(
            OneExample,
            settings=settings(
                max_examples=40,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


class StoreConformance(KeyConformance):
    """What every store promises of keys and of bytes."""

    def damage(self, store: Store) -> None:
        """Change stored bytes of every record behind the back of the open ``store``, as a failing
        disk would."""
        raise NotImplementedError

    def test_a_damaged_record_is_a_miss_and_can_be_written_anew(self, store: Store) -> None:
        keys = [key(i, group) for i in range(3) for group in SIZES]
        self.write(store, keys)
        before = store.faults.copy()
        self.damage(store)
        assert not any(self.read(store, keys))
        assert before < store.faults or self.lossy
        assert all(self.write(store, keys)) or self.lossy
        assert all(self.read(store, keys)) or self.lossy

    def test_faults_only_grow(self, store: Store) -> None:
        keys, seen = [key(1), key(2)], store.faults.copy()
        calls: list[Callable[[], object]] = [
            lambda: self.write(store, keys),
            lambda: self.damage(store),
            lambda: self.read(store, keys),
            lambda: store.touch(keys),
            lambda: store.delete(keys),
            lambda: store.probe(keys),
        ]
        for call in calls:
            call()
            assert seen <= store.faults
            seen = store.faults.copy()

    def test_keys_of_unknown_groups_are_misses(self, store: Store) -> None:
        strange = key(1, b"never heard of16")
        buffer = memoryview(bytearray(4096))
        assert store.write([strange, key(1)], [buffer, self.record(key(1))])[0] is False
        assert store.probe([strange]) == store.read([strange], [buffer]) == [False]
        assert self.read(store, [key(1)]) == [True] or self.lossy
        store.touch([strange])
        store.delete([strange])

    def test_buffers_are_the_caller_s_again_when_a_call_returns(self, store: Store) -> None:
        """Host slots are: the next page goes into them."""
        mine = memoryview(bytearray(body(key(1))))
        store.write([key(1)], [mine])
        mine[:] = bytes(len(mine))
        assert self.read(store, [key(1)]) == [True] or self.lossy
        store.read([key(1)], [mine])
        mine[:] = bytes(len(mine))
        assert self.read(store, [key(1)]) == [True] or self.lossy

    def test_buffers_may_be_parts_of_something_larger(self, store: Store) -> None:
        keys = [key(1), key(2)]
        self.write(store, keys)
        arena = memoryview(bytearray(3 * SIZES[SMALL] + 1))
        out = [arena[1 : 1 + SIZES[SMALL]], arena[-SIZES[SMALL] :]]
        for wanted, hit, buffer in zip(keys, store.read(keys, out), out, strict=True):
            assert buffer == body(wanted) if hit else self.lossy

    def test_a_buffer_of_the_wrong_size_is_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError):
            store.read([key(1)], [memoryview(bytearray(8192))])
        with pytest.raises(ConfigError):
            store.write([key(1)], [memoryview(bytes(8192))])
        assert self.read(store, [key(1)]) == [False]


class Machine(RuleBasedStateMachine):
    """A store beside a set of keys that is assumed to be perfect: the store may lose a record only
    if it is ``lossy``, and may never make one up."""

    numbers = st.lists(st.integers(0, 11), min_size=1, max_size=6)
    groups = st.sampled_from(list(SIZES))

    def __init__(self, suite: KeyConformance, store: Store, example: int) -> None:
        super().__init__()
        self.suite, self.store = suite, store
        self.example = example  # all examples share the store, so each has keys of its own
        self.perfect: set[Key] = set()
        self.used: set[Key] = set()

    def keys(self, numbers: list[int], group: bytes) -> list[Key]:
        """This example's keys."""
        keys = [key(100 * self.example + number, group) for number in numbers]
        self.used.update(keys)
        return keys

    def compare(self, keys: list[Key], answers: list[bool]) -> None:
        """Assert that a hit is in the perfect set, and a miss is not, unless the store is lossy."""
        for key, answer in zip(keys, answers, strict=True):
            assert key in self.perfect or not answer
            assert answer or key not in self.perfect or self.suite.lossy

    @rule(numbers=numbers, group=groups)
    def write(self, numbers: list[int], group: bytes) -> None:
        """Keys may repeat, and may be there already."""
        keys = self.keys(numbers, group)
        answers = self.suite.write(self.store, keys)
        assert all(answers) or self.suite.lossy
        self.perfect.update(key for key, stored in zip(keys, answers, strict=True) if stored)

    @rule(numbers=numbers, group=groups)
    def read(self, numbers: list[int], group: bytes) -> None:
        """Keys may repeat: one record goes into two buffers."""
        keys = self.keys(numbers, group)
        self.compare(keys, self.suite.read(self.store, keys))

    @rule(numbers=numbers, group=groups)
    def probe(self, numbers: list[int], group: bytes) -> None:
        """While nothing else uses the store, a probe answers as a read does."""
        keys = self.keys(numbers, group)
        self.compare(keys, self.store.probe(keys))

    @rule(numbers=numbers, group=groups)
    def touch(self, numbers: list[int], group: bytes) -> None:
        """A touch changes nothing that a read could see."""
        self.store.touch(self.keys(numbers, group))

    @rule(numbers=numbers, group=groups)
    def delete(self, numbers: list[int], group: bytes) -> None:
        """Keys may be absent."""
        keys = self.keys(numbers, group)
        self.store.delete(keys)
        self.perfect.difference_update(keys)

    def teardown(self) -> None:
        """Leave room for the next example."""
        self.store.delete(sorted(self.used))
