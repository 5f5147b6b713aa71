"""kvkeep.server.tokens and kvkeep.server.prompts: text to tokens in threads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from fake_engine import VOCAB, FakeEngine
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

import kvkeep.demo
from kvkeep.engine.client import EngineClient
from kvkeep.models.tokenizer import load_tokenizer
from kvkeep.schema import PromptTooLong, RequestError
from kvkeep.server.app import create_app
from kvkeep.server.tokens import _LONG, Texts

DEMO = Path(kvkeep.demo.__file__).parent / "pair/target"
CORPUS = [
    "The quick brown fox, 1234 times. ",
    "def f(x):\n    return x  # naïve\n",
    "日本語 Δ\t",
] * 9
SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
TEXTS = [
    *CORPUS, " leading and trailing ", "a", "\n\n  \n", "<s>user</s> <s>", "x<mask>  y",
    "é e\u0301", "\U0001f642\u200d", "\x00\x7f", "Once, 98765 upon" * 50,
]  # fmt: skip


def byte_level(template: bool) -> Tokenizer:
    """As of GPT-2, Llama-3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    if template:
        begin = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[begin])
    return tokenizer


def metaspace() -> Tokenizer:
    """As of Llama-2 and Mistral: spaces are letters, unknown characters become bytes."""
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    letters = {letter: 256 + n for n, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz<>?")}
    tokenizer = Tokenizer(
        models.BPE({**fallback, **letters}, [], unk_token="?", byte_fallback=True, fuse_unk=True)
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)  # type: ignore[arg-type]
    tokenizer.add_special_tokens([*SPECIAL, AddedToken("<mask>", lstrip=True, rstrip=True)])
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[begin])
    return tokenizer


def word_piece() -> Tokenizer:
    """As of BERT: its normalizer drops characters."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram_with_limits() -> Tokenizer:
    """Its file says to cut and to pad: neither is for prompts."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=70, special_tokens=["<unk>", "<pad>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=1, pad_token="<pad>", length=16)
    return tokenizer


