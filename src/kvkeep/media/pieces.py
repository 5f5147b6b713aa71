"""Where the bytes of each component lie in a host arena: memory layouts are strides.

An arena is ``[slots, record_bytes]``. ``page_first``: a row is a page's record body, components in
order, layers within. ``layer_first``: the pages of one layer of a component lie side by side, as
they do on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from ..schema import Group, Schema


class Piece(NamedTuple):
    """Some layers of one component, as bytes ``[layers, slots, n]`` uint8 on either side."""

    group: int  # index in the schema
    layers: tuple[int, ...]  # in the model's numbering
    pool: Tensor
    arena: Tensor

    def each_layer(self) -> Iterator[Piece]:
        """A piece for each of its layers."""
        for i, layer in enumerate(self.layers):
            yield Piece(self.group, (layer,), self.pool[i : i + 1], self.arena[i : i + 1])


class Step(NamedTuple):
    """What a load moves at once."""

    layer: int | None  # with this step, all is there that layers up to this one need; None: rest
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


def steps(schema: Schema, pieces: Sequence[Piece]) -> list[Step]:
    """A load in order: layer by layer of the groups that every hit needs, then all others.

    Layers have the numbers of the model that runs first. Groups that a hit may do without may be
    another model's, which numbers its own layers: they come last.
    """
    first = [
        p for piece in pieces if schema.groups[piece.group].required for p in piece.each_layer()
    ]
    first.sort(key=lambda piece: piece.layers)
    found = [Step(n, list(mine)) for (n,), mine in groupby(first, lambda piece: piece.layers)]
    return [*found, Step(None, [p for p in pieces if not schema.groups[p.group].required])]
