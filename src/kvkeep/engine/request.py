"""State of one request while the engine serves it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core.lease import Explanation, Lease, Prefetch
from ..core.pages import Retention
from .messages import Generate, TokenLogprobs, Usage

if TYPE_CHECKING:  # imports torch, which settings and servers need not
    from .processors import Processors


@dataclass(slots=True)
class Times:
    """Timestamps of one request, in seconds of ``time.monotonic``. 0: not yet."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0  # first step under the first lease
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True, eq=False)
class RequestState:
    """One request's tokens and how far they are computed. Engine's thread only.

    ::

        0              computed            length            computed = length - 1: decoding
        |  KV is final  |  known, to run    |

    Draft KV rows cover ``[draft_from, computed)``. Once ``hidden`` is set they also include row
    ``computed``: row i needs only token i and the target's features of the tokens before it.
    """

    request: Generate
    seed: int
    prompt_length: int
    buffer: NDArray[np.int32]  # capacity >= length; grows by doubling
    length: int  # known tokens: the prompt and all accepted ones
    retention: Retention  # of its pages
    computed: int = 0  # tokens whose target KV and draft rows are final
    draft_from: int = 1  # first draft row that attention may read, for a stage with shift 1
    hidden: Any = None  # draft outputs [stages * hidden] of row ``computed``; set by the runner
    warm: bool = False  # working slots hold the state after ``computed`` tokens; set by the runner
    snapshots: list[int] = field(default_factory=list)  # page indices snapshotted since a commit
    lease: Lease | None = None  # while running
    prefetch: Prefetch | None = None  # while waiting
    processors: Processors | None = None  # of its logits
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from its second token on
    finish: str | None = None  # why it ended: "stop" or "length"
    started: bool = False  # a step has completed under this lease
    most_computed: int = 0  # high-water mark of ``computed``; less than that again is a recompute
    explanation: Explanation | None = None  # of the first lease
    preemptions: int = 0
    rounds: int = 0  # speculative rounds
    emitted_in_rounds: int = 0  # tokens that those rounds accepted, bonus tokens included
    proposals: list[list[int]] = field(default_factory=list)
    times: Times = field(default_factory=Times)

    @classmethod
    def of(cls, request: Generate, seed: int) -> RequestState:
        """A new sequence whose sampling noise is seeded with ``seed``.

        Raises:
            RequestError: its priority or ttl is out of range.
        """
        tokens = np.array(request.tokens, dtype=np.int32)
        ttl = math.inf if request.ttl is None else request.ttl
        retention = Retention(request.priority, ttl, keep=not request.no_store)
        return cls(request, seed, len(tokens), tokens, len(tokens), retention)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 ``[length]``: the prompt and accepted tokens. A view; do not write to it."""
        return self.buffer[: self.length]

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt."""
        return self.length - self.prompt_length

    @property
    def to_generate(self) -> int:
        """Tokens left until ``max_tokens``."""
        return self.request.sampling.max_tokens - self.generated

    @property
    def decoding(self) -> bool:
        """True if only the last token has no KV yet, and it is a generated one."""
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
        """Drop the last ``count`` tokens, which follow a stop condition."""
        self.length -= count
        self.computed = min(self.computed, self.length)

    def usage(self) -> Usage:
        """The request's usage so far."""
        t, seen = self.times, self.explanation or Explanation()
        return Usage(
            prompt_tokens=self.prompt_length,
            completion_tokens=self.generated,
            cached_tokens={"device": 0, "host": 0, "storage": 0} | seen.tokens,
            limited_by=seen.limited_by,
            skipped_tokens=seen.skipped,
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
