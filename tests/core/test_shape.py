"""The core knows no kind of model, and stays small."""

import re
from pathlib import Path

import pytest

import kvkeep.schema

SOURCE = Path(kvkeep.schema.__file__).parent
ROOMS = [
    "tree.py", "pages.py", "tier.py", "transfer.py", "residency.py", "slots.py", "backup.py",
    "prefetch.py", "loading.py", "recompute.py", "speed.py", "breaker.py", "audit.py",
    *(f"{room}/{file.name}" for room in ("media", "stores")
    for file in sorted((SOURCE / room).glob("*.py"))),
]  # fmt: skip


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


@pytest.mark.parametrize("room", ROOMS)
def test_no_kind_of_model_is_named(room: str) -> None:
    """Not even as a part of a word."""
    text = (SOURCE / room).read_text()
    found = re.findall(r"\w*(?:draft|mamba|swa|mla|eagle)\w*", text, re.IGNORECASE)
    assert found == []


def test_the_core_fits_into_a_head() -> None:
    core = ("tree.py", "pages.py", "tier.py", "cache.py", "transfer.py")
    assert sum(lines(SOURCE / name) for name in core) < 2500


def test_no_file_is_long() -> None:
    assert {f.name: n for f in SOURCE.rglob("*.py") if (n := lines(f)) > 500} == {}
