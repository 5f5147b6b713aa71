"""kvkeep.cli and kvkeep.server.run"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from processes import children
from typer.testing import CliRunner

import kvkeep
from kvkeep import cli
from kvkeep.cli import cache as cache_commands
from kvkeep.core.policy import Policy
from kvkeep.engine.build import build
from kvkeep.engine.config import GIB, EngineConfig
from kvkeep.schema import BLOCK, ConfigError, Key
from kvkeep.server import run as server_run
from kvkeep.server.config import ServerConfig
from kvkeep.settings import settings_of
from kvkeep.stores.file import FileStore
from kvkeep.stores.labels import Label

FAKE_SERVER = """
import sys
from fake_engine import FakeEngine
from kvkeep.server.run import bind, run

class Engine(FakeEngine):
    def start(self):
        print("started")
    def close(self, timeout):
        super().close()
        print("closed")

run(Engine(step_seconds=0.05), bind("127.0.0.1", 0), "warning", grace=float(sys.argv[1]))
"""

REMOTE_SERVER = """
import sys
from pathlib import Path
from fake_engine import FakeTokenizer
from kvkeep.cli import main
from kvkeep.engine.link import RemoteEngine
from kvkeep.server import run

def serve(config):
    options = {"home": Path(sys.argv[2]), "step_seconds": 0.05}
    engine = RemoteEngine(options, FakeTokenizer, make="remote_engines:make")
    run.say(f"engine {engine.pid}")
    run.run(engine, run.bind("127.0.0.1", 0), "warning", grace=30)

run.serve = serve
main()
"""


PATHS = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=PATHS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments that ``serve`` would get."""
    calls: list[Any] = []
    monkeypatch.setattr(server_run, "serve", lambda *args: calls.append(args))
    return calls


