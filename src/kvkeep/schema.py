"""What one page of cached state is made of, how it is named, and what can go wrong.

A *page* is a run of ``page_tokens`` tokens. Its state is a set of *groups* (one slot id addresses
all of a group), each a set of *components* (one tensor per layer). Kinds of state are described
here as data and never subclassed: how far a hit reaches back is one integer, ``Group.tail``.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FORMAT_VERSION = 2
"""Version of keys and records. Records of another version are plain misses."""

BLOCK = 4096
"""What storage keeps of a record is whole blocks of so many bytes."""

SECTOR = 512
"""Record bodies are padded to this many bytes: what direct I/O asks of a buffer."""

Ids = NDArray[np.intp]
"""Page ids. Of the width that NumPy indexes with: it converts any other, at ten times the cost."""

Slots = NDArray[np.int32]
"""Slots of one group in one memory tier; in a block table -1 is none."""

NO_IDS: Ids = np.empty(0, dtype=np.intp)
NO_SLOTS: Slots = np.empty(0, dtype=np.int32)

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element, by safetensors' dtype names."""


class KvkeepError(Exception):
    """Root of every error that kvkeep raises on purpose.

    ::

        KvkeepError
        +-- ConfigError        what was asked for at start cannot be served (also a ValueError)
        |   +-- UnsupportedModel   a model, layer or setting that is not supported, by name
        |   +-- DraftMismatch      a draft that does not fit its target
        +-- RequestError       one request is refused, nothing else is affected (also a ValueError)
        |   +-- PromptTooLong      more tokens than the context or the device pool can hold
        |   +-- ModelNotFound      a request names a model that is not served
        +-- StoreError         a storage backend failed; contained by the transfer lanes
        +-- LoadFailed         state on its way to the device was lost; the step is taken again
        +-- InvariantError     kvkeep's own bookkeeping is wrong; the affected pages are dropped
        +-- Closed             the cache, store or engine was closed
    """


class ConfigError(KvkeepError, ValueError):
    """What was asked for at start cannot be served."""


class UnsupportedModel(ConfigError):
    """A model, layer or setting that is not supported; the message names it."""


class DraftMismatch(ConfigError):
    """A draft model that does not fit its target; the message says where."""


class RequestError(KvkeepError, ValueError):
    """One request is refused; nothing else is affected."""


class PromptTooLong(RequestError):
    """More tokens than the context length or the device pool can hold."""


class ModelNotFound(RequestError):
    """A request names a model that is not served here."""


class StoreError(KvkeepError):
    """A storage backend failed. Lanes contain and count it."""


class LoadFailed(KvkeepError):
    """State on its way to the device was lost. What waited for it takes its step again."""


class InvariantError(KvkeepError):
    """Bookkeeping is wrong. The affected pages are dropped and serving goes on."""


class Closed(KvkeepError):
    """The cache, store or engine was closed."""


class Residence(enum.IntEnum):
    """State of one group of one page in one memory tier."""

    ABSENT = 0  # no slot
    WRITING = 1  # a slot whose bytes are on their way
    LIVE = 2  # a slot whose bytes are there


class Key(NamedTuple):
    """Name of one record in storage: one group of one page."""

    group: bytes  # 16 bytes: Schema.fingerprint of the group
    page: bytes  # 32 bytes: the page's chained key


@dataclass(frozen=True, slots=True)
class Component:
    """One named piece of a page's state, the same in each of its layers."""

    name: str  # "k", "v", "latent", "conv", "carry", ...
    layers: tuple[int, ...]  # the layers that have it, in the model's numbering
    shape: tuple[int, ...]  # of one page in one layer, this rank's shard
    dtype: str  # safetensors' names: "BF16", "F8_E4M3", ...

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"component {self.name!r}: unknown dtype {self.dtype!r}; "
                f"known are {', '.join(DTYPE_BYTES)}"
            )
        if not self.layers or not self.shape or min(self.shape) < 1:
            raise ConfigError(f"component {self.name!r} has no layers or an empty shape")

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.layer_bytes * len(self.layers)


