"""Draft chains before a step's target pass, true draft rows after it.

::

    position   old                 old + chunk      new
                |  chunk (known)       | accepted    |        target rows run: [old, new)
                |                                    |
        rows  old (unless there)  ...   new - 1     new       draft rows rebuilt, of every stage
     sources  carry of old - 1    ...   feature of new - 1    row ``new`` only if token ``new``
                                                              was just drawn

The source of a step's first row always lies in the ``carry`` of the page of token old - 1: each
step leaves there what the row of token new will need. So a chunk that goes on where the last one
ended and a hit that goes on where another request left are the same case.

Draft state may be missing for a gap of first tokens; a cold start has an empty one. A stage's rows
begin ``shift`` tokens after it; those that would lie before are zero and never seen. After a gap
that is not empty, rows are a function of the prefix only as far as no attention took part in them:
keys and values of the first decoder layer of a stage that reads the target. The cache keeps what
follows a gap private to its request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.lease import Lease
from ..models.drafts.interface import Draft, Source, Stage
from ..models.passes import Pools, Run
from ..schema import UnsupportedModel
from .draft_state import DraftState, SourceValues, on
from .request import RequestState


@dataclass(frozen=True, slots=True)
class Chain:
    """Proposals wanted for a sequence; its ``hidden`` state predicts the next token."""

    seq: RequestState
    steps: int  # at least 1


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What one sequence's step has made final. ``seq.computed`` is the new count."""

    seq: RequestState
    old: int  # ``seq.computed`` before the step
    offset: int  # of row ``old`` in the step's packed target rows
    drawn: bool  # token ``seq.computed`` was drawn in this step


