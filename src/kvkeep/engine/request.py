"""A request while it is being served."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.lease import Explanation, Lease, Prefetch
from .messages import Generate, Usage


@dataclass(slots=True)
class Times:
    """When things happened, in monotonic seconds."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0  # first granted a lease
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True, eq=False)
class RequestState:
    """One request's tokens and how far they are computed. Owned by the scheduler's thread.

    ::

        0              computed            length            computed = length - 1: decoding
        |  KV is final  |  known, to run    |

    Draft rows cover ``[draft_from, computed)``, and row ``computed`` too once ``hidden`` is set:
    row i needs only token i and what the target made of tokens before.
    """

    request: Generate
    seed: int
    prompt_length: int
    buffer: NDArray[np.int32]  # capacity >= length; grows by doubling
    length: int  # known tokens: prompt and accepted
    computed: int = 0  # tokens whose target KV and draft rows are final
    draft_from: int = 1  # first draft row that may be attended to, of a stage that is shifted by 1
    hidden: Any = None  # draft outputs [stages * hidden] in row ``computed``; the runner's
    warm: bool = False  # working slots hold the state after ``computed`` tokens; the runner's
    snapshots: list[int] = field(default_factory=list)  # pages, since the last commit
    lease: Lease | None = None
    prefetch: Prefetch | None = None
    finish: str | None = None  # why it ended: "stop" or "length"
    started: bool = False  # computing has begun under this lease
    reached: int = 0  # the most tokens ever computed; computing one again is a recompute
    explanation: Explanation | None = None  # of the first lease
    preemptions: int = 0
    rounds: int = 0  # verify rounds
    emitted_in_rounds: int = 0  # tokens that those rounds produced
    proposals: list[list[int]] = field(default_factory=list)
    times: Times = field(default_factory=Times)

    @classmethod
    def of(cls, request: Generate, seed: int) -> RequestState:
        """A new sequence; ``seed`` is what its noise is drawn from."""
        tokens = np.array(request.tokens, dtype=np.int32)
        return cls(request, seed, len(tokens), tokens, len(tokens))

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tokens(self) -> NDArray[np.int32]:
        """``[length]`` int32: prompt and accepted tokens. A view; do not write."""
        return self.buffer[: self.length]

    @property
    def generated(self) -> int:
        """Tokens beyond the prompt."""
        return self.length - self.prompt_length

    @property
    def to_generate(self) -> int:
        """Tokens that may still come."""
        return self.request.sampling.max_tokens - self.generated

    @property
    def decoding(self) -> bool:
        """Only the last known token has no KV yet, and it was generated."""
        return self.computed == self.length - 1 and self.length > self.prompt_length

    def extend(self, tokens: list[int]) -> None:
        """Append accepted tokens."""
        end = self.length + len(tokens)
        if end > len(self.buffer):
            grown = np.empty(max(2 * len(self.buffer), end), dtype=np.int32)
            grown[: self.length] = self.tokens
            self.buffer = grown
        self.buffer[self.length : end] = tokens
        self.length = end

    def cut(self, count: int) -> None:
        """Forget the last ``count`` tokens: they came after the end."""
        self.length -= count
        self.computed = min(self.computed, self.length)

    def usage(self) -> Usage:
        """What it cost so far."""
        t, seen = self.times, self.explanation or Explanation()
        return Usage(
            prompt_tokens=self.prompt_length,
            completion_tokens=self.generated,
            cached_tokens={"device": 0, "host": 0, "storage": 0} | seen.tokens,
            limited_by=seen.limited_by,
            loaded_bytes=seen.loaded_bytes,
            load_ms=seen.load_ms,
            wait_ms=1e3 * max(0.0, t.scheduled - t.arrived),
            ttft_ms=1e3 * max(0.0, t.first_token - t.arrived),
            decode_ms=1e3 * (t.last_token - t.first_token),
            verify_steps=self.rounds,
            accept_length=self.emitted_in_rounds / self.rounds if self.rounds else None,
            proposals=self.proposals if self.request.report_proposals else None,
            preemptions=self.preemptions,
        )
