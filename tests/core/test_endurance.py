"""A short endurance run by default, the full one on request: see :mod:`endurance`."""

import subprocess
import sys
from pathlib import Path

import pytest
from endurance import SMALL, endure, jobs

from kvkeep.testing.fakes import TruthMedia

pytestmark = pytest.mark.untraced


@pytest.mark.parametrize(("seed", "pages"), [(0, 16), (1, 32), (2, SMALL), (3, 512)])
def test_some_thousand_operations(seed: int, pages: int) -> None:
    report = endure(seed, pages, 1500)
    assert report.violations == []
    assert report.checks > (1500 if pages <= SMALL else 15)
    for what in ("hit", "evict", "tick", "step"):
        assert report.happened[what], f"no operation came to {what!r}"


@pytest.mark.parametrize("verb", ["load", "save"])
def test_a_violation_is_reported(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a copy that reports success without copying."""
    monkeypatch.setattr(TruthMedia, verb, lambda media, copies, *more: None)
    report = endure(0, SMALL, 1500)
    assert len(report.violations) == 1
    assert "wrong bytes" in report.violations[0]
    assert report.operations < 1500


@pytest.mark.parametrize("pages", [SMALL, 512])
def test_wrong_bytes_are_noticed_as_they_are_stored(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes contain what a store raises, so the world checks the bytes."""
    bodies = TruthMedia.bodies
    monkeypatch.setattr(TruthMedia, "bodies", lambda *args: bodies(*args)[::-1])
    report = endure(0, pages, 1500)
    assert "wrong bytes in storage" in report.violations[0]


def test_half_of_the_operations_are_on_small_pools() -> None:
    todo = jobs(1_000_000, 0)
    assert sum(operations for _, pages, operations in todo if pages <= SMALL) == 500_000
    assert sum(operations for _, _, operations in todo) == 1_000_000
    assert len({seed for seed, _, _ in todo}) == len(todo)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_operations() -> None:
    script = Path(__file__).parent / "endurance.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1,000,000" in done.stdout
