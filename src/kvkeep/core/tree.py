"""A radix tree from token runs to page ids.

A node holds a run of whole pages: their tokens as little-endian int32 bytes, which one ``memcmp``
compares, and their ids. The page table keeps all state by page id, so a split moves no state.

Splits: a letter is a page's tokens, ``first`` the depth of a node's first page. One prompt, ABCDE,
is one node, which grows in place while its request generates::

    root -- A --> [A B C D E]
                  first 0

``insert(parent=(C, 2), raw=XY)`` adds pages after C, inside the node:

1. ``Node.cut`` removes the pages after C; the node keeps its parent and key::

    root -- A --> [A B C]                 raw and ids of D E are in hand

2. ``_split`` makes of them the node's only child, which takes over the node's children.
   ``_assign`` points D and E at it::

    root -- A --> [A B C] --- D --> [D E] --> its children
                  first 0           first 3

3. ``insert`` adds a second child under its key X; no two children begin with the same page::

    root -- A --> [A B C] -+- D --> [D E]
                           +- X --> [X Y]
                  first 0           first 3

``cut`` of page X reverses it: ``_unlink`` removes [X Y], and [A B C] absorbs its only child.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, Ids, InvariantError

Raw = bytes | memoryview  # token bytes of whole pages: int32, little-endian


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages."""

    first: int  # depth of its first page
    key: bytes  # that page's tokens; of a root, its root key
    raw: bytearray  # tokens of all pages
    _ids: Ids  # capacity >= size
    parent: Node | None
    kids: dict[bytes, Node] = field(default_factory=dict)  # by key
    size: int = field(init=False)  # in pages

    def __post_init__(self) -> None:
        self.size = len(self._ids)

    @property
    def ids(self) -> Ids:
        """``[size]`` page ids. A view."""
        return self._ids[: self.size]

    def page(self, at: int) -> int:
        """The ``at``-th page's id."""
        return self._ids.item(at)

    def grow(self, raw: Raw | bytearray, ids: Ids) -> None:
        """Append pages, each in amortised constant time."""
        end = self.size + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(self.size + self.size // 8, end), dtype=np.intp)
            grown[: self.size] = self.ids
            self._ids = grown
        self._ids[self.size : end] = ids
        self.size = end
        self.raw += raw

    def cut(self, at: int, page_bytes: int) -> tuple[bytearray, Ids]:
        """Remove and return tokens and ids from the ``at``-th page on."""
        tail = self.raw[at * page_bytes :], self.ids[at:].copy()
        del self.raw[at * page_bytes :]
        self.size = at
        return tail


class Tree:
    """One radix tree per namespace."""

    def __init__(self, page_tokens: int) -> None:
        self.page_bytes = 4 * page_tokens
        self._roots: dict[bytes, Node] = {}  # by schema.root_key of the namespace
        self._node: NDArray[np.object_] = np.empty(0, dtype=object)  # by page id

    def match(self, root: bytes, raw: Raw) -> Ids:
        """Ids of the longest prefix of ``raw`` that is stored below a root key."""
        node = self._roots.get(root)
        return NO_IDS if node is None else self._walk(node, 0, raw)

    def below(self, page: int, depth: int, raw: Raw) -> Ids:
        """Ids of the longest prefix of ``raw`` that is stored after ``page`` (at ``depth``)."""
        node = self._node[page]
        return self._walk(node, depth + 1 - node.first, raw)

    def insert(self, root: bytes, parent: tuple[int, int] | None, raw: Raw, ids: Ids) -> None:
        """Add pages after ``parent``, a (page id, depth) pair or None for the root, where the first
        page of ``raw`` must not exist yet."""
        if parent is None:
            node = self._roots.get(root)
            if node is None:
                node = self._roots[root] = Node(0, root, bytearray(), NO_IDS, None)
            at = 0
        else:
            node = self._node[parent[0]]
            at = parent[1] + 1 - node.first
        if at < node.size:
            self._split(node, at)
        first = bytes(raw[: self.page_bytes])
        if first in node.kids:
            raise InvariantError("a page is inserted twice")
        if node.size and not node.kids:  # a leaf that is not a root
            node.grow(raw, ids)
        else:
            kid = Node(node.first + node.size, first, bytearray(raw), ids.copy(), node)
            node.kids[first] = kid
            node = kid
        self._assign(ids, node)

    def cut(self, pages: Ids, depths: NDArray[np.int32]) -> Ids:
        """Remove ``pages`` (at ``depths``) and their subtrees; returns all removed ids."""
        removed = [NO_IDS]
        order = np.argsort(depths, kind="stable")
        for page, depth in zip(pages[order].tolist(), depths[order].tolist(), strict=True):
            node = self._node[page]
            at = -1 if node is None else depth - node.first
            if node is not None and at >= node.size:  # it went with one above it
                continue
            if at < 0 or node.page(at) != page:
                raise InvariantError(f"page {page} is not in the tree at depth {depth}")
            if node.kids:
                for kid in _descendants(node):
                    removed.append(kid.ids)
                    kid.size = 0
            if at:
                removed.append(node.cut(at, self.page_bytes)[1])
                node.kids = {}
            else:
                removed.append(node.ids)
                self._unlink(node)
                node.size = 0
        gone = np.concatenate(removed)
        self._node[gone] = None
        return gone

    def is_last(self, page: int, depth: int) -> bool:
        """Whether ``page`` (at ``depth``) is in the tree with nothing below it."""
        node = self._node[page] if page < len(self._node) else None
        return node is not None and not node.kids and depth == node.first + node.size - 1

    def _walk(self, node: Node, at: int, raw: Raw) -> Ids:
        """Follow ``raw`` from the ``at``-th page of ``node``; returns a new array of the ids."""
        view, size, done, runs = memoryview(raw), self.page_bytes, 0, []
        left = len(view) // size
        while left:
            if at == node.size:
                kid = node.kids.get(bytes(view[done : done + size]))
                if kid is None:
                    break
                node, at = kid, 0
            count = min(node.size - at, left)
            part = view[done : done + count * size]
            if not node.raw.startswith(part, at * size):
                count = _common(node.raw, at * size, part) // size
                if count == 0:
                    break
            runs.append(node.ids[at : at + count])
            done += count * size
            left -= count
            at += count
            if at < node.size:
                break
        return np.concatenate(runs) if runs else NO_IDS

    def _split(self, node: Node, at: int) -> None:
        """Move the pages from the ``at``-th on into a child."""
        kids = node.kids
        raw, ids = node.cut(at, self.page_bytes)
        low = Node(node.first + at, bytes(raw[: self.page_bytes]), raw, ids, node)
        low.kids = kids
        for kid in kids.values():
            kid.parent = low
        node.kids = {low.key: low}
        self._assign(ids, low)

    def _unlink(self, node: Node) -> None:
        """Remove a node from its parent, which then absorbs an only child."""
        parent = node.parent
        if parent is None:
            raise InvariantError("a root was cut")
        del parent.kids[node.key]
        if parent.parent is not None and len(parent.kids) == 1:
            (kid,) = parent.kids.values()
            parent.grow(kid.raw, kid.ids)
            parent.kids = kid.kids
            for below in kid.kids.values():
                below.parent = parent
            self._assign(kid.ids, parent)
        elif parent.parent is None and not parent.kids:
            del self._roots[parent.key]

    def _assign(self, ids: Ids, node: Node) -> None:
        """Note that these pages are in ``node``."""
        try:
            self._node[ids] = node
        except IndexError:
            more = np.empty(max(len(self._node), int(ids.max()) + 1), dtype=object)
            self._node = np.concatenate((self._node, more))
            self._node[ids] = node

    def walk(self) -> Iterator[tuple[bytes, Node]]:
        """Every node except roots, with its root's key."""
        for name, root in self._roots.items():
            for node in _descendants(root):
                yield name, node

    def check(self) -> None:
        """Raise InvariantError unless nodes, ids and links agree."""
        seen: list[Ids] = [NO_IDS]
        for _, node in self.walk():
            parent = node.parent
            if parent is None or parent.kids.get(node.key) is not node:
                raise InvariantError("a node is not among its parent's children")
            if node.key != node.raw[: self.page_bytes]:
                raise InvariantError("a node's key differs from its first page")
            if node.first != parent.first + parent.size or node.size == 0:
                raise InvariantError("a node is empty or at the wrong depth")
            if len(node.raw) != node.size * self.page_bytes:
                raise InvariantError("a node's tokens and pages differ in number")
            if any(self._node[i] is not node for i in node.ids):
                raise InvariantError("a page points at another node")
            seen.append(node.ids)
        ids = np.concatenate(seen)
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


def _common(run: bytearray, start: int, raw: memoryview) -> int:
    """Length of the common prefix of ``run[start:]`` and ``raw``, in bytes, whole tokens only."""
    count = min(len(run) - start, len(raw)) // 4
    a = np.frombuffer(run, dtype=np.int32, count=count, offset=start)
    b = np.frombuffer(raw, dtype=np.int32, count=count)
    differ = a != b
    return 4 * (int(differ.argmax()) if differ.any() else count)
