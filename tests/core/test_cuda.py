"""Copies beside computing on a CUDA device: no slot is read before it is written or overwritten
before it is read. Run with ``-m gpu``."""

import threading

import numpy as np
import pytest
import torch

from kvkeep.media.base import Copy, Mark
from kvkeep.media.memory import Memory
from kvkeep.schema import Component, Group, Identity, Schema

pytestmark = pytest.mark.gpu

LAYERS, SLOTS, SIZE = 4, 8, 1 << 16
SCHEMA = Schema(
    Identity("m"),
    1,
    (
        Group("full", (Component("k", tuple(range(LAYERS)), (SIZE,), "F32"),)),
        Group("other", (Component("k", (0,), (SIZE,), "F32"),), required=False),
    ),
)
ALL = np.arange(SLOTS, dtype=np.int32)
EVERYTHING = [Copy(0, ALL, ALL[::-1].copy()), Copy(1, ALL, ALL)]
LONG = 200_000_000  # cycles, a tenth of a second


@pytest.fixture(params=["direct", "kernel"])
def memory(request: pytest.FixtureRequest) -> Memory:
    return Memory(SCHEMA, [SLOTS] * 2, [SLOTS] * 2, "cuda", backend=request.param)


def pools(memory: Memory) -> list[torch.Tensor]:
    return [pool for group in memory.pools.values() for pool in group["k"]]


def fill(memory: Memory, value: float) -> None:
    """Fill each pool with a different number."""
    for i, pool in enumerate(pools(memory)):
        pool.fill_(value + i)


def on_a_lane(work) -> threading.Thread:
    lane = threading.Thread(target=work)
    lane.start()
    return lane


def test_a_save_waits_for_the_step_that_writes(memory: Memory) -> None:
    torch.cuda._sleep(LONG)
    fill(memory, 1)
    mark = memory.mark()
    on_a_lane(lambda: memory.save(EVERYTHING, [mark])).join()
    fill(memory, 0)
    memory.load(EVERYTHING, [memory.mark()])
    assert [pool.unique().tolist() for pool in pools(memory)] == [[i] for i in range(1, 6)]


def test_a_load_waits_for_the_step_that_reads(memory: Memory) -> None:
    fill(memory, 1)
    memory.save(EVERYTHING, [memory.mark()])
    fill(memory, 11)
    torch.cuda._sleep(LONG)
    read = [pool.clone() for pool in pools(memory)]
    mark = memory.mark()
    on_a_lane(lambda: memory.load(EVERYTHING, [mark])).join()
    assert [copy.unique().tolist() for copy in read] == [[i] for i in range(11, 16)]
    assert [pool.unique().tolist() for pool in pools(memory)] == [[i] for i in range(1, 6)]


def test_a_step_waits_for_each_layer(memory: Memory) -> None:
    """The step is queued while the copies are still queued behind other work."""
    fill(memory, 1)
    memory.save(EVERYTHING, [memory.mark()])
    fill(memory, 11)
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        beside.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(LONG)
        busy = memory.mark()
    read: list[list[float]] = []
    marks: list[tuple[int, Mark]] = []
    known = threading.Event()

    def reached(layer: int, mark: Mark) -> None:
        marks.append((layer, mark))
        if layer == LAYERS - 1:
            known.set()

    lane = on_a_lane(lambda: memory.load(EVERYTHING, [busy], reached))
    assert known.wait(10)
    for layer, mark in marks:
        mark.wait()
        read.append(memory.pools["full"]["k"][layer].unique().tolist())
    lane.join()
    assert [layer for layer, _ in marks] == list(range(LAYERS))
    assert read == [[1], [2], [3], [4]]


def test_arenas_are_pinned_and_not_rounded_up(memory: Memory) -> None:
    for arena, group in zip(memory.arenas, SCHEMA.groups, strict=True):
        assert arena.is_pinned()
        assert arena.untyped_storage().nbytes() == SLOTS * group.record_bytes
