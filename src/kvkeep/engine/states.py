"""The running state of each sequence: restored from a snapshot, advanced by accepted tokens.

::

    position   start         cut           computed         start + rows
                |  accepted   |  accepted     |   rejected    |     a pass ran all of it

If every row of a pass was accepted, the state after the pass becomes the running state. Otherwise
the running state is still the one from before the pass, and the accepted tokens run again: up to
each cut, where a snapshot is taken, and then to ``computed``. Only recurrent layers need this; for
other models it does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..models.passes import Pools, Run
from ..models.target.model import Target
from ..schema import InvariantError
from .request import RequestState


class Ran(NamedTuple):
    """The rows that a pass ran of a sequence; those before ``seq.computed`` were accepted."""

    seq: RequestState
    start: int
    rows: int


class RunningStates:
    """Copies state between working slots and the snapshots in pages. The engine's thread only."""

    def __init__(self, target: Target, pools: Mapping[str, Pools], page_tokens: int) -> None:
        self._target = target
        self._pools = pools
        self._page_tokens = page_tokens
        self._groups = [group.name for group in target.groups(page_tokens) if group.working]

    def start(self, seq: RequestState) -> None:
        """Under a new lease, set the running state: the hit's snapshot, or zeros without a hit.

        Raises:
            InvariantError: the hit has no snapshot.
        """
        if seq.warm:
            return
        assert seq.lease is not None
        if self._groups:
            for arrival in seq.lease.arriving:
                arrival.wait()
        seq.warm = True
        for group in self._groups:
            working = int(seq.lease.working(group)[0])
            if seq.computed:
                snapshot = int(seq.lease.slots(group)[seq.computed // self._page_tokens - 1])
                if snapshot < 0:
                    raise InvariantError(f"a hit of {seq.computed} tokens without their {group}")
                self._copy(group, snapshot, working)
            else:
                for tensors in self._pools[group].values():
                    for pool in tensors:
                        pool[working] = 0

    def settle(self, ran: Sequence[Ran]) -> None:
        """After a pass of the target, advance running states by the accepted tokens."""
        if not self._groups:
            return
        whole, again = [], []
        for i, one in enumerate(ran):
            stops = self._stops(one)
            if stops == [one.start + one.rows]:
                whole.append(i)
            else:
                again.append((one.seq, [one.start, *stops]))
        self._target.store(whole)
        for i in whole:
            self._snapshot(ran[i].seq, ran[i].seq.computed)
        while again:
            self._run([(seq, stops[0], stops[1]) for seq, stops in again])
            again = [(seq, stops[1:]) for seq, stops in again if len(stops) > 2]

    def _stops(self, ran: Ran) -> list[int]:
        """Positions where the running state is needed: each cut on the way, and the end."""
        seq = ran.seq
        assert seq.lease is not None
        return [*(c for c in seq.lease.cuts if ran.start < c < seq.computed), seq.computed]

    def _run(self, parts: list[tuple[RequestState, int, int]]) -> None:
        """Advance running states over accepted tokens ``[start, end)`` of each sequence."""
        runs = []
        for seq, start, end in parts:
            assert seq.lease is not None
            runs.append(Run(seq.lease, start, end - start))
        tokens = np.concatenate([seq.tokens[start:end] for seq, start, end in parts])
        packed = torch.from_numpy(tokens.astype(np.int64)).to(self._target.device)
        self._target.forward(packed, runs, self._pools)
        self._target.store(range(len(runs)))
        for seq, _, end in parts:
            self._snapshot(seq, end)

    def _snapshot(self, seq: RequestState, at: int) -> None:
        """If ``at`` is a cut whose page has a slot, copy the running state there."""
        assert seq.lease is not None
        if at not in seq.lease.cuts:
            return
        page = at // self._page_tokens - 1
        for group in self._groups:
            slot, working = int(seq.lease.slots(group)[page]), int(seq.lease.working(group)[0])
            if slot >= 0:
                self._copy(group, working, slot)
                seq.snapshots.append(page)

    def _copy(self, group: str, source: int, target: int) -> None:
        for tensors in self._pools[group].values():
            for pool in tensors:
                pool[target] = pool[source]
