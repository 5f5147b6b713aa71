"""Proof that a model can be served on pages: short passes compared with its own attention.

The logits differ if the model keeps state that we do not see, if its mask holds biases, or if
sequences of a batch see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...media.arrival import Arrival
from ...media.memory import TORCH_DTYPES
from ...schema import UnsupportedModel
from ..passes import Run
from .model import Target
from .survey import STATE

_CHUNKS = ((0, 13), (13, 26))  # positions; single tokens follow
_LENGTH, _OTHER = 32, 5  # tokens of the compared sequence, and of the other one in each batch
_PAGE, _PAGES, _SLOTS = 4, 8, 13  # tokens of a page, pages of the sequence, slots of a pool
_WINDOW = 6  # tokens


@contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Shorten sliding windows for the proof, so that its sequence is longer than a window."""
    owners = [
        one for one in (model.config, *model.modules())
        if isinstance(getattr(one, "sliding_window", None), int) and one.sliding_window > _WINDOW
    ]  # fmt: skip
    sizes = [one.sliding_window for one in owners]
    for one in owners:
        one.sliding_window = _WINDOW
    try:
        yield
    finally:
        for one, size in zip(owners, sizes, strict=True):
            one.sliding_window = size


def expected_logits(model: Any) -> Tensor:
    """Logits ``[length, vocab]`` float32 of the proof's tokens, from the model's own attention."""
    tokens = _tokens(model.config.vocab_size, model.device)[:_LENGTH]
    logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits.float()


def prove(target: Target, expected: Tensor) -> None:
    """Compare chunks and single tokens, batched with another sequence, with ``expected``.

    Each pass starts from a copy, in a new slot, of the running state that the last pass left.

    Raises:
        UnsupportedModel: the logits differ.
    """
    pools = {
        group.name: {
            c.name: [
                torch.full((_SLOTS, *c.shape), fill, device=target.device).to(TORCH_DTYPES[c.dtype])
                for _ in c.layers
            ]
            for c in group.components
        }
        for group in target.groups(_PAGE)
        for fill in (0.0 if group.name == STATE else torch.nan,)
    }
    tokens = _tokens(target.vocab_size, target.device)
    pages = np.random.default_rng(0).permutation(_SLOTS).astype(np.int32)
    other = Run(_Tables(pages[_PAGES:], 0), 0, _OTHER)
    found = []
    steps = (*_CHUNKS, *((at, at + 1) for at in range(_CHUNKS[-1][1], _LENGTH)))
    for i, (start, end) in enumerate(steps):
        for pool in (x for tensors in pools.get(STATE, {}).values() for x in tensors):
            pool[i + 2] = pool[i + 1]
            pool[0] = 0
        run = Run(_Tables(pages, i + 2), start, end - start, keep=end - start)
        both = torch.cat((tokens[_LENGTH:], tokens[start:end]))
        found.append(target.forward(both, [other, run], pools)[0])
        target.store([1])
    off = (torch.cat(found) - expected).norm(dim=-1) / expected.norm(dim=-1)
    for start, end in (*_CHUNKS, (_CHUNKS[-1][1], _LENGTH)):
        median = off[start:end].median()  # rounding may route a few rows to other experts
        if not median < (1e-3 if target.dtype == torch.float32 else 0.1):
            raise UnsupportedModel(
                f"on pages, tokens {start} to {end} differ from the model's own by {median:.1e}; "
                "it keeps state elsewhere or has a special mask"
            )


class _Tables:
    """:class:`~kvkeep.models.passes.Tables` with the same pages in every group."""

    arriving: Sequence[Arrival] = ()

    def __init__(self, pages: NDArray[np.int32], working: int) -> None:
        self._pages, self._working = pages, np.array([working], np.int32)

    def slots(self, group: str) -> NDArray[np.int32]:
        return self._pages

    def working(self, group: str) -> NDArray[np.int32]:
        return self._working


def _tokens(vocab: int, device: torch.device) -> Tensor:
    return (torch.arange(_LENGTH + _OTHER, device=device) * 7 + 3) % vocab
