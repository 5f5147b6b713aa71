"""Bytes on the device and on the host, and the copies between them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkeep.media.base import Copy, Mark
from kvkeep.media.memory import TORCH_DTYPES, Memory
from kvkeep.schema import DTYPE_BYTES, Component, ConfigError, Group, Identity, Schema

# Where there is no CUDA device, the kernel runs in Triton's interpreter.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

WAYS = [("page_first", "direct"), ("layer_first", "direct"), ("page_first_direct", "direct")]
WAYS += [("page_first", "kernel"), ("layer_first", "kernel")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

FULL = Group("full", (Component("k", (0, 1), (2, 3), "BF16"), Component("v", (1,), (5,), "I8")))
STATE = Group("state", (Component("conv", (0,), (700, 2), "F32"),))


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def schema(*groups: Group) -> Schema:
    return Schema(Identity("m"), 2, groups)


def fill(memory: Memory) -> None:
    """Fill all pools with random bytes."""
    torch.manual_seed(0)
    for components in memory.pools.values():
        for pools in components.values():
            for pool in pools:
                view = pool.flatten(1).view(torch.uint8)
                high = 2 if pool.dtype == torch.bool else 256
                view.copy_(torch.randint(0, high, view.shape, dtype=torch.uint8))


def page(memory: Memory, name: str, slot: int) -> bytes:
    """A page's bytes in a record's order: by component, then by layer."""
    group = next(g for g in memory.schema.groups if g.name == name)
    return b"".join(
        memory.pools[name][c.name][i][slot].cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        for c in group.components
        for i in range(len(c.layers))
    )


def record(memory: Memory, group: int, slot: int) -> bytes:
    return bytes(memory.bodies(group, ids(slot))[0])


def padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 512)


def test_every_dtype_is_known_by_its_size() -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BYTES)
    for name, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize == DTYPE_BYTES[name]


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_bytes_survive_the_round_trip(dtype: str) -> None:
    """To the host and back into other slots, bit for bit, in every dtype."""
    kv = Component("k", (0, 2), (2, 3), dtype)
    memory = Memory(schema(Group("g", (kv,))), [5], [4])
    fill(memory)
    want = [page(memory, "g", slot) for slot in (4, 1)]
    memory.save([Copy(0, ids(4, 1), ids(0, 3))])
    memory.load([Copy(0, ids(3, 0), ids(2, 0))])
    assert [page(memory, "g", slot) for slot in (0, 2)] == want


def make(way: tuple[str, str], *groups: Group, slots: int = 5, device: str = "cpu") -> Memory:
    backend = way[1]
    if backend == "kernel":
        pytest.importorskip("triton")
        if device == "cpu" and torch.cuda.is_available():
            pytest.skip("kernels are compiled here, and then reach no memory that is not pinned")
    memory = Memory(schema(*groups), [slots] * len(groups), [slots] * len(groups), device, *way)
    fill(memory)
    return memory


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WAYS, ids="-".join)
def memory(request: pytest.FixtureRequest, device: str) -> Memory:
    """Two groups that differ in every way."""
    return make(request.param, FULL, STATE, device=device)


def test_a_record_has_components_in_order_and_is_padded(memory: Memory) -> None:
    """In every memory layout, since other processes read the store."""
    memory.save([Copy(0, ids(2), ids(1)), Copy(1, ids(0), ids(4))])
    assert record(memory, 0, 1) == padded(page(memory, "full", 2))
    assert record(memory, 1, 4) == padded(page(memory, "state", 0))
    assert (len(record(memory, 0, 1)), len(record(memory, 1, 4))) == (512, 5632)


def test_many_pages_of_many_groups_at_once(memory: Memory) -> None:
    """And no other slot changes."""
    full, state = ([page(memory, name, s) for s in range(5)] for name in memory.pools)
    memory.save([Copy(0, ids(0, 1, 2), ids(2, 0, 1)), Copy(1, ids(2, 0), ids(4, 1))])
    assert [record(memory, 0, s) for s in range(3)] == [padded(full[s]) for s in (1, 2, 0)]
    assert [record(memory, 1, s) for s in (4, 1)] == [padded(state[s]) for s in (2, 0)]
    assert not any(any(record(memory, g, s)) for g, s in ((0, 3), (0, 4), (1, 0), (1, 2), (1, 3)))
    memory.load([Copy(0, ids(2), ids(1)), Copy(1, ids(1, 4), ids(1, 0))])
    assert [page(memory, "full", s) for s in range(5)] == [full[0], full[0], *full[2:]]
    assert [page(memory, "state", s) for s in range(5)] == [state[2], state[0], *state[2:]]


def test_slots_that_follow_each_other(memory: Memory) -> None:
    """A run of slots ends where either side is not consecutive."""
    want = [page(memory, "full", s) for s in (1, 2, 3, 0, 4)]
    memory.save([Copy(0, ids(1, 2, 3, 0, 4), ids(0, 1, 2, 3, 4))])
    assert [record(memory, 0, s) for s in range(5)] == [padded(raw) for raw in want]
    memory.load([Copy(0, ids(0, 1, 2, 3), ids(4, 3, 0, 1))])
    assert [page(memory, "full", s) for s in (4, 3, 0, 1)] == want[:4]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_load_goes_layer_by_layer(way: tuple[str, str], device: str) -> None:
    """Layers of groups that every hit needs come first, in order, then the rest."""
    groups = {
        "window": Group("window", (Component("k", (3, 1), (5,), "F32"),), tail=1),
        "other": Group("other", (Component("k", (0, 1), (5,), "F32"),), required=False),
        "full": Group("full", tuple(Component(kv, (0, 2), (3,), "I8") for kv in "kv")),
    }
    memory = make(way, *groups.values(), device=device)
    memory.save([Copy(g, ids(0), ids(1)) for g in range(3)])

    def there() -> dict[str, list[int]]:
        """By group, layers that are no longer zero."""
        return {
            name: [
                layer
                for i, layer in enumerate(group.components[0].layers)
                if all(layers[i][2].any() for layers in memory.pools[name].values())
            ]
            for name, group in groups.items()
        }

    for pool in (p for group in memory.pools.values() for ps in group.values() for p in ps):
        pool.zero_()
    seen = []

    def reached(layer: int, mark: Mark) -> None:
        mark.wait()
        seen.append((layer, there()))

    memory.load([Copy(g, ids(1), ids(2)) for g in range(3)], (), reached)
    assert [layer for layer, _ in seen] == [0, 1, 2, 3]
    assert [now["full"] for _, now in seen] == [[0], [0], [0, 2], [0, 2]]
    assert [now["window"] for _, now in seen] == [[], [1], [1], [3, 1]]
    assert [now["other"] for _, now in seen] == [[]] * 4
    assert there() == {"full": [0, 2], "window": [3, 1], "other": [0, 1]}


def test_what_a_store_reads_into_a_body_is_what_the_device_gets(memory: Memory) -> None:
    slots, raw = ids(2, 0), [bytes([i]) * FULL.record_bytes for i in (7, 8)]
    bodies = memory.bodies(0, slots)
    for body, value in zip(bodies, raw, strict=True):
        assert not body.readonly
        body[:] = value
    memory.keep(0, slots, bodies)
    memory.load([Copy(0, slots, ids(3, 1))])
    assert [page(memory, "full", s) for s in (3, 1)] == [value[:29] for value in raw]


def test_nothing_to_copy_is_no_error(memory: Memory) -> None:
    memory.save([])
    memory.load([Copy(0, ids(), ids())])
    assert memory.bodies(0, ids()) == []


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_page_first_body_is_the_arena_itself(layout: str) -> None:
    memory = make((layout, "direct"), FULL)
    memory.bodies(0, ids(2))[0][:3] = b"abc"
    assert memory.arenas[0][2, :3].tolist() == [*b"abc"]


@pytest.mark.parametrize("way", WAYS[:2] + WAYS[3:], ids="-".join)
def test_a_page_larger_than_a_block_of_the_kernel(way: tuple[str, str], device: str) -> None:
    """Copied in words of eight bytes, or of one byte if the size requires that."""
    for size in (2100, 2101):
        big = Group("big", (Component("k", (0, 3), (size,), "F64" if size % 2 == 0 else "U8"),))
        memory = make(way, big, slots=2, device=device)
        want = page(memory, "big", 1)
        memory.save([Copy(0, ids(1), ids(0))])
        assert record(memory, 0, 0) == padded(want)
        memory.load([Copy(0, ids(0), ids(0))])
        assert page(memory, "big", 0) == want


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_tier_may_be_empty(layout: str) -> None:
    group = Group("g", (Component("k", (0,), (1,), "F32"),))
    memory = Memory(schema(group), [2], [0], layout=layout)
    assert memory.arenas[0].shape == (0, 512)


@pytest.mark.parametrize(
    ("layout", "backend", "what"),
    [
        ("page_last", "direct", "'page_last'"),
        ("page_first", "magic", "'magic'"),
        ("page_first_direct", "kernel", "direct"),
    ],
)
def test_what_does_not_exist_is_refused(layout: str, backend: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Memory(schema(FULL), [1], [1], "cpu", layout, backend)


HUGE = Path("/sys/kernel/mm/transparent_hugepage")


@pytest.mark.skipif(not HUGE.exists(), reason="this system has no huge pages")
def test_arenas_may_have_huge_pages() -> None:
    """Shared mappings have none unless the system is set up for it."""
    memory = Memory(schema(FULL), [4], [4])
    address = memory.arenas[0].data_ptr()
    mapped = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (flags,) = (f for first, last, f in mapped if int(first, 16) <= address < int(last, 16))
    assert "hg" in flags.split()
    assert "sh" not in flags.split()


def test_lanes_may_write_to_what_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        memory = make(("page_first", "direct"), Group("g", (Component("k", (0,), (2,), "F32"),)))
    memory.pools["g"]["k"][0].fill_(1)


def test_the_kernel_compiles_for_cuda(tmp_path: Path) -> None:
    """The interpreter accepts more than the compiler does."""
    pytest.importorskip("triton")
    code = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvkeep.media.kernel import _move
types = {"parts": "*i64", "pages": "*i32", "WORD": "constexpr", "BLOCK": "constexpr"}
for word in (tl.int64, tl.uint8):
    source = ASTSource(_move, types, {"WORD": word, "BLOCK": 1024})
    assert "st.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
"""
    compiled = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=os.environ | compiled, check=True, timeout=120)


def test_a_kernel_needs_something_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="CUDA"):
        Memory(schema(FULL), [1], [1], backend="kernel")
