"""kvkeep.engine.fault_log: what fails in storage is said once, then rarely."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from rig import DEMO_PAIR, Rig, prompt

from kvkeep.engine.fault_log import FIRST_SECONDS, MOST_SECONDS, FaultLog
from kvkeep.stores import catalog

FULL = "storage_faults_total{kind=full}"

Said = Callable[[float, float], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """Looks at a count at a time; returns what was logged."""
    faults = FaultLog()

    def look(now: float, count: float) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            faults.look({FULL: count, "pages": 7}, now)
        return caplog.messages

    return look


def test_a_kind_is_said_once_then_at_growing_intervals_with_a_count(said: Said) -> None:
    assert said(0, 0) == []
    (first,) = said(1, 3)
    assert "the disk is full" in first
    assert "(3 times; " in first
    assert FULL in first
    lines = [
        (now, line) for now in range(2, 1800) for line in said(now, 3 + now)
    ]  # it fails each second
    assert [now for now, _ in lines] == [61, 181, 421, 901]
    assert "still: " in lines[0][1]
    assert "(61 times more, 64 in all)" in lines[0][1]


def test_intervals_have_a_limit(said: Said) -> None:
    times = [now for now in range(0, 20 * int(MOST_SECONDS), 10) if said(now, 1 + now)]
    assert times[-1] - times[-2] == MOST_SECONDS


def test_its_end_is_said_and_its_return(said: Said) -> None:
    said(0, 2)
    assert said(FIRST_SECONDS - 1, 2) == []
    (over,) = said(FIRST_SECONDS, 2)
    assert over.startswith("over: the disk is full")
    assert "(2 times in all)" in over
    assert said(1000, 2) == []
    (again,) = said(1001, 3)
    assert "(1 times; " in again


def test_what_is_no_fault_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultLog()
    faults.look({"storage_faults_total{kind=recycled}": 5, "moved_bytes_total{lane=read}": 9}, 0)
    assert not caplog.messages
    faults.look({"storage_faults_total{kind=odd}": 1, "storage_breaker_trips_total": 1}, 1)
    assert [line.split(" (")[0] for line in caplog.messages] == [
        "odd failed", "storage failed too often and is left alone for a while",
    ]  # fmt: skip


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage directory on a file system that may not be written to."""
    whole = catalog.Directory

    def refuse(path: Path, writable: bool) -> object:
        if writable:
            raise OSError(30, "Read-only file system")
        return whole(path, writable)

    monkeypatch.setattr(catalog, "Directory", refuse)
    return tmp_path


def test_an_engine_says_that_its_storage_may_not_be_written_to(
    read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Rig(DEMO_PAIR, storage_dir=read_only) as rig:
        for seed in range(3):
            rig.ask(prompt(200, seed), 2)
        lines = [line for line in caplog.messages if "may not be written to" in line]
        assert len(lines) == 1
        assert "storage_faults_total{kind=read_only}" in lines[0]
        assert rig.figure("storage_faults_total") > 1
