"""The samples of lm-eval, compared with what the server's own endpoints say."""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    url = os.environ["KVKEEP"] + path
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def samples(task: str) -> Iterator[dict[str, Any]]:
    (file,) = Path(os.environ["OUT"]).rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == 4
    yield from found


def likelihood(context: str, continuation: str) -> float:
    """The continuation's log-likelihood, by ``/generate``."""
    start, tokens = len(tokenizer.encode(context)), tokenizer.encode(context + continuation)
    ask = {"input_ids": tokens, "return_logprob": True, "logprob_start_len": 0}
    meta = post("/generate", ask | {"sampling_params": {"max_new_tokens": 1}})["meta_info"]
    return sum(value for value, *_ in meta["input_token_logprobs"][start:])


for sample in samples("kvkeep_choice"):
    assert sample["acc"] == 1
    for arguments, ((said, greedy),) in zip(
        sample["arguments"].values(), sample["resps"], strict=True
    ):
        own = likelihood(arguments["arg_0"], arguments["arg_1"])
        assert abs(float(said) - own) < 1e-3, (said, own)
        assert greedy == str(arguments["arg_1"] == sample["doc"]["right"])
print("ok: log-likelihoods equal those of /generate; all choices are right")

for sample in samples("kvkeep_continue"):
    assert sample["exact_match"] == 1
    text = sample["arguments"]["gen_args_0"]["arg_0"]
    ask = {"prompt": text, "max_tokens": 12, "temperature": 0, "stop": ["\n"]}
    assert sample["resps"] == [[post("/v1/completions", ask)["choices"][0]["text"]]]
print("ok: generations equal /v1/completions; all continue the text as it began")
