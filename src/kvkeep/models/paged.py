"""What attention layers do in a pass over page pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import attention
from .attention import Layout, Part
from .base import Pools, Run
from .survey import FULL, WINDOW, Inventory


class Paged:
    """A :class:`~kvkeep.models.base.Step`: rows go to the pools, what they see comes from there.

    Plain keys and values are stored as attention gets them. Compressed ones are stored as the cache
    object gets them, and what all rows see is handed back for the layer to expand.
    """

    def __init__(
        self,
        inventory: Inventory,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
        device: torch.device,
    ) -> None:
        self._inventory = inventory
        self._pools = pools
        self._layouts = {}
        for group in inventory.paged:
            parts = [Part(run.tables.slots(group), run.start, run.rows, run.first) for run in runs]
            page_tokens = next(iter(pools[group].values()))[0].shape[1]
            window = inventory.window if group == WINDOW else None
            self._layouts[group] = Layout.of(parts, page_tokens, device, window)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._inventory.latent:
            return key, value
        layout = self._layouts[FULL]
        seen = []
        for name, rows in (("latent", key), ("rope", value)):
            _, pool = self._inventory.place(self._pools, layer, name)
            attention.write(pool, rows[0, 0], layout)
            spans = [attention.gather(pool, span, rows.dtype) for span in layout.spans]
            seen.append(torch.cat(spans)[None, None])
        return seen[0], seen[1]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        batch, heads, rows, dim = query.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        mix = (options.get("scaling") or dim**-0.5, options.get("softcap"), options.get("s_aux"))
        if layer in self._inventory.latent:
            layout = self._layouts[FULL]
            counts = [span.seen.stop - span.seen.start for span in layout.spans]
            seen = zip(torch.split(k, counts), torch.split(v, counts), strict=True)
            out = attention.attend_to(q, seen, layout, *mix)
        else:
            group, keys = self._inventory.place(self._pools, layer, "k")
            _, values = self._inventory.place(self._pools, layer, "v")
            layout = self._layouts[group]
            attention.write(keys, k, layout)
            attention.write(values, v, layout)
            out = attention.attend(q, keys, values, layout, *mix)
        return out.view(batch, rows, heads, -1)
