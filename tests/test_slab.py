"""Slabs: all bytes reach their place, however few the system moves per call."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.schema import Key
from kvkeep.stores import moving
from kvkeep.stores import slab as module
from kvkeep.stores.record import footer_bytes
from kvkeep.stores.rows import Place
from kvkeep.stores.slab import Slab

BODY = 5000
FOOT = footer_bytes(BODY)


def views(data: bytes, count: int, size: int) -> list[memoryview]:
    whole = memoryview(bytearray(data))
    return [whole[i * size : (i + 1) * size] for i in range(count)]


@given(
    slots=st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True),
    most=st.integers(1000, 40_000),
    portion=st.integers(3000, 20_000),
    many=st.integers(2, 9),
)
def test_records_move_however_little_moves_at_once(
    slots: list[int], most: int, portion: int, many: int
) -> None:
    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert len(buffers) <= many
        return os.pwrite(fd, b"".join(buffers)[:most], offset)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert len(buffers) <= many
        data = os.pread(fd, min(most, sum(map(len, buffers))), offset)
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return len(data)

    bodies = [os.urandom(BODY) for _ in slots]
    feet = [bytes([n]) * FOOT for n in slots]
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.os, "pwritev", pwritev)
        patch.setattr(module.os, "preadv", preadv)
        patch.setattr(module, "_PORTION", portion)
        patch.setattr(module, "_BUFFERS", many)
        slab = Slab(Path(directory) / "slab", BODY, writable=True, create=True)
        count = len(slots)
        written = slab.write(slots, *([memoryview(x) for x in part] for part in (bodies, feet)))
        assert written == [None] * count
        got = views(bytes(count * BODY), count, BODY), views(bytes(count * FOOT), count, FOOT)
        assert slab.read(slots, *got) == [None] * count
        slab.close()
    assert [bytes(body) for body in got[0]] == bodies
    assert [bytes(foot) for foot in got[1]] == feet


@pytest.mark.parametrize(
    ("error", "there"), [(BlockingIOError(), False), (OSError(), True), (None, True)]
)
def test_what_waits_for_a_disk_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None, there: bool
) -> None:
    """``in_memory`` asks with RWF_NOWAIT; the test replaces the page cache's real answer."""
    asked = []

    def preadv(_: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        asked.append((len(buffers[0]), offset, flags))
        if error:
            raise error
        return 1

    slab = Slab(tmp_path / "slab", BODY, writable=True, create=True)
    monkeypatch.setattr(module.os, "preadv", preadv)
    assert slab.in_memory(1) == there
    assert asked == [(1, 2 * (BODY + FOOT) - 1, os.RWF_NOWAIT)]
    slab.close()


def test_one_thread_reads_from_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads would disturb the system's read-ahead."""
    monkeypatch.setattr(moving, "SHARED", 0)
    group, page = b"\1" * 16, b"\2" * 32
    slab = Slab(tmp_path / "slab", BODY, writable=True, create=True)
    body = memoryview(bytearray(BODY))
    records = moving.Records([Key(group, page)], [Place(1, 0, 1)], [body])
    helper = ThreadPoolExecutor(1)
    assert moving.save(records, lambda _: slab, helper) == [None]
    helpers = []
    monkeypatch.setattr(
        helper, "submit", lambda work: helpers.append(work) or ThreadPoolExecutor(1).submit(dict)
    )
    for there in (True, False):
        monkeypatch.setattr(Slab, "in_memory", lambda _, number, there=there: there)
        assert moving.load(records, lambda _: slab, helper) == [None]
    assert len(helpers) == 1
    slab.close()
