"""Replays a trace on the real cache: its tree, table, tiers and policies, without any bytes.

Transfers complete at once, one request runs at a time, and a page is a block of the trace. So the
figures depend on capacities and policies alone, and are the same in every run.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..core.cache import Cache
from ..core.pages import Retention
from ..core.policy import Policy
from ..core.ticket import ROUTES
from ..schema import Closed, Component, ConfigError, Group, Identity, Key, Schema
from ..testing.fakes import AtOnce, NoBytes
from .traces import Trace

Ids = NDArray[np.int32]

Hits = NDArray[np.int64]
"""``[tiers]``: pages that one request hit, by the highest tier that had them."""

TIERS = ("device", "host", "storage")
_SCHEMA = Schema(Identity("replay"), 1, (Group("full", (Component("k", (0,), (1,), "U8"),)),))
_COMPUTED = np.array([-1], dtype=np.int32)  # a last token: a hit never covers the whole prompt


@dataclass(frozen=True, slots=True)
class Capacity:
    """Pages that each tier holds.

    Raises:
        ConfigError: the device holds none.
    """

    device: int | None = None  # None: every page of the trace
    host: int = 0
    storage: int = 0

    def __post_init__(self) -> None:
        if self.device is not None and self.device < 1:
            raise ConfigError("the device must hold at least one page")


@dataclass(frozen=True, slots=True)
class Result:
    """The counts of a replay, in pages."""

    requests: int
    pages: int  # of all requests
    hits: dict[str, int]  # by tier, and "total"
    evictions: dict[str, int]  # by tier; a page that moves down counts for the upper tier
    moved: dict[str, int]  # by lane: "save" to the host, "load" from it, "write" to storage, "read"

    @property
    def ratio(self) -> float:
        """Hits per page."""
        return self.hits["total"] / max(1, self.pages)

    def __add__(self, other: Result) -> Result:
        """The sums of both."""
        return Result(
            self.requests + other.requests,
            self.pages + other.pages,
            {key: count + other.hits[key] for key, count in self.hits.items()},
            {key: count + other.evictions[key] for key, count in self.evictions.items()},
            {key: count + other.moved[key] for key, count in self.moved.items()},
        )


class KeyStore:
    """A store that keeps the keys of ``capacity`` records, least recently used first, and no bytes.

    It takes records of every group and any size. One thread only, as :class:`AtOnce` runs it.
    """

    def __init__(self, capacity: int) -> None:
        self.faults: Counter[str] = Counter()
        self.evicted = 0
        self._capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()
        self._closed = False

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        held = self._held()
        return [key in held for key in keys]

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        return self.probe(keys)

    def write(self, keys: Sequence[Key], records: Sequence[memoryview]) -> list[bool]:
        held = self._held()
        for key in keys:
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._capacity:
            held.popitem(last=False)
            self.evicted += 1
        return self.probe(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        held = self._held()
        for key in keys:
            if key in held:
                held.move_to_end(key)

    def delete(self, keys: Sequence[Key]) -> None:
        held = self._held()
        for key in keys:
            held.pop(key, None)

    def close(self) -> None:
        self._closed = True

    def _held(self) -> OrderedDict[Key, None]:
        if self._closed:
            raise Closed("the store is closed")
        return self._keys


def replay(
    trace: Trace,
    capacity: Capacity,
    policy: Policy | None = None,
    tell: Callable[[Hits], None] = lambda hits: None,
) -> Result:
    """Serve the requests of ``trace`` in order, one at a time.

    A request hits its longest resident prefix, which is loaded where the device lacks it, and then
    commits the rest. If a request is longer than the device, only the head that fits is served.
    Under write-back, where both tiers hit as one tier of their total size, it is the head that fits
    both.

    Args:
        policy: the eviction order and the write policy.
        tell: called after each request, with its hits.

    Raises:
        ConfigError: storage has pages, but the host is too small to read them into.
    """
    most = trace.distinct + trace.longest + 1  # pages; more slots change nothing
    device = most if capacity.device is None else min(capacity.device, most)
    host = min(capacity.host, most)
    policy = replace(
        policy or Policy(), write_ahead=0.0, prefetch_min_tokens=0
    )  # copies cost nothing
    if capacity.storage and host * policy.prefetch_share < 1:
        least = math.ceil(1 / policy.prefetch_share)
        raise ConfigError(
            f"storage is read into a share of the host, which must hold at least {least} pages, "
            f"not {host}"
        )
    served, spare = device, 0  # pages of a request at most, and host slots beyond its capacity
    if host and policy.write == "write_back":
        # A copy needs its target while its source is still taken; between requests that is free.
        served = max(device, min(trace.longest, device + host))
        spare = min(trace.longest, served)
    store = KeyStore(capacity.storage) if capacity.storage else None
    slots = [served], [host + spare]
    cache = Cache(_SCHEMA, *slots, store, policy, NoBytes(), AtOnce)
    total = _hits(cache)
    for blocks, priority in zip(trace, trace.priorities, strict=True):
        _serve(cache, blocks[:served], Retention(priority))
        while not cache.make_room([served - device]):
            cache.tick()
        cache.residency.make_room(cache.residency.host, 0, spare)
        before, total = total, _hits(cache)
        tell(total - before)
    evicted = (cache.residency.device.evicted[0], cache.residency.host.evicted[0])
    cache.close()
    size = _SCHEMA.groups[0].record_bytes
    return Result(
        len(trace),
        len(trace.blocks),
        dict(zip((*TIERS, "total"), (*total.tolist(), int(total.sum())), strict=True)),
        dict(zip(TIERS, (*evicted, store.evicted if store else 0), strict=True)),
        {route.name: cache.transfers.moved[route.name] // size for route in ROUTES},
    )


def _hits(cache: Cache) -> Hits:
    """Hits of all requests so far."""
    return np.array([cache.counts[f"hit_tokens_total{{tier={tier}}}"] for tier in TIERS])


def _serve(cache: Cache, blocks: Ids, retention: Retention) -> None:
    tokens = np.concatenate((blocks, _COMPUTED))
    prefetch = cache.prefetch(tokens) if cache.store else None
    while prefetch and not cache.ready(prefetch):
        cache.tick()
    while (lease := cache.admit(tokens, prefetch=prefetch, retention=retention)) is None:
        cache.tick()  # no other request runs, and this one fits: pages are being copied down
    while not lease.ready:
        cache.tick()
    while not cache.grow(lease, len(blocks)):
        cache.tick()
    cache.commit(lease, blocks)
    cache.release(lease)
    cache.tick()
    while not cache.transfers.idle:  # a ticket that lands may start another
        cache.tick()
