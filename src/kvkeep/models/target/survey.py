"""What the layers of a model keep of a sequence, found by watching one pass.

Nothing depends on a model's name. Attention layers show keys, values and window when they call our
attention function. Layers with compressed keys and values (multi-head latent attention) show what
they give to the cache. Recurrent layers leave their tensors in transformers' cache object.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...schema import Component, Group, UnsupportedModel
from ..checkpoint import DTYPE_NAMES
from ..passes import Pools

FULL, WINDOW, STATE = "full", "window", "state"  # group names
STATE_KINDS = ("conv", "recurrent")  # a cache layer has ``conv_states`` and ``recurrent_states``


class Kept(NamedTuple):
    """One tensor that one layer keeps."""

    group: str
    component: str  # "k", "v"; "latent", "rope"; "conv", "recurrent"
    layer: int
    shape: tuple[int, ...]  # per token; in the group "state", per sequence
    dtype: str | None = None  # safetensors' name; None: the dtype of the key and value pools


@dataclass(slots=True)
class Survey:
    """A :class:`~kvkeep.models.target.context.ForwardContext` that only records shapes.

    Each entry has two shapes ``(heads, dim)``: of keys, then of values.
    """

    attended: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    cached: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.cached[layer] = tuple(tuple(x.shape[1::2]) for x in (key, value))
        return key, value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        self.attended[layer] = tuple(tuple(x.shape[1::2]) for x in (key, value))
        self.windows[layer] = options.get("sliding_window")
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def rows(self) -> list[Kept]:
        """The tensors that attention layers keep per token.

        Raises:
            UnsupportedModel: a layer caches something else than it attends to.
        """
        if missed := sorted(set(self.cached) - set(self.attended)):
            raise UnsupportedModel(f"layers {missed} do not reach the attention hook")
        found = []
        for layer, shapes in sorted(self.attended.items()):
            names, group = ("k", "v"), FULL if self.windows[layer] is None else WINDOW
            if (cached := self.cached.get(layer, shapes)) != shapes:
                if any(heads != 1 for heads, _ in cached) or group != FULL:
                    raise UnsupportedModel(f"layer {layer} caches {cached} and attends to {shapes}")
                names, shapes = ("latent", "rope"), tuple(shape[1:] for shape in cached)
            found += [Kept(group, n, layer, s) for n, s in zip(names, shapes, strict=True)]
        return found

    def window(self) -> int | None:
        """Size of the sliding window in tokens; None if no layer has one.

        Raises:
            UnsupportedModel: layers have windows of several sizes.
        """
        sizes = sorted({size for size in self.windows.values() if size is not None})
        if len(sizes) > 1:
            raise UnsupportedModel(f"sliding windows of several sizes: {sizes}")
        return sizes[0] if sizes else None


def states(layers: Iterable[Any]) -> list[Kept]:
    """The tensors that recurrent layers left in the ``layers`` of a cache object.

    Raises:
        UnsupportedModel: a layer has several states of one kind.
    """
    found = []
    for (i, layer), kind in itertools.product(enumerate(layers), STATE_KINDS):
        tensors = [x for x in getattr(layer, f"{kind}_states", {}).values() if x is not None]
        if len(tensors) > 1:
            raise UnsupportedModel(f"layer {i} keeps {len(tensors)} {kind} states")
        found += [Kept(STATE, kind, i, tuple(x.shape[1:]), DTYPE_NAMES[x.dtype]) for x in tensors]
    return found


class Inventory:
    """Everything that a model keeps of a sequence.

    Args:
        kept: every tensor of every layer.
        window: number of tokens that a row of the group "window" sees, its own included.

    Raises:
        UnsupportedModel: the model mixes kinds of layers that cannot run in one pass.
    """

    def __init__(self, kept: Sequence[Kept], window: int | None) -> None:
        self.kept = tuple(kept)
        self.window = window
        self.states = tuple(one for one in kept if one.group == STATE)
        self.paged = frozenset(one.group for one in kept) - {STATE}  # groups with one row per token
        self.latent = frozenset(one.layer for one in kept if one.component == "latent")
        if self.states and self.latent:
            raise UnsupportedModel("it has compressed attention beside recurrent layers")
        self._places: dict[tuple[int, str], tuple[str, int]] = {}
        count: Counter[tuple[str, str]] = Counter()
        for one in kept:  # a component's pools follow the order of ``Component.layers``
            self._places[one.layer, one.component] = (one.group, count[one[:2]])
            count[one[:2]] += 1

    def groups(self, page_tokens: int, kv_dtype: str) -> tuple[Group, ...]:
        """Those of the groups ``full``, ``window`` and ``state`` that have layers.

        Raises:
            UnsupportedModel: layers keep one component in several shapes or dtypes.
        """
        reach = (self.window or 1) - 1  # earlier tokens that a row sees
        tails = {FULL: None, WINDOW: max(1, -(-reach // page_tokens)), STATE: 1}
        present = {one.group for one in self.kept}
        return tuple(
            Group(
                name,
                tuple(self._components(name, page_tokens, kv_dtype)),
                tail,
                sharded=not self.latent,
                working=int(name == STATE),
            )
            for name, tail in tails.items()
            if name in present
        )

    def _components(self, group: str, page_tokens: int, kv_dtype: str) -> Iterator[Component]:
        per_page = () if group == STATE else (page_tokens,)
        by_name: dict[str, list[Kept]] = {}
        for one in self.kept:
            if one.group == group:
                by_name.setdefault(one.component, []).append(one)
        for name, mine in by_name.items():
            forms = {(one.shape, one.dtype or kv_dtype) for one in mine}
            if len(forms) > 1:
                raise UnsupportedModel(f"layers keep {name!r} in several forms: {sorted(forms)}")
            shape, dtype = forms.pop()
            yield Component(name, tuple(one.layer for one in mine), (*per_page, *shape), dtype)

    def place(self, pools: Mapping[str, Pools], layer: int, component: str) -> tuple[str, Tensor]:
        """The group and the pool of one layer's component."""
        group, index = self._places[layer, component]
        return group, pools[group][component][index]
