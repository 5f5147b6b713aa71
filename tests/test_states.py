"""Running states, where no model is needed to see what becomes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FakeLease, allocate, sequence

from kvkeep.engine.states import Ran, RunningStates
from kvkeep.schema import Component, Group, InvariantError

PAGE, SLOTS, WORKING = 4, 6, 5
STATE = Group("state", (Component("conv", (0, 2), (3,), "F32"),), tail=1, working=1)


def begin(computed: int, snapshot: int) -> tuple[RunningStates, Any, list[torch.Tensor]]:
    """States of a sequence whose second page has a slot; slot s holds s everywhere."""
    pools = {"state": allocate(STATE, SLOTS)}
    for pool in pools["state"]["conv"]:
        pool.copy_(torch.arange(SLOTS)[:, None].expand(SLOTS, 3))
    table, working = np.array([-1, snapshot, -1], np.int32), np.array([WORKING], np.int32)
    seq = sequence(list(range(12)), FakeLease({"state": table}, {"state": working}, [2 * PAGE]))
    seq.computed = computed
    target: Any = SimpleNamespace(groups=lambda page_tokens: (STATE,), store=lambda which: None)
    return RunningStates(target, pools, PAGE), seq, pools["state"]["conv"]


@pytest.mark.parametrize(("computed", "expected"), [(0, 0), (2 * PAGE, 3)])
def test_a_lease_begins_with_a_snapshot_or_with_nothing(computed: int, expected: int) -> None:
    states, seq, pools = begin(computed, snapshot=3)
    for _ in range(2):
        states.start(seq)
        assert all((pool[WORKING] == expected).all() for pool in pools)
        expected = 7  # once warm, nothing is overwritten
        for pool in pools:
            pool[WORKING] = 7


def test_a_hit_without_its_state_is_not_served() -> None:
    states, seq, _ = begin(2 * PAGE, snapshot=-1)
    with pytest.raises(InvariantError, match="8 tokens without their state"):
        states.start(seq)


@pytest.mark.parametrize(("snapshot", "taken"), [(3, [1]), (-1, [])])
def test_snapshots_need_a_slot(snapshot: int, taken: list[int]) -> None:
    states, seq, pools = begin(PAGE, snapshot)
    seq.warm, seq.computed = True, 2 * PAGE
    states.settle([Ran(seq, PAGE, PAGE)])
    assert seq.snapshots == taken
    assert all((pool[3] == (WORKING if taken else 3)).all() for pool in pools)
