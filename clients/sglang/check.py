"""The reports of ``sglang.bench_serving``, one per backend."""

import json
import os
from pathlib import Path

REQUESTS, NEW = 16, 32  # as the command asks

for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
    (line,) = (Path(os.environ["OUT"]) / f"{backend}.jsonl").read_text().splitlines()
    report = json.loads(line)
    assert report["backend"] == backend
    assert report["completed"] == REQUESTS
    assert report["total_output_tokens"] == REQUESTS * NEW
    assert 1 < report["accept_length"] <= 8
    assert 0 < report["mean_ttft_ms"] < report["mean_e2e_latency_ms"]
    assert report["output_throughput"] > 0
    print(
        f"ok: {backend}: all {REQUESTS} requests successful, "
        f"accept length {report['accept_length']:.2f}"
    )