class TestServe:
    def test_defaults_are_the_engine_s(self, model: Path, served: list[Any]) -> None:
        assert CliRunner().invoke(cli.app, ["serve", str(model)]).exit_code == 0
        assert served == [(ServerConfig(engine=EngineConfig(model=model)),)]

    def test_every_flag(self, model: Path, served: list[Any]) -> None:
        flags = f"""serve {model} --draft {model} --host ::1 --port 0 --served-model-name m
            --dtype bfloat16 --device cpu --context-length 100 --max-total-tokens 5000
            --max-running-requests 3 --chunked-prefill-size 64 --page-size 16 --hicache-size 0.5
            --hicache-ratio 3 --hicache-write-policy write_back --hicache-storage-backend file
            --hicache-storage-dir {model} --hicache-storage-size 2 --enable-cache-report
            --hicache-storage-prefetch-policy timeout --speculative-algorithm EAGLE3
            --speculative-num-steps 7 --speculative-num-draft-tokens 8 --speculative-eagle-topk 1
            --log-level info --missing-policy lenient
            --mem-fraction-static 0.5 --eviction-policy lfu --write-through-threshold 3
            --prefetch-min-tokens 100 --recompute-policy never --prefetch-timeout-base 2
            --prefetch-timeout-per-1k 0.5 --prefetch-host-share 0.25 --write-back-ahead 0.1
            --hicache-mem-layout page_first_direct --io-backend kernel --disable-cuda-graph
            --swa-full-tokens-ratio 0.5 --max-mamba-cache-size 9 --kv-cache-dtype float16
            --random-seed 3 --snapshot-pages 4 --storage-stall-seconds 5
            --shutdown-grace-seconds 9"""
        result = CliRunner().invoke(cli.app, flags.split())
        assert result.exit_code == 0, result.output
        config = EngineConfig(
            model=model, draft=model, served_name="m", dtype="bfloat16", device="cpu",
            context_length=100, page_size=16, device_tokens=5000, host_bytes=GIB // 2,
            host_ratio=3.0, storage_dir=model, storage_bytes=2 * GIB, chunked_prefill_size=64,
            max_running=3, mem_fraction=0.5, num_steps=7, num_draft_tokens=8, algorithm="EAGLE3",
            memory_layout="page_first_direct", io_backend="kernel", storage_backend="file",
            disable_cuda_graph=True, window_ratio=0.5, state_slots=9, kv_dtype="float16", seed=3,
            policy=Policy(
                write="write_back", prefetch="timeout", eviction="lfu", missing="lenient",
                write_hits=3, prefetch_min_tokens=100, recompute="never", prefetch_seconds=2.0,
                prefetch_seconds_per_1k=0.5, prefetch_share=0.25, write_ahead=0.1,
                snapshot_pages=4, stall_seconds=5.0,
            ),
        )  # fmt: skip
        server = ServerConfig(
            host="::1", port=0, log_level="info", enable_cache_report=True,
            shutdown_grace_seconds=9, engine=config,
        )  # fmt: skip
        assert served == [(server,)]

    def test_a_value_of_another_type_is_a_usage_error(self, model: Path, served: list[Any]) -> None:
        result = CliRunner().invoke(cli.app, ["serve", str(model), "--page-size", "x"])
        assert result.exit_code == 2
        assert "--page-size" in result.output
        assert not served

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("--hicache-storage-backend file", "needs --hicache-storage-dir"),
            ("--speculative-algorithm EAGLE3", "needs --draft"),
            (
                "--speculative-num-draft-tokens 3",
                "--speculative-num-draft-tokens must be --spec.* 6, not 3",
            ),
            ("--dtype int4", "--dtype must be one of"),
            ("--memory-layout page_last", "--memory-layout must be one of page_first"),
            ("--hicache-io-backend magic", "--hicache-io-backend must be one of direct"),
            ("--speculative-algorithm NGRAM", "EAGLE, EAGLE3, NEXTN, STANDALONE, not 'NGRAM'"),
            ("--speculative-eagle-topk 4", "--speculative-eagle-topk must be 1, not 4"),
            ("--hicache-storage-backend mooncake", "must be one of file, or .*'mooncake'"),
            ("--hicache-storage-backend no.module:Store", "'no.module:Store' cannot be imported"),
            ("--hicache-size nan", "--hicache-size must be a number, not nan"),
            ("--port 65536", r"--port must be in \[0, 65536\), not 65536"),
            ("--port=99999", r"^--port must be in \[0, 65536\), not 99999"),
            ("--hicache-ratio -1", r"^--hicache-ratio must be at least 0, not -1"),
            ("--radix-eviction-policy fifo", "^--radix-eviction-policy must be one of lru"),
            ("--eviction=fifo", "^--eviction must be one of lru"),
            ("--api-key=", "^--api-key must be printable"),
        ],
    )
    def test_contradictions_are_refused(
        self, model: Path, served: list[Any], flags: str, message: str
    ) -> None:
        result = CliRunner().invoke(cli.app, ["serve", str(model), *flags.split()])
        assert isinstance(result.exception, ConfigError)
        assert re.search(message, str(result.exception))
        assert not served

    def test_flags_of_sglang_that_are_always_on(self, model: Path, served: list[Any]) -> None:
        flags = "--enable-hierarchical-cache --enable-metrics --radix-eviction-policy lfu"
        result = CliRunner().invoke(cli.app, ["serve", "--model-path", str(model), *flags.split()])
        assert result.exit_code == 0, result.output
        ((config,),) = served
        assert config.engine.model == model
        assert config.engine.policy.eviction == "lfu"

    @pytest.mark.parametrize("columns", [60, 80, 139, 140, 200])
    def test_no_name_is_cut_on_a_narrow_screen(self, columns: int) -> None:
        screen = {"COLUMNS": str(columns)}
        text = CliRunner().invoke(cli.app, ["serve", "--help"], env=screen).output
        assert "…" not in text
        for flag in (flag for one in settings_of(ServerConfig) for flag in one.flags):
            assert re.search(rf"{flag}(?![\w-])", text), flag
        text = CliRunner().invoke(cli.app, ["bench", "serve", "--help"], env=screen).output
        assert "…" not in text
        assert "--random-output-len" in text

    def test_a_model_must_be_named(self) -> None:
        result = CliRunner().invoke(cli.app, ["serve"])
        assert isinstance(result.exception, ConfigError)
        assert "model is missing" in str(result.exception)

    def test_an_error_is_one_line(self) -> None:
        result = python("-m", "kvkeep", "serve", "/nowhere")
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("kvkeep: /nowhere is no model directory")

    @pytest.mark.parametrize("damaged", ["target", "draft"])
    def test_weights_that_were_cut_off_are_told(self, tmp_path: Path, damaged: str) -> None:
        pair = Path(kvkeep.__file__).parent / "demo/pair"
        for name in ("target", "draft"):
            shutil.copytree(pair / name, tmp_path / name)
        weights = tmp_path / damaged / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        with pytest.raises(ConfigError, match=re.escape(f"{weights} is damaged: ")):
            build(EngineConfig(model=tmp_path / "target", draft=tmp_path / "draft"))

    def test_a_device_that_is_not_there_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        pair = Path(kvkeep.__file__).parent / "demo/pair"
        with pytest.raises(ConfigError, match="--device cuda: PyTorch finds no CUDA device here"):
            build(EngineConfig(model=pair / "target", device="cuda"))

    def test_a_taken_port_is_told_before_anything_is_loaded(self, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            result = python("-m", "kvkeep", "serve", str(model), "--port", str(port))
        assert result.returncode == 1
        assert result.stderr == (
            f"kvkeep: port {port} of 127.0.0.1 is taken; --port chooses another\n"
        )


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on port 0 of 192\.0\.2\.1"):
        server_run.bind("192.0.2.1", 0)


def test_the_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"kvkeep {kvkeep.__version__}\n")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvkeep import cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit: print(sorted(sys.modules.keys() & {'torch', 'transformers', 'numpy'}))"
    )
    result = python("-c", code)
    assert "serve" in result.stdout
    assert result.stdout.endswith("[]\n")


