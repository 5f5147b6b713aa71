"""Mistakes that the tests must find: each one was made, or nearly made, by somebody.

Every module here lists the mutants of the source that it is named for. To add some, append to its
``MUTANTS``, or add a module with such a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules


@dataclass(frozen=True)
class Mutant:
    """An exact replacement in one file of the package.

    ``killer`` names what must find it: a test module, relative to ``tests/core``, and an
    expression for ``pytest -k``: "test_tier.py: used_since".
    """

    name: str
    why: str  # it is wrong
    file: str  # of src/kvkeep
    old: str
    new: str
    killer: str
    slow: bool = False  # to be found; left out by default

    @property
    def module(self) -> str:
        """The killer's test module."""
        return self.killer.partition(":")[0]


def every_mutant() -> list[Mutant]:
    """The lists of all modules here, in the order of the modules' names."""
    names = sorted(module.name for module in iter_modules(__path__))
    return [m for name in names for m in import_module(f"{__name__}.{name}").MUTANTS]
