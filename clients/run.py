"""``make clients``: unchanged clients of others against ``kvkeep serve`` on the demo pair.

Each client is a folder here with its ``requirements.txt`` (all packages pinned) and a ``check.py``,
and a section of ``docs/clients.md`` of the same name. The runner makes an environment per client,
runs the section's blocks as they stand there, then ``check.py``, which prints a line per fact it
asserted. Blocks and checks find in their environment: ``KVKEEP``, the server's URL; ``KVKEEP_2``, a
second server's (of clients that name it); ``MODEL``, the served model's directory, which has the
tokenizer; ``OUT``, a folder for reports; ``PORT`` and ``PORT_2``, free ports. What a block leaves
in the background runs until the check is done.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep.demo.process import Server
from kvkeep.demo.run import DRAFT, STEPS, TARGET
from kvkeep.schema import ConfigError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "clients.md"
ENVIRONMENTS = ROOT / ".venv-clients"
NAMES = (
    *("openai", "litellm", "langchain-openai", "instructor"),
    *("sglang", "guidellm", "lm-eval", "sglang-router"),
)  # in the order in which they run
PATIENCE = 900.0  # seconds for a block or a check
SERVER = [
    *(str(TARGET), "--draft", str(DRAFT), "--speculative-num-steps", str(STEPS)),
    *("--speculative-num-draft-tokens", str(STEPS + 1)),
]


class Failure(Exception):
    """A client's environment, block or check failed; the message says how."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client of someone else's."""

    name: str

    @property
    def pins(self) -> Path:
        """Its requirements, all with their exact versions."""
        return HERE / self.name / "requirements.txt"

    @property
    def check(self) -> Path:
        """The script that asserts."""
        return HERE / self.name / "check.py"

    @property
    def version(self) -> str:
        """The pinned version of the package that it is named for."""
        found = re.search(rf"^{re.escape(self.name)}==(\S+)", self.pins.read_text(), re.M | re.I)
        return found[1] if found else "?"

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and text of the blocks in its section of the page."""
        section = re.search(rf"^## {self.name}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
        return re.findall(r"^```(sh|python)\n(.*?)^```", section[1] if section else "", re.M | re.S)

    @property
    def servers(self) -> int:
        """How many servers it needs."""
        blocks = "".join(text for _, text in self.blocks)
        return 2 if "KVKEEP_2" in blocks + self.check.read_text() else 1


def main() -> None:
    """Run the clients that the command line names; exit with 1 if any fails."""
    parser = argparse.ArgumentParser(description="Run clients of others against kvkeep serve.")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep reports and logs in DIR")
    given = parser.parse_args()
    if unknown := set(given.clients) - set(NAMES):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [Client(name) for name in NAMES if name in (given.clients or NAMES)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvkeep-clients-"))
        out = (given.keep or Path(scratch)).resolve()
        servers: list[Server] = []
        for number in range(max(one.servers for one in chosen)):
            print(f"starting server {number + 1}", flush=True)
            servers.append(Server(SERVER))
            stack.callback(servers[-1].stop)
            try:
                servers[-1].wait()
            except ConfigError as error:
                sys.exit(str(error))
        rows = [_run(client, servers, out / client.name) for client in chosen]
    _show(rows)
    sys.exit(any(not passed for *_, passed in rows))


def _run(client: Client, servers: list[Server], out: Path) -> tuple[Client, list[str], float, bool]:
    """The client, what its check asserted, the seconds that took, and whether it passed."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"{client.name} {client.version}", flush=True)
    began, facts, passed = time.monotonic(), [], False
    try:
        python = _environment(client)
        began = time.monotonic()
        variables = _variables(python, servers, out)
        with ExitStack() as stack:
            for index, (language, text) in enumerate(client.blocks, 1):
                print(f"  block {index} of docs/clients.md", flush=True)
                shell = ["bash", "-euo", "pipefail", "-c", text]
                command = shell if language == "sh" else [str(python), "-c", text]
                _call(command, variables, out / f"block-{index}.log", stack)
            check = [str(python), "-P", str(client.check)]
            said = _call(check, variables, out / "check.log", stack)
        facts = re.findall(r"^ok: (.*)", said, re.M)
        for fact in facts:
            print(f"  {fact}", flush=True)
        passed = bool(facts)
    except Failure as failure:
        print(failure, flush=True)
    return client, facts, time.monotonic() - began, passed


def _environment(client: Client) -> Path:
    """The Python of the client's environment, made anew if its pins changed."""
    folder = ENVIRONMENTS / client.name
    python, stamp = folder / "bin" / "python", folder / ".pins"
    digest = hashlib.sha256(client.pins.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return python
    print("  making its environment (minutes, the first time)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    with ExitStack() as stack:
        # torch comes first, with what it needs: which build suits a machine is pip's choice
        for torch in re.findall(r"^torch==\S+", client.pins.read_text(), re.M):
            _call([*pip, torch], dict(os.environ), folder / "torch.log", stack)
        # the list is complete, and some packages declare far more than their client needs
        command = [*pip, "--no-deps", "-r", str(client.pins)]
        _call(command, dict(os.environ), folder / "pip.log", stack)
    stamp.write_text(digest)
    return python


def _variables(python: Path, servers: list[Server], out: Path) -> dict[str, str]:
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    urls = {f"KVKEEP_{index}": server.url for index, server in enumerate(servers, 1)}
    return {name: value for name, value in os.environ.items() if name not in own} | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "KVKEEP": servers[0].url,
        **urls,
        "MODEL": str(TARGET),
        "OUT": str(out),
        "PORT": str(_free_port()),
        "PORT_2": str(_free_port()),
        "HF_HOME": str(out / "huggingface"),
        "HF_HUB_OFFLINE": "1",  # no client needs a hub, and none may wait for one
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nor for a list of prices
        "DO_NOT_TRACK": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _call(command: list[str], variables: dict[str, str], log: Path, stack: ExitStack) -> str:
    """Run a command from the repository's root; return what it wrote, which ``log`` keeps.

    Args:
        stack: its end ends what the command left running.

    Raises:
        Failure: it exits with another code than 0, or takes too long.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_end, process)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = -1
    said = log.read_text(errors="replace")
    if code:
        last = "\n".join(f"    {line}" for line in said.splitlines()[-40:])
        how = f"exit {code}" if code > 0 else f"ended after {PATIENCE:g} s, or by a signal"
        raise Failure(f"{last}\n  {log.name}: {how}")
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the command's session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show(rows: list[tuple[Client, list[str], float, bool]]) -> None:
    print(f"\n{'client':18}{'version':14}{'checks':>7}{'seconds':>9}  result")
    for client, facts, seconds, passed in rows:
        result = "passed" if passed else "FAILED"
        print(f"{client.name:18}{client.version:14}{len(facts):7}{seconds:9.1f}  {result}")


if __name__ == "__main__":
    main()