class TestCache:
    """The commands on a storage directory."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        group, body = bytes(16), bytes(BLOCK)
        store = FileStore(tmp_path, {group: BLOCK})
        keys = [Key(group, bytes([number] * 32)) for number in range(3)]
        assert store.write(keys, [memoryview(body)] * 3) == [True] * 3
        store.close()
        return tmp_path

    def invoke(self, *words: object) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, ["cache", *map(str, words)])
        return result.exit_code, result.output

    def test_ls(self, directory: Path) -> None:
        code, output = self.invoke("ls", directory)
        assert code == 0
        assert output.splitlines()[-1].split()[:3] == [bytes(16).hex(), "?", "3"]

    def test_ls_names_what_was_served(self, directory: Path) -> None:
        """Also groups of a directory that was made without labels, once a server has opened it."""
        label = Label("a-model-of-a-long-name + its-draft", "full", page_tokens=64)
        FileStore(directory, {bytes(16): BLOCK}, None, {bytes(16): label}).close()
        (slab,) = directory.glob("*.slab")
        os.utime(slab, (0, time.time() - 3 * 3600))
        for columns in ("40", "200"):
            result = CliRunner().invoke(
                cli.app, ["cache", "ls", str(directory)], env={"COLUMNS": columns}
            )
            words = re.split(r"  +", result.output.splitlines()[-1])
            assert words[:4] == [label.model, "full", "3", "192"]
            assert words[5:] == ["3 hours ago", "no"]

    @pytest.mark.parametrize("text", [b"", b"{", b'{"model": 1, "group": "g", "page_tokens": 1}'])
    def test_a_damaged_label_is_none(self, directory: Path, text: bytes) -> None:
        (directory / f"{bytes(16).hex()}.json").write_bytes(text)
        code, output = self.invoke("ls", directory)
        assert (code, bytes(16).hex() in output) == (0, True)

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(None, "?"), (0, "0 seconds ago"), (119, "119 seconds ago"), (-5, "0 seconds ago"),
         (120, "2 minutes ago"), (7200, "2 hours ago"), (86400 * 30, "30 days ago")],
    )  # fmt: skip
    def test_ages(self, seconds: float | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_commands.time, "time", lambda: 1e9)
        assert cache_commands.ago(None if seconds is None else 1e9 - seconds) == words

    def test_du(self, directory: Path) -> None:
        code, output = self.invoke("du", directory)
        assert code == 0
        assert "3 records of 1 groups" in output

    def test_fsck(self, directory: Path) -> None:
        assert self.invoke("fsck", directory)[0] == 0
        (slab,) = directory.glob("*.slab")
        damaged = bytearray(slab.read_bytes())
        damaged[100] ^= 1
        slab.write_bytes(damaged)
        code, output = self.invoke("fsck", directory)
        assert (code, "2 good, 1 corrupt" in output) == (1, True)
        assert self.invoke("fsck", directory, "--repair")[0] == 0
        code, output = self.invoke("fsck", directory)
        assert (code, "2 good, 0 corrupt" in output) == (0, True)

    def test_gc(self, directory: Path) -> None:
        assert self.invoke("gc", directory, "--keep", "0")[0] == 0
        assert "0 records" in self.invoke("du", directory)[1]

    @pytest.mark.parametrize("keep", ["inf", "nan", "-1"])
    def test_how_much_gc_cannot_keep(self, directory: Path, keep: str) -> None:
        result = CliRunner().invoke(cli.app, ["cache", "gc", str(directory), "--keep", keep])
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith("--keep must be a number of at least 0, not")
        assert "3 records" in self.invoke("du", directory)[1]

    def test_looking_makes_no_cache(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "absent"):
            result = CliRunner().invoke(cli.app, ["cache", "ls", str(path)])
            assert "there is no cache in" in str(result.exception)
        assert not list(tmp_path.iterdir())


@contextmanager
def server(code: str, *words: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process that runs ``code``, and its address."""
    command = [sys.executable, "-c", code, *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=PATHS) as process:
        try:
            assert process.stderr
            for line in process.stderr:
                if ready := re.search(r"ready: (http://\S+)/v1", line):
                    yield process, ready[1]
                    break
        finally:
            process.kill()


