"""A server whose engine's process dies, with the demo's models."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
from pathlib import Path
from typing import Any

import httpx
from processes import children, ended
from rig import DEMO_PAIR, demo_prompts

from kvkeep.demo.process import Server

PROMPT = demo_prompts()["period-64"][0]


def test_a_killed_engine_comes_back_with_what_storage_has(tmp_path: Path) -> None:
    server = Server(
        [
            *(str(DEMO_PAIR.target), "--draft", str(DEMO_PAIR.draft)),
            *("--speculative-num-steps", "7", "--recompute-policy", "never"),
            *("--hicache-storage-backend", "file", "--hicache-storage-dir", str(tmp_path)),
        ]
    )

    def ask(new: int) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        return server.post("/v1/completions", body)

    try:
        server.wait()
        cold = ask(50)
        server.empty("device")  # waits until storage has everything
        refused: list[tuple[int, Any]] = []

        def ask_on() -> None:
            try:
                while True:
                    ask(800)
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
        restored = ask(50)
        assert restored["choices"] == cold["choices"]
        assert restored["kvkeep"]["cached_tokens"]["storage"] >= 960
        assert restored["kvkeep"]["accept_length"] == cold["kvkeep"]["accept_length"]
        gone = ended(again)
    finally:
        server.stop()
    assert gone()
    assert server._process.returncode == 0
