"""The engine: a thread that takes messages, runs steps and sends replies.

One thread decides and computes: it alone touches the scheduler, the cache and the models. No
request, and no failure of a step, ends it, and what fails fails the requests concerned only.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..schema import Closed, KvkeepError, LoadFailed, PromptTooLong, RequestError
from .build import OpenStore, build, open_store
from .config import EngineConfig
from .messages import (
    Abort,
    Ask,
    Done,
    Evict,
    Failed,
    Figures,
    Finished,
    Generate,
    ModelInfo,
    Output,
    Reply,
    Request,
)
from .request import RequestState
from .runner import Work
from .scheduler import Scheduler
from .text import Detokenizer

log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.05  # between ticks while nothing runs
_BUSY_SECONDS = 0.005  # while bytes are on their way, which wake us when they come
_PREFILL_TOKENS = 128  # fewer computed at once tell little of how fast prompts are computed


class Engine:
    """Serves one model. Build it, :meth:`listen`, :meth:`start`, :meth:`send`, :meth:`close`.

    Args:
        config: all settings.
        store: opens the storage tier.

    Raises:
        ConfigError: the settings cannot be served; raised at construction.
    """

    def __init__(self, config: EngineConfig, store: OpenStore = open_store) -> None:
        parts = build(config, store)
        self.info: ModelInfo = parts.info
        self.tokenizer: Any = parts.tokenizer
        self.cache = parts.cache  # this and the scheduler: the engine's thread only
        self.scheduler = Scheduler(
            parts.cache, config.chunked_prefill_size, config.max_running, parts.lookahead
        )
        self._target, self._runner = parts.target, parts.runner
        self._sequences: dict[str, tuple[RequestState, Detokenizer]] = {}
        self._seeds = random.Random(config.seed)
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # None: look around
        self.cache.listen(lambda: self._inbox.put(None))
        self._reply: Callable[[Reply], None] = lambda _: None
        self._stepped = False  # the last turn ran a step
        self._prefill = 0, 0.0  # tokens and seconds of steps of nothing else, since the last draw
        self._door = threading.Lock()  # a message comes in before ``_closing`` is set, or never
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)

    def listen(self, callback: Callable[[Reply], None]) -> None:
        """Have every reply from now on given to ``callback``, on the engine's thread; the last
        ones on the thread that closes it."""
        self._reply = callback

    def start(self) -> None:
        """Begin serving."""
        self._thread.start()

    def send(self, message: Request) -> None:
        """Hand over a message. Thread-safe, does not block.

        Raises:
            Closed: the engine was closed.
        """
        with self._door:
            if self._closing.is_set():
                raise Closed("the engine was closed")
            self._inbox.put(message)

    def close(self) -> None:
        """Fail what still runs, write back what storage has not got yet, and end. Idempotent."""
        with self._door:
            self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        closed = Closed("the engine was closed")
        self._fail_all(closed)
        while not self._inbox.empty():
            if message := self._inbox.get():
                self._refuse(message.id, closed)
        self.cache.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.turn()
            except Exception as error:  # whatever it was, others are still to be served
                log.exception("a turn failed")
                self._fail_all(error)

    def turn(self) -> None:
        """Take messages, tick the cache, run a step if there is one. The engine's thread only."""
        self._receive()
        self._stepped = False
        self.cache.tick()
        work = self.scheduler.schedule()
        if work:
            self._stepped = True
            self._step(work)

    def _step(self, work: list[Work]) -> None:
        before = [one.seq.computed for one in work]
        loading = any(one.seq.lease and one.seq.lease.arriving for one in work)
        prefill = not loading and not any(one.seq.decoding for one in work)
        began = time.monotonic()
        try:
            advances = self._runner.step(work)
        except LoadFailed as error:
            log.warning("a step of %d requests is taken again: %s", len(work), error)
            return
        except Exception as error:
            log.exception("a step of %d requests failed", len(work))
            for one in work:
                self._fail(one.seq.id, error)
            return
        now = time.monotonic()
        tokens = sum(one.chunk for one in work) if prefill else 0
        self._time_prefill(tokens, now - began, any(advance.tokens for advance in advances))
        for one, old, advance in zip(work, before, advances, strict=True):
            try:
                self._advance(one.seq, old, advance.tokens, now)
            except Exception as error:
                log.exception("a request failed after its step")
                self._fail(one.seq.id, error)

    def _time_prefill(self, tokens: int, seconds: float, drawn: bool) -> None:
        """Tell the cache how fast prompts are computed. A step computed so many ``tokens``, 0 if it
        did anything else; a device may be behind until it draws."""
        before = self._prefill if tokens else (0, 0.0)
        self._prefill = before[0] + tokens, before[1] + seconds
        if drawn and self._prefill[0] >= _PREFILL_TOKENS:
            self.cache.observe_prefill(*self._prefill)
        if drawn or not tokens:
            self._prefill = 0, 0.0

    def _advance(self, seq: RequestState, old: int, tokens: list[int], now: float) -> None:
        """A step took ``seq`` from ``old`` tokens to where it is now, and made new ``tokens``."""
        if tokens:
            self._emit(seq, tokens, now)
        self.scheduler.computed(seq, old)
        if seq.lease is not None:
            self.cache.commit(seq.lease, seq.tokens[: seq.computed], seq.snapshots)
            seq.snapshots = []
        if seq.finish is not None:
            self._finish(seq)

    def _receive(self) -> None:
        """Handle what has come in; wait a little if there is nothing else to do."""
        wait = _IDLE_SECONDS
        if self._stepped:
            wait = 0.0
        elif self._sequences or not self.cache.idle:
            wait = _BUSY_SECONDS
        try:
            while True:
                if message := self._inbox.get(block=wait > 0, timeout=wait or None):
                    self._handle(message)
                wait = 0.0
        except queue.Empty:
            return

    def _handle(self, message: Request) -> None:
        try:
            match message:
                case Generate():
                    self._accept(message)
                case Abort():
                    if message.id in self._sequences:
                        self._drop(message.id)
                case Evict():
                    self._reply(Done(message.id, self.cache.evict(message.tier)))
                case Ask():
                    self._reply(Figures(message.id, self.figures()))
        except Exception as error:
            if not isinstance(error, KvkeepError):
                log.exception("a message could not be handled")
            self._refuse(message.id, error)

    def _accept(self, request: Generate) -> None:
        """Check a request at the door and put it in line."""
        room = self.info.context_length - len(request.tokens)
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is in use")
        if not request.tokens:
            raise RequestError("the prompt is empty: it needs at least one token")
        if not 0 <= request.priority <= 255:
            raise RequestError(f"priority must be from 0 to 255, not {request.priority}")
        if min(request.tokens) < 0 or max(request.tokens) >= self.info.vocab_size:
            raise RequestError(f"token ids must be in [0, {self.info.vocab_size})")
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(request.tokens)} tokens; with one to generate, at most "
                f"{self.info.context_length} fit"
            )
        sampling = request.sampling
        fitting = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        request = msgspec.structs.replace(request, sampling=fitting)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        seq = RequestState.of(request, seed)
        detokenizer = Detokenizer(self.tokenizer.backend_tokenizer, sampling.stop)
        self.scheduler.add(seq)
        self._sequences[request.id] = seq, detokenizer

    def _emit(self, seq: RequestState, tokens: list[int], now: float) -> None:
        """Report new tokens up to the end, if one is among them; what is past it is forgotten."""
        detokenizer = self._sequences[seq.id][1]
        seq.times.first_token = seq.times.first_token or now
        seq.times.last_token = now
        kept = self._until_end_token(seq, tokens)
        shown = kept if seq.finish is None else kept - 1  # an end token is no text
        text, stopped = detokenizer.push(tokens[:shown])
        if stopped is not None:
            kept, seq.finish = stopped, "stop"
        seq.cut(len(tokens) - kept)
        if seq.finish is None and seq.to_generate <= 0:
            seq.finish = "length"
        if seq.finish is not None and stopped is None:
            text += detokenizer.flush()
        self._reply(Output(seq.id, tokens[:kept], text))

    def _until_end_token(self, seq: RequestState, tokens: list[int]) -> int:
        """How many of ``tokens`` come before the end, an end token included."""
        sampling = seq.request.sampling
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._target.eos_ids
        for count, token in enumerate(tokens, 1):
            if token in ends:
                seq.finish = "stop"
                return count
        return len(tokens)

    def _finish(self, seq: RequestState) -> None:
        self._drop(seq.id)
        self._reply(Finished(seq.id, seq.finish or "stop", seq.usage()))

    def _drop(self, name: str) -> None:
        seq, _ = self._sequences.pop(name)
        self.scheduler.remove(seq)

    def _fail_all(self, error: Exception) -> None:
        """End every request with ``error``, and keep nothing of them."""
        for name in list(self._sequences):
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        try:
            self._drop(name)
        except Exception:  # bookkeeping that is wrong already; the others still get an answer
            log.exception("a request could not be dropped cleanly")
        self._refuse(name, error)

    def _refuse(self, name: str, error: Exception) -> None:
        self._reply(Failed(name, type(error).__name__, str(error)))

    def figures(self) -> dict[str, float]:
        """Counters and gauges of the cache and the scheduler. The engine's thread only."""
        figures = self.cache.figures() | dict(self.scheduler.counts)
        figures["running_requests"] = len(self.scheduler.running)
        figures["waiting_requests"] = len(self.scheduler.waiting)
        return figures
