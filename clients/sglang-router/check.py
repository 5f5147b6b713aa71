"""SGLang's router, which runs with the policy cache_aware before two servers."""

import json
import os
import re
import secrets
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ROUTER = f"http://127.0.0.1:{os.environ['PORT']}"
WORKERS = [os.environ["KVKEEP"], os.environ["KVKEEP_2"]]
NEW = 48  # tokens: requests that are sent at once overlap
PATIENCE = 60.0  # seconds until the router knows both workers
CONVERSATIONS = [f"{secrets.token_hex(8)}: go on. " * 12 for _ in range(8)]  # new to everybody


def read(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def healthy_workers() -> int:
    try:
        return sum(one["is_healthy"] for one in json.loads(read(f"{ROUTER}/workers"))["workers"])
    except (urllib.error.URLError, ConnectionError):
        return 0


def served(worker: str) -> float:
    """Generations that a worker has begun."""
    lines = re.findall(r"^kvkeep_http_requests_total\{.*\} (\S+)", read(f"{worker}/metrics"), re.M)
    return sum(map(float, lines))


def chat(content: str) -> dict[str, Any]:
    ask = {"model": "target", "temperature": 0, "max_tokens": NEW}
    messages = [{"role": "user", "content": content}]
    url = f"{ROUTER}/v1/chat/completions"
    return json.loads(read(url, ask | {"messages": messages}))


end = time.monotonic() + PATIENCE
while healthy_workers() < 2:
    assert time.monotonic() < end, "the router found no two healthy workers"
    time.sleep(0.2)
print("ok: the router finds both workers healthy")

before = [served(worker) for worker in WORKERS]
with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:  # what is new goes where the load is least
    first = list(pool.map(chat, CONVERSATIONS))
middle = [served(worker) for worker in WORKERS]
assert sum(middle) - sum(before) == len(CONVERSATIONS)
assert all(now > then for now, then in zip(middle, before, strict=True))
print("ok: eight conversations at once reach both workers")

again = [chat(one + "Go on.") for one in CONVERSATIONS]
for cold, warm in zip(first, again, strict=True):
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached >= warm["usage"]["prompt_tokens"] // 2
print("ok: each goes on at the worker that has its prefix, and hits it")

direct = WORKERS[0] + "/v1/chat/completions"
ask = {"model": "target", "temperature": 0, "max_tokens": NEW}
ask |= {"messages": [{"role": "user", "content": CONVERSATIONS[0]}]}
plain = json.loads(read(direct, ask))["choices"][0]["message"]["content"]
assert first[0]["choices"][0]["message"]["content"] == plain
found = read(f"{ROUTER}/v1/chat/completions", ask | {"stream": True})
events = [json.loads(data) for data in re.findall(r"^data: (\{.*)", found, re.M)]
parts = [choice["delta"].get("content", "") for one in events for choice in one["choices"]]
assert "".join(parts) == plain
assert "data: [DONE]" in found
completed = json.loads(
    read(f"{ROUTER}/v1/completions", {"model": "target", "prompt": "one two", "max_tokens": 4})
)
assert completed["usage"]["completion_tokens"] == 4
native = json.loads(
    read(f"{ROUTER}/generate", {"text": "one two", "sampling_params": {"max_new_tokens": 4}})
)
assert native["meta_info"]["completion_tokens"] == 4
print("ok: chat and its stream equal the worker's own; completions and /generate pass through")
