"""Decoding steps as CUDA graphs: what a step tells the device is recorded once, then replayed.

A step of few rows is thousands of small kernels, and telling them takes the host longer than the
device needs to run them. In a recording nothing is told anew, so its inputs must be tensors of
fixed shapes at fixed addresses: batches are filled up to a power of two.

The idea is that of every serving engine with CUDA graphs, first vLLM's.
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
"""What PyTorch says of operations whose outcome the host must know."""

_log = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]
Record = Callable[[Callable[[], Tensors]], Callable[[], Tensors]]
"""Makes of a function what does the same to the same tensors again."""


class _Recording(NamedTuple):
    inputs: Tensors
    replay: Callable[[], Tensors]


class Graphs:
    """Recordings of functions of tensors. The engine's thread only.

    Before a function is recorded it runs as it is, so running it twice on the same tensors must do
    what running it once does. One in which the host waits for the device cannot be recorded (say,
    of experts that are asked what is routed to them): it is run as it is from then on.

    Args:
        record: what makes recordings.
    """

    def __init__(self, record: Record | None = None) -> None:
        self._record = record or cuda_graphs()
        self._recordings: dict[Hashable, _Recording] = {}
        self._refused: set[Hashable] = set()

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return len(self._recordings)

    def run(
        self, name: Hashable, function: Callable[[Tensors], Tensors], inputs: Sequence[Tensor]
    ) -> Tensors:
        """``function(inputs)``.

        Args:
            name: stands for the function and all that it reads besides, always the same tensors.
            inputs: ``[sequences, ...]`` each, at least one. A batch is filled up with its last one.

        Returns:
            ``[sequences, ...]`` each, the caller's own.
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
                _log.warning("decoding is not recorded: %s", why)
                self._refused.add(name)
                return function(tuple(inputs))
            self._recordings[key] = recording
        _fill(recording.inputs, inputs)
        return tuple(x[:count].clone() for x in recording.replay())

    def _new(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        function()  # kernels are compiled and chosen, which may do anything
        with _Watch():  # type: ignore[no-untyped-call]
            function()
        return self._record(function)


class NotRecordable(Exception):
    """A function does what cannot be recorded."""


def cuda_graphs() -> Record:
    """Recordings as CUDA graphs, which share the memory of what they do not return."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        graph = torch.cuda.CUDAGraph()
        try:  # other threads go on copying meanwhile
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
    """Looks out for what cannot be recorded, in the calling thread alone.

    Raises:
        NotRecordable: the host waits for what the device computes, or bytes go between them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_iter((args, kwargs, out)) if isinstance(x, Tensor)]
        waits = not _WAITING.isdisjoint(func.tags)
        if func is torch.ops.aten.index.Tensor:  # for masks only: whole numbers are no question
            waits = any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:-1])
        if waits or len({x.device for x in tensors if x.dim()}) > 1:
            raise NotRecordable(f"the host and the device wait for each other in {func}")
        return out


def _fill(buffers: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for buffer, one in zip(buffers, inputs, strict=True):
        buffer[: len(one)].copy_(one)
        buffer[len(one) :].copy_(one[-1:])
