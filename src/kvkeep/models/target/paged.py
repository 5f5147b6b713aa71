"""Attention layers in a pass over page pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...media.arrival import Arrival
from ..attention.interface import Attention, AttentionPlan, Part, ReplayablePlan, Scoring
from ..passes import Pools, Run
from .survey import FULL, WINDOW, Inventory


class PagedContext:
    """A :class:`~kvkeep.models.target.context.ForwardContext` that reads and writes page pools.

    Plain layers store keys and values when they call attention. Layers with compressed keys and
    values (multi-head latent attention) store them when they update their cache; they get back what
    all rows see, and expand it.
    """

    def __init__(
        self,
        inventory: Inventory,
        plans: Mapping[str, AttentionPlan],
        pools: Mapping[str, Pools],
        arriving: Sequence[Arrival] = (),
    ) -> None:
        self._inventory, self._plans, self._pools = inventory, plans, pools
        self._arriving = arriving

    @classmethod
    def of(
        cls,
        inventory: Inventory,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
        attention: Attention,
    ) -> PagedContext:
        """The context of a pass of ``runs``, with a plan for each group of attention layers."""
        plans = {}
        for group in inventory.paged:
            parts = [Part(run.tables.slots(group), run.start, run.rows, run.first) for run in runs]
            page_tokens = next(iter(pools[group].values()))[0].shape[1]
            window = inventory.window if group == WINDOW else None
            plans[group] = attention.plan(parts, page_tokens, window)
        arriving = [arrival for run in runs for arrival in run.tables.arriving]
        return cls(inventory, plans, pools, arriving)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """``[sequences, ...]`` each, positions first: all that differs between steps whose
        sequences have equally many rows. Empty if the step cannot be replayed: a plan is not
        replayable, a layer gathers rows, or rows are still loading."""
        found: list[Tensor] = []
        for plan in self._plans.values():
            if self._inventory.latent or self._arriving or not isinstance(plan, ReplayablePlan):
                return ()
            found += plan.tensors
        return tuple(found)

    def over(self, tensors: Sequence[Tensor]) -> PagedContext:
        """This context with ``tensors`` in place of its own."""
        rest, plans = iter(tensors), {}
        for group, plan in self._plans.items():
            assert isinstance(plan, ReplayablePlan)
            plans[group] = plan.over([next(rest) for _ in plan.tensors])
        return PagedContext(self._inventory, plans, self._pools)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._inventory.latent:
            return key, value
        self._wait(layer)
        plan, seen = self._plans[FULL], []
        for name, rows in (("latent", key), ("rope", value)):
            _, pool = self._inventory.place(self._pools, layer, name)
            plan.write(pool, rows[0, 0])
            seen.append(plan.gather(pool, rows.dtype)[None, None])
        return seen[0], seen[1]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        batch, heads, rows, dim = query.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        scale = options.get("scaling") or dim**-0.5
        scoring = Scoring(scale, options.get("softcap"), options.get("s_aux"))
        if layer in self._inventory.latent:
            out = self._plans[FULL].attend_to(q, k, v, scoring)
        else:
            self._wait(layer)
            group, keys = self._inventory.place(self._pools, layer, "k")
            _, values = self._inventory.place(self._pools, layer, "v")
            plan = self._plans[group]
            plan.write(keys, k)
            plan.write(values, v)
            out = plan.attend(q, keys, values, scoring)
        return out.view(batch, rows, heads, -1)

    def _wait(self, layer: int) -> None:
        """Wait until every load in flight has brought this layer's part."""
        for arrival in self._arriving:
            arrival.wait(layer)
