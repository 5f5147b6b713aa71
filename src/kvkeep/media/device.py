"""What computes and holds the pools: its memory, and the order of what it is told to do."""

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
        """Bytes in its memory, uint8."""

    def host_zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Bytes in the host's memory, uint8, that it can reach by itself."""

    def mark(self) -> Mark:
        """All that the calling thread has told it to do until now."""

    def stream(self) -> Stream:
        """A line of work beside that of computing."""


class Stream(Protocol):
    """Work of a thread of its own."""

    def after(self, marks: Iterable[Mark]) -> AbstractContextManager[None]:
        """What is told in the block is done after the marks, and when the block ends, done."""


class Cpu:
    """Threads that do what they are told at once."""

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
    """A CUDA device, the current one of every thread that uses it."""

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device="cuda")

    def host_zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Registered; what PyTorch pins by itself, it rounds up to a power of two."""
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
    """A stream of copies."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @contextmanager
    def after(self, marks: Iterable[Mark]) -> Iterator[None]:
        try:
            with torch.cuda.stream(self._stream):
                for mark in marks:
                    mark.wait()
                yield
        finally:  # what is under way uses the slots, whatever happened
            self._stream.synchronize()


def _memory(size: int) -> NDArray[np.uint8]:
    """Zeros in memory pages of their own, huge ones where the system has them."""
    # Private: what is shared has no huge pages, as systems are set up.
    pages = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, size)


def open_device(name: str) -> Device:
    """The device that PyTorch calls so: a CPU, or one that works like CUDA's."""
    return Cpu() if torch.device(name).type == "cpu" else Cuda()
