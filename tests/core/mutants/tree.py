"""Mutants of ``core/tree.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "namespaces share a root",
        "one tenant reads another's state from memory",
        "core/tree.py",
        "        node = self._roots.get(root)\n        return NO_IDS",
        "        node = next(iter(self._roots.values()), None)\n        return NO_IDS",
        killer="test_tree.py: share_nothing",
    ),
    Mutant(
        "half a page matches",
        "pages are shared whole",
        "core/tree.py",
        "count = _common(node.raw, at * size, part) // size\n",
        "count = -(-_common(node.raw, at * size, part) // size)\n",
        killer="test_tree.py: matches_whole",
    ),
    Mutant(
        "a split forgets who moved",
        "pages below the fork point at the node above it",
        "core/tree.py",
        "low}\n        self._assign(ids, low)\n",
        "low}\n",
        killer="test_tree.py: fork_splits",
    ),
    Mutant(
        "a cut leaves what is below",
        "pages that no hit can use keep their slots",
        "core/tree.py",
        "                removed.append(kid.ids)\n",
        "",
        killer="test_tree.py: cut_takes",
    ),
    Mutant(
        "what went with a page above it is cut again",
        "two misses on one path break the tree",
        "core/tree.py",
        "            if node is not None and at >= node.size:  # it went with one above it\n"
        "                continue\n",
        "",
        killer="test_tree.py: dict_of_prompts",
    ),
    Mutant(
        "a cut merges and tells no page",
        "pages point at a node that is not in the tree",
        "core/tree.py",
        "            self._assign(kid.ids, parent)\n",
        "",
        killer="test_policies.py: leaf_first and lru",
    ),
]
