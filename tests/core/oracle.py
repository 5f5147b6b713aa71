"""An oracle of the cache in plain dicts: written without the core, from its design alone.

A page is named by its prompt: the oracle knows no page ids, slots or nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from request import Path

MANY = 2  # hits that make a tail worth keeping


@dataclass(slots=True)
class Clocks:
    """By group, when a page was last needed and how many hits needed it."""

    used: list[int]
    hits: list[int]


class Oracle:
    """``tails``: by group, how many trailing pages a hit needs; None: all."""

    def __init__(self, tails: Sequence[int | None]) -> None:
        self.tails = tails
        self.clock = 0
        self.pages: defaultdict[Path, Clocks] = defaultdict(self.fresh)

    def fresh(self) -> Clocks:
        """The clocks of a page that nothing has needed."""
        return Clocks([0] * len(self.tails), [0] * len(self.tails))

    def known(self, paths: Iterable[Path]) -> list[Clocks]:
        """The clocks of these pages."""
        fresh = self.fresh()
        return [self.pages.get(path, fresh) for path in paths]

    # --- clocks

    def needed(self, g: int, pages: int) -> range:
        tail = self.tails[g]
        return range(max(0, pages - (pages if tail is None else tail)), pages)

    def stamp(self, path: Callable[[int], Path], pages: int) -> None:
        """Mark all that a hit of so many pages needs as needed now."""
        self.clock += 1
        clocks = [self.pages[path(i)] for i in range(pages)]
        for g in range(len(self.tails)):
            for i in self.needed(g, pages):
                clocks[i].used[g] = self.clock

    def hit(self, path: Callable[[int], Path], pages: int) -> None:
        """Count a hit of so many pages in groups with a tail, up to :data:`MANY`."""
        for g in [g for g, tail in enumerate(self.tails) if tail is not None]:
            for i in self.needed(g, pages):
                hits = self.pages[path(i)].hits
                hits[g] = min(hits[g] + 1, MANY)

    def slide(self, g: int, path: Path) -> None:
        """Note that a request slid past a page: it is evicted first unless many hits end there."""
        if self.pages[path].hits[g] < MANY:
            self.pages[path].used[g] = 0

    def keep(self, alive: Callable[[Path], bool]) -> None:
        """Forget all other pages."""
        for path in [path for path in self.pages if not alive(path)]:
            del self.pages[path]

    # --- hits

    def longest(self, known: int, groups: Iterable[int], has: Callable[[int, int], bool]) -> int:
        """The longest hit on these pages such that each group has all it needs."""
        groups = list(groups)
        for pages in range(known, 0, -1):
            if all(has(g, i) for g in groups for i in self.needed(g, pages)):
                return pages
        return 0

    def valid_from(self, g: int, pages: int, has: Callable[[int, int], bool]) -> int:
        """First page from which a group has all that a hit needs."""
        return max((i + 1 for i in self.needed(g, pages) if not has(g, i)), default=0)

    # --- eviction

    def rank(self, g: int, path: Path) -> tuple[int, int]:
        """The sort key of a page; the lowest is evicted first."""
        used = self.pages[path].used[g] if path in self.pages else 0
        return used, -len(path[1])

    def ranks(self, g: int, paths: Collection[Path]) -> list[tuple[int, int]]:
        """The ranks of evictable pages, in eviction order."""
        return sorted(self.rank(g, path) for path in paths)


def follows(path: Path, head: Path) -> bool:
    """Whether a page is this one or below it."""
    return path[0] == head[0] and path[1][: len(head[1])] == head[1]


def with_ancestors(paths: Iterable[Path], size: int) -> set[Path]:
    """These pages and all their ancestors."""
    return {
        (namespace, tokens[:end])
        for namespace, tokens in paths
        for end in range(size, len(tokens) + 1, size)
    }


def parentless(tree: Mapping[Path, int], size: int) -> list[Path]:
    """Pages whose parent is missing."""
    return [
        (namespace, tokens)
        for namespace, tokens in tree
        if len(tokens) > size and (namespace, tokens[:-size]) not in tree
    ]