def begun(url: str, **body: Any) -> Any:
    """A stream of tokens that has begun."""
    body = {"prompt": "a", "max_tokens": 60, "stream": True} | body
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60)


class TestEnd:
    """A server that gets a signal to stop."""

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_running_requests_finish_and_the_engine_closes(self, number: int) -> None:
        with server(FAKE_SERVER, 30) as (process, url):
            with begun(url, max_tokens=20) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(number)
                *_, finish, last = (line for line in lines if line)
            out, err = process.communicate(timeout=60)
        assert last == "data: [DONE]"
        assert json.loads(finish.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert out.split() == ["started", "closed"]
        assert process.returncode == 0
        assert "Traceback" not in err

    def test_new_requests_are_refused_while_others_finish(self) -> None:
        with server(FAKE_SERVER, 1000) as (process, url):
            with begun(url) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.terminate()
                while (answer := httpx.post(f"{url}/v1/completions", json={"prompt": "a"})) and (
                    answer.status_code == 200  # the signal has not arrived yet
                ):
                    pass
                assert answer.status_code == 503
                assert answer.json()["error"]["message"] == "the server is shutting down"
                assert httpx.get(f"{url}/health").status_code == 200
                *_, last = (line for line in lines if line)
            process.communicate(timeout=60)
        assert last == "data: [DONE]"
        assert process.returncode == 0

    @pytest.mark.parametrize("second", [False, True])
    def test_what_still_runs_at_the_end_of_the_grace_fails_in_order(self, second: bool) -> None:
        """A second signal is the end of the grace."""
        with server(FAKE_SERVER, 1000 if second else 0.5) as (process, url):
            with begun(url) as stream, ThreadPoolExecutor() as pool:
                whole = pool.submit(
                    httpx.post, f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 60}
                )
                lines = stream.iter_lines()
                next(lines)
                while "kvkeep_running 2.0" not in httpx.get(f"{url}/metrics").text:
                    pass
                process.terminate()
                if second:
                    while httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).is_success:
                        pass
                    process.terminate()
                *_, error, last = (line for line in lines if line)
                answer = whole.result()
            out, err = process.communicate(timeout=60)
        assert json.loads(error.removeprefix("data: "))["error"] == {
            "message": "the server is shutting down",
            "type": "server_error",
            "param": None,
            "code": None,
        }
        assert last == "data: [DONE]"
        assert answer.status_code == 503
        assert answer.json() == json.loads(error.removeprefix("data: "))
        assert out.split() == ["started", "closed"]
        assert process.returncode == 0
        assert "Traceback" not in err

    def test_a_client_that_does_not_read_cannot_hold_it_up(self) -> None:
        begin = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        with (
            server(FAKE_SERVER, 0) as (process, url),
            socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1]))) as slow,
        ):
            slow.sendall(begin)
            httpx.get(f"{url}/health")  # so that the server has seen what came before
            process.terminate()
            out, err = process.communicate(timeout=60)
        assert out.split() == ["started", "closed"]
        assert "Traceback" not in err


class TestEngineProcess:
    """A server whose engine has a process of its own."""

    def test_kill_it_until_the_server_ends(self, tmp_path: Path) -> None:
        command = ["serve", tmp_path]
        with server(REMOTE_SERVER, *command) as (process, url):
            for _ in range(4):
                with begun(url) as stream:
                    lines = stream.iter_lines()
                    next(lines)
                    (engine,) = children(process.pid)
                    os.kill(engine, signal.SIGKILL)
                    *_, error, last = (line for line in lines if line)
                assert "killed by SIGKILL" in error
                assert last == "data: [DONE]"
                with suppress(httpx.TransportError):  # after the last time
                    while httpx.get(f"{url}/health").status_code == 503:
                        time.sleep(0.05)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert err.splitlines()[-1] == (
            "kvkeep: the engine's process died (killed by SIGKILL), 4 times within 10 minutes"
        )
        assert "Traceback" not in err

    def test_signals_reach_it_in_order(self, tmp_path: Path) -> None:
        with server(REMOTE_SERVER, "serve", tmp_path) as (process, url):
            with begun(url, max_tokens=20) as stream:
                lines = stream.iter_lines()
                next(lines)
                for one in (process.pid, *children(process.pid)):
                    os.kill(one, signal.SIGTERM)  # as systemd does
                *_, last = (line for line in lines if line)
            _, err = process.communicate(timeout=60)
        assert last == "data: [DONE]"
        assert process.returncode == 0
        assert float((tmp_path / "closed").read_text()) > 20
        assert "Traceback" not in err