@dataclass(frozen=True, slots=True)
class Group:
    """Components that live and die together: one slot id addresses all of them."""

    name: str  # "full", "window", "state", "draft"
    components: tuple[Component, ...]
    tail: int | None = None  # how many trailing pages a hit needs; None = every page
    sharded: bool = True  # split over tensor-parallel ranks, or the same on each
    working: int = 0  # slots a running request needs beside its pages
    required: bool = True  # False: a hit may do without it (policy ``lenient``)
    source: str = ""  # digest of the weights and settings that only this group depends on

    def __post_init__(self) -> None:
        if not self.components:
            raise ConfigError(f"group {self.name!r} has no components")
        if len({component.name for component in self.components}) != len(self.components):
            raise ConfigError(f"group {self.name!r}: component names must differ")
        if self.tail is not None and self.tail < 1:
            raise ConfigError(f"group {self.name!r}: tail must be at least 1, or None")
        if self.working and self.tail is None:
            raise ConfigError(f"group {self.name!r}: snapshots cannot serve every page; set a tail")

    def needed(self, pages: int) -> range:
        """Pages of this group that make pages ``[0, pages)`` usable."""
        return range(0 if self.tail is None else max(0, pages - self.tail), pages)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, without padding."""
        return sum(c.page_bytes for c in self.components)

    @property
    def record_bytes(self) -> int:
        """Bytes of one page's record body: ``page_bytes`` padded to whole sectors."""
        return -(-self.page_bytes // SECTOR) * SECTOR


@dataclass(frozen=True, slots=True)
class Identity:
    """What the bytes of every group depend on. Anything that differs is a miss."""

    model: str  # digest of the target's weights and of the config that shapes its forward pass
    rank: int = 0  # this rank's shard ...
    world: int = 1  # ... of so many


@dataclass(frozen=True, slots=True)
class Schema:
    """What one page of this deployment is made of."""

    identity: Identity
    page_tokens: int
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ConfigError("page size must be at least 1 token")
        if not self.groups:
            raise ConfigError("a schema needs at least one group")
        if len({g.name for g in self.groups}) != len(self.groups):
            raise ConfigError("group names must differ")

    @property
    def clocks(self) -> tuple[int, ...]:
        """Which clock each group goes by, numbered from 0: groups that need every page are needed
        by the same hits, so they share one."""
        names = ["" if group.tail is None else group.name for group in self.groups]
        known = list(dict.fromkeys(names))
        return tuple(known.index(name) for name in names)

    def fingerprint(self, group: Group) -> bytes:
        """16 bytes that name ``group``'s records: weights, geometry, shard and format."""
        shard = (self.identity.rank, self.identity.world) if group.sharded else (0, 1)
        what = (group.name, group.components, group.source)
        parts = (FORMAT_VERSION, self.identity.model, shard, self.page_tokens, what)
        return hashlib.sha256(repr(parts).encode()).digest()[:16]


def root_key(namespace: str) -> bytes:
    """The chained key that the first page of ``namespace`` follows."""
    name = namespace.encode("utf-8", "surrogatepass")  # JSON can hold what is no text
    return hashlib.sha256(b"%d:%d:" % (FORMAT_VERSION, len(name)) + name).digest()


def chain_keys(parent: bytes, raw: bytes | memoryview, page_tokens: int) -> list[bytes]:
    """Chained keys of whole pages: ``key[i] = SHA256(key[i-1], tokens of page i)``.

    Args:
        parent: key of the page before, or :func:`root_key`.
        raw: tokens, int32 little-endian; a partial last page is left out.
    """
    size = 4 * page_tokens
    keys = []
    for start in range(0, len(raw) - size + 1, size):
        link = hashlib.sha256(parent)
        link.update(raw[start : start + size])
        parent = link.digest()
        keys.append(parent)
    return keys


def as_tokens(tokens: ArrayLike) -> NDArray[np.int32]:
    """``[n]`` int32, little-endian.

    Raises:
        RequestError: they are not one row of integers in int32's range.
    """
    run = np.asarray(tokens)
    if run.dtype != np.int32:
        fits = np.iinfo(np.int32)
        if run.dtype.kind not in "iu" or (
            run.size and (run.min() < fits.min or run.max() > fits.max)
        ):
            raise RequestError(f"tokens must be integers in int32's range, not {run.dtype}")
    if run.ndim != 1:
        raise RequestError(f"tokens must have one dimension, not {run.ndim}")
    return np.ascontiguousarray(run, dtype="<i4")