FAMILIES: dict[str, tuple[Tokenizer, dict[str, Any]]] = {
    "byte-level": (byte_level(template=False), {}),
    "byte-level-bos": (byte_level(template=True), {"bos_token": "<s>"}),
    "qwen": (byte_level(template=False), {"tokenizer_class": "Qwen2Tokenizer"}),
    "llama": (metaspace(), {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
    "metaspace": (metaspace(), {"bos_token": "<s>"}),
    "split-special": (metaspace(), {"split_special_tokens": True}),
    "wordpiece": (word_piece(), {}),
    "unigram-with-limits": (unigram_with_limits(), {}),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_tokens_are_those_of_transformers(tmp_path: Path, family: str, special: bool) -> None:
    directory = DEMO
    if family != "demo":
        backend, config = FAMILIES[family]
        directory = tmp_path
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = load_tokenizer(directory)
    ours = Texts(load_tokenizer(directory), context_length=10_000)
    for text in TEXTS:
        tokens = ours.encode(text, special)
        assert tokens == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(tokens) == theirs.decode(tokens, clean_up_tokenization_spaces=False)


@dataclass
class FakeBackend:
    """One token per ASCII character. Notes what it encodes, and can be made to wait."""

    encoded: list[str] = field(default_factory=list)
    gates: dict[int, threading.Event] = field(default_factory=dict)  # by length of a text
    encode_special_tokens: bool = False

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def get_vocab(self) -> dict[str, int]:
        return {"xx": VOCAB - 1} | {chr(token): token for token in range(VOCAB - 1)}

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        for text in texts:
            self.encoded.append(text)
            if gate := self.gates.get(len(text)):
                gate.wait(60)
        return [SimpleNamespace(ids=[min(ord(x), VOCAB - 1) for x in text]) for text in texts]


class FakeTokenizer:
    """A chat template that is the first message, on a :class:`FakeBackend`."""

    split_special_tokens = False
    chat_template = "plain"

    def __init__(self) -> None:
        self.backend_tokenizer = FakeBackend()

    def apply_chat_template(self, turns: list[dict[str, str]], **options: Any) -> str:
        return turns[0]["content"]


class TestSize:
    """The longest token of the fake vocabulary has two characters."""

    def test_what_no_context_holds_is_not_encoded(self) -> None:
        tokenizer = FakeTokenizer()
        texts = Texts(tokenizer, context_length=10)
        assert len(texts.encode("x" * 20, special=True)) == 20
        with pytest.raises(PromptTooLong, match=r"21 characters; .* length is 10 tokens, .* 20$"):
            texts.encode("x" * 21, special=True)
        assert tokenizer.backend_tokenizer.encoded == ["x" * 20]

    def test_text_that_is_none(self) -> None:
        texts = Texts(FakeTokenizer(), context_length=10)
        for text, message in (("", "empty"), ("\ud800", "Unicode")):
            with pytest.raises(RequestError, match=message):
                texts.encode(text, special=True)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


class TestTurns:
    """Who waits for whom."""

    pytestmark = pytest.mark.anyio

    LONG = "x" * _LONG

    @pytest.fixture
    def tokenizer(self) -> Iterator[FakeTokenizer]:
        tokenizer = FakeTokenizer()
        yield tokenizer
        for gate in tokenizer.backend_tokenizer.gates.values():
            gate.set()

    async def encoding(self, tokenizer: FakeTokenizer, text: str) -> None:
        """Wait until ``text`` is being encoded."""
        with anyio.fail_after(60):
            while text not in tokenizer.backend_tokenizer.encoded:
                await asyncio.sleep(0.001)

    async def test_short_texts_do_not_wait_for_long_ones(self, tokenizer: FakeTokenizer) -> None:
        gate = tokenizer.backend_tokenizer.gates[_LONG] = threading.Event()
        texts = Texts(tokenizer, context_length=_LONG)
        long = [
            asyncio.create_task(texts.run(lambda: texts.encode(self.LONG, special=False), _LONG))
            for _ in range(9)
        ]
        await self.encoding(tokenizer, self.LONG)
        short = [texts.run(lambda: texts.encode("ab", special=False), 2) for _ in range(99)]
        assert await asyncio.gather(*short) == [[97, 98]] * 99
        assert not any(task.done() for task in long)
        gate.set()
        assert [len(tokens) for tokens in await asyncio.gather(*long)] == [_LONG] * 9

    @pytest.mark.parametrize("chat", [False, True])
    async def test_texts_of_clients_that_are_gone_are_not_encoded(
        self, engine: FakeEngine, tokenizer: FakeTokenizer, chat: bool
    ) -> None:
        backend = tokenizer.backend_tokenizer
        gate = backend.gates[len("busy")] = threading.Event()
        app = create_app(EngineClient(engine), tokenizer)
        body: dict[str, Any] = {"prompt": "left"}
        path = "/v1/completions"
        if chat:
            path, body = "/v1/chat/completions", {"messages": [{"role": "a", "content": "left"}]}

        async def ask(body: Any, path: str, leave: asyncio.Event) -> None:
            """Send a request, and disconnect when told to."""
            messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

            async def receive() -> Any:
                if message := next(messages, None):
                    return message
                await leave.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None: ...

            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
            await app({**scope, "query_string": b""}, receive, send)

        leave, stay = asyncio.Event(), asyncio.Event()
        busy = [
            asyncio.create_task(ask({"prompt": "busy"}, "/v1/completions", stay)) for _ in range(2)
        ]
        with anyio.fail_after(60):
            while backend.encoded != ["busy"] * 2:
                await asyncio.sleep(0.001)
            left = asyncio.create_task(ask(body, path, leave))
            await asyncio.sleep(0.05)  # so that it is in line
            leave.set()
            await left
            gate.set()
            await asyncio.gather(*busy)
        assert backend.encoded == ["busy"] * 2
        assert [request.tokens for request in engine.generates()] == [[*b"busy"]] * 2


@pytest.fixture
async def http(engine: FakeEngine, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(EngineClient(engine), FakeTokenizer())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as client:
        yield client


@pytest.mark.anyio
@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_that_is_too_long_is_told_by_its_characters(
    http: httpx.AsyncClient, engine: FakeEngine, chat: bool
) -> None:
    text = "x" * 129  # the context is 64
    body: dict[str, Any] = {"prompt": text}
    if chat:
        body = {"messages": [{"role": "user", "content": text}]}
    answer = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "characters" in error["message"]
    assert not engine.received
