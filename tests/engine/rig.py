"""An engine that a test drives turn by turn, with access to every byte that a request holds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import xxhash
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvkeep.engine.build import OpenStore, open_store
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.core import Engine
from kvkeep.engine.messages import (
    Abort,
    Failed,
    Finished,
    Generate,
    Output,
    Reply,
    Sampling,
    TokenLogprobs,
)
from kvkeep.engine.request import RequestState
from kvkeep.engine.text import Detokenizer
from kvkeep.media.memory import Memory
from kvkeep.settings import make

DEMO = Path(str(resources.files("kvkeep.demo")))
PATIENCE = 240.0  # seconds until an unfinished request fails the test


class Pair(NamedTuple):
    """Directories of a target and of a draft for it."""

    target: Path
    draft: Path


DEMO_PAIR = Pair(DEMO / "pair" / "target", DEMO / "pair" / "draft")


@cache
def demo_prompts() -> dict[str, list[list[int]]]:
    prompts: dict[str, list[list[int]]] = json.loads((DEMO / "prompts.json").read_text())
    return prompts


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ordinary (not special) tokens of a tiny model."""
    return np.random.default_rng([length, seed]).integers(3, 128, length).tolist()


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer of 128 tokens: three special ones, ASCII characters, and single bytes."""
    vocabulary = {word: i for i, word in enumerate(("<pad>", "<s>", "</s>"))}
    for letter in map(chr, range(32, 127)):
        vocabulary[letter] = len(vocabulary)
    for byte in [*range(0x80, 0x97), 0x98, 0xA9, 0xAC, 0xC3, 0xE2, 0xF0, 0x9F]:
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    assert len(vocabulary) == 128
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<pad>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


State = dict[str, Tensor]  # "draft.k.0" -> rows in order of position; "draft.carry.0" -> pages


def _raw(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def same(a: State, b: State) -> bool:
    """Whether two states are bitwise equal."""
    assert a.keys() == b.keys()
    return all(torch.equal(_raw(a[name]), _raw(b[name])) for name in a)


def close(a: State, b: State, atol: float = 1e-5) -> None:
    """Assert that two states are equal up to rounding."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=1e-4, msg=name)


def part(state: State, first: int, last: int, page: int) -> State:
    """The part of ``state`` in pages ``[first, last)``."""
    return {
        name: rows[first:last] if ".carry." in name else rows[first * page : last * page]
        for name, rows in state.items()
    }


def digest(state: State) -> dict[str, int]:
    return {name: xxhash.xxh3_64_intdigest(_raw(rows).numpy()) for name, rows in state.items()}


@dataclass
class Answer:
    """The engine's replies to one request."""

    detokenizer: Detokenizer
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    hit: int = 0  # tokens of the prefix hit, as told with the first token
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | Failed | None = None
    steps: list[dict[str, int]] = field(default_factory=list)  # with watch: digests per step
    state: State = field(default_factory=dict)  # with watch: after the last step

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end

    @property
    def cached(self) -> Mapping[str, int]:
        return self.finished.usage.cached_tokens

    @property
    def proposals(self) -> list[list[int]]:
        assert self.finished.usage.proposals is not None
        return self.finished.usage.proposals


