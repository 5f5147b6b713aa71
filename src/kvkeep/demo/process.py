"""Runs ``kvkeep serve`` as a child process and talks to it over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..schema import ConfigError

_START_SECONDS = 120.0
_REQUEST_SECONDS = 120.0
_STOP_SECONDS = 60.0


class Server:
    """A server process. The constructor starts it; :meth:`wait` waits until it is ready.

    Args:
        arguments: of ``kvkeep serve``, without host and port: it listens on a free loopback port.
        program: the module that runs, and what comes before ``arguments``.
    """

    def __init__(self, arguments: list[str], program: Sequence[str] = ("kvkeep", "serve")) -> None:
        command = [sys.executable, "-m", *program, *arguments]
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._url: str | None = None
        self._last_lines: deque[str] = deque(maxlen=20)  # of its stderr
        self._started_or_ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._last_lines.append(line.rstrip())
                if found := re.search(r"ready: (http://\S+)/v1", line):
                    self._url = found[1]
                    self._started_or_ended.set()
        self._started_or_ended.set()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def url(self) -> str:
        """``http://HOST:PORT`` of the server. Empty before :meth:`wait`."""
        return self._url or ""

    def wait(self) -> None:
        """Wait until the server is ready, for at most 120 s.

        Raises:
            ConfigError: the server exited or took too long; the message has its last output.
        """
        self._started_or_ended.wait(_START_SECONDS)
        if self._url is None:
            raise ConfigError("the server did not start:\n" + "\n".join(self._last_lines))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON request; return the JSON response."""
        request = urllib.request.Request(
            f"{self._url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as answer:
            parsed: dict[str, Any] = json.load(answer)
        return parsed

    def metric(self, name: str) -> float:
        """Current value of a Prometheus metric, summed over its labels."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=_REQUEST_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if re.match(rf"{name}(\{{.*)? ", x))

    def empty(self, tier: str) -> None:
        """Evict all pages of a memory tier, once pending transfers no longer pin them."""
        end = time.monotonic() + _REQUEST_SECONDS
        while self.metric("kvkeep_transfers_pending") and time.monotonic() < end:
            time.sleep(0.01)
        self.post("/kvkeep/evict", {"tier": tier})

    def stop(self) -> None:
        """Send SIGTERM and wait for the exit, up to 60 s; then kill. Idempotent.

        The server first writes the pages that storage does not have yet.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
