"""What a benchmark says of the machine and of the code that it ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvkeep.bench.machine import commit, machine


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """In a repository, which does not track it."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "readme").touch()
    git(tmp_path, "add", "readme")
    git(tmp_path, "commit", "--quiet", "--message=first")
    file = tmp_path / "code.py"
    file.touch()
    return file


def git(directory: Path, *arguments: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    done = subprocess.run(
        ["git", "-C", directory, *name, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_commit_is_that_of_the_repository_that_tracks_the_code(file: Path) -> None:
    assert commit(file) == "unknown"
    git(file.parent, "add", "code.py")
    git(file.parent, "commit", "--quiet", "--message=second")
    head = git(file.parent, "rev-parse", "--short", "HEAD")
    assert commit(file) == head
    file.write_text("changed")
    assert commit(file) == f"{head}+changes"


def test_a_machine_without_git(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(file.parent))
    assert machine()["commit"] == "unknown"


def test_versions_are_of_the_packages_that_took_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.23"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    found = machine()
    assert found["sglang"] == "0.5.23"
    assert "vllm" not in found
    assert {"numpy", "torch"} <= found.keys()
