"""Speculative decoding: draft chains before the target's pass, true draft rows after it.

::

    position   old                 old + chunk      new
                |  chunk (known)       | accepted    |        target rows run: [old, new)
                |                                    |
        rows  old (unless there)  ...   new - 1     new       draft rows rebuilt, of every stage
     sources  carry of old - 1    ...   feature of new - 1    row ``new`` only if token ``new``
                                                              was just drawn

The source of a step's first row is always in the ``carry`` of the page of token old - 1, because
each step stores there the source of row new. So continuing the previous chunk and continuing from
a hit on another request's pages are the same case.

Draft state may be missing for the first tokens of a sequence: the *gap*, empty at a cold start. A
stage's rows begin ``shift`` tokens after the gap; earlier rows are zero and never attended to.
After a gap that is not empty, rows depend on more than their prefix as soon as attention takes part
in them; only keys and values of the first decoder layer of a stage that reads the target do not.
So the cache keeps rows after a gap private to their request.
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
    """A request for proposals; the sequence's ``hidden`` state predicts its next token."""

    seq: RequestState
    steps: int  # tokens to propose, at least 1


@dataclass(frozen=True, slots=True)
class Rebuild:
    """The tokens ``[old, seq.computed)`` of a sequence, which a step has made final."""

    seq: RequestState
    old: int  # ``seq.computed`` before the step
    offset: int  # index of row ``old`` in the step's packed target rows
    drawn: bool  # this step sampled token ``seq.computed``


class Speculator:
    """Runs a draft network over the pools of its groups. The engine's thread only.

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
        """Propose a greedy chain of ``steps`` tokens for every sequence, in the given order.

        This writes speculative rows at positions ``[length, length + steps - 1)``.
        """
        order = sorted(range(len(chains)), key=lambda i: -chains[i].steps)  # unfinished come first
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
        """Write draft rows from the target's features; update ``carry`` and ``hidden``.

        Args:
            done: one per sequence of the step; tokens and ``computed`` are already updated.
            features: of the step's packed target rows, for ``Draft.fuse``; None: the draft reads
                none.
        """
        seqs, olds = [d.seq for d in done], [d.old for d in done]
        leases, gaps = [_lease(seq) for seq in seqs], [_gap(seq) for seq in seqs]
        final = [range(d.old, d.seq.computed) for d in done]
        rows = [range(d.old + (d.seq.hidden is not None), d.seq.computed + d.drawn) for d in done]
        most = self._stages[-1].shift
        holes = [range(r.start, min(r.stop, gap + most)) for r, gap in zip(rows, gaps, strict=True)]
        self._state.clear(leases, holes)  # stages with rows here overwrite the zeros below
        sources: list[SourceValues | None] = [None]  # the target's, then each stage's
        if features is not None:
            fused = self._draft.fuse(features)
            before = [self._state.carry(k, leases, olds) for k in range(self._fed)]
            sources = [SourceValues.of(fused, before, olds, [d.offset for d in done], gaps)]
        states = []
        drawn = [(i, np.array([d.seq.computed])) for i, d in enumerate(done) if d.drawn]
        for k, stage in enumerate(self._stages):
            values = sources[k if stage.source is Source.PREVIOUS else 0]
            before = self._outputs_before(k, seqs, olds)
            if values is not None:
                self._state.keep(k, stage.lag, values, leases, final)
            outputs = self._run(k, values, before, seqs, rows)
            states.append(outputs.take(drawn))
            sources.append(outputs)
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
        """Run speculative rows at positions ``length + step``, of all stages needed from here on.

        Args:
            tokens: ``[sequences]``, just proposed.
            states: each stage's outputs in the previous rows, ``[sequences, hidden]``.
            past: features of the last token that the target has seen, of the token before it, ...

        Returns:
            Each stage's outputs in these rows.
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
        values: SourceValues | None,
        before: Sequence[Tensor],
        seqs: Sequence[RequestState],
        rows: Sequence[range],
    ) -> SourceValues:
        """Run stage ``k``'s part of ``rows``; return its outputs as a source for the next stage."""
        shift, lag = self._stages[k].shift, self._stages[k].lag
        known = [_gap(seq) + shift for seq in seqs]
        first = [max(r.start, n) for r, n in zip(rows, known, strict=True)]
        at = [np.arange(f, r.stop) for f, r in zip(first, rows, strict=True)]
        source = None if values is None else values.take((i, a - lag) for i, a in enumerate(at))
        runs = [
            _run(seq, f, len(a), shift) for seq, f, a in zip(seqs, first, at, strict=True) if len(a)
        ]
        if runs:
            known_tokens = [seq.buffer[a] for seq, a in zip(seqs, at, strict=True)]
            tokens = on(self._device, np.concatenate(known_tokens))
            outputs = self._draft.forward(k, tokens, source, runs, self._state.pools)
        else:
            assert source is not None  # a stage whose source is NOTHING always has rows
            outputs = source
        offset = np.cumsum([0, *map(len, at)]).tolist()
        return SourceValues.of(outputs, before, first, offset[:-1], known)

    def _outputs_before(
        self, k: int, seqs: Sequence[RequestState], olds: Sequence[int]
    ) -> list[Tensor]:
        """Stage ``k``'s outputs in the rows before this step, if the next stage reads them."""
        if [stage.source for stage in self._stages[k + 1 : k + 2]] != [Source.PREVIOUS]:
            return []
        found = self._state.carry(k + 1, [_lease(seq) for seq in seqs], olds)
        for i, seq in enumerate(seqs):
            if seq.hidden is not None:  # it is the output in the row before the first
                found[i] = seq.hidden.chunk(len(self._stages))[k]
        return [found]


def _lease(seq: RequestState) -> Lease:
    assert seq.lease is not None
    return seq.lease


def _gap(seq: RequestState) -> int:
    """Number of leading tokens whose draft state is missing."""
    return seq.draft_from - 1


def _run(seq: RequestState, start: int, rows: int, shift: int) -> Run:
    """Rows of a stage. A row inside the gap attends to itself, and no other row attends to it."""
    return Run(_lease(seq), start, rows, first=min(_gap(seq) + shift, start))
