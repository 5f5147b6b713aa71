"""The engine: a thread that receives messages, runs steps and sends replies.

Only this thread touches the scheduler, the cache and the models. A failing request or step fails
the requests involved and nothing else; the thread goes on serving.
"""

from __future__ import annotations

import heapq
import itertools
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
from .errors import DeadlineExceeded, Overloaded
from .fault_log import FaultLog
from .grammar import Grammars
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
    Sampling,
)
from .processors import Processors
from .request import RequestState
from .runner import Advance, Work
from .scheduler import Scheduler
from .text import Detokenizer
from .waiting import WaitingLine

log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.05  # longest wait between ticks while no request is known
_BUSY_SECONDS = 0.005  # ... while transfers are in flight; one that lands ends the wait
_MESSAGES = 32  # handled before each step, besides those that overtake others
_PREFILL_TOKENS = 128  # shorter prefills are not representative of prefill speed


class Engine:
    """Serves one model: construct, :meth:`listen`, :meth:`start`, :meth:`send`, :meth:`close`.

    Construction loads the models and allocates the pools. From :meth:`start` on, the engine's own
    thread runs everything; :meth:`send` and :meth:`close` may be called from other threads. Without
    :meth:`start`, a caller may run :meth:`turn` itself.

    Args:
        config: all settings.
        store: opens the storage tier.

    Raises:
        ConfigError: the models cannot be loaded, or the settings do not fit them or the memory.
    """

    lost, restarts = None, 0  # an engine on a thread lives as long as its process

    def __init__(self, config: EngineConfig, store: OpenStore = open_store) -> None:
        parts = build(config, store)
        self.info: ModelInfo = parts.info
        self.tokenizer: Any = parts.tokenizer
        self.cache = parts.cache  # cache and scheduler: engine's thread only
        self.scheduler = Scheduler(
            parts.cache,
            config.chunked_prefill_size,
            config.max_running,
            parts.lookahead,
            WaitingLine(config.schedule_policy, config.schedule_patience),
        )
        self._max_queued = config.max_queued
        self._fault_log = FaultLog()
        self._deadlines: list[tuple[float, str]] = []  # a heap: monotonic seconds, request id
        self._target, self._runner = parts.target, parts.runner
        # with a detokenizer if the request has stop strings
        self._sequences: dict[str, tuple[RequestState, Detokenizer | None]] = {}
        self._seeds = random.Random(config.seed)
        self._grammars = Grammars(parts.tokenizer, parts.info.vocab_size)
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # None: just wake up
        self._arrived: dict[str, Request] = {}  # by id: taken from the inbox, not handled yet
        self.cache.listen(lambda: self._inbox.put(None))
        self._reply: Callable[[Reply], None] = lambda _: None
        self._stepped = False  # the last turn ran a step
        self._prefill = 0, 0.0  # tokens, seconds of prefill-only steps since a token was sampled
        self._send_lock = threading.Lock()  # no message enters the inbox after ``_closing`` is set
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)

    def listen(self, callback: Callable[[Reply], None]) -> None:
        """Call ``callback`` with every reply from now on.

        It runs on the engine's thread; for requests that :meth:`close` fails, on the thread that
        called :meth:`close`.
        """
        self._reply = callback

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def send(self, message: Request) -> None:
        """Queue a message for the engine. Thread-safe, does not block.

        Raises:
            Closed: the engine was closed.
        """
        with self._send_lock:
            if self._closing.is_set():
                raise Closed("the engine was closed")
            self._inbox.put(message)

    def close(self, timeout: float = 30.0) -> None:
        """Stop the thread, fail all requests with :class:`Closed`, and close the cache. Idempotent.

        Closing the cache writes pages that storage does not have yet, for what is left of
        ``timeout`` seconds after the step that runs.
        """
        end = time.monotonic() + timeout
        with self._send_lock:
            self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        closed = Closed("the engine was closed")
        self._fail_all(closed)
        self._sort()
        while self._arrived:
            self._refuse(self._arrived.popitem()[0], closed)
        self.cache.close(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.turn()
            except Exception as error:  # keep serving later requests
                log.exception("a turn of the engine failed; failing all its requests")
                self._fail_all(error)

    def turn(self) -> None:
        """Handle messages, tick the cache, run one step if anything is ready.

        Engine's thread only. Waits up to 50 ms for a message if there is nothing to compute.
        """
        self._receive()
        self._expire()
        self._stepped = False
        self.cache.tick()
        self._say_faults()
        work = self.scheduler.schedule()
        if work:
            self._stepped = True
            self._step(work)

    def _say_faults(self) -> None:
        if (now := time.monotonic()) >= self._fault_log.due:
            self._fault_log.look(self.cache.figures(), now)

    def _step(self, work: list[Work]) -> None:
        before = [one.seq.computed for one in work]
        loading = any(one.seq.lease and one.seq.lease.arriving for one in work)
        prefill = not loading and not any(one.seq.decoding for one in work)
        began = time.monotonic()
        try:
            advances = self._runner.step(work)
        except LoadFailed as error:
            log.warning("retrying a step of %d requests: %s", len(work), error)
            return
        except Exception as error:
            log.exception("a step failed; failing its %d requests", len(work))
            for one in work:
                self._fail(one.seq.id, error)
            return
        now = time.monotonic()
        tokens = sum(one.chunk for one in work) if prefill else 0
        self._time_prefill(tokens, now - began, any(advance.tokens for advance in advances))
        for one, old, advance in zip(work, before, advances, strict=True):
            try:
                self._advance(one.seq, old, advance, now)
            except Exception as error:
                log.exception("request %s failed after its step", one.seq.id)
                self._fail(one.seq.id, error)

    def _time_prefill(self, tokens: int, seconds: float, drawn: bool) -> None:
        """Measure prefill speed and report it to the cache, for its load-or-recompute decision.

        Args:
            tokens: prefilled by the step; 0 if it also decoded or waited for a load.
            seconds: wall time of the step.
            drawn: the step sampled a token. Only then has an asynchronous device caught up, so
                chunks of a prompt are summed until it happens.
        """
        before = self._prefill if tokens else (0, 0.0)
        self._prefill = before[0] + tokens, before[1] + seconds
        if drawn and self._prefill[0] >= _PREFILL_TOKENS:
            self.cache.observe_prefill(*self._prefill)
        if drawn or not tokens:
            self._prefill = 0, 0.0

    def _advance(self, seq: RequestState, old: int, advance: Advance, now: float) -> None:
        """Emit and commit what a step did; it computed from ``old`` tokens on."""
        if advance.tokens:
            self._emit(seq, advance, now)
        self.scheduler.computed(seq, old)
        if seq.lease is not None:
            self.cache.commit(seq.lease, seq.tokens[: seq.computed], seq.snapshots)
            seq.snapshots = []
        if seq.finish is not None:
            self._finish(seq)

    def _receive(self) -> None:
        """Handle queued messages, some per turn, so that a flood of them holds up no step.

        Questions and aborts overtake others: a question is answered in its turn, and a request
        whose abort has come costs nothing. Waits briefly if there is nothing to compute."""
        wait = _IDLE_SECONDS
        if self._stepped or self._arrived:
            wait = 0.0
        elif self._sequences or not self.cache.idle:
            wait = _BUSY_SECONDS
        self._sort(wait)
        for name in list(itertools.islice(self._arrived, _MESSAGES)):
            self._handle(self._arrived.pop(name))

    def _sort(self, wait: float = 0.0) -> None:
        """Take what is in the inbox, after up to ``wait`` seconds; handle what overtakes others."""
        try:
            for _ in range(max(1, self._inbox.qsize())):
                message = self._inbox.get(block=wait > 0, timeout=wait or None)
                wait = 0.0
                match message:
                    case None:
                        pass
                    case Ask():
                        self._handle(message)
                    case Abort() if message.id in self._arrived:
                        del self._arrived[message.id]
                    case Abort():
                        self._handle(message)
                    case _ if message.id in self._arrived:
                        self._refuse(message.id, RequestError(f"id {message.id!r} is in use"))
                    case _:
                        self._arrived[message.id] = message
        except queue.Empty:
            return

    def _expire(self) -> None:
        """Fail requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, name = heapq.heappop(self._deadlines)
            if name in self._sequences:
                self._fail(name, DeadlineExceeded("the request's deadline has passed"))

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
                log.exception("could not handle message %s", message.id)
            self._refuse(message.id, error)

    def _accept(self, request: Generate) -> None:
        """Validate a request and add it to the waiting queue."""
        room = self.info.context_length - len(request.tokens)
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is in use")
        if len(self.scheduler.waiting) >= self._max_queued:
            raise Overloaded(f"{self._max_queued} requests wait already; try again later")
        if not request.tokens:
            raise RequestError("the prompt is empty; it needs at least one token")
        if min(request.tokens) < 0 or max(request.tokens) >= self.info.vocab_size:
            raise RequestError(f"token ids must be in [0, {self.info.vocab_size})")
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(request.tokens)} tokens; the context of "
                f"{self.info.context_length} must hold it and at least one new token"
            )
        sampling = request.sampling
        fitting = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        request = msgspec.structs.replace(request, sampling=fitting)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        for token in (*sampling.logit_bias, *sampling.stop_token_ids):
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(f"token ids must be in [0, {self.info.vocab_size}), not {token}")
        seq = RequestState.of(request, seed)
        seq.processors = self._processors(sampling, seq)
        stop, backend = sampling.stop, self.tokenizer.backend_tokenizer
        detokenizer = Detokenizer(backend, stop, sampling.spelled) if stop else None
        self.scheduler.add(seq)
        self._sequences[request.id] = seq, detokenizer
        if request.deadline_seconds is not None:
            heapq.heappush(
                self._deadlines, (seq.times.arrived + request.deadline_seconds, request.id)
            )

    def _emit(self, seq: RequestState, advance: Advance, now: float) -> None:
        """Reply with new tokens, up to the first stop condition; drop the tokens after it."""
        detokenizer, tokens = self._sequences[seq.id][1], advance.tokens
        opening = not seq.times.first_token
        seq.times.first_token = seq.times.first_token or now
        seq.times.last_token = now
        kept = self._until_end_token(seq, tokens)
        shown = kept if seq.finish is None else kept - 1  # a stop token is not part of the text
        stopped = detokenizer.push(tokens[:shown])[1] if detokenizer else None
        if stopped is not None:
            kept = shown = stopped
            seq.finish = "stop"
        seq.cut(len(tokens) - kept)
        if seq.finish is None and seq.to_generate <= 0:
            seq.finish = "length"
        self._reply(
            Output(
                seq.id,
                tokens[:kept],
                shown,
                advance.logprobs and advance.logprobs[:kept],
                seq.prompt_logprobs if opening and seq.request.prompt_logprobs else None,
                seq.usage().cached_tokens if opening else None,
            )
        )

    def _until_end_token(self, seq: RequestState, tokens: list[int]) -> int:
        """Number of ``tokens`` up to the first stop token, inclusive. Sets ``seq.finish``."""
        sampling = seq.request.sampling
        ends = self._ends(sampling)
        for count, token in enumerate(tokens, 1):
            if token in ends:
                seq.finish = "stop"
                return count
        return len(tokens)

    def _ends(self, sampling: Sampling) -> set[int]:
        """Tokens that end a request."""
        ends = set(sampling.stop_token_ids)
        return ends if sampling.ignore_eos else ends | self._target.eos_ids

    def _processors(self, sampling: Sampling, seq: RequestState) -> Processors | None:
        """Raises RequestError if the request's grammar cannot be used."""
        if not sampling.processed:
            return None
        matcher = self._grammars.matcher(sampling.grammar) if sampling.grammar else None
        return Processors(sampling, seq.tokens, self._ends(sampling), matcher)

    def _finish(self, seq: RequestState) -> None:
        self._drop(seq.id)
        self._reply(Finished(seq.id, seq.finish or "stop", seq.usage()))

    def _drop(self, name: str) -> None:
        seq, _ = self._sequences.pop(name)
        self.scheduler.remove(seq)

    def _fail_all(self, error: Exception) -> None:
        """Fail every request with ``error`` and release what it holds."""
        for name in list(self._sequences):
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        try:
            self._drop(name)
        except Exception:  # other requests must still get their reply
            log.exception("could not release request %s cleanly", name)
        self._refuse(name, error)

    def _refuse(self, name: str, error: Exception) -> None:
        self._reply(Failed(name, type(error).__name__, str(error)))

    def figures(self) -> dict[str, float]:
        """Counters and gauges of the cache and the scheduler, by name. Engine's thread only."""
        figures = self.cache.figures() | dict(self.scheduler.counts)
        figures["running_requests"] = len(self.scheduler.running)
        figures["waiting_requests"] = len(self.scheduler.waiting)
        return figures
