"""Stores that misbehave on purpose, by wrapping one that does not: no patching."""

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
    """Passes every verb on; subclass it to change one."""

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
    """A store behind a thin pipe: its bytes pass at ``bytes_per_second``, which may be changed at
    any time, also for those that are passing; infinity is no pipe at all."""

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
    """How often what goes wrong. Shares are from 0 (never) to 1 (always)."""

    fail: float = 0.0  # of calls that raise StoreError instead of doing anything
    corrupt: float = 0.0  # of records that read as a miss, with garbage left in the buffer
    lose: float = 0.0  # of records that a write reports as stored and drops
    delay: float = 0.0  # seconds that each call takes longer


class FaultyStore(WrapperStore):
    """Fails, lags, stalls, corrupts and loses, the same way for the same seed and calls.

    What happens to a record depends on the seed, the verb, the key and how often that verb has seen
    that key, not on what other threads do meanwhile; what happens to a call, on its first key.
    ``plan`` may be replaced at any time.

    Args:
        inner: the store that does the work.
        plan: what goes wrong.
        seed: of all decisions.
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
        """Let calls hang from now on, until :meth:`resume`. Also those of ``close``."""
        self._flowing.clear()

    def resume(self) -> None:
        """Let calls through, those that hang included."""
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
        """What may happen to a call as a whole."""
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
