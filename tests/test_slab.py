"""Slabs: bytes go where they belong, however little the system moves at once."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.stores import slab as module
from kvkeep.stores.record import footer_bytes
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