class Speculator:
    """Runs a draft network over the pools of its groups. Engine's thread only.

    Raises:
        UnsupportedModel: the draft's stages break the rules of
            :class:`~kvkeep.models.drafts.interface.Draft`.
    """

    def __init__(
        self, draft: Draft, pools: Mapping[str, Pools], page_tokens: int, device: torch.device
    ) -> None:
        self._draft, self._stages, self._device = draft, draft.stages, device
        mine = {group.name: pools[group.name] for group in draft.groups(page_tokens)}
        self._state = DraftState(mine, page_tokens, device)
        self._fed = sum(stage.source is Source.TARGET for stage in self._stages)
        kinds = [Source.TARGET] * max(self._fed, 1) + [Source.PREVIOUS] * len(self._stages)
        fed = tuple(Stage(k + 1, kinds[k]) for k in range(len(self._stages)))
        if self._stages not in (fed, (Stage(0, Source.NOTHING),)):
            raise UnsupportedModel(f"draft stages {self._stages}")

    def propose(self, chains: Sequence[Chain]) -> list[list[int]]:
        """Greedy chains for all sequences at once, ``steps`` tokens each, in the given order.

        Writes speculative rows at positions ``[length, length + steps - 1)``.
        """
        order = sorted(range(len(chains)), key=lambda i: -chains[i].steps)  # the living: a prefix
        found: list[list[int]] = [[] for _ in chains]
        seqs = [chains[i].seq for i in order]
        leases, ends = [_lease(seq) for seq in seqs], [seq.computed for seq in seqs]
        states = [*torch.stack([seq.hidden for seq in seqs]).chunk(len(self._stages), -1)]
        past = [self._state.carry(k, leases, ends) for k in range(self._fed - 1)]
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

    def rebuild(self, done: Sequence[Rebuild], features: Tensor | None) -> None:
        """Write draft rows from true features, ``carry`` and each sequence's ``hidden``.

        Args:
            done: one per sequence of the step; tokens and ``computed`` are already updated.
            features: of the step's packed target rows, for ``Draft.fuse``; None: nobody reads any.
        """
        seqs, olds = [d.seq for d in done], [d.old for d in done]
        leases, gaps = [_lease(seq) for seq in seqs], [_gap(seq) for seq in seqs]
        final = [range(d.old, d.seq.computed) for d in done]
        rows = [range(d.old + (d.seq.hidden is not None), d.seq.computed + d.drawn) for d in done]
        most = self._stages[-1].shift
        holes = [range(r.start, min(r.stop, gap + most)) for r, gap in zip(rows, gaps, strict=True)]
        self._state.clear(leases, holes)  # of some stages; the others' rows are written below
        streams: list[SourceValues | None] = [None]  # the target's, then each stage's
        if features is not None:
            fused = self._draft.fuse(features)
            before = [self._state.carry(k, leases, olds) for k in range(self._fed)]
            streams = [SourceValues.of(fused, before, olds, [d.offset for d in done], gaps)]
        states = []
        drawn = [(i, np.array([d.seq.computed])) for i, d in enumerate(done) if d.drawn]
        for k, stage in enumerate(self._stages):
            stream = streams[k if stage.source is Source.PREVIOUS else 0]
            before = self._outputs_before(k, seqs, olds)
            if stream is not None:
                self._state.keep(k, stage.lag, stream, leases, final)
            outputs = self._run(k, stream, before, seqs, rows)
            states.append(outputs.take(drawn))
            streams.append(outputs)
        for seq in seqs:
            seq.hidden = None
        for (i, _), state in zip(drawn, torch.cat(states, -1), strict=True):
            seqs[i].hidden = state

    def _extend(
        self,
        seqs: Sequence[RequestState],
        step: int,
        tokens: Tensor,
        states: Sequence[Tensor],
        past: Sequence[Tensor],
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
            found[k] = self._draft.forward(k, tokens, source, runs, self._state.pools)
        return found

    def _run(
        self,
        k: int,
        stream: SourceValues | None,
        before: Sequence[Tensor],
        seqs: Sequence[RequestState],
        rows: Sequence[range],
    ) -> SourceValues:
        """Stage ``k``'s part of ``rows``, and its outputs as a stream."""
        shift, lag = self._stages[k].shift, self._stages[k].lag
        known = [_gap(seq) + shift for seq in seqs]
        first = [max(r.start, n) for r, n in zip(rows, known, strict=True)]
        at = [np.arange(f, r.stop) for f, r in zip(first, rows, strict=True)]
        source = None if stream is None else stream.take((i, a - lag) for i, a in enumerate(at))
        runs = [
            _run(seq, f, len(a), shift) for seq, f, a in zip(seqs, first, at, strict=True) if len(a)
        ]
        if runs:
            known_tokens = [seq.buffer[a] for seq, a in zip(seqs, at, strict=True)]
            tokens = on(self._device, np.concatenate(known_tokens))
            outputs = self._draft.forward(k, tokens, source, runs, self._state.pools)
        else:
            assert source is not None  # rows that nothing feeds are never missing
            outputs = source
        offset = np.cumsum([0, *map(len, at)]).tolist()
        return SourceValues.of(outputs, before, first, offset[:-1], known)

    def _outputs_before(
        self, k: int, seqs: Sequence[RequestState], olds: Sequence[int]
    ) -> list[Tensor]:
        """Stage ``k``'s outputs in the rows before a step's first, if the next stage reads them."""
        if [stage.source for stage in self._stages[k + 1 : k + 2]] != [Source.PREVIOUS]:
            return []
        found = self._state.carry(k + 1, [_lease(seq) for seq in seqs], olds)
        for i, seq in enumerate(seqs):
            if seq.hidden is not None:  # the first row comes after the one at hand
                found[i] = seq.hidden.chunk(len(self._stages))[k]
        return [found]


def _lease(seq: RequestState) -> Lease:
    assert seq.lease is not None
    return seq.lease


def _gap(seq: RequestState) -> int:
    """Leading tokens whose draft state is missing."""
    return seq.draft_from - 1


def _run(seq: RequestState, start: int, rows: int, shift: int) -> Run:
    """Rows of a stage. One that stands in for a missing row sees itself, and is not seen."""
    return Run(_lease(seq), start, rows, first=min(_gap(seq) + shift, start))
