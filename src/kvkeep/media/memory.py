"""The memory of device and host slots, and the copies between them.

Device pools are layer-first, as attention needs them: one tensor ``[slots, *shape]`` per component
and layer. The layout of host arenas and the backend that copies are settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..schema import ConfigError, Schema, Slots
from .base import BACKENDS, LAYOUTS, Copy, Mark, Reached
from .device import open_device
from .direct import Direct
from .pieces import LoadStep, Piece, by_component, steps

if TYPE_CHECKING:
    from .kernel import Kernel

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Memory:
    """Device pools and host arenas of one schema.

    Copies block and run on a lane's thread. Two lanes may copy at once: they never share a target
    slot. One copy moves many pages of many groups.

    Args:
        schema: the groups of a page, and their components.
        device_slots: slots of each group on the device.
        host_slots: slots of each group on the host.
        device: a torch device.
        layout: one of :data:`~kvkeep.media.base.LAYOUTS`, of the arenas.
        backend: one of :data:`~kvkeep.media.base.BACKENDS`.

    Raises:
        ConfigError: the layout or the backend is unknown, or they do not fit together.
    """

    @torch.inference_mode(False)  # lanes write to these tensors, outside of that mode
    def __init__(
        self,
        schema: Schema,
        device_slots: Sequence[int],
        host_slots: Sequence[int],
        device: str = "cpu",
        layout: str = "page_first",
        backend: str = "direct",
    ) -> None:
        _check(layout, backend)
        self.schema = schema
        self._layout = layout
        self._device = open_device(device)
        self._saving, self._loading = self._device.stream(), self._device.stream()
        self.pools: dict[str, dict[str, list[Tensor]]] = {}
        """Group name -> component name -> one tensor ``[slots, *shape]`` per layer."""
        self.arenas = [
            self._device.host_zeros((slots, group.record_bytes))
            for group, slots in zip(schema.groups, host_slots, strict=True)
        ]
        """One ``[slots, record_bytes]`` uint8 tensor per group. Its rows are record bodies unless
        the layout is ``layer_first``."""
        self._flat = [arena.numpy().reshape(-1).data for arena in self.arenas]
        pieces: list[Piece] = []
        for g, (group, slots) in enumerate(zip(schema.groups, device_slots, strict=True)):
            self.pools[group.name] = {}
            views = by_component(group, self.arenas[g], layout)
            for c, arena in zip(group.components, views, strict=True):
                shape = (len(c.layers), slots, c.layer_bytes)
                pool = self._device.zeros(shape)
                layers = pool.view(TORCH_DTYPES[c.dtype]).view(*shape[:2], *c.shape).unbind()
                self.pools[group.name][c.name] = list(layers)
                pieces.append(Piece(g, c.layers, pool, arena))
        self._backend = _backend(backend, pieces, steps(schema, pieces))

    def mark(self) -> Mark:
        """A mark after all commands that this thread has queued on the device so far."""
        return self._device.mark()

    def save(self, copies: Sequence[Copy], after: Iterable[Mark] = ()) -> None:
        """Copy from device to host once the device has reached the marks ``after``."""
        with self._saving.after(after):
            self._backend.save(copies)

    def load(
        self,
        copies: Sequence[Copy],
        after: Iterable[Mark] = (),
        reached: Reached = lambda layer, mark: None,
    ) -> None:
        """Copy from host to device once the device has reached the marks ``after``, in the order of
        :func:`~kvkeep.media.pieces.steps`. Call ``reached`` for each layer."""
        with self._loading.after(after):
            for layer in self._backend.load(copies):
                if layer is not None:
                    reached(layer, self._device.mark())

    def bodies(self, group: int, slots: Slots) -> list[memoryview]:
        """The writable record body of each host slot: a view of the arena, or a copy for
        :meth:`keep` if the layout is ``layer_first``."""
        flat, size = self._flat[group], self.schema.groups[group].record_bytes
        if self._layout != "layer_first":
            return [flat[slot * size : (slot + 1) * size] for slot in slots.tolist()]
        bodies = [memoryview(bytearray(size)) for _ in slots]
        for body, host in self._both(group, slots, bodies):
            body.copy_(host)
        return bodies

    def keep(self, group: int, slots: Slots, bodies: Sequence[memoryview]) -> None:
        """Take over what was read into ``bodies`` of these slots."""
        if self._layout == "layer_first":
            for body, host in self._both(group, slots, bodies):
                host.copy_(body)

    def _both(
        self, group: int, slots: Slots, bodies: Sequence[memoryview]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each component of each record as views ``[layers, n]``: of its body, and of the arena."""
        kind = self.schema.groups[group]
        arena = by_component(kind, self.arenas[group], self._layout)
        for slot, raw in zip(slots, bodies, strict=True):
            record = torch.frombuffer(raw, dtype=torch.uint8).view(1, -1)
            for body, host in zip(by_component(kind, record, "page_first"), arena, strict=True):
                yield body[:, 0], host[:, slot]


def _check(layout: str, backend: str) -> None:
    for what, value, known in (("layout", layout, LAYOUTS), ("I/O backend", backend, BACKENDS)):
        if value not in known:
            raise ConfigError(f"unknown memory {what} {value!r}: choose one of {', '.join(known)}")
    if backend == "kernel" and layout == "page_first_direct":
        raise ConfigError(
            "the memory layout page_first_direct needs the I/O backend direct, not kernel"
        )


def _backend(name: str, pieces: Sequence[Piece], order: Sequence[LoadStep]) -> Direct | Kernel:
    if name == "direct":
        return Direct(pieces, order)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if any(piece.pool.device.type == "cpu" for piece in pieces) and not interpreted:
        raise ConfigError("the I/O backend kernel needs a CUDA device")
    from .kernel import Kernel

    return Kernel(pieces, order)
