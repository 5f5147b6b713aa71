"""Draft chains before a step's target pass, true draft rows after it.

::

    position   old                 old + chunk      new
                |  chunk (known)       | accepted    |        target rows run: [old, new)
                |                                    |
        rows  old (unless there)  ...   new - 1     new       draft rows rebuilt, of every stage
     sources  carry of old - 1    ...   feature of new - 1    row ``new`` only if token ``new``
                                                              was just drawn

What feeds a stage is a *stream* with a value per token: the target's fused features, or the output
of the stage before. The values before a step's first row always lie in the ``carry`` of the page of
token old - 1: each step leaves there what the row of token new will need. So a chunk that goes on
where the last one ended and a hit that goes on where another request left are the same case.

Draft state may be missing for a gap of first tokens; a cold start has an empty one. A stage's rows
begin ``shift`` tokens after it, and those that would lie before are zero and never seen. After a gap
that is not empty, rows are a function of the prefix only as far as no attention took part in them:
keys and values of the first decoder layer of a stage that reads the target. The cache keeps what
follows a gap private to its request.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..lease import Lease
from ..models.base import Draft, Pools, Run, Source, Stage
from ..schema import UnsupportedModel
from .request import Sequence


@dataclass(frozen=True, slots=True)
class Chain:
    """Proposals wanted for a sequence; its ``hidden`` state predicts the next token."""

    seq: Sequence
    steps: int  # at least 1


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What one sequence's step has made final. ``seq.computed`` is the new count."""

    seq: Sequence
    old: int  # ``seq.computed`` before the step
    offset: int  # of row ``old`` in the step's packed target rows
    drawn: bool  # token ``seq.computed`` was drawn in this step


