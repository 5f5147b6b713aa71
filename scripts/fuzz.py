"""Attacks a server with Schemathesis and with hostile clients, and checks what it holds afterwards.

A ``kvkeep serve`` process with the demo's models and little patience is attacked in one way after
the other. In each, clients may get 4xx or 503; the server must not fail, log a traceback or stop
answering ``/health``. After each, it must hold what it held before: no request, no lease, no
connection, as many open files, about the same memory.

    python -m scripts.fuzz --minutes 10 --json fuzz.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from scripts.attacks import CONNECTIONS, Attacks, Statuses, completion, once
from scripts.soak import children, resident

from kvkeep.demo.run import DRAFT, TARGET

PATIENCE = 3.0  # the server's, in seconds
HELD = ("leases", "prefetches", "running_requests", "waiting_requests", "transfers_pending")
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance",
)  # fmt: skip


class Target:
    """The server under attack; its log is a file."""

    def __init__(self, scratch: Path) -> None:
        self._log = scratch / "log"
        command = [
            *(sys.executable, "-m", "kvkeep", "serve", str(TARGET), "--draft", str(DRAFT)),
            *("--host", "127.0.0.1", "--port", "0", "--context-length", "1024"),
            *("--max-total-tokens", "8192", "--max-queued-requests", "64"),
            *("--hicache-storage-backend", "file", "--hicache-storage-dir", f"{scratch}/storage"),
            *("--hicache-storage-size", "0.1", "--max-connections", str(CONNECTIONS)),
            *(f"--{name}-timeout={PATIENCE}" for name in ("header", "body", "write")),
        ]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        while not (found := re.search(r"ready: http://[\d.]+:(\d+)/v1", self.log)):
            if self.process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{self.log}")
            time.sleep(0.2)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text(errors="replace")

    @property
    def processes(self) -> list[int]:
        """Process ids of the server and its engine."""
        return [self.process.pid, *children(self.process.pid)]

    def metrics(self) -> dict[str, float]:
        """All series, without the prefix."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        pairs = (line.removeprefix("kvkeep_").rsplit(" ", 1) for line in lines if line[0] != "#")
        return {name: float(value) for name, value in pairs}

    def stop(self) -> None:
        """End it in order."""
        self.process.terminate()
        self.process.wait(60)


@dataclass
class State:
    """What a server holds, and what has gone wrong so far."""

    processes: list[int]
    files: int
    mib: int
    held: dict[str, float]
    faults: int  # responses of 500
    tracebacks: int

    @classmethod
    def of(cls, target: Target) -> State:
        """The state of a server that nobody asks anything."""
        metrics = target.metrics()
        held = {name: metrics[name] for name in HELD}
        held["connections"] = metrics["http_connections"] - 1  # that of this question
        held["invariant_errors"] = metrics["invariant_errors_total"]
        faults = (metrics[x] for x in metrics if re.match(r'http_responses_total.*"500"', x))
        return cls(
            target.processes,
            sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in target.processes),
            sum(map(resident, target.processes)) >> 10,
            held,
            round(sum(faults)),
            target.log.count("Traceback"),
        )

    def worse(self, before: State) -> list[str]:
        """In what way this is worse than ``before``."""
        found = [f"holds {value:g} {name}" for name, value in self.held.items() if value]
        if self.processes != before.processes:
            found.append("a process was started again")
        if self.files > before.files + 16:
            found.append(f"{self.files - before.files} more open files")
        if self.mib > 1.25 * before.mib + 64:
            found.append(f"{self.mib - before.mib} MiB more")
        if self.faults > before.faults:
            found.append(f"{self.faults - before.faults} responses of 500")
        if self.tracebacks > before.tracebacks:
            found.append(f"{self.tracebacks - before.tracebacks} tracebacks")
        return found


@dataclass
class Result:
    """Of one attack."""

    name: str
    seconds: float
    statuses: dict[str, int]
    slowest_health: float  # seconds
    log_lines: int
    after: State
    violations: list[str] = field(default_factory=list)


