"""The fakes that stand for storage keep the rules of a store."""

import hashlib

import numpy as np
import pytest

from kvkeep.schema import Key
from kvkeep.testing.fakes import JUNK, DictStore
from kvkeep.testing.stores import KeyConformance


class TestDictStore(KeyConformance):
    """Its buffers hold one number instead of bytes."""

    test_close_is_idempotent_and_final = None  # it outlives caches, which close it

    @pytest.fixture
    def store(self) -> DictStore:
        return DictStore()

    def record(self, key: Key) -> memoryview:
        return memoryview(np.array([self._number(key)]))

    def buffer(self, key: Key) -> memoryview:
        return memoryview(np.array([JUNK]))

    def holds(self, buffer: memoryview, key: Key) -> bool:
        return buffer[0] == self._number(key)

    def _number(self, key: Key) -> int:
        return int.from_bytes(hashlib.sha256(key.group + key.page).digest()[:7], "little")
