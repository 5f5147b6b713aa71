"""Mutants of ``schema.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a window is one page",
        "the first token after a hit attends to what is not there",
        "schema.py",
        "max(0, pages - self.tail)",
        "max(0, pages - 1)",
        killer="test_cache.py: rejected_draft",
    ),
    Mutant(
        "keys do not chain",
        "two prompts with one page in common share its state",
        "schema.py",
        "hashlib.sha256(parent)",
        "hashlib.sha256()",
        killer="test_cache.py: limits_a_hit",
    ),
    Mutant(
        "namespaces share their keys",
        "one tenant reads another's state from storage",
        "schema.py",
        'name = namespace.encode("utf-8", "surrogatepass")',
        'name = b""',
        killer="test_cache.py: are_strangers",
    ),
]
