"""Triton's interpreter, for kernels on CPU tensors. Import this before any kernel.

Its loops fail on NumPy 2.4 and later up to Triton 3.6; mended as in Triton's pull request 9172.
"""

from __future__ import annotations

import os
from typing import Any

import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _mended(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _mended
