"""On a device: tokens equal transformers', with and without hits and CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from served import DEVICE, GPU, Served, load, prompt
from tiny_models import PAGE

from kvkeep.models.graphs import Graphs

pytestmark = GPU
NEW = 12
PAGED = ["llama", "qwen3", "qwen3-moe", "mistral", "gemma2", "gemma3", "gpt-oss", "deepseek-v2"]
FIXED = ["llama", "qwen3", "mistral", "gemma2", "gemma3"]  # no experts, nothing gathered


@torch.inference_mode()
def check_greedy(directory: Path, dtype: torch.dtype, text: list[int], length: int) -> None:
    """Assert that each token from ``length`` on has transformers' highest logit, up to rounding."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).to(DEVICE)
    logits = model(torch.tensor([text], device=DEVICE)).logits[0, length - 1 : -1].float()
    chosen = torch.tensor(text[length:], device=DEVICE)
    short = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
    spread = logits.std(-1)
    assert (short <= spread * (1e-3 if dtype == torch.float32 else 0.1)).all()


@pytest.mark.parametrize("kind", PAGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    directory, name = tmp_path / kind, str(dtype).removeprefix("torch.")
    served, text = Served(load(directory, kind, name)), prompt(3 * PAGE + 5)
    for _ in range(2):  # cold, then from the device
        tokens, _ = served.answer(text, NEW)
        check_greedy(directory, dtype, text + tokens, len(text))
    served.close()


def test_tokens_are_those_of_generate(tmp_path: Path) -> None:
    import transformers

    served, text = Served(load(tmp_path / "llama")), prompt(3 * PAGE + 5)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "llama", dtype=torch.float32
    ).to(DEVICE)
    given = torch.tensor([text], device=DEVICE)
    expected = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, min_new_tokens=NEW,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    assert served.answer(text, NEW)[0] == expected[0, len(text) :].tolist()
    served.close()


@pytest.mark.parametrize("kind", PAGED)
def test_recorded_steps_give_the_same_tokens(tmp_path: Path, kind: str) -> None:
    target = load(tmp_path / kind, kind)
    text, served = prompt(2 * PAGE + 3), Served(target)
    expected = served.answer(text, NEW)[0]
    served.close()
    target.graphs, served = Graphs(), Served(target)
    assert [served.answer(text, NEW)[0] for _ in range(2)] == [expected] * 2
    if kind in FIXED:
        assert target.graphs.recorded
    served.close()


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct"])
@pytest.mark.parametrize("backend", ["direct", "kernel"])
def test_bytes_come_back_from_host_and_storage(tmp_path: Path, layout: str, backend: str) -> None:
    if (layout, backend) == ("page_first_direct", "kernel"):
        pytest.skip("they exclude each other")
    target, text = load(tmp_path / "gemma3", "gemma3"), prompt(6 * PAGE + 2)
    served = Served(target, tmp_path / "storage", layout, backend)
    cold = served.answer(text, NEW)
    for wait in (True, False):  # for the whole load, or layer by layer
        served.cache.evict("device")
        assert served.answer(text, NEW, wait) == cold
        assert served.origin["host"] == 6 * PAGE
    served.close()
    served = Served(target, tmp_path / "storage", layout, backend)
    assert served.answer(text, NEW) == cold
    assert served.origin["storage"] == 6 * PAGE
    served.close()
