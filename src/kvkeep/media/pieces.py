"""Where the bytes of each component lie in a host arena: memory layouts are strides.

An arena is ``[slots, record_bytes]`` uint8. ``page_first``: a row is the record body of a page,
component by component, each layer by layer. ``layer_first``: the pages of one layer of a component
are adjacent, as they are on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from ..schema import Group, Schema


class Piece(NamedTuple):
    """Some layers of one component: views ``[layers, slots, n]`` uint8 of pool and arena."""

    group: int  # index in the schema
    layers: tuple[int, ...]  # in the model's numbering
    pool: Tensor
    arena: Tensor

    def each_layer(self) -> Iterator[Piece]:
        """One piece per layer."""
        for i, layer in enumerate(self.layers):
            yield Piece(self.group, (layer,), self.pool[i : i + 1], self.arena[i : i + 1])


class LoadStep(NamedTuple):
    """The pieces that a load copies at once."""

    layer: int | None  # after this step, layers up to this one have their state; None: the rest
    pieces: list[Piece]


def by_component(group: Group, arena: Tensor, layout: str) -> list[Tensor]:
    """Views ``[layers, slots, n]`` of an arena ``[slots, record_bytes]`` uint8, by component."""
    slots, record = arena.shape
    views, start = [], 0
    for component in group.components:
        n = component.layer_bytes
        if layout == "layer_first":
            strides, offset = (slots * n, n, 1), slots * start
        else:
            strides, offset = (n, record, 1), start
        views.append(arena.as_strided((len(component.layers), slots, n), strides, offset))
        start += component.page_bytes
    return views


def steps(schema: Schema, pieces: Sequence[Piece]) -> list[LoadStep]:
    """The steps of a load: the groups that every hit needs layer by layer, then all others.

    Layer numbers are those of the model that runs first. A group that a hit may lack may belong to
    another model with layer numbers of its own, so such groups come last.
    """
    first = [
        p for piece in pieces if schema.groups[piece.group].required for p in piece.each_layer()
    ]
    first.sort(key=lambda piece: piece.layers)
    found = [LoadStep(n, list(mine)) for (n,), mine in groupby(first, lambda piece: piece.layers)]
    return [*found, LoadStep(None, [p for p in pieces if not schema.groups[p.group].required])]
