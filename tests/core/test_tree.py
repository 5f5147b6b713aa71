"""The radix tree, compared with a dict and in single cases."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.tree import Tree
from kvkeep.schema import InvariantError

P = 2


def raw(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.intp)


def runs(tree: Tree) -> list[list[int]]:
    """The page ids of each node, sorted."""
    return sorted(node.ids.tolist() for _, node in tree.walk())


class Forest:
    """A tree, and a dict of what it must hold."""

    def __init__(self) -> None:
        self.tree = Tree(P)
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}
        self.next = 0

    def put(self, namespace: str, tokens: tuple[int, ...], split: int = 0) -> None:
        """Add a prompt as the cache does: match (in two parts), then insert the rest."""
        whole = tokens[: len(tokens) // P * P]
        known = self.tree.match(namespace, raw(*whole))
        if len(known) and split:
            head = min(split, len(known))
            below = self.tree.below(int(known[head - 1]), head - 1, raw(*whole[head * P :]))
            assert known.tolist() == [*known[:head], *below]
        rest = range(len(known), len(whole) // P)
        fresh = ids(*range(self.next, self.next + len(rest)))
        self.next += len(rest)
        if len(rest):
            parent = (int(known[-1]), len(known) - 1) if len(known) else None
            self.tree.insert(namespace, parent, raw(*whole[len(known) * P :]), fresh)
        for i, page in zip(rest, fresh.tolist(), strict=True):
            self.pages[namespace, whole[: (i + 1) * P]] = page

    def cut(self, indices: list[int]) -> None:
        """Cut pages by index; one may be below another."""
        tops = list(dict.fromkeys(sorted(self.pages)[i % len(self.pages)] for i in indices))
        below = {
            (name, tokens)
            for name, tokens in self.pages
            if any(name == top[0] and tokens[: len(top[1])] == top[1] for top in tops)
        }
        pages, depths = [self.pages[top] for top in tops], [len(t) // P - 1 for _, t in tops]
        gone = self.tree.cut(ids(*pages), ids(*depths))
        assert sorted(gone.tolist()) == sorted(self.pages.pop(key) for key in below)

    def check(self, namespace: str, tokens: tuple[int, ...]) -> None:
        self.tree.check()
        whole = tokens[: len(tokens) // P * P]
        found = self.tree.match(namespace, raw(*whole)).tolist()
        path = [self.pages.get((namespace, whole[:i])) for i in range(P, len(whole) + 1, P)]
        assert found == path[: (*path, None).index(None)]
        assert sorted(chain.from_iterable(runs(self.tree))) == sorted(self.pages.values())


Tokens = st.lists(st.integers(0, 1), max_size=12).map(tuple)
Numbers = st.lists(st.integers(0, 20), min_size=1, max_size=3)
Step = st.tuples(st.booleans(), st.sampled_from(["", "b"]), Tokens, Numbers)


@pytest.mark.untraced
@settings(max_examples=300)
@given(st.lists(Step, max_size=25))
def test_a_tree_is_a_dict_of_prompts(steps) -> None:
    """After any inserts and cuts in any namespace, a match is the longest known prefix."""
    forest = Forest()
    for put, namespace, tokens, numbers in steps:
        if put:
            forest.put(namespace, tokens, numbers[0] % 4)
        elif forest.pages:
            forest.cut(numbers)
        forest.check(namespace, tokens)


def test_nothing_matches_in_an_empty_tree() -> None:
    assert Tree(P).match("", raw(1, 2)).tolist() == []
    assert Tree(P).match("", b"").tolist() == []


def test_a_page_matches_whole_or_not_at_all() -> None:
    tree = Tree(P)
    tree.insert("", None, raw(1, 2, 3, 4), ids(5, 6))
    assert tree.match("", raw(1, 2, 3, 9)).tolist() == [5]
    assert tree.match("", raw(1, 9, 3, 4)).tolist() == []


def test_decoding_grows_one_node_in_place() -> None:
    """A generation that commits page by page is one node, not a chain."""
    tree = Tree(P)
    tree.insert("", None, raw(0, 0), ids(0))
    for i in range(1, 100):
        tree.insert("", (i - 1, i - 1), raw(i, i), ids(i))
    tree.check()
    assert runs(tree) == [list(range(100))]


def test_a_fork_splits_a_node_and_keeps_what_is_below() -> None:
    tree = Tree(P)
    tree.insert("", None, raw(1, 1, 2, 2, 3, 3), ids(0, 1, 2))
    tree.insert("", (0, 0), raw(9, 9), ids(3))
    tree.insert("", (2, 2), raw(4, 4), ids(4))
    tree.check()
    assert runs(tree) == [[0], [1, 2, 4], [3]]
    assert tree.below(0, 0, raw(2, 2, 3, 3, 4, 4, 5, 5)).tolist() == [1, 2, 4]
    assert tree.below(1, 1, raw(9, 9)).tolist() == []


def test_a_cut_takes_all_below_and_only_that() -> None:
    tree = Tree(P)
    tree.insert("", None, raw(1, 1, 2, 2, 3, 3), ids(0, 1, 2))
    tree.insert("", (1, 1), raw(9, 9), ids(3))
    assert sorted(tree.cut(ids(1), ids(1)).tolist()) == [1, 2, 3]
    tree.check()
    tree.insert("", (0, 0), raw(2, 2), ids(1))  # in place, where the cut run was
    assert tree.match("", raw(1, 1, 2, 2, 3, 3)).tolist() == [0, 1]


def test_namespaces_share_nothing_and_end_with_their_last_page() -> None:
    tree = Tree(P)
    tree.insert("a", None, raw(1, 1), ids(0))
    tree.insert("b", None, raw(1, 1), ids(1))
    assert tree.match("a", raw(1, 1)).tolist() == [0]
    assert tree.match("b", raw(1, 1)).tolist() == [1]
    tree.cut(ids(0), ids(0))
    assert tree.match("a", raw(1, 1)).tolist() == []
    assert [name for name, _ in tree.walk()] == ["b"]


def test_a_long_prompt_is_found_whole() -> None:
    """A million tokens: one node, one comparison."""
    tokens = np.arange(1 << 20, dtype="<i4")
    tree = Tree(64)
    tree.insert("", None, tokens.tobytes(), np.arange(1 << 14, dtype=np.intp))
    assert len(tree.match("", tokens.tobytes())) == 1 << 14
    tokens[700_000] = -1
    assert len(tree.match("", tokens.tobytes())) == 700_000 // 64


def test_what_cannot_be_is_refused() -> None:
    tree = Tree(P)
    tree.insert("", None, raw(1, 1, 2, 2), ids(0, 1))
    with pytest.raises(InvariantError, match="inserted twice"):
        tree.insert("", None, raw(1, 1), ids(2))
    with pytest.raises(InvariantError, match="not in the tree at depth"):
        tree.cut(ids(1), ids(0))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda node: node.parent.kids.clear(), "points into it"),
        (lambda node: node.parent.kids.update({b"x": node.parent.kids.popitem()[1]}), "among"),
        (lambda node: setattr(node, "first", 3), "wrong depth"),
        (lambda node: node.raw.extend(b"1234"), "differ in number"),
        (lambda node: node.ids.__setitem__(0, 1), "another node|twice"),
    ],
    ids=["lost", "misplaced", "depth", "tokens", "ids"],
)
def test_check_sees_damage(spoil, message: str) -> None:
    tree = Tree(P)
    tree.insert("", None, raw(1, 1, 2, 2), ids(0, 1))
    spoil(next(node for _, node in tree.walk()))
    with pytest.raises(InvariantError, match=message):
        tree.check()


def test_check_sees_a_page_that_points_elsewhere() -> None:
    tree = Tree(P)
    tree.insert("", None, raw(1, 1), ids(0))
    tree.insert("", None, raw(2, 2), ids(1))
    tree._node[1] = tree._node[0]
    with pytest.raises(InvariantError, match="another node"):
        tree.check()
