"""What clients of others send, in the shape in which they send it; and the page about them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/clients.md").read_text()
CHECKS = sorted((ROOT / "clients").glob("*/check.py"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.parent.name)
def test_every_client_has_pins_and_a_section_with_a_command(check: Path) -> None:
    name = check.parent.name
    pins = check.with_name("requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", pin) for pin in pins)
    assert re.search(rf"^{name}==", "\n".join(pins), re.M)
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert section
    assert re.search(r"^```(sh|python)$", section[1], re.M)


def test_the_page_has_no_other_section() -> None:
    assert sorted(re.findall(r"^## (.*)", PAGE, re.M)) == [each.parent.name for each in CHECKS]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * 64},
        {"prompt": "a" * 65},
        {"prompt": "a" * 200},
        {"prompt": "a" * 60, "max_tokens": 5},
    ],
)
async def test_litellm_recognises_a_prompt_that_is_too_long(
    http: httpx.AsyncClient, body: dict[str, object]
) -> None:
    answer = await http.post("/v1/completions", json=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 64 tokens" in answer.json()["error"]["message"]
