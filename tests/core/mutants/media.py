"""Mutants of ``media/``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a layer waits for the first of them only",
        "a step reads what was there before",
        "media/arrival.py",
        "self._marks[bisect_left(self._layers, layer)]",
        "self._marks[0]",
        killer="test_loading.py: first_mark",
    ),
    Mutant(
        "components lie over each other",
        "a record has the last component's bytes only",
        "media/pieces.py",
        "        start += component.page_bytes\n",
        "",
        killer="test_memory.py: components_in_order",
        slow=True,
    ),
    Mutant(
        "a load reads where it should write",
        "a page comes back from a slot of the same number",
        "media/direct.py",
        "self._copy(pool[:, target], arena[:, source])",
        "self._copy(pool[:, target], arena[:, target])",
        killer="test_memory.py: round_trip and BF16",
        slow=True,
    ),
]
