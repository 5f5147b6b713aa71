"""After a hit from any tier, all state is bitwise equal to the cold run's, as is what follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import DEMO_PAIR, Answer, Pair, Rig, close, demo_prompts, part, prompt, same

from kvkeep.engine.request import RequestState

NEW = 24


def equal(warm: Answer, cold: Answer) -> bool:
    """Tokens and proposals are equal, and all state after each step that returned tokens."""
    return (
        warm.tokens == cold.tokens
        and warm.proposals == cold.proposals
        and warm.steps == cold.steps
        and same(warm.state, cold.state)
    )


def tour(pair: Pair, tokens: list[int], hit: int, storage: Path, **options: Any) -> None:
    """Run cold, then with hits of ``hit`` tokens from every tier; all must be bitwise equal."""
    options |= {"storage_dir": storage, "watch": True}
    with Rig(pair, **options) as rig:
        cold = rig.ask(tokens, NEW)
        assert not any(cold.cached.values())
        assert cold.proposals
        device = rig.ask(tokens, NEW)
        assert device.cached == {"device": hit, "host": 0, "storage": 0}
        assert equal(device, cold)
        rig.evict("device")
        host = rig.ask(tokens, NEW)
        assert host.cached == {"device": 0, "host": hit, "storage": 0}
        assert equal(host, cold)
        rig.evict("device", "host")
        emptied = rig.ask(tokens, NEW)
        assert emptied.cached == {"device": 0, "host": 0, "storage": hit}
        assert equal(emptied, cold)
        rig.check_idle()
    with Rig(pair, **options) as rig:
        rig.ask(tokens[::-1], NEW)  # takes slots, so that the prompt gets different ones
        restarted = rig.ask(tokens, NEW)
        assert restarted.cached == {"device": 0, "host": 0, "storage": hit}
        assert equal(restarted, cold)
        rig.check_idle()


@pytest.mark.parametrize(
    ("period", "length", "chunk"),
    [
        ("period-64", 1024, 960),
        ("period-200", 1024, 320),
        ("period-64", 1000, 192),
        ("period-200", 577, 64),
    ],
)
def test_the_demo_pair(period: str, length: int, chunk: int, tmp_path: Path) -> None:
    """``hit`` is a multiple of ``chunk``: a chunk of the cold run ends where the hit ends."""
    tokens = demo_prompts()[period][0][:length]
    hit = (length - 1) // 64 * 64
    assert hit % chunk == 0
    tour(
        DEMO_PAIR, tokens, hit, tmp_path, page_size=64, chunked_prefill_size=chunk, num_steps=7,
        device_tokens=4096, host_bytes=1 << 25,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("page", "length", "chunk"), [(16, 100, 96), (16, 97, 32), (1, 20, 19), (5, 21, 10)]
)
def test_a_random_pair(page: int, length: int, chunk: int, tiny: Pair, tmp_path: Path) -> None:
    hit = (length - 1) // page * page
    assert hit % chunk == 0
    tour(
        tiny, prompt(length), hit, tmp_path, page_size=page, chunked_prefill_size=chunk,
        device_tokens=1024, host_bytes=1 << 22,
    )  # fmt: skip


def test_half_precision(tiny: Pair, tmp_path: Path) -> None:
    tour(tiny, prompt(100), 96, tmp_path, chunked_prefill_size=96, dtype="bfloat16")


def test_two_continuations_of_one_prefix(tmp_path: Path) -> None:
    """Prompts A and B share 15 pages."""
    first, second = demo_prompts()["period-64"][:2]
    shared, page = first[:960], 64
    a, b = [*shared, *second[:100]], [*shared, *second[500:600]]
    options: dict[str, Any] = {"page_size": page, "num_steps": 7, "watch": True}
    options |= {"device_tokens": 4096, "host_bytes": 1 << 25}
    with Rig(DEMO_PAIR, **options, chunked_prefill_size=960) as rig:
        cold = rig.ask(b, NEW)
    for evicted in ((), ("device",)):
        with Rig(DEMO_PAIR, **options, chunked_prefill_size=960) as rig:
            rig.ask(a, NEW)
            rig.evict(*evicted)
            warm = rig.ask(b, NEW)
            assert sum(warm.cached.values()) == 960
            assert equal(warm, cold)  # one of A's chunks also ended at the branch
    with Rig(DEMO_PAIR, **options, chunked_prefill_size=512) as rig:
        went_on = rig.ask(a, NEW)
        warm = rig.ask(b, NEW)
        assert warm.cached["device"] == 960
        assert same(part(warm.state, 0, 15, page), part(went_on.state, 0, 15, page))
        close(warm.state, cold.state)
        assert warm.tokens == cold.tokens


def test_a_second_turn_hits_the_first(tmp_path: Path) -> None:
    """The next turn hits pages that decoding filled, on the device and in storage."""
    page = 64
    tokens = demo_prompts()["period-200"][1][:700]
    options: dict[str, Any] = {"page_size": page, "num_steps": 7, "watch": True}
    options |= {"device_tokens": 4096, "host_bytes": 1 << 25, "storage_dir": tmp_path}
    with Rig(DEMO_PAIR, **options) as rig:
        first = rig.ask(tokens, 150)
        longer = [*tokens, *first.tokens, *demo_prompts()["period-200"][2][:70]]
        hit = (700 + 149) // page * page  # the last token has no KV
        device = rig.ask(longer, NEW)
        assert device.cached["device"] == hit == 832
        assert same(part(device.state, 0, 13, page), part(first.state, 0, 13, page))
    with Rig(DEMO_PAIR, **options) as rig:
        storage = rig.ask(longer[:-1], NEW)  # the device run stored the whole prompt
        assert storage.cached["storage"] >= hit
        assert same(part(storage.state, 0, 13, page), part(first.state, 0, 13, page))
    with Rig(DEMO_PAIR, **options | {"storage_dir": None}) as rig:
        cold = rig.ask(longer, NEW)
    close(device.state, cold.state, atol=1e-4)
    assert device.tokens == cold.tokens


Pools = dict[str, dict[str, list[torch.Tensor]]]
Tables = dict[str, list[int]]  # by group: the slots of the pages of a hit


def shift_a_draft_page(pools: Pools, tables: Tables) -> None:
    page = pools["draft"]["k"][0][tables["draft"][3]]
    page.copy_(page.roll(1, 0))


def zero_a_carry(pools: Pools, tables: Tables) -> None:
    pools["draft"]["carry"][0][tables["draft"][-1]] = 0


def swap_two_pages(pools: Pools, tables: Tables) -> None:
    first, second = tables["full"][:2]
    values = pools["full"]["v"][2]
    values[[first, second]] = values[[second, first]]


def flip_a_bit(pools: Pools, tables: Tables) -> None:
    pools["full"]["k"][0].view(torch.int32)[tables["full"][0], 0, 0, 0] ^= 1


@pytest.mark.parametrize("spoil", [shift_a_draft_page, zero_a_carry, swap_two_pages, flip_a_bit])
def test_spoiled_bytes_are_noticed(spoil: Callable[[Pools, Tables], None], tiny: Pair) -> None:
    """The comparisons of this module detect planted corruption."""
    tokens = prompt(100)
    tables: Tables = {}

    def look(seq: RequestState) -> None:
        assert seq.lease is not None
        tables.update({name: seq.lease.slots(name)[:6].tolist() for name in ("full", "draft")})

    with Rig(tiny, chunked_prefill_size=96, watch=True) as rig:
        rig.on_output = look
        cold = rig.ask(tokens, NEW)
        assert equal(rig.ask(tokens, NEW), cold)
        spoil(rig.pools, tables)
        spoiled = rig.ask(tokens, NEW)
        assert spoiled.cached["device"] == 96
        assert not equal(spoiled, cold)
        if spoil in (shift_a_draft_page, zero_a_carry):
            assert spoiled.tokens == cold.tokens  # corrupt draft KV does not change tokens
