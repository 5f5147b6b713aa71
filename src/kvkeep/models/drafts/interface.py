"""The interface of every draft network."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ...schema import Group
from ..passes import Pools, Run


class Source(enum.Enum):
    """What a row of a draft reads besides its token."""

    NOTHING = enum.auto()  # the token alone: the draft is a language model of its own
    TARGET = enum.auto()  # the target's feature, as :meth:`Draft.fuse` returns it
    PREVIOUS = enum.auto()  # the output of the previous stage


class Stage(NamedTuple):
    """One draft layer, or several that run as one: what its rows read, and where they lie.

    ::

        token     0     1     2     3    ...
        shift 1         0     1     2         row i: token i and the feature of token i - 1
        shift 2               0     1         row i: token i and the feature of token i - 2,
                                              or stage 0's output in row i - 1

    Row i is stored at position i of the sequence, has RoPE position i - shift, and predicts token
    i + 1. The first ``shift`` positions hold no row. Row i depends on tokens [0, i] alone, so every
    request computes the same row for the same prefix.
    """

    shift: int  # k + 1 in stage k; 0 if the source is ``NOTHING``
    source: Source

    @property
    def lag(self) -> int:
        """Row i reads the value that its source has for token i - lag."""
        return 1 if self.source is Source.PREVIOUS else self.shift


class Draft(Protocol):
    """A draft network. Call it on the engine's thread, inside ``torch.inference_mode``.

    Stage 0 predicts the first token of a chain, stage 1 the second, and so on; the last stage
    predicts all further ones. When a chain is longer than a stage's shift, the stage would need
    features of tokens that the target has not seen. It then reads its own output in the previous
    row instead.
    """

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs :meth:`fuse` reads, in order: see ``Target.capture``."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in order: first those that read the target, then those that read stages."""

    def groups(self, page_tokens: int) -> tuple[Group, ...]:
        """Groups of keys and values, and unless the source is ``NOTHING``, of ``carry``.

        ``carry`` has a row per stage: the source of the first row after the page. For stage k this
        is the feature of the page's (k + 1)-th last token, or stage k - 1's output in its last row.
        """

    def fuse(self, features: Tensor) -> Tensor:
        """Map target features ``[rows, aux layers * target hidden]`` to ``[rows, hidden]``."""

    def forward(
        self,
        stage: int,
        tokens: Tensor,
        source: Tensor | None,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
    ) -> Tensor:
        """Run one stage over rows of many sequences and write their keys and values to ``pools``.

        Args:
            tokens: ``[rows]`` int64, each row's own token.
            source: ``[rows, hidden]``, each row's source; None if the source is ``NOTHING``.
            runs: where the rows lie and what they attend to.
            pools: by group name.

        Returns:
            ``[rows, hidden]``: states for :meth:`propose`, and sources of later rows.
        """

    def propose(self, hidden: Tensor) -> Tensor:
        """The likeliest next token for each state: ``[n, hidden]`` to ``[n]`` int64 target ids."""
