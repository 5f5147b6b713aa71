"""A small stage that compares every step with an oracle of plain dicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from oracle import Clocks, Oracle, follows, parentless, with_ancestors
from request import Path, Request, names, root, true_key
from schemas import ABSENT, LIVE, WRITING, P
from stage import Stage

from kvkeep.schema import Residence, Schema

Tree = dict[Path, int]  # all findable pages, and their ids


class World(Stage):
    """Each operation compares its own outcome with the oracle; :meth:`compare` compares the whole
    state."""

    def __init__(
        self,
        schema: Schema,
        device: Sequence[int],
        host: Sequence[int],
        missing: str = "strict",
        select: float = 0.4,
        every: int | None = None,
    ) -> None:
        self.vital = [grp.required and grp.tail is None for grp in schema.groups]
        self.names: dict[bytes, Path] = {}  # chained key -> the page it must belong to
        self.keys: dict[Path, bytes] = {}  # the inverse
        self.roots = {root(name): name for name in ("", "last")}  # key of a namespace -> its name
        super().__init__(schema, device, host, missing, select, every)

    # --- operations

    def restart(self) -> None:
        super().restart()
        self.oracle = Oracle([grp.tail for grp in self.schema.groups])

    def arrive(self, tokens: Sequence[int], namespace: str = "", ask: bool = True) -> Request:
        self.roots[root(namespace)] = namespace
        request = super().arrive(tokens, namespace, ask)
        for page, key in enumerate(request.keys):
            if key.tobytes() not in self.names:
                self.names[key.tobytes()] = request.path(page)
        return request

    def admit(self, request: Request, chunk: int = P) -> bool:
        if not self.may_come(request):
            return False
        tree = self.tree()
        pages = self.hit(request, tree)
        fresh, roomy = self._room(request, tree, pages, chunk)
        pins = self.inside.pins[0].copy()
        if not super().admit(request, chunk):
            assert np.array_equal(pins, self.inside.pins[0]), "a refused request keeps pins"
            assert not roomy, "refused despite room"
            return False
        assert roomy, "admitted without room"
        lease = request.lease
        assert lease.pages == pages, "the hit is not the longest"
        assert lease.path.tolist() == [tree[request.path(i)] for i in range(lease.pages)]
        for grp in self.schema.groups:
            assert len(lease.slots(grp.name)) == lease.pages + fresh
        whole = (len(request.tokens) - 1) // self.size
        known = next((i for i in range(whole) if request.path(i) not in tree), whole)
        request.cuts = {n for n in (whole, known) if n > pages}
        self._check_cuts(request)
        if pages:
            self.oracle.stamp(request.path, pages)
            self.oracle.hit(request.path, pages)
            assert self.inside.tells_storage, "storage will not be told"
        return True

    def _room(self, request: Request, tree: Tree, pages: int, chunk: int) -> tuple[int, bool]:
        """Fresh pages, and whether each group has room; snapshots are optional."""
        tokens = min(len(request.tokens), pages * self.size + chunk)
        fresh = -(-tokens // self.size) - pages
        roomy, device = True, self.inside.state[0]
        for g, grp in enumerate(self.schema.groups):
            has = self._has(request, tree)
            valid = self.oracle.valid_from(g, pages, has)
            assert not valid or self.missing == "lenient"
            mine = {request.path(i) for i in self.oracle.needed(g, pages) if i >= valid}
            short = sum(device[g, tree[path]] == ABSENT for path in mine)
            short += grp.working or fresh
            idle = set(self._evictable(0, g, tree)) - mine
            used = np.count_nonzero(device[g] != ABSENT) + self._private(g)
            roomy &= bool(short <= self.device[g] - used + len(idle))
        return fresh, roomy

    def _private(self, g: int) -> int:
        """Private slots."""
        leases = [request.lease for request in self.requests if request.lease]
        return sum(len(self.inside.own(lease, g)) for lease in leases)

    def _check_cuts(self, request: Request) -> None:
        """Snapshots are planned where hits are expected to end, and as often as the policy says;
        only those pages have slots."""
        lease, interim = request.lease, set()
        keeps = [g for g in self.groups if self.schema.groups[g].working]
        if not keeps:
            assert not lease.cuts
            return
        planned = {cut // self.size for cut in lease.cuts}
        assert lease.cuts == sorted(n * self.size for n in planned), "cuts are not in order"
        if self.every:
            last = len(lease.slots(self.schema.groups[keeps[0]].name))
            interim = {n for n in range(lease.pages + 1, last + 1) if n % self.every == 0}
            planned = {n for n in planned if n % self.every or n in request.cuts | interim}
        assert planned == request.cuts | interim
        for g in keeps:
            at = np.flatnonzero(self.inside.owned(lease, g)).tolist()
            planned = all((i + 1) * self.size in lease.cuts for i in at)
            assert planned, "a snapshot that nobody planned"

    def grow(self, request: Request, tokens: int) -> bool:
        grown = super().grow(request, tokens)
        if grown:
            self._check_cuts(request)
        return grown

    def _write(self, request: Request, g: int, slots: np.ndarray, values: np.ndarray | int) -> None:
        """Write only into slots that no page and no other request has."""
        inside, others = self.inside, np.ones(self.device[g], bool)
        others[inside.own(request.lease, g)] = False
        others[inside.slot[0, g][inside.state[0, g] != ABSENT]] = True
        for other in self.requests:
            if other.lease and other is not request:
                others[inside.own(other.lease, g)] = True
        for slot in slots[others[slots]].tolist():
            raise AssertionError(f"a slot is written that belongs to {self.who(0, g, slot)}")
        super()._write(request, g, slots, values)

    def commit(self, request: Request) -> None:
        """Committed pages are in the tree, stamped and owned as they must be; windows slid."""
        lease, inside = request.lease, self.inside
        first, last = lease.pages, request.computed // self.size
        detached, snapshots = inside.detached(lease), list(request.snapshots)
        tree = self.tree()
        self.oracle.keep(tree.__contains__)  # grow may have evicted it
        own, moving, pinned = [], [], []  # by group: pages
        for g, grp in enumerate(self.schema.groups):
            owned, slots = inside.owned(lease, g), lease.slots(grp.name)
            mine = [i for i in range(last) if not grp.working or i in snapshots]
            own.append({i for i in mine if owned[i]})
            moves = [i for i in mine if i >= first]
            moving.append({i for i in moves if self._state(tree, 0, g, request.path(i)) == WRITING})
            pinned.append({i for i in range(first) if slots[i] >= 0 and not owned[i]})
        super().commit(request)
        if detached or last <= first:
            assert lease.pages == first
            self.happened["detached"] += detached
            return
        tree = self.tree()
        assert lease.path.tolist() == [tree[request.path(i)] for i in range(last)], "not findable"
        self.oracle.stamp(request.path, last)
        for g in self.groups:
            new = {i for i in own[g] if i >= first}
            pinned[g] |= self._check_published(request, tree, g, new, moving[g])
            self._check_slid(request, g, pinned[g])

    def _check_published(
        self, request: Request, tree: Tree, g: int, new: set[int], moving: set[int]
    ) -> set[int]:
        """New pages of a group have one row each; returns those that the lease pins through it."""
        lease, reach = request.lease, self.oracle.needed(g, request.lease.pages)
        owned = self.inside.owned(lease, g)
        if not self.inside.publishes(lease, g):
            assert all(owned[i] for i in new if i in reach)
            return set()
        for i in new:
            assert self._state(tree, 0, g, request.path(i)) != ABSENT, "a row is left empty"
            if i in reach:
                assert owned[i] == (i in moving), "a duplicate is kept"
        return new - moving

    def _check_slid(self, request: Request, g: int, pinned: set[int]) -> None:
        """Pages out of reach are let go and evicted first."""
        lease, working = request.lease, self.schema.groups[g].working
        reach = self.oracle.needed(g, lease.pages)
        if not self.inside.publishes(lease, g):
            pinned = pinned - set(reach)
        assert (self.inside.landed(lease, g)[: reach.start] == -1).all(), "the window did not slide"
        coming = self.inside.coming(lease, g)
        for i in range(reach.start):
            if i in coming:
                request.outrun.add((g, i))
            elif i in pinned and not (working and i + 1 in request.cuts):
                self.oracle.slide(g, request.path(i))

    def tick(self) -> None:
        super().tick()
        for request in self.requests:
            if request.lease and request.lease.ready:
                for g, i in request.outrun:
                    self.oracle.slide(g, request.path(i))
                request.outrun = set()
        tree = self.tree()  # a page may have left and come back, with fresh clocks
        ids = list(tree.values())
        known = self.inside.used[:, ids].any(axis=0) | self.inside.hits[:, ids].any(axis=0)
        fresh = {path for path, old in zip(tree, known, strict=True) if not old}
        self.oracle.keep(lambda path: path not in fresh)

    def evict(self, tier: int, g: int, count: int) -> None:
        """Evict as a leaf-first LRU of dicts would, subtrees included."""
        tree = self.tree()
        want = self.oracle.ranks(g, self._evictable(tier, g, tree))[:count]
        paths = {page: path for path, page in tree.items()}
        gone = [paths[page] for page in self.inside.evict(tier, g, count).tolist()]
        assert [self.oracle.rank(g, path) for path in gone] == want, "not leaf-first LRU"
        heads = [p for p in gone if self.vital[g] and self._state(tree, 1 - tier, g, p) == ABSENT]
        rest = {path for path in tree if not any(follows(path, head) for head in heads)}
        if not any(self.vital):
            rest = self._in_use(tree)
        assert rest == set(self.tree()), "not what was lost, and all below it, leaves the tree"
        self.happened["evicted"] += len(gone)

    def empty(self, tier: int) -> None:
        tree = self.tree()
        before = {g: self._evictable(tier, g, tree) for g in self.groups}
        count = self.cache.evict(("device", "host")[tier])
        tree = self.tree()
        assert not any(self._evictable(tier, g, tree) for g in self.groups)
        lost = sum(self._state(tree, tier, g, path) == ABSENT for g in before for path in before[g])
        assert count <= lost  # the rest went with a subtree

    # --- contents

    def tree(self) -> Tree:
        found: Tree = {}
        above: dict[int, tuple[int, ...]] = {}
        for key, node, parent, raw, ids in self.inside.runs():  # parents first
            tokens = above[node] = above.get(parent, ()) + tuple(memoryview(raw).cast("i"))
            end = len(tokens) - (len(ids) - 1) * self.size
            for page in ids:
                found[self.roots[key], tokens[:end]] = page
                end += self.size
        return found

    def hit(self, request: Request, tree: Tree) -> int:
        """The longest hit, the slow way."""
        whole = (len(request.tokens) - 1) // self.size
        known = next((i for i in range(whole) if request.path(i) not in tree), whole)
        groups = enumerate(self.schema.groups)
        counting = [g for g, grp in groups if self.missing == "strict" or grp.required]
        return self.oracle.longest(known, counting, self._has(request, tree))

    def _has(self, request: Request, tree: Tree):
        """Whether a page of a request is in memory or being loaded."""
        state = self.inside.state

        def has(g: int, i: int) -> bool:
            page = tree[request.path(i)]
            return bool(state[0, g, page] != ABSENT or state[1, g, page] == LIVE)

        return has

    def _in_use(self, tree: Tree) -> set[Path]:
        """Pages with a slot or a hold, and their ancestors; without a vital group, others end."""
        busy = self.inside.holds.astype(bool) | (self.inside.state != ABSENT).any(axis=(0, 1))
        return with_ancestors([path for path, page in tree.items() if busy[page]], self.size)

    def _state(self, tree: Tree, tier: int, g: int, path: Path) -> Residence:
        return Residence(self.inside.state[tier, g, tree[path]]) if path in tree else ABSENT

    def _evictable(self, tier: int, g: int, tree: Tree) -> list[Path]:
        ids = list(tree.values())
        state, pins = self.inside.state[tier, g, ids], self.inside.pins[tier, g, ids]
        idle = (state == LIVE) & (pins == 0)
        return [path for path, may in zip(tree, idle.tolist(), strict=True) if may]

    def page(self, name: int) -> str:
        found = (p for k, p in self.names.items() if names(np.frombuffer(k, np.uint8)) == name)
        return str(next(found, super().page(name)))

    # --- invariants

    def compare(self) -> None:
        tree = self.tree()
        self.oracle.keep(tree.__contains__)
        super().compare()
        self._check_names(tree)
        assert any(self.vital) or set(tree) == self._in_use(tree), "an empty page is in the tree"

    def _key(self, path: Path) -> bytes:
        if path not in self.keys:
            self.keys[path] = true_key(path, self.size)
        return self.keys[path]

    def _check_names(self, tree: Tree) -> None:
        ids = list(tree.values())
        keys = [key.tobytes() for key in self.inside.keys[ids]]
        assert keys == list(map(self._key, tree)), "a page has another page's key"
        assert not parentless(tree, self.size)
        known = self.oracle.known(tree)
        used, hits = [page.used for page in known], [page.hits for page in known]
        assert self.inside.used[:, ids].T.tolist() == used, "a clock went wrong"
        assert self.inside.hits[:, ids].T.tolist() == hits, "a hit was not counted"

    def _check_storage(self) -> None:
        strangers = [key for key, _ in self.store.written if key.page not in self.names]
        assert not strangers, "storage has a page that no prompt had"
        super()._check_storage()

    def trust(self) -> None:
        """Copy the cache's clocks into the oracle after damage, which may change them."""
        inside, self.oracle.clock = self.inside, self.inside.clock
        self.oracle.pages.clear()
        for path, page in self.tree().items():
            used, hits = inside.used[:, page].tolist(), inside.hits[:, page].tolist()
            self.oracle.pages[path] = Clocks(used, hits)
