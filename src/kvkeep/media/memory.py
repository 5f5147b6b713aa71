"""Where a slot's bytes live in memory, and the copies between device and host.

Device pools are layer-first: one tensor per component and layer, ``[slots, *shape]``, which is
what attention wants. The host arena of a group is page-first: a page's record body is contiguous,
components in order, layers within, so storage reads and writes it without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..schema import Group, Schema

Ids = NDArray[np.int32]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Copy(NamedTuple):
    """Pages of one group to move from slots of one medium to slots of the other."""

    group: int  # index in the schema
    source: Ids
    target: Ids


class Memory:
    """Device pools and host arenas of one schema.

    Copies are blocking and run on a lane's thread; two lanes may copy at once, since they never
    share a target slot. A copy takes many pages of many groups as one operation.

    Args:
        schema: what a page is made of.
        device_slots: slots of each group on the device.
        host_slots: slots of each group on the host.
        device: a torch device.
    """

    def __init__(
        self,
        schema: Schema,
        device_slots: Sequence[int],
        host_slots: Sequence[int],
        device: str = "cpu",
    ) -> None:
        self.schema = schema
        self.pools = {
            group.name: {
                c.name: [
                    torch.zeros((slots, *c.shape), dtype=TORCH_DTYPES[c.dtype], device=device)
                    for _ in c.layers
                ]
                for c in group.components
            }
            for group, slots in zip(schema.groups, device_slots, strict=True)
        }
        """Group name -> component name -> one tensor ``[slots, *shape]`` per layer."""
        self.arenas = [
            torch.zeros((slots, group.record_bytes), dtype=torch.uint8)
            for group, slots in zip(schema.groups, host_slots, strict=True)
        ]
        """One ``[slots, record_bytes]`` uint8 tensor per group."""
        self._parts = [self._layout(group) for group in schema.groups]

    def _layout(self, group: Group) -> list[tuple[torch.Tensor, slice]]:
        """Each pool tensor of a group as bytes ``[slots, n]``, and its place in a record body."""
        parts, start = [], 0
        for component in group.components:
            for pool in self.pools[group.name][component.name]:
                end = start + component.layer_bytes
                parts.append((pool.flatten(1).view(torch.uint8), slice(start, end)))
                start = end
        return parts

    def save(self, copies: Sequence[Copy]) -> None:
        """Device to host."""
        for group, source, target in copies:
            src, dst = torch.from_numpy(source), torch.from_numpy(target).long()
            for pool, part in self._parts[group]:
                rows = pool.index_select(0, src.to(pool.device)).cpu()
                self.arenas[group][:, part].index_copy_(0, dst, rows)

    def load(self, copies: Sequence[Copy]) -> None:
        """Host to device."""
        for group, source, target in copies:
            src, dst = torch.from_numpy(source), torch.from_numpy(target).long()
            for pool, part in self._parts[group]:
                rows = self.arenas[group][:, part].index_select(0, src)
                pool.index_copy_(0, dst.to(pool.device), rows.to(pool.device))

    def bodies(self, group: int, slots: Ids) -> list[memoryview]:
        """Record bodies of host slots, writable, without a copy."""
        arena = self.arenas[group].numpy()
        return [memoryview(arena[slot]) for slot in slots]
