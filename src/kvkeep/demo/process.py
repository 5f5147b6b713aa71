"""A ``kvkeep serve`` of one's own: a real process, reached over HTTP, ended by its pid."""

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
from typing import Any

from ..schema import ConfigError

_START_SECONDS = 120.0
_REQUEST_SECONDS = 120.0
_STOP_SECONDS = 60.0


class Server:
    """Starts at once and in the background; :meth:`wait` until it answers.

    Args:
        arguments: of ``kvkeep serve``. Host and port are chosen here: loopback, and a free one.
    """

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "kvkeep", "serve", *arguments]
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._url: str | None = None
        self._said: deque[str] = deque(maxlen=20)
        self._settled = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._said.append(line.rstrip())
                if found := re.search(r"ready: (http://\S+)/v1", line):
                    self._url = found[1]
                    self._settled.set()
        self._settled.set()

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it listens; after :meth:`wait`."""
        return self._url or ""

    def wait(self) -> None:
        """Until it is ready.

        Raises:
            ConfigError: it ended, or took too long; with its last words.
        """
        self._settled.wait(_START_SECONDS)
        if self._url is None:
            raise ConfigError("the server did not start:\n" + "\n".join(self._said))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer to a JSON request."""
        request = urllib.request.Request(
            f"{self._url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as answer:
            parsed: dict[str, Any] = json.load(answer)
        return parsed

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=_REQUEST_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if re.match(rf"{name}(\{{.*)? ", x))

    def empty(self, tier: str) -> None:
        """Evict a memory tier, once nothing on its way down keeps it."""
        end = time.monotonic() + _REQUEST_SECONDS
        while self.metric("kvkeep_transfers_pending") and time.monotonic() < end:
            time.sleep(0.01)
        self.post("/kvkeep/evict", {"tier": tier})

    def stop(self) -> None:
        """Ask it to end, and wait: what storage has not got yet is written first. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
