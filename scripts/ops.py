"""Checks the files of ``deploy/``; runs the dashboard and the alerts on a real Prometheus.

Linters first, each of them only if it is installed. Then a ``kvkeep serve`` of the demo's models
gets some load, and a Prometheus with the rules scrapes it: every expression of the dashboard and
every recorded one must return numbers, every selector of an alert must find its series, and no
alert may fire. Both processes listen on the loopback only, and are ended.

    python -m scripts.ops
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from kvkeep.demo.process import Server
from kvkeep.demo.run import DRAFT, TARGET, prompts

DEPLOY = Path(__file__).parent.parent / "deploy"
PROMETHEUS, UNIT = DEPLOY / "prometheus", DEPLOY / "systemd" / "kvkeep.service"
MANIFESTS = [str(path) for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))]
YAML = "{extends: default, rules: {line-length: {max: 110}}}"
UNSAFE = 30  # most tenths of exposure that systemd-analyze may find
WINDOW = "30s"  # what Grafana's $__rate_interval stands for, at a scrape each second

LINTS = [
    ["promtool", "check", "config", str(PROMETHEUS / "prometheus.yml")],
    ["promtool", "check", "rules", str(PROMETHEUS / "rules.yml")],
    ["promtool", "test", "rules", str(PROMETHEUS / "rules_test.yml")],
    ["yamllint", "--strict", "-d", YAML, str(DEPLOY)],
    ["kubernetes-validate", "--strict", *MANIFESTS],
    ["hadolint", str(DEPLOY / "Dockerfile")],
    ["systemd-analyze", "security", "--offline=true", f"--threshold={UNSAFE}", str(UNIT)],
]


def main() -> int:
    """Run all checks; the exit status."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-ops-") as scratch:
        checks = [lambda line=line: lint(line) for line in [*LINTS, verify(Path(scratch))]]
        failed = [check for check in checks if not check()]
        if not shutil.which("prometheus"):
            say("not run", "dashboard and alerts: prometheus is not installed (Debian has it)")
        elif not on_prometheus(Path(scratch)):
            failed.append(main)
    return bool(failed)


def say(verdict: str, what: str) -> None:
    print(f"{verdict:8} {what}", flush=True)


def lint(command: list[str]) -> bool:
    """Whether a linter finds nothing, or is not there."""
    shown = " ".join(Path(word).name for word in command if word != YAML)
    if not shutil.which(command[0]):
        say("not run", f"{shown}: {command[0]} is not installed")
        return True
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    say("FAILED" if done.returncode else "ok", shown)
    if done.returncode:
        print(done.stdout + done.stderr)
    return not done.returncode


def verify(scratch: Path) -> list[str]:
    """The command that verifies the unit; with a program that exists, as it wants to see one."""
    copy = scratch / UNIT.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text()))
    return ["systemd-analyze", "verify", "--man=no", str(copy)]


def on_prometheus(scratch: Path) -> bool:
    """Whether every expression finds its series, and no alert fires."""
    with ExitStack() as stack:
        storage = ("--hicache-storage-backend", "file", "--hicache-storage-dir", f"{scratch}/kv")
        speculation = ("--draft", str(DRAFT), "--speculative-num-steps", "7")
        server = Server([str(TARGET), *speculation, *storage, "--recompute-policy", "never"])
        stack.callback(server.stop)
        server.wait()
        url = stack.enter_context(prometheus(scratch, server.url.removeprefix("http://")))
        ask = asker(url)
        wait("a first scrape", lambda: ask("kvkeep_engine_up == 1"))
        load(server)
        wait("scrapes of the load", lambda: ask('kvkeep_accept_length_count{tier="storage"} > 0'))
        time.sleep(3)  # rules see it, too
        rules = {
            rule["name"]: rule for rule in get(url, "rules")["groups"] for rule in rule["rules"]
        }
        shown, alerts = list(panels()), [one for one in rules.values() if one["type"] == "alerting"]
        recorded = [(one["name"], one["name"]) for one in rules.values() if one not in alerts]
        wrong = [
            f"{name}: no numbers: {e}" for name, e in [*shown, *recorded] if not numbers(ask(e))
        ]
        for rule in rules.values():
            if rule["health"] != "ok" or rule.get("state") in ("firing", "pending"):
                wrong.append(f"{rule['name']}: {rule.get('state')} {rule.get('lastError', '')}")
            wrong += [
                f"{rule['name']}: no series: {x}" for x in selectors(rule["query"]) if not ask(x)
            ]
    for line in wrong:
        print(line)
    what = (
        f"{len(shown)} expressions of the dashboard, {len(recorded)} recorded, {len(alerts)} alerts"
    )
    say("FAILED" if wrong else "ok", f"on Prometheus: {what}")
    return not wrong


@contextmanager
def prometheus(scratch: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes ``target`` each second; its URL."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    (scratch / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        *("prometheus", f"--config.file={scratch}/prometheus.yml", "--log.level=error"),
        *(f"--storage.tsdb.path={scratch}/data", f"--web.listen-address={address}"),
    ]
    process = subprocess.Popen(command)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def load(server: Server) -> None:
    """Prompts that are new, and hits in every tier, for some seconds."""
    some = [prompt.tokens for prompt in prompts()[:4]]

    def complete(tokens: list[int]) -> None:
        server.post("/v1/completions", {"prompt": tokens, "max_tokens": 48, "temperature": 0})

    complete(some[0][::-1])  # rate() sees a counter move only after a scrape of it
    for emptied in ([], ["device"], ["device", "host"], []):
        time.sleep(2)
        for tier in emptied:
            server.empty(tier)
        for tokens in some:
            complete(tokens)


def panels() -> Iterator[tuple[str, str]]:
    """Title and expression of each target of the dashboard, as Grafana would send it."""
    for panel in json.loads((DEPLOY / "grafana" / "kvkeep.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", WINDOW)
            yield panel["title"], re.sub(r"\$(job|instance)\b", ".*", expression)


def selectors(expression: str) -> list[str]:
    """The series that an expression names, without ranges."""
    return re.findall(r"\b(?:kvkeep[\w:]*|up)\b(?:\{[^}]*\})?", expression)


def asker(url: str) -> Callable[[str], list[Any]]:
    """A function that evaluates an expression now: the samples."""
    return lambda expression: get(url, "query", query=expression)["result"]


def get(url: str, path: str, **fields: str) -> Any:
    query = urllib.parse.urlencode(fields)
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=30) as answer:
        return json.load(answer)["data"]


def numbers(samples: list[Any]) -> bool:
    """There are samples, and one of them is a number."""
    return any(math.isfinite(float(one["value"][1])) for one in samples)


def wait(what: str, until: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if until():
                return
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.5)
    raise SystemExit(f"{what} did not come in a minute")


if __name__ == "__main__":
    sys.exit(main())
