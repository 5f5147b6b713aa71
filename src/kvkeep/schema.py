"""The layout of a page of cached state, the keys that name it, and the errors kvkeep raises.

A *page* is ``page_tokens`` consecutive tokens. Its state is a set of *groups* (one slot id
addresses a whole group), each a set of *components* (one tensor per layer). Data, not subclasses,
describes the kinds of state: ``Group.tail`` is how many trailing pages a hit needs.
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

FORMAT_VERSION = 2  # of keys and records; records of another version are misses
BLOCK = 4096  # bytes: storage allocates records in blocks
SECTOR = 512  # bytes: record bodies are padded to a multiple, as direct I/O requires

Ids = NDArray[np.intp]
"""Page ids, in NumPy's index width: indexing with any other costs ten times as much."""

Slots = NDArray[np.int32]
"""Slots of one group in one memory tier; -1 in a block table: no slot."""

_TOKEN = np.dtype("<i4")

NO_IDS: Ids = np.empty(0, dtype=np.intp)
NO_SLOTS: Slots = np.empty(0, dtype=np.int32)

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element, by safetensors' dtype names."""


class KvkeepError(Exception):
    """Base class of all errors that kvkeep raises."""


class ConfigError(KvkeepError, ValueError):
    """The configuration cannot be served."""


class UnsupportedModel(ConfigError):
    """kvkeep does not support a model, layer or setting; the message names it."""


class DraftMismatch(ConfigError):
    """A draft model does not fit its target; the message says where."""


class RequestError(KvkeepError, ValueError):
    """One request is refused; others go on."""


class PromptTooLong(RequestError):
    """More tokens than the context length or the device pool can hold."""


class ModelNotFound(RequestError):
    """A request names a model that is not served here."""


class StoreError(KvkeepError):
    """A storage backend failed. The lanes contain and count the failure."""


class LoadFailed(KvkeepError):
    """A load to the device failed. Requests that waited for it repeat their step."""


class InvariantError(KvkeepError):
    """Bookkeeping is wrong. The cache drops the affected pages and goes on."""


class Closed(KvkeepError):
    """The cache, store or engine was closed."""


class Residence(enum.IntEnum):
    """State of one group of one page in one memory tier."""

    ABSENT = 0  # no slot
    WRITING = 1  # a slot that is being filled
    LIVE = 2  # a slot whose bytes are valid


class Key(NamedTuple):
    """Names one record in storage: one group of one page."""

    group: bytes  # 16 bytes: Schema.fingerprint of the group
    page: bytes  # 32 bytes: the page's chained key


@dataclass(frozen=True, slots=True)
class Component:
    """One named tensor of a page's state, with the same shape in each of its layers."""

    name: str  # "k", "v", "latent", "conv", "carry", ...
    layers: tuple[int, ...]  # layers that have it, by the model's layer index
    shape: tuple[int, ...]  # of one page in one layer, on this rank
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
    """Components that are stored and evicted together: one slot id addresses all of them."""

    name: str  # "full", "window", "state", "draft"
    components: tuple[Component, ...]
    tail: int | None = None  # trailing pages that a hit needs; None: every page
    sharded: bool = True  # over tensor-parallel ranks; False: replicated
    working: int = 0  # extra slots that a running request needs for recurrent state
    required: bool = True  # False: a hit may lack it under policy ``lenient``
    source: str = ""  # digest of weights and settings that affect only this group

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
        """Pages of this group that a hit of ``pages`` pages needs."""
        return range(0 if self.tail is None else max(0, pages - self.tail), pages)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page without padding."""
        return sum(c.page_bytes for c in self.components)

    @property
    def record_bytes(self) -> int:
        """Bytes of one page's record body: ``page_bytes`` padded to whole sectors."""
        return -(-self.page_bytes // SECTOR) * SECTOR


@dataclass(frozen=True, slots=True)
class Identity:
    """What the bytes of every group depend on. State of another identity is a miss."""

    model: str  # digest of the target's weights and forward-pass config
    rank: int = 0  # tensor-parallel rank
    world: int = 1  # tensor-parallel size


@dataclass(frozen=True, slots=True)
class Schema:
    """The layout of a page in this deployment."""

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
        """By group, its clock. Groups that need every page share one: the same hits use them."""
        names = ["" if group.tail is None else group.name for group in self.groups]
        known = list(dict.fromkeys(names))
        return tuple(known.index(name) for name in names)

    def fingerprint(self, group: Group) -> bytes:
        """16-byte digest that names ``group``'s records: weights, geometry, shard and format."""
        shard = (self.identity.rank, self.identity.world) if group.sharded else (0, 1)
        what = (group.name, group.components, group.source)
        parts = (FORMAT_VERSION, self.identity.model, shard, self.page_tokens, what)
        return hashlib.sha256(repr(parts).encode()).digest()[:16]


def root_key(namespace: str) -> bytes:
    """32 bytes: the parent key of the first page of ``namespace``."""
    name = namespace.encode("utf-8", "surrogatepass")  # JSON can hold lone surrogates
    return hashlib.sha256(b"%d:%d:" % (FORMAT_VERSION, len(name)) + name).digest()


def chain_keys(parent: bytes, raw: bytes | memoryview, page_tokens: int) -> list[bytes]:
    """Chained keys of whole pages: ``key[i] = SHA256(key[i-1], tokens of page i)``.

    Args:
        parent: key of the previous page, or :func:`root_key`.
        raw: tokens, int32 little-endian; a partial last page is ignored.
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
    """``[n]`` little-endian int32 tokens; RequestError unless 1-D integers in int32's range."""
    run = np.asarray(tokens)
    if run.dtype != _TOKEN:
        fits = np.iinfo(_TOKEN)
        if run.dtype.kind not in "iu" or (
            run.size and (run.min() < fits.min or run.max() > fits.max)
        ):
            raise RequestError(f"tokens must be integers in int32's range, not {run.dtype}")
    if run.ndim != 1:
        raise RequestError(f"tokens must have one dimension, not {run.ndim}")
    return np.ascontiguousarray(run, dtype=_TOKEN)
