"""Everything that crosses the line between a front end and the engine.

Plain data on both sides, so that the engine may be a thread today and a process tomorrow.
A front end sends :data:`Request` messages and gets :data:`Reply` messages; every reply carries
the ``id`` of the request it answers.
"""

from __future__ import annotations

import math

import msgspec

from ..schema import RequestError


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when to stop. Checked at construction.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = -1  # -1: all
    seed: int | None = None  # any 64-bit integer; None: the engine draws one
    max_tokens: int = 16  # of new tokens, at least 1
    stop: tuple[str, ...] = ()  # strings that end the text; not part of it
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False  # go on past the model's end tokens

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 1e3):
            raise RequestError(f"temperature must be a number from 0 on, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 1 and self.top_k != -1:
            raise RequestError(f"top_k must be at least 1, or -1 for all, not {self.top_k}")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if any(not s for s in self.stop):
            raise RequestError("a stop string must not be empty")


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Continue a prompt."""

    id: str
    tokens: list[int]  # the prompt; not empty, each in [0, vocab_size)
    sampling: Sampling
    namespace: str = ""  # root of the prefix tree: tenant salt, adapter, ...
    priority: int = 0  # 0 to 255; pages of the lowest go first where eviction is by priority
    speculate: bool = True  # False: no draft model for this request
    report_proposals: bool = False  # return every draft proposal in Finished


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a request and free its pages. Unknown or finished ids are fine. No reply."""

    id: str


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Empty a memory tier of everything unpinned. Answered by :class:`Done`."""

    id: str
    tier: str  # "device" or "host"


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Ask for the engine's figures. Answered by :class:`Figures`."""

    id: str


Request = Generate | Abort | Evict | Ask


class Output(msgspec.Struct, frozen=True, tag=True):
    """Some new tokens of a request, in order."""

    id: str
    tokens: list[int]
    text: str  # may be empty while bytes of a character or a possible stop string are held back


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one request cost, and where its prefix came from."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: dict[str, int]  # by tier: "device", "host", "storage"
    limited_by: str | None = None  # the group that kept the hit from being longer, if one did
    loaded_bytes: int = 0  # moved up for this request ...
    load_ms: float = 0.0  # ... in so long, from host to device
    wait_ms: float = 0.0  # from arrival to scheduling
    ttft_ms: float = 0.0  # from arrival to the first token
    decode_ms: float = 0.0  # from the first token to the last
    verify_steps: int = 0  # rounds of draft and verify
    accept_length: float | None = None  # mean tokens per round, bonus included; None: no rounds
    proposals: list[list[int]] | None = None  # per round, when asked for
    preemptions: int = 0


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last message of a request."""

    id: str
    reason: str  # "stop", "length", "abort"
    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request could not be served. ``kind`` is the error's class name."""

    id: str
    kind: str
    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """An administrative request was carried out."""

    id: str
    count: int = 0


class Figures(msgspec.Struct, frozen=True, tag=True):
    """Metrics by name. A name may carry Prometheus labels: ``evictions{tier=host}``.

    Names that end in ``_total`` are counters, all others gauges."""

    id: str
    values: dict[str, float]


Reply = Output | Finished | Failed | Done | Figures


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end must know of the model that the engine serves."""

    name: str
    context_length: int  # prompt and new tokens together
    vocab_size: int
    page_tokens: int
    draft: str | None  # name of the draft model, if there is one
    pools: dict[str, int]  # tokens, or running states, that each group holds in each memory tier
