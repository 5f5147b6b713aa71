"""A request of an engine, and the names of the bytes that it writes."""

from __future__ import annotations

import hashlib
import itertools
import struct
from dataclasses import dataclass, field

import numpy as np
from schemas import P

from kvkeep.core.lease import Lease, Prefetch

Path = tuple[str, tuple[int, ...]]  # a page's name: namespace, and all tokens to its end

GROUPS = 16  # names of one page's groups are neighbours
_serial = itertools.count(1)


def root(namespace: str) -> bytes:
    """The root key of a namespace, implemented a second time."""
    return hashlib.sha256(b"2:%d:" % len(namespace) + namespace.encode()).digest()


def chain(namespace: str, tokens: tuple[int, ...], size: int) -> list[bytes]:
    """The chained keys of whole pages, implemented a second time."""
    key, keys = root(namespace), []
    for end in range(size, len(tokens) + 1, size):
        key = hashlib.sha256(key + struct.pack(f"<{size}i", *tokens[end - size : end])).digest()
        keys.append(key)
    return keys


def true_key(path: Path, size: int = P) -> bytes:
    """The chained key of a page."""
    return chain(*path, size)[-1]


def names(keys: np.ndarray) -> np.ndarray:
    """Of pages with these chained keys, ``[..., 32]`` uint8: the name of their bytes in group 0,
    positive and a multiple of :data:`GROUPS`. In another group it is so much more."""
    head = np.ascontiguousarray(keys[..., :8]).view(np.int64)[..., 0]
    return head & ((1 << 62) - GROUPS)


@dataclass(eq=False)
class Request:
    """One request, which writes true bytes, and junk for speculated tokens."""

    namespace: str
    tokens: tuple[int, ...]
    size: int = P  # tokens of a page
    prefetch: Prefetch | None = None
    lease: Lease | None = None
    computed: int | None = None  # tokens; None until it began to run
    snapshots: list[int] = field(default_factory=list)  # pages, since the last commit
    cuts: set[int] = field(default_factory=set)  # pages where a hit may be expected to end
    outrun: set[tuple[int, int]] = field(default_factory=set)  # slid past before they landed
    serial: int = field(default_factory=_serial.__next__)

    def __post_init__(self) -> None:
        keys = chain(self.namespace, self.tokens, self.size)
        self.keys = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), 32)
        self.truth = names(self.keys)  # [pages]: names of its bytes in group 0

    def path(self, page: int) -> Path:
        return self.namespace, self.tokens[: (page + 1) * self.size]

    @property
    def array(self) -> np.ndarray:
        return np.array(self.tokens, np.int32)

    @property
    def running(self) -> int:
        """The name of its recurrent state."""
        return -(self.serial << 20 | self.computed)