class Rig:
    """Runs an engine on the test's thread, so that runs are reproducible. A context manager.

    Args:
        pair: models to serve.
        draft: False: without the draft.
        store: opens the storage tier.
        watch: record digests of a request's state after each step.
        options: of :class:`~kvkeep.engine.config.EngineConfig`.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        draft: bool = True,
        store: OpenStore = open_store,
        watch: bool = False,
        **options: Any,
    ) -> None:
        options = {"prefetch_min_tokens": 0, "recompute": "never"} | options  # load every hit
        options = {"page_size": 16, "num_steps": 4, "device_tokens": 4096} | options
        self.config = make(
            EngineConfig, {"model": pair.target, "draft": pair.draft if draft else None} | options
        )
        self.engine = Engine(self.config, store)
        self.engine.listen(self._hear)
        self._backend = self.engine.tokenizer.backend_tokenizer
        self.answers: dict[str, Answer] = {}
        self.watch = watch
        self.on_output: Callable[[RequestState], None] = lambda _: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.close()

    def _hear(self, reply: Reply) -> None:
        answer = self.answers[reply.id]
        match reply:
            case Output():
                answer.tokens += reply.tokens
                answer.text += answer.detokenizer.push(reply.tokens[: reply.shown])[0]
                answer.hit += sum((reply.cached or {}).values())
                answer.logprobs += reply.logprobs or []
                answer.prompt_logprobs += reply.prompt_logprobs or []
                (seq,) = (seq for seq in self.engine.scheduler if seq.id == reply.id)
                self.on_output(seq)
                if self.watch:
                    answer.state = self.state(seq)
                    answer.steps.append(digest(answer.state))
            case Finished() | Failed():
                assert answer.end is None, f"request {reply.id} ended twice"
                answer.end = reply
                answer.text += answer.detokenizer.flush()

    def send(self, tokens: list[int], new: int = 16, **options: Any) -> str:
        """Send a request for ``new`` tokens; options of Sampling and Generate. Returns its id."""
        names = set(Sampling.__struct_fields__) & options.keys()
        sampling = {"temperature": 0.0, "max_tokens": new, "ignore_eos": True}
        sampling |= {name: options.pop(name) for name in names}
        options = {"report_proposals": True} | options
        name = f"r{len(self.answers)}"
        request = Generate(id=name, tokens=tokens, sampling=Sampling(**sampling), **options)
        self.answers[name] = Answer(Detokenizer(self._backend, request.sampling.stop))
        self.engine.send(request)
        return name

    def abort(self, name: str) -> None:
        """Abort a request. The engine does not reply, so its answer is marked as ended here."""
        self.engine.send(Abort(name))
        self.answers[name].end = self.answers[name].end or Failed(name, "Aborted", "")

    def turns(self) -> Iterator[int]:
        """Run the engine's turns until all requests have ended; yields after each."""
        end, turn = time.monotonic() + PATIENCE, 0
        while any(answer.end is None for answer in self.answers.values()):
            assert time.monotonic() < end, "a request did not end in time"
            self.engine.turn()
            yield turn
            turn += 1

    def run(self, *names: str) -> list[Answer]:
        """Run until all requests have ended; return the answers to ``names``."""
        for _ in self.turns():
            pass
        return [self.answers[name] for name in names]

    def ask(self, tokens: list[int], new: int = 16, **options: Any) -> Answer:
        """Send one request, run until all have ended, return its answer."""
        return self.run(self.send(tokens, new, **options))[0]

    def settle(self) -> None:
        """Tick until no transfer is pending; writes may wait if the circuit breaker is open."""
        cache = self.engine.cache
        assert cache.drain(PATIENCE) or cache.transfers.storage.breaker.open
        while not cache.idle:
            cache.tick()

    def evict(self, *tiers: str) -> None:
        self.settle()
        for tier in tiers:
            self.engine.cache.evict(tier)

    @property
    def pools(self) -> dict[str, dict[str, list[Tensor]]]:
        """Device pools by group and component."""
        media = self.engine.cache.media
        assert isinstance(media, Memory)
        return media.pools

    def state(self, seq: RequestState) -> State:
        """All computed state of a request, read through its block tables; carries are per page."""
        assert seq.lease is not None
        found = {}
        for group, components in self.pools.items():
            pages = -(-seq.computed // self.engine.info.page_tokens)
            slots = torch.from_numpy(seq.lease.slots(group)[:pages])
            for name, pools in components.items():
                for layer, pool in enumerate(pools):
                    kept = pool.index_select(0, slots)
                    rows = kept if name == "carry" else kept.flatten(0, 1)[: seq.computed]
                    found[f"{group}.{name}.{layer}"] = rows.clone()
        return found

    def figure(self, name: str) -> float:
        """A figure of the engine, summed over its labels."""
        figures = self.engine.figures()
        return sum(value for key, value in figures.items() if key.split("{")[0] == name)

    def check_idle(self) -> None:
        """Assert that the idle engine holds nothing: no lease, prefetch, pin or private slot."""
        self.engine.turn()  # handles the last aborts
        self.settle()
        cache = self.engine.cache
        cache.check()
        figures = self.engine.figures()
        assert figures["leases"] == figures["prefetches"] == 0
        assert figures["running_requests"] == figures["waiting_requests"] == 0
        assert figures.get("invariant_errors_total", 0) == 0
        table = cache.residency.table
        lines = (entries for line in cache._backup.lines for entries in line.entries)
        assert table.holds.sum() == sum(len(pages) for entries in lines for pages in entries)
        assert not table.pins.any()
        assert not table.dying.any()
        for tier in (cache.residency.device, cache.residency.host):
            for group in range(len(cache.schema.groups)):
                used = np.count_nonzero(table.state[tier.index, group])
                assert tier.private(group) == 0
                assert used + tier.free_slots(group) == tier.capacity[group]
