"""Layer-by-layer loading: no layer is read before it is loaded, and a failed load is not used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from rig import Pair, Rig, close, prompt, same
from tiny_models import KINDS

from kvkeep.media.base import Copy, Mark

PAGE, PROMPT, NEW, FEW = 8, prompt(100), 16, 8
HIT = 96
PATIENCE = 60.0  # seconds until a wait fails the test


class Gate:
    """Wraps ``load`` of a rig's media: fills the target slots with NaN before loading, and calls
    ``after`` after each layer, before the next one is copied.

    Args:
        after: called on the lane's thread with the index of the layer that has been loaded.
    """

    def __init__(self, rig: Rig, after: Callable[[int], None]) -> None:
        self._media, self._load = rig.engine.cache.media, rig.engine.cache.media.load
        self._pools, self._after = list(rig.pools.values()), after
        self.layers: list[int] = []
        self._media.load = self  # type: ignore[method-assign]

    def __call__(
        self,
        copies: Sequence[Copy],
        after: Iterable[Mark],
        reached: Callable[[int, Mark], None],
    ) -> None:
        for group, _, target in copies:
            for pool in (pool for pools in self._pools[group].values() for pool in pools):
                pool[torch.from_numpy(target).to(pool.device)] = torch.nan

        def then(layer: int, mark: Mark) -> None:
            self.layers.append(layer)
            reached(layer, mark)
            self._after(layer)

        self._load(copies, after, then)


class Layers:
    """Events that tell which layers of a rig's target have been computed."""

    def __init__(self, rig: Rig) -> None:
        stack = rig.engine._target._model.model.layers
        self.done = [threading.Event() for _ in stack]
        for layer, event in zip(stack, self.done, strict=True):
            layer.register_forward_hook(lambda *_, event=event: event.set())


def test_a_layer_is_computed_before_the_next_one_is_there(tiny: Pair) -> None:
    """Each layer is copied only when the layer before has been computed. The cold run's chunk ends
    where the hit does: rows have the same bytes only where the same chunks are computed."""
    with Rig(tiny, page_size=PAGE, chunked_prefill_size=HIT, watch=True) as rig:
        cold = rig.ask(PROMPT, NEW)
        rig.evict("device")
        layers = Layers(rig)

        def after(layer: int) -> None:
            assert layers.done[layer].wait(PATIENCE)

        gate = Gate(rig, after)
        warm = rig.ask(PROMPT, NEW)
        assert gate.layers == [*range(len(layers.done))]
        assert warm.cached == {"device": 0, "host": HIT, "storage": 0}
        assert (warm.tokens, warm.proposals) == (cold.tokens, cold.proposals)
        assert same(warm.state, cold.state)
        assert rig.figure("missed_loads_total") == 0
        rig.check_idle()


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_kind_of_state_is_read_before_it_is_there(
    make_pair: Callable[[str], Pair], kind: str
) -> None:
    """Nor if other requests join the load, or if a request ends before its load does."""
    with Rig(make_pair(kind), page_size=PAGE, chunked_prefill_size=32) as rig:
        cold = rig.run(rig.send(PROMPT, FEW), rig.send(PROMPT[:60], FEW))
        rig.evict("device")
        gate = Gate(rig, lambda _: time.sleep(0.01))
        names = [rig.send(PROMPT, 1), rig.send(PROMPT, FEW), rig.send(PROMPT[:60], FEW)]
        one, *warm = rig.run(*names)
        assert gate.layers
        assert one.cached["host"] == HIT
        assert one.tokens == cold[0].tokens[:1]
        assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
        assert [answer.proposals for answer in warm] == [answer.proposals for answer in cold]
        rig.check_idle()


@pytest.mark.parametrize("used", [1, 4])
def test_a_load_that_fails_in_the_middle_of_a_step(tiny: Pair, used: int) -> None:
    """The load fails after one layer, or after the target's layers and before the draft's.

    The engine discards the step for all its requests and retries it. All tokens are as expected."""
    with Rig(tiny, page_size=PAGE, watch=True) as rig:
        cold = rig.ask(PROMPT, NEW)
        other = rig.ask(prompt(50, 7), 3 * NEW)
        rig.evict("device")
        layers = Layers(rig)

        def after(layer: int) -> None:
            if layer == used - 1:
                assert layers.done[layer].wait(PATIENCE)
                raise RuntimeError("the copy engine failed")

        gate = Gate(rig, lambda _: None)
        running = rig.send(prompt(50, 7), 3 * NEW)
        turns = rig.turns()
        while not rig.answers[running].tokens:
            next(turns)
        for event in layers.done:
            event.clear()
        gate._after = after
        warm, beside = rig.run(rig.send(PROMPT, NEW), running)
        assert (warm.tokens, warm.proposals) == (cold.tokens, cold.proposals)
        close(warm.state, cold.state)
        assert beside.tokens == other.tokens
        assert beside.proposals == other.proposals
        assert warm.cached == {"device": 0, "host": 0, "storage": 0}
        assert rig.figure("missed_loads_total") == 2 * HIT // PAGE
        assert rig.figure("transfer_faults_total") == 1
        rig.check_idle()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["direct", "kernel"])
def test_on_a_cuda_device(tiny: Pair, backend: str) -> None:
    with Rig(tiny, page_size=PAGE, device="cuda", dtype="float32", io_backend=backend) as rig:
        cold = rig.ask(PROMPT, NEW)
        rig.evict("device")
        gate = Gate(rig, lambda _: time.sleep(0.01))
        warm = rig.ask(PROMPT, NEW)
        assert gate.layers
        assert warm.cached == {"device": 0, "host": HIT, "storage": 0}
        assert (warm.tokens, warm.proposals) == (cold.tokens, cold.proposals)
        rig.check_idle()
