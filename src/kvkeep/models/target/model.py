"""A target model: transformers' own code, run over page pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...schema import Group
from ..attention.device import attention_on
from ..checkpoint import DTYPE_NAMES
from ..graphs import Graphs, Tensors
from ..passes import Pools, Run
from . import recurrent
from .context import ForwardContext
from .paged import PagedContext
from .survey import Inventory


class ContextCache(Protocol):
    """transformers' cache object; its attention layers call a :class:`ForwardContext`."""

    context: ForwardContext
    layers: Sequence[Any]


class Target:
    """A causal language model. Call it on the engine's thread, inside ``torch.inference_mode``.

    Args:
        model: transformers' model, with our attention function.
        cache: the cache object for all passes; the survey has run one pass with it.
        inventory: what the model keeps.
        kv_dtype: dtype of the key and value pools, by safetensors' name.
        digest: hash of weights and configuration, 32 hex digits.
        eos_ids: tokens that end a text.
    """

    def __init__(
        self,
        model: Any,
        cache: ContextCache,
        inventory: Inventory,
        kv_dtype: str,
        digest: str = "",
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        config = model.config
        self.digest = digest
        self.eos_ids = eos_ids
        self.kv_dtype = kv_dtype
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.attention = attention_on(self.device)  # drafts use it too
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.embedding: Tensor = model.get_input_embeddings().weight  # [vocab, hidden]
        self.head: nn.Module = model.get_output_embeddings()  # [rows, hidden] to [rows, vocab]
        self._model, self._cache, self._inventory = model, cache, inventory
        self._features: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._scratch: list[tuple[list[int], recurrent.Scratch]] = []  # by the last forward
        self.graphs: Graphs | None = None
        """If set, decoding steps of target and drafts are recorded and replayed. All passes must
        then use the same pools."""

    @property
    def dtype_name(self) -> str:
        """The dtype that the model runs in, by safetensors' name."""
        return DTYPE_NAMES[self.dtype]

    @property
    def packable(self) -> bool:
        """Whether a batch can be one packed row of tokens: only attention mixes positions."""
        return not self._inventory.states

    def groups(self, page_tokens: int) -> tuple[Group, ...]:
        """The groups of a page of ``page_tokens`` tokens, without those of drafts.

        ``full`` has a row per token; so has ``window``, for sliding-window layers. ``state`` is the
        state of recurrent layers at the end of the page.
        """
        return self._inventory.groups(page_tokens, self.kv_dtype)

    def capture(self, layers: Sequence[int]) -> None:
        """Make :meth:`forward` return the outputs of these layers, in this order, from now on.

        Layer ``num_layers``, one past the last, stands for the output of the final norm.
        """
        stack = next(
            m for m in self._model.modules()
            if isinstance(m, nn.ModuleList) and len(m) == self.num_layers
        )  # fmt: skip

        def keep(layer: int) -> Callable[[Any, Any, Any], None]:
            def hook(_module: Any, _args: Any, out: Any) -> None:
                self._features[layer] = out if isinstance(out, Tensor) else out[0]

            return hook

        modules = (*stack, self._model.base_model)
        for handle in self._hooks:
            handle.remove()
        self._features = dict.fromkeys(layers, torch.empty(0))
        self._hooks = [modules[layer].register_forward_hook(keep(layer)) for layer in layers]

    def forward(
        self, tokens: Tensor, runs: Sequence[Run], pools: Mapping[str, Pools]
    ) -> tuple[Tensor, Tensor | None]:
        """Run a packed batch of many sequences' rows on the state in ``pools``.

        This writes keys and values to their pages. It does not change running states; see
        :meth:`store`.

        Args:
            tokens: ``[rows]`` int64, the rows of ``runs`` in order.
            runs: at least one; no two of the same sequence.
            pools: by group name, on this device.

        Returns:
            Logits ``[kept, vocab]`` float32 of the rows that ``runs`` keep, and the concatenated
            outputs of captured layers ``[rows, layers * hidden]``, or None without
            :meth:`capture`.
        """
        if self.packable:
            context = PagedContext.of(self._inventory, runs, pools, self.attention)
            if self._recordable(runs) and context.tensors:
                return self._replay(tokens, runs[0], context)
            ends = np.cumsum([run.rows for run in runs])
            kept = [np.arange(e - run.keep, e) for run, e in zip(runs, ends, strict=True)]
            logits, features = self._pass(tokens[None], runs, np.concatenate(kept), context)
            return logits[0], None if features is None else features[0]
        self._scratch = []
        parts = torch.split(tokens, [run.rows for run in runs])
        logits_of: dict[int, Tensor] = {}
        features_of: dict[int, Tensor] = {}
        for rows in sorted({run.rows for run in runs}):  # runs of equal length make one batch
            which = [i for i, run in enumerate(runs) if run.rows == rows]
            mine = [runs[i] for i in which]
            scratch = recurrent.load(self._cache, self._inventory, mine, pools, self.device)
            self._scratch.append((which, scratch))
            most = max(run.keep for run in mine)
            batch = torch.stack([parts[i] for i in which])
            context = PagedContext.of(self._inventory, mine, pools, self.attention)
            logits, features = self._pass(batch, mine, np.arange(rows - most, rows), context)
            for at, i in enumerate(which):
                logits_of[i] = logits[at, most - runs[i].keep :]
                if features is not None:
                    features_of[i] = features[at]
        order = range(len(runs))
        return (
            torch.cat([logits_of[i] for i in order]),
            torch.cat([features_of[i] for i in order]) if features_of else None,
        )

    def store(self, which: Sequence[int]) -> None:
        """Accept all rows of these runs, by index, of the last :meth:`forward`: the states that
        recurrent layers computed from them become the running states."""
        for members, scratch in self._scratch:
            scratch.store([at for at, i in enumerate(members) if i in which])

    def _pass(
        self, tokens: Tensor, runs: Sequence[Run], kept: NDArray[np.int64], context: PagedContext
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over ``tokens [batch, rows]``, the rows of ``runs`` in order.

        Returns:
            Logits ``[batch, kept, vocab]`` and features ``[batch, rows, layers * hidden]``.
        """
        positions = np.concatenate([np.arange(run.start, run.start + run.rows) for run in runs])
        where = torch.from_numpy(positions).to(self.device).view(tokens.shape)
        return self._compute(tokens, where, torch.from_numpy(kept).to(self.device), context)

    def _recordable(self, runs: Sequence[Run]) -> bool:
        """Whether this is a decoding step of equal runs: one row, or rows that are verified."""
        rows, keep = runs[0].rows, runs[0].keep
        return (
            self.graphs is not None
            and (rows == 1 or rows == keep)
            and all(run.rows == rows and run.keep == keep for run in runs)
        )

    def _replay(
        self, tokens: Tensor, run: Run, context: PagedContext
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward` by a recording, for sequences that all have as many rows as ``run``."""
        assert self.graphs is not None

        def once(inputs: Tensors) -> Tensors:
            tokens, positions = inputs[:2]
            rows = torch.arange(tokens.numel(), device=self.device).view(tokens.shape)
            kept = rows[:, run.rows - run.keep :].flatten()
            packed, where = (x.flatten()[None] for x in (tokens, positions))
            found = self._compute(packed, where, kept, context.over(inputs[1:]))
            n = len(tokens)
            return tuple(x.view(n, x.shape[1] // n, x.shape[2]) for x in found if x is not None)

        name = (id(self), *self._features, run.keep)
        inputs = (tokens.view(-1, run.rows), *context.tensors)
        logits, *features = (x.flatten(0, 1) for x in self.graphs.run(name, once, inputs))
        return logits, features[0] if features else None

    def _compute(
        self, tokens: Tensor, positions: Tensor, kept: Tensor, context: PagedContext
    ) -> tuple[Tensor, Tensor | None]:
        self._cache.context = context
        out = self._model(
            input_ids=tokens,
            position_ids=positions,
            logits_to_keep=kept,
            past_key_values=self._cache,
            use_cache=True,
            ctx=context,
        )
        features = list(self._features.values())
        return out.logits.float(), torch.cat(features, -1) if features else None
