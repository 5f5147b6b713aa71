"""kvkeep.engine.link and kvkeep.engine.child, with engines that have no model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeTokenizer
from processes import ended
from remote_engines import MAKE

from kvkeep import logs
from kvkeep.engine import link
from kvkeep.engine.client import EngineClient, Piece
from kvkeep.engine.errors import EngineDied
from kvkeep.engine.link import RemoteEngine
from kvkeep.engine.messages import (
    Abort,
    Ask,
    Evict,
    Failed,
    Finished,
    Generate,
    Output,
    Reply,
    Sampling,
)
from kvkeep.schema import Closed, ConfigError, DraftMismatch, RequestError, UnsupportedModel
from kvkeep.server.app import create_app

Start = Callable[..., RemoteEngine]


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where links make their directories."""
    directory = tmp_path / "sockets"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def start(tmp_path: Path, sockets: Path) -> Iterator[Start]:
    """Starts remote engines, with options of FakeEngine; ends them."""
    with contextlib.ExitStack() as stack:

        def started(**options: Any) -> RemoteEngine:
            engine = RemoteEngine({"home": tmp_path} | options, FakeTokenizer, make=MAKE)
            stack.callback(engine.close, 0.0)
            engine.start()
            return engine

        yield started


def ask(name: str, tokens: list[int], limit: int = 4) -> Generate:
    return Generate(id=name, tokens=tokens, sampling=Sampling(max_tokens=limit))


def hear(engine: RemoteEngine, count: int) -> tuple[list[Reply], threading.Event]:
    """Replies from now on, and an event that is set when ``count`` requests have ended."""
    heard: list[Reply] = []
    last: list[Reply] = []
    ended = threading.Event()

    def listen(reply: Reply) -> None:
        heard.append(reply)
        if not isinstance(reply, Output):
            last.append(reply)
        if len(last) == count:
            ended.set()

    engine.listen(listen)
    return heard, ended


async def restarted(client: EngineClient) -> None:
    """Wait until another process serves."""
    while True:
        try:
            await client.figures()
        except EngineDied:
            await asyncio.sleep(0.02)
        else:
            return


