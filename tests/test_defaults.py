"""kvkeep.server.defaults: what the model's files say about requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeTokenizer

from kvkeep.engine.client import EngineClient
from kvkeep.engine.config import EngineConfig
from kvkeep.schema import ConfigError
from kvkeep.server.app import create_app
from kvkeep.server.config import ApiConfig, ServerConfig
from kvkeep.server.defaults import sampling_defaults
from kvkeep.server.run import serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


def model(directory: Path, text: str) -> Path:
    (directory / "generation_config.json").write_text(text)
    return directory


class TestSampling:
    SAID = json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 3})

    @pytest.mark.anyio
    @pytest.mark.parametrize(
        ("choice", "body", "expected"),
        [
            ("model", {}, (0.6, 0.95, 20)),
            ("model", {"temperature": None, "top_k": None}, (0.6, 0.95, 20)),
            ("model", {"temperature": 1.0, "top_k": -1}, (1.0, 0.95, -1)),
            ("openai", {}, (1.0, 1.0, -1)),
            ("openai", {"top_p": 0.5}, (1.0, 0.5, -1)),
        ],
    )
    async def test_a_request_that_names_none_gets_the_model_s(
        self, engine: FakeEngine, tmp_path: Path, choice: str, body: Any, expected: Any
    ) -> None:
        config = ServerConfig(
            api=ApiConfig(sampling_defaults=choice),
            engine=EngineConfig(model=model(tmp_path, self.SAID)),
        )
        app = create_app(EngineClient(engine), FakeTokenizer(), config)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as http:
            for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [HELLO]})):
                assert (await http.post(path, json=body | prompt)).status_code == 200
            info = (await http.get("/model_info")).json()
        for request in engine.generates():
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected
        said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20} if choice == "model" else None
        assert info["preferred_sampling_params"] == said

    def test_what_a_file_may_say(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert sampling_defaults(tmp_path) == {}
        said = {"top_k": 0, "temperature": None, "length_penalty": 2}
        assert sampling_defaults(model(tmp_path, json.dumps(said))) == {"top_k": -1}
        assert not caplog.records

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"top_p": 2}', '{"temperature": "hot"}', '{"top_k": [1]}']
    )
    def test_what_it_may_not(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match="--sampling-defaults openai ignores it"):
            sampling_defaults(model(tmp_path, text))


HELLO = {"role": "user", "content": "hello"}


class TestTemplate:
    def test_a_file_replaces_the_model_s(self, engine: FakeEngine, tmp_path: Path) -> None:
        file = tmp_path / "chat.jinja"
        file.write_text("{{ messages }}", encoding="utf-8")
        config = ServerConfig(
            api=ApiConfig(chat_template=file), engine=EngineConfig(model=tmp_path)
        )
        tokenizer = FakeTokenizer(chat_template=None)
        create_app(EngineClient(engine), tokenizer, config)
        assert tokenizer.chat_template == "{{ messages }}"

    def test_what_is_none(self, engine: FakeEngine, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"\xff")
        for file in (tmp_path, tmp_path / "x", tmp_path / "absent"):
            config = ServerConfig(
                api=ApiConfig(chat_template=file), engine=EngineConfig(model=tmp_path)
            )
            with pytest.raises(ConfigError, match=f"--chat-template {file} cannot be read"):
                create_app(EngineClient(engine), FakeTokenizer(), config)
            (tmp_path / "config.json").write_text("{}")
            with pytest.raises(ConfigError, match=f"--chat-template {file} cannot be read"):
                serve(config)  # without loading the model
