"""Which attention a device gets."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from .cascade import CascadeAttention
from .interface import Attention


def attention_on(device: torch.device) -> Attention:
    """Triton's kernels on CUDA where Triton is installed, else plain PyTorch."""
    if device.type == "cuda" and find_spec("triton"):
        from .paged import PagedAttention  # Triton is optional

        return PagedAttention(device)
    return CascadeAttention(device)
