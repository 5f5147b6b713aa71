"""Token runs to page ids: a radix tree and nothing else.

A node holds a run of whole pages: their tokens as raw little-endian int32 bytes, and their ids.
Comparing a run is one ``memcmp``. Splitting a node slices two arrays, since state lives by page
id elsewhere. Chains coalesce: a leaf grows in place, so a long generation is one node. Tokens are
stored once. The tree does not know what a page holds, where, or for how long.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .schema import InvariantError

Ids = NDArray[np.int32]


class Node:
    """A run of pages. ``first`` is the depth of its first page."""

    __slots__ = ("_ids", "first", "kids", "parent", "raw", "size")

    def __init__(self, first: int, raw: bytearray, ids: Ids, parent: Node | None) -> None:
        self.first = first
        self.raw = raw
        self._ids = ids  # capacity >= size
        self.size = len(ids)
        self.kids: dict[bytes, Node] = {}  # by the raw bytes of their first page
        self.parent = parent

    @property
    def ids(self) -> Ids:
        """``[size]`` page ids. A view."""
        return self._ids[: self.size]

    def grow(self, raw: bytes | bytearray, ids: Ids) -> None:
        """Append pages, in amortised constant time each."""
        end = self.size + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(2 * len(self._ids), end), dtype=np.int32)
            grown[: self.size] = self.ids
            self._ids = grown
        self._ids[self.size : end] = ids
        self.size = end
        self.raw += raw

    def cut(self, at: int, page_bytes: int) -> tuple[bytearray, Ids]:
        """Remove and return the tokens and ids from the ``at``-th page on."""
        tail = self.raw[at * page_bytes :], self.ids[at:].copy()
        del self.raw[at * page_bytes :]
        self.size = at
        return tail


class Tree:
    """One radix tree per namespace. ``raw`` arguments are token bytes of whole pages."""

    def __init__(self, page_tokens: int) -> None:
        self.page_bytes = 4 * page_tokens
        self._roots: dict[str, Node] = {}
        self._node: NDArray[np.object_] = np.empty(0, dtype=object)  # by page id

    def match(self, namespace: str, raw: bytes) -> Ids:
        """Ids of the longest stored run of pages that ``raw`` begins with."""
        root = self._roots.get(namespace)
        if root is None:
            return np.empty(0, dtype=np.int32)
        return _joined(self._walk(root, 0, raw)[0])

    def below(self, page: int, depth: int, raw: bytes) -> Ids:
        """Ids of the longest stored run that follows ``page`` (at ``depth``) and begins ``raw``."""
        node = self._node[page]
        return _joined(self._walk(node, depth + 1 - node.first, raw)[0])

    def insert(self, namespace: str, parent: tuple[int, int] | None, raw: bytes, ids: Ids) -> None:
        """Add pages below ``parent``, a (page id, depth) pair, or at the root if it is None.

        The first page of ``raw`` must not be there yet: see :meth:`match` and :meth:`below`.
        """
        if parent is None:
            node = self._roots.setdefault(namespace, Node(0, bytearray(), _joined([]), None))
            at = 0
        else:
            node = self._node[parent[0]]
            at = parent[1] + 1 - node.first
        if at < node.size:
            self._split(node, at)
        if raw[: self.page_bytes] in node.kids:
            raise InvariantError("a page is inserted twice")
        if node.size and not node.kids:  # a leaf that is not a root
            node.grow(raw, ids)
        else:
            kid = Node(node.first + node.size, bytearray(raw), ids.copy(), node)
            node.kids[raw[: self.page_bytes]] = kid
            node = kid
        self._assign(ids, node)

    def cut(self, page: int, depth: int) -> Ids:
        """Remove ``page`` (at ``depth``) and everything below it; returns all removed ids."""
        node = self._node[page]
        at = depth - node.first
        if at < 0 or at >= node.size or node.ids[at] != page:
            raise InvariantError(f"page {page} is not in the tree at depth {depth}")
        removed = [kid.ids for kid in _descendants(node)]
        if at:
            removed.append(node.cut(at, self.page_bytes)[1])
            node.kids = {}
        else:
            removed.append(node.ids)
            self._unlink(node)
        ids = _joined(removed)
        self._node[ids] = None
        return ids

    def parent(self, page: int, depth: int) -> int | None:
        """The page before ``page`` (at ``depth``); None: it is the first of its prompt."""
        node = self._node[page]
        if depth > node.first:
            return int(node.ids[depth - node.first - 1])
        return int(node.parent.ids[-1]) if node.parent.size else None

    def is_last(self, page: int, depth: int) -> bool:
        """Whether ``page`` (at ``depth``) is in the tree with nothing below it."""
        node = self._node[page] if page < len(self._node) else None
        return node is not None and not node.kids and depth == node.first + node.size - 1

    def _walk(self, node: Node, at: int, raw: bytes) -> tuple[list[Ids], Node]:
        """Follow ``raw`` from the ``at``-th page of ``node`` on; the runs of ids passed."""
        size, done, runs = self.page_bytes, 0, []
        while done < len(raw):
            if at == node.size:
                kid = node.kids.get(raw[done : done + size])
                if kid is None:
                    break
                node, at = kid, 0
            run = node.raw if at == 0 else node.raw[at * size :]
            if raw.startswith(run, done):
                count = node.size - at
            else:
                count = _common(run, raw, done) // size
                if count == 0:
                    break
            runs.append(node.ids[at : at + count])
            done += count * size
            at += count
            if at < node.size:
                break
        return runs, node

    def _split(self, node: Node, at: int) -> None:
        kids = node.kids
        raw, ids = node.cut(at, self.page_bytes)
        low = Node(node.first + at, raw, ids, node)
        low.kids = kids
        for kid in kids.values():
            kid.parent = low
        node.kids = {bytes(raw[: self.page_bytes]): low}
        self._assign(ids, low)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise InvariantError("a root was cut")
        del parent.kids[bytes(node.raw[: self.page_bytes])]
        if parent.parent is not None and len(parent.kids) == 1:
            (kid,) = parent.kids.values()
            parent.grow(kid.raw, kid.ids)
            parent.kids = kid.kids
            for below in kid.kids.values():
                below.parent = parent
            self._assign(kid.ids, parent)
        elif parent.parent is None and not parent.kids:
            self._roots = {name: root for name, root in self._roots.items() if root is not parent}

    def _assign(self, ids: Ids, node: Node) -> None:
        if len(ids) and (top := int(ids.max())) >= len(self._node):
            more = np.empty(max(len(self._node), top + 1 - len(self._node)), dtype=object)
            self._node = np.concatenate((self._node, more))
        self._node[ids] = node

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Every node with its namespace, roots left out."""
        for name, root in self._roots.items():
            for node in _descendants(root):
                yield name, node

    def check(self) -> None:
        """Raise InvariantError unless nodes, ids and links agree."""
        seen: list[Ids] = []
        for _, node in self.walk():
            parent = node.parent
            if parent is None or parent.kids.get(bytes(node.raw[: self.page_bytes])) is not node:
                raise InvariantError("a node is not among its parent's children")
            if node.first != parent.first + parent.size or node.size == 0:
                raise InvariantError("a node is empty or at the wrong depth")
            if len(node.raw) != node.size * self.page_bytes:
                raise InvariantError("a node's tokens and pages differ in number")
            if any(self._node[i] is not node for i in node.ids):
                raise InvariantError("a page points at another node")
            seen.append(node.ids)
        ids = _joined(seen)
        if len(np.unique(ids)) != len(ids):
            raise InvariantError("a page is in the tree twice")
        if np.count_nonzero(self._node) != len(ids):
            raise InvariantError("a page that is not in the tree points into it")


def _descendants(node: Node) -> Iterator[Node]:
    stack = list(node.kids.values())
    while stack:
        node = stack.pop()
        stack.extend(node.kids.values())
        yield node


def _joined(runs: list[Ids]) -> Ids:
    """One array of ids that is the caller's to keep."""
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)


def _common(run: bytearray, raw: bytes, start: int) -> int:
    """Length of the common prefix of ``run`` and ``raw[start:]``, in bytes, whole tokens only."""
    count = min(len(run), len(raw) - start) // 4
    a = np.frombuffer(run, dtype=np.int32, count=count)
    b = np.frombuffer(raw, dtype=np.int32, count=count, offset=start)
    differ = a != b
    return 4 * (int(differ.argmax()) if differ.any() else count)