async def schemathesis(target: Target, command: Path, seconds: float, scratch: Path) -> Statuses:
    """Property-based requests over the OpenAPI document; how many checks failed.

    ``deadline_seconds`` is not in the document that it gets: a request that sets it asks for a 504.
    """
    document = httpx.get(f"{target.url}/openapi.json").json()
    del document["components"]["schemas"]["KvkeepOptions"]["properties"]["deadline_seconds"]
    file, report = scratch / "openapi.json", scratch / "report.ndjson"
    file.write_text(json.dumps(document))
    process = await asyncio.create_subprocess_exec(
        *(str(command.absolute()), "run", str(file), "--url", target.url),
        *("--max-time", str(max(1, round(seconds))), "--checks", ",".join(CHECKS)),
        *("--continue-on-failure", "--request-timeout", "60", "--suppress-health-check", "all"),
        *("--report", "ndjson", "--report-ndjson-path", str(report)),
        cwd=scratch,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    if process.returncode:
        print(out.decode(errors="replace"))
    text = report.read_text(errors="replace")
    found = Counter(re.findall(r'"status_code": ?(\d+)', text))
    return found + Counter({"failures": 1 if process.returncode else 0})


async def attack(
    target: Target, before: State, name: str, made: Callable[[], Awaitable[Statuses]]
) -> Result:
    """Attack while asking for the server's health; then wait until it holds what it held before."""
    begin, lines = time.monotonic(), target.log.count("\n")
    slowest, sick = 0.0, ""
    over = asyncio.Event()

    async def watch() -> None:
        nonlocal slowest, sick
        while not over.is_set():
            async with httpx.AsyncClient(base_url=target.url, timeout=60) as http:
                asked = time.monotonic()
                try:
                    answer = await http.get("/health")
                    if answer.status_code != 200:
                        sick = f"/health answered {answer.status_code}"
                except httpx.TransportError as error:
                    if name != "many connections":
                        sick = f"/health: {error!r}"
                slowest = max(slowest, time.monotonic() - asked)
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    statuses = await made()
    over.set()
    await watching
    seconds = time.monotonic() - begin
    violations = [sick] if sick else []
    bad = ("no answer", "not cut off", "failures", "500", "501", "502", "504")
    violations += [f"{count} x {what}" for what, count in statuses.items() if what in bad]
    if target.process.poll() is not None:
        raise SystemExit(f"the server ended:\n{target.log[-5000:]}")
    end = time.monotonic() + 60
    while (worse := (after := await asyncio.to_thread(State.of, target)).worse(before)) and (
        time.monotonic() < end
    ):
        await asyncio.sleep(1)
    lines = target.log.count("\n") - lines
    if lines > 2 * sum(statuses.values()) + 100:
        violations.append(f"{lines} lines in the log")
    found = dict(sorted(statuses.items()))
    return Result(name, seconds, found, slowest, lines, after, violations + worse)


async def run(options: argparse.Namespace, scratch: Path) -> list[Result]:
    """All attacks, in turn."""
    target = Target(scratch)
    try:
        attacks = Attacks(target.port)
        named: dict[str, Callable[[], Awaitable[Statuses]]] = {
            name.replace("_", " "): getattr(attacks, name)
            for name in vars(Attacks)
            if not name.startswith("_") and name not in ("each", "send")
        }
        if options.schemathesis:
            seconds = 60 * options.minutes
            named["schemathesis"] = lambda: schemathesis(
                target, options.schemathesis, seconds, scratch
            )
        chosen = {name: one for name, one in named.items() if options.only in name}
        for _ in range(20):  # all code is loaded, all threads are there
            await attacks.each(20, 20, lambda _: attacks.send(once(completion())))
        await attacks.large_bodies()
        before = State.of(target)
        results = []
        for name, one in chosen.items():
            print(f"{name} ...", file=sys.stderr)
            results.append(await attack(target, before, name, one))
            before.faults, before.tracebacks = (
                results[-1].after.faults,
                results[-1].after.tracebacks,
            )
            before.processes = results[-1].after.processes
        if options.log:
            print(target.log)
        return [Result("at first", 0, {}, 0, 0, before), *results]
    finally:
        target.stop()


def table(results: list[Result]) -> Table:
    """The results for people."""
    found = Table(
        "attack", "s", "what clients saw", "slowest\n/health", "files", "MiB", "violations"
    )
    for one in results:
        found.add_row(
            one.name,
            f"{one.seconds:.0f}",
            ", ".join(f"{count} x {what}" for what, count in one.statuses.items()),
            f"{one.slowest_health:.2f} s",
            str(one.after.files),
            str(one.after.mib),
            "\n".join(one.violations) or "none",
        )
    return found


def main() -> None:
    """Run all attacks; exit with code 1 if one found something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="of Schemathesis")
    parser.add_argument("--schemathesis", type=Path, help="the command; without it, not run")
    parser.add_argument("--only", default="", help="attacks whose names have this in them")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--log", action="store_true", help="print the server's log at the end")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
    with tempfile.TemporaryDirectory(prefix="kvkeep-fuzz-") as scratch:
        results = asyncio.run(run(options, Path(scratch)))
    Console(width=140).print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results]))
    sys.exit(any(one.violations for one in results))


if __name__ == "__main__":
    main()
