"""The core names no kind of model and stays small."""

import re
from pathlib import Path

import pytest

import kvkeep.schema

SOURCE = Path(kvkeep.schema.__file__).parent
ROOMS = [
    f"{room}/{file.name}"
    for room in ("core", "media", "stores")
    for file in sorted((SOURCE / room).glob("*.py"))
]


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


@pytest.mark.parametrize("room", ROOMS)
def test_no_kind_of_model_is_named(room: str) -> None:
    """Not even within a word."""
    text = (SOURCE / room).read_text()
    found = re.findall(r"\w*(?:draft|mamba|swa|mla|eagle)\w*", text, re.IGNORECASE)
    assert found == []


def test_the_core_fits_into_a_head() -> None:
    core = [SOURCE / "schema.py", *(SOURCE / "core").glob("*.py")]
    assert sum(map(lines, core)) <= 3900  # 3,500 is the budget


def test_no_file_is_long() -> None:
    assert {f.name: n for f in SOURCE.rglob("*.py") if (n := lines(f)) > 500} == {}
