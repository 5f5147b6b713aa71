"""What the engine asks of a draft network, of whatever kind."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ...schema import Group
from ..passes import Pools, Run


class Source(enum.Enum):
    """What a draft's row mixes its token with."""

    NOTHING = enum.auto()  # a model of its own: the token is all it gets
    TARGET = enum.auto()  # the target's feature, as :meth:`Draft.fuse` makes it
    PREVIOUS = enum.auto()  # the output of the stage before


class Stage(NamedTuple):
    """A draft layer, or a stack of them that runs at once: whose rows, and of what they are made.

    ::

        token     0     1     2     3    ...
        shift 1         0     1     2         row i: token i and the feature of token i - 1
        shift 2               0     1         row i: token i and the feature of token i - 2,
                                              or stage 0's output in row i - 1

    Row i lies in slot i, at RoPE position i - shift, and predicts token i + 1. The first ``shift``
    slots hold no row. Every row is a function of tokens [0, i] alone, whoever computed it.
    """

    shift: int  # of stage k: k + 1, or 0 where the source is nothing
    source: Source

    @property
    def lag(self) -> int:
        """Tokens from a row's source to the row's own, in what feeds the stage."""
        return 1 if self.source is Source.PREVIOUS else self.shift


class Draft(Protocol):
    """A draft network. Called on the engine's thread, inside ``torch.inference_mode``.

    A chain's first token is read off stage 0, the next off stage 1, and all that follow off the
    last stage. Once a chain is longer than a stage's shift, the features that the stage would mix
    in are of tokens that the target has not seen; its own output in the row before takes their
    place.
    """

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What of the target :meth:`fuse` reads, in order: see ``Target.capture``."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The row conventions. First those fed by the target, then those fed by the one before."""

    def groups(self, page_tokens: int) -> tuple[Group, ...]:
        """Keys and values, and unless the source is nothing, ``carry`` with a row per stage.

        Carry is the source of the first row after the page. So stage k's is the feature of the
        (k + 1)-th last token of the page, or stage k - 1's output in the page's last row.
        """

    def fuse(self, features: Tensor) -> Tensor:
        """Target features ``[rows, aux layers * target hidden]`` to ``[rows, hidden]``."""

    def forward(
        self,
        stage: int,
        tokens: Tensor,
        source: Tensor | None,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
    ) -> Tensor:
        """Run one stage over rows of many sequences, writing its keys and values into ``pools``.

        Args:
            tokens: ``[rows]`` int64, the rows' own tokens.
            source: ``[rows, hidden]``, what each row mixes in; None if the source is nothing.
            runs: where the rows go and what they see.
            pools: by group name.

        Returns:
            ``[rows, hidden]``: states for :meth:`propose`, and a source of later rows.
        """

    def propose(self, hidden: Tensor) -> Tensor:
        """The likeliest next token of each state: ``[n, hidden]`` to ``[n]`` int64 target ids."""
