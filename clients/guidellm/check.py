"""GuideLLM's reports, one per endpoint."""

import json
import os
from pathlib import Path

REQUESTS, PROMPT, NEW = 8, 128, 16  # as the command asks

for name in ("chat.completions", "completions"):
    report = json.loads((Path(os.environ["OUT"]) / f"{name}.json").read_text())
    (run,) = report["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    for request in run["requests"]["successful"]:
        assert request["output_tokens"] == NEW
        assert request["prompt_tokens"] >= PROMPT
        assert 0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"]
    print(f"ok: /v1/{name.replace('.', '/')}: {REQUESTS} requests, none errored or incomplete")