class TestMessages:
    @pytest.mark.anyio
    async def test_an_engine_elsewhere_answers_like_one_here(self, start: Start) -> None:
        engine = start()
        client = EngineClient(engine)
        assert client.info.name == "fake"
        *pieces, end = [one async for one in client.generate(ask("a", [97, 98]))]
        hit = {"device": 2, "host": 1, "storage": 0}
        cached = [hit, None, None, None]  # in the first output
        assert pieces == [
            Piece("a", [97 + i % 2], 1, cached=cached[i], text="ab"[i % 2]) for i in range(4)
        ]
        assert isinstance(end, Finished)
        assert end.usage.completion_tokens == 4
        assert await client.evict("host") == 7

    @pytest.mark.anyio
    async def test_its_process_imports_only_what_it_needs_and_freezes_it(
        self, start: Start
    ) -> None:
        figures = await EngineClient(start()).figures()
        assert figures["heavy"] == 0
        assert figures["frozen"] > 0

    @pytest.mark.anyio
    async def test_failures_keep_their_class(self, start: Start) -> None:
        client = EngineClient(start(failure=("StoreError", "gone")))
        with pytest.raises(Exception, match="gone") as caught:
            await anext(client.generate(ask("a", [1])))
        assert type(caught.value).__name__ == "StoreError"

    def test_only_this_user_may_enter_the_directory(self, start: Start, sockets: Path) -> None:
        start()
        (directory,) = sockets.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert all(file.is_socket() for file in directory.iterdir())

    def test_an_engine_that_does_not_listen_loses_nothing(
        self, start: Start, tmp_path: Path
    ) -> None:
        """Five megabytes are more than a socket's buffer; the order stays as it was."""
        engine = start()
        heard, all_ended = hear(engine, 5001)
        engine.send(Evict("pause", "pause"))
        for number in range(5000):
            engine.send(ask(f"{number}", [number % 128] * 1000, 1))
        (tmp_path / "go on").touch()
        assert all_ended.wait(120)
        assert [one.id for one in heard if isinstance(one, Output)] == [
            f"{number}" for number in range(5000)
        ]

    def test_many_threads_may_send(self, start: Start) -> None:
        engine = start()
        heard, all_ended = hear(engine, 400)

        def send(first: int) -> None:
            for number in range(first, first + 100):
                engine.send(ask(f"{number}", [number % 128], 3))

        threads = [threading.Thread(target=send, args=(i,)) for i in range(0, 400, 100)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert all_ended.wait(120)
        for number in range(400):
            mine = [one for one in heard if one.id == f"{number}"]
            assert [one.tokens for one in mine[:-1] if isinstance(one, Output)] == [
                [number % 128]
            ] * 3
            assert isinstance(mine[-1], Finished)

    def test_an_abort_expects_no_reply(self, start: Start) -> None:
        engine = start(step_seconds=0.01)
        heard, all_ended = hear(engine, 1)
        engine.send(ask("a", [1], 10_000))
        engine.send(Abort("a"))
        engine.send(Ask("b"))
        assert all_ended.wait(60)
        engine.close()
        assert [one.id for one in heard if not isinstance(one, Output)] == ["b"]

    def test_what_cannot_be_sent_is_refused(self, start: Start) -> None:
        engine = start()
        heard, all_ended = hear(engine, 1)
        for bad in (
            Generate(id="a", tokens=[1], sampling=Sampling(), namespace="\ud800"),
            Generate(id="a", tokens=[1 << 64], sampling=Sampling()),
        ):
            with pytest.raises(RequestError, match="cannot be sent"):
                engine.send(bad)
        engine.send(ask("a", [1], 1))
        assert all_ended.wait(60)
        assert isinstance(heard[-1], Finished)


class TestStart:
    @pytest.mark.parametrize(
        "error",
        [ConfigError("too big"), UnsupportedModel("a 'window'"), DraftMismatch("other vocabulary")],
    )
    def test_an_error_of_the_engine_s_is_raised_here(
        self, error: ConfigError, sockets: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(type(error), match=str(error)) as caught:
            RemoteEngine(error, FakeTokenizer, make="remote_engines:broken")
        assert type(caught.value) is type(error)
        assert capfd.readouterr().err == ""
        assert not list(sockets.iterdir())

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B"),
        ],
    )
    def test_too_little_memory_is_the_operator_s_to_correct(
        self, error: Exception, sockets: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(
            ConfigError, match=r"memory does not suffice: .*memory.*--max-total-tokens"
        ):
            RemoteEngine(error, FakeTokenizer, make="remote_engines:broken")
        assert capfd.readouterr().err == ""

    def test_a_fault_is_logged_where_it_was(
        self, sockets: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(EngineDied, match="did not start: ZeroDivisionError: oh"):
            RemoteEngine(ZeroDivisionError("oh"), FakeTokenizer, make="remote_engines:broken")
        assert "Traceback" in capfd.readouterr().err

    def test_a_process_that_only_dies(self, sockets: Path) -> None:
        with pytest.raises(EngineDied, match="ended while it started: exit status 3"):
            RemoteEngine(3, FakeTokenizer, make="remote_engines:leaving")
        assert not list(sockets.iterdir())

    def test_a_tokenizer_that_cannot_be_loaded_ends_the_process(
        self, tmp_path: Path, sockets: Path
    ) -> None:
        (tmp_path / "wait").touch()  # the engine is not there yet

        def no_tokenizer() -> None:
            raise ConfigError("no tokenizer")

        with pytest.raises(ConfigError, match="no tokenizer"):
            RemoteEngine({"home": tmp_path}, no_tokenizer, make=MAKE)
        assert not list(sockets.iterdir())

    def test_a_path_that_is_too_long_for_sockets(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(ConfigError, match="too long a path for sockets: set TMPDIR"):
            RemoteEngine({"home": tmp_path}, FakeTokenizer, make=MAKE)
        assert not list(long.iterdir())


class TestDeath:
    """The engine's process dies."""

    @pytest.mark.anyio
    @pytest.mark.parametrize(
        ("way", "how"),
        [("kill", "killed by SIGKILL"), ("exit", "exit status 3"), ("segfault", "by SIGSEGV")],
    )
    async def test_requests_fail_and_another_process_serves(
        self, start: Start, tmp_path: Path, way: str, how: str
    ) -> None:
        engine = start(step_seconds=0.01)
        client = EngineClient(engine)
        (tmp_path / "wait").touch()
        first = engine.pid

        async def long(name: str) -> None:
            async for reply in client.generate(ask(name, [1], 1_000_000)):
                if name == "a" and isinstance(reply, Piece) and way == "kill":
                    os.kill(first, signal.SIGKILL)
                elif name == "a":
                    engine.send(Evict("end", way))

        for outcome in await asyncio.gather(long("a"), long("b"), return_exceptions=True):
            assert isinstance(outcome, EngineDied)
            assert how in str(outcome)
        with pytest.raises(EngineDied, match=how):
            await anext(client.generate(ask("c", [1])))
        with pytest.raises(EngineDied):
            await client.figures()
        (tmp_path / "wait").unlink()
        await restarted(client)
        assert engine.pid != first
        assert len([one async for one in client.generate(ask("a", [1], 4))]) == 5
        assert engine.lost is None

    @pytest.mark.anyio
    async def test_it_is_restarted_only_so_often(self, start: Start, sockets: Path) -> None:
        engine = start()
        client = EngineClient(engine)
        for _ in range(link.RESTARTS):
            with pytest.raises(EngineDied):
                await client.evict("exit")
            await restarted(client)
        with pytest.raises(EngineDied, match="4 times within 10 minutes") as caught:
            await client.evict("exit")
        assert str(engine.lost) == str(caught.value)
        with pytest.raises(EngineDied, match="4 times"):
            engine.send(Ask("a"))
        engine.close()
        assert not list(sockets.iterdir())

    @pytest.mark.anyio
    async def test_deaths_of_long_ago_do_not_count(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "RESTART_SECONDS", 0.0)
        engine = start()
        client = EngineClient(engine)
        for _ in range(link.RESTARTS + 1):
            with pytest.raises(EngineDied):
                await client.evict("exit")
            await restarted(client)
        assert engine.lost is None

    def test_an_engine_that_cannot_start_again(
        self, tmp_path: Path, sockets: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A failed start is a death: it is tried again, until it was too often."""
        engine = RemoteEngine({"home": tmp_path}, FakeTokenizer, make=MAKE)
        heard, failed = hear(engine, 1)
        engine._start = "remote_engines:broken", ConfigError("disk on fire"), logs.Choice(), 0.0
        engine.start()
        engine.send(Evict("a", "exit"))
        assert failed.wait(60)
        assert heard == [Failed("a", "EngineDied", "the engine's process died (exit status 3)")]
        engine._pump.join(60)
        assert "4 times" in str(engine.lost)
        assert caplog.text.count("disk on fire") == link.RESTARTS
        engine.close()

    @pytest.mark.parametrize("where", ["a reply", "a new process"])
    def test_a_link_that_fails_fails_all_requests(
        self, start: Start, sockets: Path, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        def broken(*_: object) -> None:
            raise OSError("no more processes")

        engine = start(step_seconds=0.01)
        _, failed = hear(engine, 1 if where == "a reply" else 2)
        monkeypatch.setattr(link, "_reply" if where == "a reply" else "_Child", broken)
        engine.send(ask("a", [1], 1_000_000))
        if where == "a new process":
            engine.send(Evict("b", "exit"))
        assert failed.wait(60)
        engine._pump.join(60)
        assert "no more processes" in str(engine.lost)
        with pytest.raises(EngineDied, match="no more processes"):
            engine.send(Ask("c"))
        engine.close()
        assert not list(sockets.iterdir())

    @pytest.mark.anyio
    async def test_over_http(self, start: Start, tmp_path: Path) -> None:
        engine = start(step_seconds=0.01)
        app = create_app(EngineClient(engine), FakeTokenizer())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as http:
            (tmp_path / "wait").touch()
            bodies = [{"prompt": "a", "max_tokens": 60, "stream": on} for on in (False, True)]
            tasks = [asyncio.create_task(http.post("/v1/completions", json=b)) for b in bodies]
            while not engine._pending:
                await asyncio.sleep(0.01)
            os.kill(engine.pid, signal.SIGKILL)
            whole, stream = await asyncio.gather(*tasks)
            assert whole.status_code == 503
            assert whole.json()["error"]["type"] == "server_error"
            assert "died" in whole.json()["error"]["message"]
            if stream.status_code == 200:  # it had begun
                assert stream.text.endswith("data: [DONE]\n\n")
                assert "killed by SIGKILL" in stream.text
            else:
                assert stream.status_code == 503
            assert (await http.get("/health")).status_code == 503
            assert (await http.post("/v1/completions", json=bodies[1])).status_code == 503
            (tmp_path / "wait").unlink()
            while (await http.get("/health")).status_code == 503:
                await asyncio.sleep(0.02)
            assert (await http.post("/v1/completions", json=bodies[0])).status_code == 200

    @pytest.mark.anyio
    async def test_an_engine_that_hangs_does_not_hang_its_server(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvkeep.server.info.HEALTH_SECONDS", 0.2)
        engine = start()
        engine.send(Evict("a", "hang"))
        transport = httpx.ASGITransport(create_app(EngineClient(engine), FakeTokenizer()))
        async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as http:
            answer = await http.get("/health")
        assert answer.status_code == 503
        assert "has not answered" in answer.json()["error"]["message"]


class TestEnd:
    def test_in_order(self, start: Start, tmp_path: Path, sockets: Path) -> None:
        engine = start(step_seconds=0.01)
        heard, _ = hear(engine, 1)
        gone = ended(engine.pid)
        engine.send(ask("a", [1], 1_000_000))
        engine.close(20.0)
        engine.close()
        assert gone()
        assert heard[-1] == Failed("a", "Closed", "the engine was closed")
        assert (tmp_path / "closed").read_text() == "20.0"
        assert (tmp_path / "frozen").read_text() == "0"  # or extensions report theirs as leaked
        assert not list(sockets.iterdir())
        with pytest.raises(Closed):
            engine.send(Ask("b"))
        assert engine.lost is None

    def test_before_it_was_started(self, tmp_path: Path, sockets: Path) -> None:
        engine = RemoteEngine({"home": tmp_path}, FakeTokenizer, make=MAKE)
        engine.close()
        assert (tmp_path / "closed").exists()
        assert not list(sockets.iterdir())

    @pytest.mark.parametrize("seconds", [0.0, 0.2])
    def test_an_engine_that_hangs_is_left(
        self, start: Start, tmp_path: Path, sockets: Path, seconds: float
    ) -> None:
        engine = start()
        _, ready = hear(engine, 1)
        engine.send(Evict("a", "pause"))
        assert ready.wait(60)
        gone = ended(engine.pid)
        engine.close(seconds)
        assert gone()
        assert not (tmp_path / "closed").exists()
        assert not list(sockets.iterdir())

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_are_for_the_parent(self, start: Start, number: int) -> None:
        engine = start()
        heard, answered = hear(engine, 1)
        os.kill(engine.pid, number)
        engine.send(Ask("a"))
        assert answered.wait(60)
        assert heard[0].id == "a"
        assert not isinstance(heard[0], Failed)

    @pytest.mark.anyio
    async def test_while_it_restarts(self, start: Start, tmp_path: Path, sockets: Path) -> None:
        engine = start()
        client = EngineClient(engine)
        (tmp_path / "wait").touch()
        first = engine.pid
        with pytest.raises(EngineDied):
            await client.evict("exit")
        while engine.pid == first:
            await asyncio.sleep(0.01)
        gone = ended(engine.pid)
        engine.close()
        assert gone()
        assert not list(sockets.iterdir())


PARENT = """
import sys, time
from pathlib import Path
from fake_engine import FakeTokenizer
from kvkeep.engine.link import RemoteEngine
from kvkeep.engine.messages import Evict, Generate, Sampling

if __name__ == "__main__":
    home, state = Path(sys.argv[1]), sys.argv[2]
    engine = RemoteEngine({"home": home}, FakeTokenizer, grace=0.5, make="remote_engines:make")
    engine.start()
    if state == "hangs":
        engine.send(Evict("b", "hang"))
    engine.send(Generate(id="a", tokens=[1], sampling=Sampling(max_tokens=10**9)))
    print(engine.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("state", ["runs", "hangs"])
def test_the_engine_ends_when_its_parent_is_killed(
    tmp_path: Path, sockets: Path, state: str
) -> None:
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(sockets)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), state],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | paths,
    ) as parent:
        assert parent.stdout
        gone = ended(int(parent.stdout.readline()))
        parent.kill()
    assert gone()
    assert not list(sockets.iterdir())
    if state == "runs":
        assert (tmp_path / "closed").read_text() == "0.5"
