"""A server and its engine's process, with the demo's models: either may end first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path
from typing import Any

import httpx
from processes import children, ended
from rig import DEMO_PAIR, demo_prompts

from kvkeep.demo.process import Server
from kvkeep.stores.file import FileStore

PROMPT = demo_prompts()["period-64"][0]


def ask(server: Server, new: int) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body)


def test_a_killed_engine_comes_back_with_what_storage_has(tmp_path: Path) -> None:
    server = Server(
        [
            *(str(DEMO_PAIR.target), "--draft", str(DEMO_PAIR.draft)),
            *("--speculative-num-steps", "7", "--recompute-policy", "never"),
            *("--hicache-storage-backend", "file", "--hicache-storage-dir", str(tmp_path)),
        ]
    )

    try:
        server.wait()
        assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()  # the engine has it
        cold = ask(server, 50)
        server.empty("device")  # waits until storage has everything
        refused: list[tuple[int, Any]] = []

        def ask_on() -> None:
            try:
                while True:
                    ask(server, 800)
            except urllib.error.HTTPError as error:
                with error:
                    refused.append((error.code, json.load(error)))

        asking = threading.Thread(target=ask_on)
        asking.start()
        while not server.metric("kvkeep_running_requests"):
            pass
        (engine,) = children(server.pid)
        os.kill(engine, signal.SIGKILL)
        asking.join()
        ((status, body),) = refused
        assert status == 503
        assert body["error"]["message"] == "the engine's process died (killed by SIGKILL)"
        while httpx.get(f"{server.url}/health").status_code == 503:
            pass
        (again,) = children(server.pid)
        assert again != engine
        restored = ask(server, 50)
        assert restored["choices"] == cold["choices"]
        assert restored["kvkeep"]["cached_tokens"]["storage"] >= 960
        assert restored["kvkeep"]["accept_length"] == cold["kvkeep"]["accept_length"]
        gone = ended(again)
    finally:
        server.stop()
    assert gone()
    assert server._process.returncode == 0


def test_an_engine_whose_server_is_killed_writes_what_storage_lacks(tmp_path: Path) -> None:
    """Under write-back storage has nothing before."""
    server = Server(
        [
            *(str(DEMO_PAIR.target), "--hicache-write-policy", "write_back"),
            *("--hicache-storage-backend", "file", "--hicache-storage-dir", str(tmp_path)),
        ]
    )
    try:
        server.wait()
        ask(server, 1)
        (engine,) = children(server.pid)
        gone = ended(engine)
        assert stored(tmp_path) == 0
        os.kill(server.pid, signal.SIGKILL)
        assert gone()
    finally:
        server.stop()
    assert stored(tmp_path) == len(PROMPT) // 64


def stored(directory: Path) -> int:
    """How many records storage has."""
    store = FileStore(directory, {})
    try:
        return sum(group.records for group in store.usage())
    finally:
        store.close()


def test_a_signal_while_the_model_is_loaded() -> None:
    command = [sys.executable, "-m", "kvkeep", "serve", str(DEMO_PAIR.target), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        while not (engines := children(server.pid)):
            assert server.poll() is None
        gone = ended(engines[0])
        server.terminate()
        _, err = server.communicate(timeout=60)
        assert gone()
    assert server.returncode == 130
    assert "Traceback" not in err
