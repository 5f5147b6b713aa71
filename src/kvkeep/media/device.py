"""The device that holds the pools: how to allocate its memory and to order its commands."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import NOW, Mark


class Device(Protocol):
    """A kind of device."""

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A zeroed uint8 tensor in the device's memory."""

    def host_zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A zeroed uint8 tensor in host memory that the device can access directly."""

    def mark(self) -> Mark:
        """A mark after all commands that this thread has queued so far."""

    def stream(self) -> Stream:
        """A new stream, to copy beside the computation."""


class Stream(Protocol):
    """A queue of device commands of its own."""

    def after(self, marks: Iterable[Mark]) -> AbstractContextManager[None]:
        """Run this block's commands after the marks. Leaving the block waits for them."""


class Cpu:
    """The CPU: every command is done when its call returns."""

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(_memory(math.prod(shape))).view(shape)

    host_zeros = zeros

    def mark(self) -> Mark:
        return NOW

    def stream(self) -> Stream:
        return self

    def after(self, marks: Iterable[Mark]) -> AbstractContextManager[None]:
        return nullcontext()


class Cuda:
    """The current CUDA device of every thread that uses it."""

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device="cuda")

    def host_zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Registers memory of the exact size; PyTorch's own pinning rounds up to a power of two."""
        block = _memory(math.prod(shape))
        if block.size:
            address = block.ctypes.data
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(address, block.size, 0))
            weakref.finalize(block, runtime.cudaHostUnregister, address)
        return torch.from_numpy(block).view(shape)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def stream(self) -> Stream:
        return CudaStream()


class CudaStream:
    """A CUDA stream for copies."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @contextmanager
    def after(self, marks: Iterable[Mark]) -> Iterator[None]:
        try:
            with torch.cuda.stream(self._stream):
                for mark in marks:
                    mark.wait()
                yield
        finally:  # also after an error: copies under way still use the slots
            self._stream.synchronize()


def _memory(size: int) -> NDArray[np.uint8]:
    """``size`` zeroed bytes in memory pages of their own, huge ones where the system has them."""
    # Private: by default, systems give shared mappings no huge pages.
    pages = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, size)


def open_device(name: str) -> Device:
    """The device that PyTorch calls ``name``: the CPU, or else one with CUDA's interface."""
    return Cpu() if torch.device(name).type == "cpu" else Cuda()
