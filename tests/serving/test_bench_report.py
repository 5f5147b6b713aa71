"""kvkeep bench report"""

from __future__ import annotations

from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_runs import QUESTIONS, bench, cached
from stub_server import serving

from kvkeep.schema import ConfigError

WILD = "</svg><script>alert('x')</script>--><b>&$"


class Outside(HTMLParser):
    """What a page loads from elsewhere, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        if tag in ("script", "link", "img", "iframe", "b"):
            self.found.append(tag)
        for name, value in attrs:
            loads = name in ("src", "href", "xlink:href") and not (value or "").startswith("#")
            if loads or name.startswith("on"):
                self.found.append(f"{name}={value}")


def made_runs(directory: Path) -> list[Path]:
    """Two runs of each kind, one of them with a tag that looks like markup."""
    files = []
    few = {
        "serve": ("--num-prompts", 3, "--random-input-len", 4),
        "multiturn": ("--num-clients", 2, "--num-rounds", 2, "--request-rate", "inf"),
        "gsm8k": ("--file", QUESTIONS, "--num-shots", 7),
    }
    with serving(cached) as stub:
        for kind, options in few.items():
            for at, tag in enumerate(("", WILD)):
                files.append(directory / f"{kind}-{at}.json")
                more = ("--tag", tag, "--json", files[-1])
                assert bench(kind, "--base-url", stub.url, *options, *more)[0] == 0
    return files


def test_a_report_joins_runs_into_a_page_of_its_own(tmp_path: Path) -> None:
    files, out = made_runs(tmp_path), tmp_path / "out.html"
    assert bench("report", *files, files[0], "--output", out)[0] == 0
    text = out.read_text()
    seen = Outside()
    seen.feed(text)
    assert (seen.found, seen.svgs) == ([], 3)
    assert "@import" not in text
    assert text.count("<h2>") == 3
    for title in (
        "Output token throughput",
        "Hit rate",
        "Accuracy",
        "num_clients",
        "&lt;known&gt;",
    ):
        assert title in text
    assert "serve-0 (1)" in text
    assert "serve-0 (2)" in text
    assert escape(WILD) in text
    assert "<td>abc</td>" in text  # the commit


def test_wrong_runs_are_errors(tmp_path: Path) -> None:
    file, out = tmp_path / "x.json", tmp_path / "out.html"
    for text, message in [
        ("{", "cannot read"),
        ("[]", "is no run of kvkeep bench serve, multiturn, gsm8k"),
        ('{"machine": {}, "parts": {}}', "is no run"),
        ('{"kind": "serve", "tag": ""}', "not as kvkeep bench writes it"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            bench("report", file, "--output", out)
        assert message in str(error.value)
    assert not out.exists()
