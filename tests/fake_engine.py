"""An engine without a model: it says the prompt again, on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from kvkeep.engine.messages import (
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
    TokenLogprobs,
    Usage,
)
from kvkeep.schema import Closed, KvkeepError

VOCAB = 128


class FakeTokenizer:
    """One token per ASCII character; the last token stands for all others."""

    split_special_tokens = False

    def __init__(self, chat_template: str | None = "plain") -> None:
        self.chat_template = chat_template
        vocabulary = {chr(token): token for token in range(VOCAB)}
        self.backend_tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(VOCAB - 1)))
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        self.backend_tokenizer.decoder = decoders.Fuse()

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: str,
    ) -> str:
        assert not tokenize
        if conversation[0]["role"] == "nobody":
            raise ValueError("unknown role")
        turns = [f"<{turn['role']}>{turn['content']}" for turn in conversation]
        return "".join([*turns, *variables.values(), "<assistant>" * add_generation_prompt])


def guess(token: int, top: int) -> TokenLogprobs:
    """Log-probabilities by token: -0.5 and so on; the next tokens are as likely."""
    return TokenLogprobs(-token / 128, [(token + i, -(token + i) / 128) for i in range(top)])


@dataclass
class FakeEngine:
    """Answers like an engine, one token per request and step, and notes what it was sent."""

    step_seconds: float = 0.0
    held: bool = False  # takes messages, and takes no step
    failure: tuple[str, str] | None = None  # kind and message, for every request ...
    fail_after: int = 0  # ... after so many tokens
    script: str | None = None  # what it says instead of the prompt, then stops
    stride: int = 1  # tokens per step of the script
    info: ModelInfo = field(
        default_factory=lambda: ModelInfo(
            name="fake",
            context_length=64,
            vocab_size=VOCAB,
            page_tokens=8,
            draft="fake-draft",
            pools={"device": 512, "host": 1024},
        )
    )
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    lost: KvkeepError | None = None
    restarts: int = 0
    received: list[Request] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._running: dict[str, tuple[Generate, int]] = {}
        self._callback: Callable[[Reply], None] = lambda reply: None
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: Request) -> None:
        if self._closed:
            raise Closed("the engine is closed")
        self.received.append(message)
        self._inbox.put(message)

    def listen(self, callback: Callable[[Reply], None]) -> None:
        self._callback = callback

    def start(self) -> None:
        """Its thread runs already."""

    def close(self, timeout: float = 30.0) -> None:
        self._closed = True
        self._inbox.put(None)
        self._thread.join()

    def aborted(self, seconds: float = 60.0) -> bool:
        """Whether an Abort arrived and everything has stopped, now or soon."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(isinstance(m, Abort) for m in self.received) and not self._running:
                return True
            time.sleep(0.005)
        return False

    def generates(self) -> list[Generate]:
        return [message for message in self.received if isinstance(message, Generate)]

    def _run(self) -> None:
        while True:
            while self.held or not (self._inbox.empty() and self._running):
                message = self._inbox.get()
                if message is None:
                    return
                self._take(message)
            time.sleep(self.step_seconds)
            self.steps += 1
            for name in list(self._running):
                self._step(name)

    def _take(self, message: Request) -> None:
        match message:
            case Generate():
                self._running[message.id] = (message, 0)
            case Abort():
                self._running.pop(message.id, None)
            case Evict():
                self._callback(Done(message.id, count=7))
            case Ask():
                values = {"hits_total{tier=host}": 3.0, "hits_total{tier=device}": 4.0, "load": 0.5}
                values["running"] = float(len(self._running))
                self._callback(Figures(message.id, values))

    def _step(self, name: str) -> None:
        request, done = self._running[name]
        if self.failure and done >= self.fail_after:
            del self._running[name]
            self._callback(Failed(name, *self.failure))
            return
        if self.script is not None:
            self._say(name, request, self.script)
            return
        token = request.tokens[done % len(request.tokens)]
        top = request.sampling.logprobs
        found = None if top is None else [guess(token, top)]
        prompt = None
        if request.prompt_logprobs and not done:
            prompt = [guess(each, top or 0) for each in request.tokens[1:]]
        hit = None if done else {"device": 2, "host": 1, "storage": 0}
        self._callback(Output(name, [token], 1, found, prompt, cached=hit))
        self._running[name] = (request, done + 1)
        if done + 1 == request.sampling.max_tokens:
            del self._running[name]
            usage = Usage(
                prompt_tokens=len(request.tokens),
                completion_tokens=done + 1,
                cached_tokens={"device": 2, "host": 1, "storage": 0},
                limited_by="draft",
                verify_steps=2,
                accept_length=1.5,
                proposals=[[1, 2]] if request.report_proposals else None,
            )
            self._callback(Finished(name, "length", usage))

    def _say(self, name: str, request: Generate, script: str) -> None:
        done = self._running[name][1]
        end = min(done + self.stride, len(script), request.sampling.max_tokens)
        tokens = [min(ord(letter), VOCAB - 1) for letter in script[done:end]]
        self._running[name] = (request, end)
        self._callback(Output(name, tokens, len(tokens)))
        if end in (len(script), request.sampling.max_tokens):
            del self._running[name]
            usage = Usage(
                prompt_tokens=len(request.tokens), completion_tokens=end, cached_tokens={"host": 8}
            )
            self._callback(Finished(name, "stop" if end == len(script) else "length", usage))
