"""Bytes on the device and on the host, and the copies between them."""

import numpy as np
import pytest
import torch

from kvkeep.media.memory import TORCH_DTYPES, Copy, Memory
from kvkeep.schema import DTYPE_BYTES, Component, Group, Identity, Schema


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def schema(*groups: Group) -> Schema:
    return Schema(Identity("m"), 2, groups)


def fill(memory: Memory) -> None:
    """Every pool byte is random."""
    torch.manual_seed(0)
    for components in memory.pools.values():
        for pools in components.values():
            for pool in pools:
                view = pool.flatten(1).view(torch.uint8)
                high = 2 if pool.dtype == torch.bool else 256
                view.copy_(torch.randint(0, high, view.shape, dtype=torch.uint8))


def page(memory: Memory, name: str, slot: int) -> bytes:
    """A page's bytes as a record has them: components in order, layers within."""
    group = next(g for g in memory.schema.groups if g.name == name)
    return b"".join(
        memory.pools[name][c.name][layer][slot].reshape(-1).view(torch.uint8).numpy().tobytes()
        for c in group.components
        for layer in range(len(c.layers))
    )


def test_every_dtype_is_known_by_its_size() -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BYTES)
    for name, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize == DTYPE_BYTES[name]


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_bytes_survive_the_round_trip(dtype: str) -> None:
    """Out to the host and back into other slots: all bits as they were, whatever they mean."""
    kv = Component("k", (0, 2), (2, 3), dtype)
    memory = Memory(schema(Group("g", (kv,))), [5], [4])
    fill(memory)
    want = [page(memory, "g", slot) for slot in (4, 1)]
    memory.save([Copy(0, ids(4, 1), ids(0, 3))])
    memory.load([Copy(0, ids(3, 0), ids(2, 0))])
    assert [page(memory, "g", slot) for slot in (0, 2)] == want


@pytest.fixture
def memory() -> Memory:
    """Two groups, unlike in every way."""
    return Memory(
        schema(
            Group(
                "full", (Component("k", (0, 1), (2, 3), "BF16"), Component("v", (1,), (5,), "I8"))
            ),
            Group("state", (Component("conv", (0,), (700, 2), "F32"),)),
        ),
        [4, 3],
        [3, 5],
    )


def test_a_record_is_contiguous_and_padded(memory: Memory) -> None:
    fill(memory)
    memory.save([Copy(0, ids(2), ids(1)), Copy(1, ids(0), ids(4))])
    (full,) = memory.bodies(0, ids(1))
    (state,) = memory.bodies(1, ids(4))
    assert (len(full), len(state)) == (4096, 8192)
    assert bytes(full) == page(memory, "full", 2) + bytes(4096 - 29)
    assert bytes(state) == page(memory, "state", 0) + bytes(8192 - 5600)


def test_many_pages_of_many_groups_at_once(memory: Memory) -> None:
    """And nothing else changes."""
    fill(memory)
    before = {name: [page(memory, name, s) for s in range(3)] for name in memory.pools}
    memory.save([Copy(0, ids(0, 1, 2), ids(2, 0, 1)), Copy(1, ids(2, 0), ids(4, 1))])
    assert not memory.arenas[1][[0, 2, 3]].any()
    memory.load([Copy(0, ids(2), ids(1)), Copy(1, ids(1, 4), ids(1, 0))])
    full, state = before["full"], before["state"]
    assert [page(memory, "full", s) for s in range(3)] == [full[0], full[0], full[2]]
    assert [page(memory, "state", s) for s in range(3)] == [state[2], state[0], state[2]]


def test_bodies_are_the_arena_itself(memory: Memory) -> None:
    """What a store reads into a body is what the device gets."""
    for body in memory.bodies(0, ids(2, 0)):
        assert not body.readonly
        body[:] = bytes([7]) * 4096
    memory.load([Copy(0, ids(2), ids(3))])
    assert page(memory, "full", 3) == bytes([7]) * 29
    assert page(memory, "full", 2) == bytes(29)


def test_nothing_to_copy_is_no_error(memory: Memory) -> None:
    memory.save([])
    memory.load([Copy(0, ids(), ids())])
    assert memory.bodies(0, ids()) == []


def test_a_tier_may_be_empty() -> None:
    memory = Memory(schema(Group("g", (Component("k", (0,), (1,), "F32"),))), [2], [0])
    assert memory.arenas[0].shape == (0, 4096)
