"""Wrappers that make any store slow or faulty on purpose."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..schema import Key, StoreError
from ..stores.base import Store


class WrapperStore:
    """Passes every verb on to ``inner``. Subclass it to change one."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.faults = inner.faults

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        """See :class:`~kvkeep.stores.base.Store`."""
        return self.inner.probe(keys)

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        """See :class:`~kvkeep.stores.base.Store`."""
        return self.inner.read(keys, out)

    def write(self, keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        """See :class:`~kvkeep.stores.base.Store`."""
        return self.inner.write(keys, records)

    def touch(self, keys: Sequence[Key]) -> None:
        """See :class:`~kvkeep.stores.base.Store`."""
        self.inner.touch(keys)

    def delete(self, keys: Sequence[Key]) -> None:
        """See :class:`~kvkeep.stores.base.Store`."""
        self.inner.delete(keys)

    def close(self) -> None:
        """See :class:`~kvkeep.stores.base.Store`."""
        self.inner.close()


class ThrottledStore(WrapperStore):
    """A store whose reads and writes move ``bytes_per_second`` at most; infinity is no limit.

    Any thread may change the rate at any time; it also applies to calls under way."""

    def __init__(self, inner: Store, bytes_per_second: float) -> None:
        super().__init__(inner)
        self.bytes_per_second = bytes_per_second

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        """See :class:`~kvkeep.stores.base.Store`."""
        self._pass(out)
        return super().read(keys, out)

    def write(self, keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        """See :class:`~kvkeep.stores.base.Store`."""
        self._pass(records)
        return super().write(keys, records)

    def _pass(self, bodies: Sequence[memoryview]) -> None:
        left = float(sum(len(body) for body in bodies))
        while left > 0 and (rate := self.bytes_per_second) < math.inf:
            seconds = min(0.01, left / rate)
            time.sleep(seconds)
            left -= rate * seconds


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong how often. Shares are from 0 (never) to 1 (always)."""

    fail: float = 0.0  # share of calls that raise StoreError and do nothing else
    corrupt: float = 0.0  # share of records whose read misses and leaves garbage in the buffer
    lose: float = 0.0  # share of records that a write drops and reports as stored
    delay: float = 0.0  # seconds added to each call


class FaultyStore(WrapperStore):
    """Fails, delays, stalls, corrupts and loses. The same seed and calls give the same faults.

    The fate of a record depends on the seed, the verb, the key and how often that verb has seen
    that key, but not on other threads. The fate of a call is that of its first key. Any thread may
    replace ``plan`` at any time.

    Args:
        inner: the store that does the work.
        plan: what goes wrong how often.
        seed: the seed of all decisions.
    """

    def __init__(self, inner: Store, plan: Faults, seed: int = 0) -> None:
        super().__init__(inner)
        self.plan = plan
        self._seed = seed
        self._seen: Counter[tuple[str, Key]] = Counter()
        self._lock = threading.Lock()  # guards _seen
        self._flowing = threading.Event()
        self._flowing.set()

    def stall(self) -> None:
        """Make all calls hang until :meth:`resume`, including ``close``."""
        self._flowing.clear()

    def resume(self) -> None:
        """Let all calls through, including those that hang."""
        self._flowing.set()

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        """See :class:`~kvkeep.stores.base.Store`."""
        self._suffer("probe", keys)
        return super().probe(keys)

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        """See :class:`~kvkeep.stores.base.Store`."""
        self._suffer("read", keys)
        hits = super().read(keys, out)
        for i, key in enumerate(keys):
            if hits[i] and self._strikes("corrupt", key, self.plan.corrupt):
                hits[i] = False
                out[i][:] = random.Random(self._seed).randbytes(len(out[i]))
                self.faults["corrupt"] += 1
        return hits

    def write(self, keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        """See :class:`~kvkeep.stores.base.Store`."""
        self._suffer("write", keys)
        kept = [i for i, key in enumerate(keys) if not self._strikes("lose", key, self.plan.lose)]
        stored = [True] * len(keys)
        answers = super().write([keys[i] for i in kept], [records[i] for i in kept])
        for i, answer in zip(kept, answers, strict=True):
            stored[i] = answer
        return stored

    def touch(self, keys: Sequence[Key]) -> None:
        """See :class:`~kvkeep.stores.base.Store`."""
        self._suffer("touch", keys)
        super().touch(keys)

    def delete(self, keys: Sequence[Key]) -> None:
        """See :class:`~kvkeep.stores.base.Store`."""
        self._suffer("delete", keys)
        super().delete(keys)

    def close(self) -> None:
        """See :class:`~kvkeep.stores.base.Store`."""
        self._flowing.wait()
        super().close()

    def _suffer(self, verb: str, keys: Sequence[Key]) -> None:
        """Delay, stall or fail a whole call."""
        time.sleep(self.plan.delay)
        self._flowing.wait()
        if keys and self._strikes(verb, keys[0], self.plan.fail):
            raise StoreError(f"{verb} failed, as planned")

    def _strikes(self, what: str, key: Key, share: float) -> bool:
        with self._lock:
            self._seen[what, key] += 1
            nth = self._seen[what, key]
        chance = random.Random(f"{self._seed} {what} {key.group.hex()} {key.page.hex()} {nth}")
        return chance.random() < share