@dataclass(frozen=True, slots=True)
class _Stream:
    """What feeds a stage: a value per token, of all sequences of a step."""

    values: Tensor  # [n, hidden]: those of the step, those before, and last a zero row
    packed: int  # values of the step; each sequence's are consecutive
    first: Seq[int]  # by sequence, the token of its first packed value
    offset: Seq[int]  # by sequence, where that value lies
    known: Seq[int]  # by sequence, the first token that has a value at all

    @classmethod
    def of(
        cls,
        packed: Tensor,
        before: Seq[Tensor],
        first: Seq[int],
        offset: Seq[int],
        known: Seq[int],
    ) -> _Stream:
        """``before``: of tokens first - 1, of tokens first - 2, ..., ``[sequences, hidden]``."""
        values = torch.cat((packed, *before, packed.new_zeros(1, packed.shape[1])))
        return cls(values, len(packed), first, offset, known)

    def index(self, i: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the values of sequence ``i`` lie; the zero row for tokens that have none."""
        ago = self.first[i] - tokens
        before = self.packed + (ago - 1) * len(self.first) + i
        found = np.where(ago > 0, before, self.offset[i] - ago)
        return np.where(tokens < self.known[i], len(self.values) - 1, found)


class Speculator:
    """Runs a draft network over the pools of its groups. Engine's thread only.

    Raises:
        UnsupportedModel: the draft's stages are not as :class:`~kvkeep.models.base.Draft` says.
    """

    def __init__(
        self, draft: Draft, pools: Mapping[str, Pools], page_tokens: int, device: torch.device
    ) -> None:
        groups = draft.groups(page_tokens)
        self._draft, self._stages = draft, draft.stages
        self._pools = {group.name: pools[group.name] for group in groups}
        self._keeper = next((n for n, p in self._pools.items() if "carry" in p), groups[0].name)
        self._page_tokens, self._device = page_tokens, device
        self._fed = sum(stage.source is Source.TARGET for stage in self._stages)
        kinds = [Source.TARGET] * max(self._fed, 1) + [Source.PREVIOUS] * len(self._stages)
        fed = tuple(Stage(k + 1, kinds[k]) for k in range(len(self._stages)))
        if self._stages not in (fed, (Stage(0, Source.NOTHING),)):
            raise UnsupportedModel(f"draft stages {self._stages}")

    def propose(self, chains: Seq[Chain]) -> list[list[int]]:
        """Greedy chains for all sequences at once, ``steps`` tokens each, in the given order.

        Writes speculative rows at positions ``[length, length + steps - 1)``.
        """
        order = sorted(range(len(chains)), key=lambda i: -chains[i].steps)  # the living: a prefix
        found: list[list[int]] = [[] for _ in chains]
        seqs = [chains[i].seq for i in order]
        states = [*torch.stack([seq.hidden for seq in seqs]).chunk(len(self._stages), -1)]
        past = self._carry(range(self._fed - 1), seqs, [seq.computed for seq in seqs])
        for step in range(chains[order[0]].steps):
            tokens = self._draft.propose(states[min(step, len(states) - 1)])
            for i, token in zip(order, tokens.tolist(), strict=True):
                found[i].append(token)
            order = [i for i in order if chains[i].steps > step + 1]
            if not order:
                break
            seqs, tokens = seqs[: len(order)], tokens[: len(order)]
            states, past = ([x[: len(order)] for x in one] for one in (states, past))
            states = self._extend(seqs, step, tokens, states, past)
        return found

    def rebuild(self, done: Seq[Rebuild], features: Tensor | None) -> None:
        """Write draft rows from true features, ``carry`` and each sequence's ``hidden``.

        Args:
            done: one per sequence of the step; tokens and ``computed`` are already updated.
            features: of the step's packed target rows, for ``Draft.fuse``; None: nobody reads any.
        """
        seqs, olds = [d.seq for d in done], [d.old for d in done]
        rows = [range(d.old + (d.seq.hidden is not None), d.seq.computed + d.drawn) for d in done]
        self._clear(seqs, rows)
        streams: list[_Stream | None] = [None]  # the target's, then each stage's
        if features is not None:
            fused, before = self._draft.fuse(features), self._carry(range(self._fed), seqs, olds)
            gaps = [_gap(seq) for seq in seqs]
            streams = [_Stream.of(fused, before, olds, [d.offset for d in done], gaps)]
        for k, stage in enumerate(self._stages):
            stream = streams[k if stage.source is Source.PREVIOUS else 0]
            before = self._outputs_before(k, seqs, olds)
            if stream is not None:
                self._keep_carry(k, stream, done)
            streams.append(self._run(k, stream, before, seqs, rows))
        states = [
            s.values[[int(s.index(i, np.array(seq.computed))) for i, seq in enumerate(seqs)]]
            for s in streams[1:]
            if s is not None
        ]
        for d, state in zip(done, torch.cat(states, -1), strict=True):
            d.seq.hidden = state if d.drawn else None

    def _extend(
        self,
        seqs: Seq[Sequence],
        step: int,
        tokens: Tensor,
        states: Seq[Tensor],
        past: Seq[Tensor],
    ) -> list[Tensor]:
        """Speculative rows at positions ``length + step``, of the stages that later tokens need.

        Args:
            tokens: ``[sequences]``, just proposed.
            states: by stage, its outputs in the rows before, ``[sequences, hidden]``.
            past: features of the last token that the target has seen, of the token before, ...

        Returns:
            By stage, its outputs in these rows.
        """
        found = list(states)
        for k in range(min(step + 1, len(states) - 1), len(states)):
            shift, kind = self._stages[k]
            source: Tensor | None = states[k]
            if kind is Source.NOTHING:
                source = None
            elif step + 1 < shift:
                source = states[k - 1] if kind is Source.PREVIOUS else past[shift - step - 2]
            runs = [_run(seq, seq.length + step, 1, shift) for seq in seqs]
            found[k] = self._draft.forward(k, tokens, source, runs, self._pools)
        return found

    def _run(
        self,
        k: int,
        stream: _Stream | None,
        before: Seq[Tensor],
        seqs: Seq[Sequence],
        rows: Seq[range],
    ) -> _Stream:
        """Stage ``k``'s part of ``rows``, and its outputs as a stream."""
        shift = self._stages[k].shift
        known = [_gap(seq) + shift for seq in seqs]
        first = [max(r.start, n) for r, n in zip(rows, known, strict=True)]
        at = [np.arange(f, r.stop) for f, r in zip(first, rows, strict=True)]
        runs = [
            _run(seq, f, len(a), shift) for seq, f, a in zip(seqs, first, at, strict=True) if len(a)
        ]
        source = None
        if stream is not None:
            index = [stream.index(i, a - self._lag(k)) for i, a in enumerate(at)]
            source = stream.values.index_select(0, self._tensor(np.concatenate(index)))
        if runs:
            tokens = np.concatenate([seq.buffer[a] for seq, a in zip(seqs, at, strict=True)])
            outputs = self._draft.forward(k, self._tensor(tokens), source, runs, self._pools)
        else:
            assert source is not None  # a row without a source is never missing
            outputs = source
        offset = np.cumsum([0, *map(len, at)]).tolist()
        return _Stream.of(outputs, before, first, offset[:-1], known)

    def _outputs_before(self, k: int, seqs: Seq[Sequence], olds: Seq[int]) -> list[Tensor]:
        """Stage ``k``'s outputs in the rows before a step's first, if the next stage reads them."""
        if [stage.source for stage in self._stages[k + 1 : k + 2]] != [Source.PREVIOUS]:
            return []
        found = self._carry(range(k + 1, k + 2), seqs, olds)
        for i, seq in enumerate(seqs):
            if seq.hidden is not None:  # the first row comes after the one at hand
                found[0][i] = seq.hidden.chunk(len(self._stages))[k]
        return found

    def _carry(self, stages: range, seqs: Seq[Sequence], ends: Seq[int]) -> list[Tensor]:
        """What the rows of tokens ``ends`` have for a source, by stage, ``[sequences, hidden]``.

        Where there is no such row it is anything.
        """
        if not stages:
            return []
        pages = [max(0, end - 1) // self._page_tokens for end in ends]
        slots = [max(0, self._table(seq)[page]) for seq, page in zip(seqs, pages, strict=True)]
        index = self._tensor(np.array(slots))
        return [self._pools[self._keeper]["carry"][k].index_select(0, index) for k in stages]

    def _keep_carry(self, k: int, stream: _Stream, done: Seq[Rebuild]) -> None:
        """Store the source of the row after each page's last final token, whole page or not."""
        size = self._page_tokens
        slots, index = [], []
        for i, d in enumerate(done):
            pages = np.arange(d.old // size, -(-d.seq.computed // size))
            ends = np.minimum((pages + 1) * size, d.seq.computed)
            slots.append(self._table(d.seq)[pages])
            index.append(stream.index(i, ends - self._lag(k)))
        values = stream.values.index_select(0, self._tensor(np.concatenate(index)))
        carry = self._pools[self._keeper]["carry"][k]
        carry.index_copy_(0, self._tensor(np.concatenate(slots)), values)

    def _clear(self, seqs: Seq[Sequence], rows: Seq[range]) -> None:
        """Zero the step's rows that may have no stage's keys and values."""
        shift, size = self._stages[-1].shift, self._page_tokens
        holes = [
            np.arange(r.start, min(r.stop, _gap(seq) + shift))
            for seq, r in zip(seqs, rows, strict=True)
        ]
        for name, pools in self._pools.items():
            index = [
                _lease(seq).slots(name)[at // size].astype(np.int64) * size + at % size
                for seq, at in zip(seqs, holes, strict=True)
            ]
            where = self._tensor(np.concatenate(index))
            for component, layers in pools.items():
                if component != "carry" and len(where):
                    for pool in layers:
                        pool.flatten(0, 1).index_fill_(0, where, 0)

    def _lag(self, k: int) -> int:
        """How far before a row's own token its source is, in the stream that feeds stage ``k``."""
        stage = self._stages[k]
        return 1 if stage.source is Source.PREVIOUS else stage.shift

    def _table(self, seq: Sequence) -> NDArray[np.int32]:
        return _lease(seq).slots(self._keeper)

    def _tensor(self, ids: NDArray[Any]) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self._device)


def _lease(seq: Sequence) -> Lease:
    assert seq.lease is not None
    return seq.lease


def _gap(seq: Sequence) -> int:
    """Leading tokens whose draft state is missing."""
    return seq.draft_from - 1


def _run(seq: Sequence, start: int, rows: int, shift: int) -> Run:
    return Run(_lease(seq), start, rows, first=min(_gap(seq) + shift, start))
