"""Triton's interpreter, for kernels on CPU tensors; import this before any kernel. Where there is a
CUDA device, kernels are compiled for it instead: one process cannot do both.

Its loops fail on NumPy 2.4 and later up to Triton 3.6; mended as in Triton's pull request 9172.
"""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("TRITON_INTERPRET", str(int(DEVICE.type == "cpu")))

from triton.runtime import interpreter  # noqa: E402

_patch = interpreter._patch_lang_tensor


def _mended(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _mended
