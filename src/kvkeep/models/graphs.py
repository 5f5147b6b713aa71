"""Decoding steps as CUDA graphs: a step's kernel launches are recorded once, then replayed.

A step of few rows launches thousands of small kernels, and the host needs longer to launch them
than the device needs to run them. A replay launches them all at once. Its inputs must be tensors of
fixed shapes at fixed addresses, so batches are padded to a power of two.

Serving engines commonly do this; vLLM did it first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's tags of operations whose result the host must wait for."""

_log = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]
Record = Callable[[Callable[[], Tensors]], Callable[[], Tensors]]
"""Records a function; returns another that repeats its work on the same tensors."""


class _Recording(NamedTuple):
    inputs: Tensors
    replay: Callable[[], Tensors]


class Graphs:
    """Recordings of functions of tensors. The engine's thread only.

    A function runs normally before it is recorded, so it must be idempotent: running it twice on
    the same tensors must do the same as running it once. A function in which the host waits for the
    device cannot be recorded (for example, experts that look up which tokens they got); it runs
    normally from then on.

    Args:
        record: makes recordings; None: CUDA graphs.
    """

    def __init__(self, record: Record | None = None) -> None:
        self._record = record or cuda_graphs()
        self._recordings: dict[Hashable, _Recording] = {}
        self._refused: set[Hashable] = set()

    @property
    def recorded(self) -> int:
        """Number of recordings."""
        return len(self._recordings)

    def run(
        self, name: Hashable, function: Callable[[Tensors], Tensors], inputs: Sequence[Tensor]
    ) -> Tensors:
        """Return ``function(inputs)``, from a recording where possible.

        Args:
            name: identifies the function and the other tensors that it reads, which must always be
                the same ones.
            inputs: ``[sequences, ...]`` each, at least one. Repeating the last sequence pads a
                batch.

        Returns:
            ``[sequences, ...]`` each; copies that the caller owns.
        """
        if name in self._refused:
            return function(tuple(inputs))
        count = len(inputs[0])
        size = 1 << (count - 1).bit_length()
        key = (name, size, *(x.shape[1:] for x in inputs))
        recording = self._recordings.get(key)
        if recording is None:
            buffers = tuple(x.new_empty(size, *x.shape[1:]) for x in inputs)
            _fill(buffers, inputs)
            try:
                recording = _Recording(buffers, self._new(lambda: function(buffers)))
            except NotRecordable as why:
                _log.warning("decoding runs without CUDA graphs: %s", why)
                self._refused.add(name)
                return function(tuple(inputs))
            self._recordings[key] = recording
        _fill(recording.inputs, inputs)
        return tuple(x[:count].clone() for x in recording.replay())

    def _new(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        function()  # warm-up: compiling and choosing kernels may do what a graph cannot record
        with _Watch():  # type: ignore[no-untyped-call]
            function()
        return self._record(function)


class NotRecordable(Exception):
    """A CUDA graph cannot record this function."""


def cuda_graphs() -> Record:
    """Record as CUDA graphs. They share one memory pool for intermediate results."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        graph = torch.cuda.CUDAGraph()
        try:  # thread_local: other threads keep copying during the capture
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = function()
        except RuntimeError as error:
            raise NotRecordable(str(error)) from error

        def replay() -> Tensors:
            graph.replay()
            return outputs

        return replay

    return record


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects operations that a CUDA graph cannot record. It sees the calling thread only.

    Raises:
        NotRecordable: the host waits for a result of the device, or they exchange bytes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_iter((args, kwargs, out)) if isinstance(x, Tensor)]
        waits = not _WAITING.isdisjoint(func.tags)
        if func is torch.ops.aten.index.Tensor:  # only masks make the host wait; integers do not
            waits = any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:-1])
        if waits or len({x.device for x in tensors if x.dim()}) > 1:
            raise NotRecordable(f"the host and the device wait for each other in {func}")
        return out


def _fill(buffers: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for buffer, one in zip(buffers, inputs, strict=True):
        buffer[: len(one)].copy_(one)
        buffer[len(one) :].copy_(one[-1:])
