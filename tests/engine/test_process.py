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

PROMPTS = [prompt[:577] for prompt in demo_prompts()["period-64"]]


def ask(server: Server, prompt: list[int], new: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body)


def test_a_killed_engine_comes_back_with_what_storage_has(tmp_path: Path) -> None:
    """It is killed in the middle of reads and writes."""
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
        cold = [ask(server, prompt, 50) for prompt in PROMPTS]
        server.empty("device")  # waits until storage has everything
        refused: list[tuple[int, Any]] = []

        def disturb(number: int) -> None:
            try:
                while True:
                    again = ask(server, PROMPTS[number], 200)["choices"][0]["token_ids"]
                    assert again[:50] == cold[number]["choices"][0]["token_ids"]
                    server.empty("host")
            except urllib.error.HTTPError as error:
                with error:
                    refused.append((error.code, json.load(error)["error"]["message"]))

        crowd = [threading.Thread(target=disturb, args=(i,)) for i in range(len(PROMPTS))]
        for one in crowd:
            one.start()
        crowd[0].join(1.0)
        while not server.metric("kvkeep_running_requests"):
            pass
        (engine,) = children(server.pid)
        os.kill(engine, signal.SIGKILL)
        for one in crowd:
            one.join()
        died = (503, "the engine's process died (killed by SIGKILL)")
        assert refused == [died] * len(PROMPTS)
        while httpx.get(f"{server.url}/health").status_code == 503:
            pass
        (again,) = children(server.pid)
        assert again != engine
        for prompt, before in zip(PROMPTS, cold, strict=True):
            restored = ask(server, prompt, 50)
            assert restored["choices"] == before["choices"]
            assert restored["kvkeep"]["cached_tokens"]["storage"] >= 512
            assert restored["kvkeep"]["accept_length"] == before["kvkeep"]["accept_length"]
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
        ask(server, PROMPTS[0], 1)
        (engine,) = children(server.pid)
        gone = ended(engine)
        assert stored(tmp_path) == 0
        os.kill(server.pid, signal.SIGKILL)
        assert gone()
    finally:
        server.stop()
    assert stored(tmp_path) == len(PROMPTS[0]) // 64


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
