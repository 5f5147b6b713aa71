"""One step of the engine: propose, run the target, sample, accept, rebuild draft rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..models.drafts.interface import Draft
from ..models.passes import Pools, Run
from ..models.target.model import Target
from .messages import TokenLogprobs
from .request import RequestState
from .rows import Rows
from .sampling import Draw, sample
from .speculation import Chain, Rebuild, Speculator
from .states import Ran, RunningStates


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: run its known tokens ``[computed, computed + chunk)``."""

    seq: RequestState
    chunk: int  # tokens; at least 1, at most length - computed
    max_new: int | None = None  # most tokens that the step may add, at least 1; None: no limit

    @property
    def draws(self) -> bool:
        """The chunk ends with the last known token, so the step samples at least one new token."""
        return self.seq.computed + self.chunk == self.seq.length


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step did for one sequence."""

    tokens: list[int]  # newly accepted; empty if the chunk did not reach the last known token
    proposals: list[int] | None  # the draft's chain; None: the draft proposed nothing
    logprobs: list[TokenLogprobs] | None  # of ``tokens``; None: not requested


class Runner:
    """Runs a target, and a draft if there is one, over device pools. The engine's thread only.

    Args:
        pools: by group name; each :data:`~kvkeep.models.passes.Pools`, on the target's device.
        num_steps: the longest draft chain, in tokens.

    A step writes target rows up to position ``length + proposals - 1`` and draft rows up to
    ``length + proposals``, so a lease must cover one token more than the step verifies.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        pools: Mapping[str, Pools],
        page_tokens: int,
        num_steps: int,
    ) -> None:
        self._target = target
        self._pools = pools
        self._states = RunningStates(target, pools, page_tokens)
        self._num_steps = num_steps
        self._speculator: Speculator | None = None
        if draft is not None:
            target.capture(draft.aux_layers)
            self._speculator = Speculator(draft, pools, page_tokens, target.device)

    @torch.inference_mode()
    def step(self, work: Sequence[Work]) -> list[Advance]:
        """Run ``work`` and update its sequences: tokens, ``computed``, ``hidden``, counters.

        The target runs prefill chunks, single tokens and rows to verify in one batch.

        Args:
            work: at least one; no two of the same sequence.
        """
        for one in work:
            self._states.start(one.seq)
        proposals = self._propose(work)
        tokens, runs, draws = [], [], []
        for one, chain in zip(work, proposals, strict=True):
            seq = one.seq
            assert seq.lease is not None
            known = seq.buffer[seq.computed : seq.computed + one.chunk]
            tokens.append(np.concatenate((known, chain or ())).astype(np.int64))
            drawn = 1 + len(chain or ()) if one.draws else 0
            draws.append(
                [Draw(seq.request.sampling, seq.seed, seq.length + i) for i in range(drawn)]
            )
            keep = len(tokens[-1]) if seq.request.prompt_logprobs else drawn
            runs.append(Run(seq.lease, seq.computed, len(tokens[-1]), keep))
        packed = torch.from_numpy(np.concatenate(tokens)).to(self._target.device)
        logits, features = self._target.forward(packed, runs, self._pools)
        for arrival in (arrival for run in runs for arrival in run.tables.arriving):
            arrival.wait()  # before any sequence changes: if a load failed, the step runs again
        kept = torch.split(logits, [run.keep for run in runs])
        rows = [
            Rows.of(one.seq, chain or (), part, len(mine))
            for one, chain, part, mine in zip(work, proposals, kept, draws, strict=True)
        ]
        if any(len(part) > len(mine) for part, mine in zip(kept, draws, strict=True)):
            logits = torch.cat([one.processed for one in rows])
        tokens_drawn = iter(sample(logits, [draw for mine in draws for draw in mine]).tolist())
        advances, rebuilds, ran = [], [], []
        offset = 0
        for one, chain, run, drawn_from in zip(work, proposals, runs, rows, strict=True):
            seq = one.seq
            new = _accept(chain or [], tokens_drawn) if one.draws else []
            rebuilds.append(Rebuild(seq, seq.computed, offset, one.draws))
            seq.computed += one.chunk + max(len(new) - 1, 0)
            seq.extend(new)
            if seq.processors is not None:
                seq.processors.accept(new)
            if chain is not None:
                seq.rounds += 1
                seq.emitted_in_rounds += len(new)
                if seq.request.report_proposals:
                    seq.proposals.append(chain)
            advances.append(Advance(new, chain, drawn_from.logprobs(new)))
            offset += run.rows
            ran.append(Ran(seq, run.start, run.rows))
        self._states.settle(ran)
        if self._speculator is not None:
            self._speculator.rebuild(rebuilds, features)
        return advances

    def _propose(self, work: Sequence[Work]) -> list[list[int] | None]:
        """The draft's chain for each sequence that decodes and wants one, else None."""
        proposals: list[list[int] | None] = [None] * len(work)
        if self._speculator is None:
            return proposals
        chains: dict[int, Chain] = {}
        for i, one in enumerate(work):
            seq = one.seq
            steps = self._num_steps
            if one.max_new is not None:
                steps = min(steps, one.max_new - 1)
            wanted = seq.request.speculate and seq.decoding and seq.hidden is not None
            if wanted and steps > 0:
                chains[i] = Chain(seq, steps)
        if chains:
            found = self._speculator.propose(list(chains.values()))
            for i, chain in zip(chains, found, strict=True):
                proposals[i] = chain
        return proposals


def _accept(chain: list[int], drawn: Iterator[int]) -> list[int]:
    """The longest prefix of ``chain`` that equals the target's draws, and the draw after it.

    It consumes ``len(chain) + 1`` draws.
    """
    draws = [next(drawn) for _ in range(len(chain) + 1)]
    matches = next((i for i, token in enumerate(chain) if token != draws[i]), len(chain))
    return draws[: matches + 1]
