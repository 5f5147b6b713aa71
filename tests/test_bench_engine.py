"""The bench of times to first token runs, tells what it measured, and draws it."""

from __future__ import annotations

from pathlib import Path

from kvkeep.bench import plot
from kvkeep.bench.engine import measure


def test_rows_and_their_chart(tmp_path: Path) -> None:
    told: list[str] = []
    rows = measure(1, told.append, (256,))
    assert told == ["256 tokens from storage, turn 1 of 1"]
    assert [(row["name"], row["peer"]) for row in rows] == [
        ("256 tokens from storage", "computed"),
        ("256 tokens from storage, no draft", "computed"),
        ("256 tokens back, extra for the draft", "its bytes"),
        ("256 tokens from storage of 1 MB/s", "computed"),
    ]
    for row in rows:
        assert row["tokens"] == 256
        assert row["ratio"] == row["ours"] / row["peer_value"]
    assert rows[2]["peer_value"] == (1024 + 128 * 4 / 64) / 4096  # rows, and a carry per page
    file = tmp_path / "chart.svg"
    plot.draw_first_token(file, rows)
    assert file.read_text().count("storage of 1 MB/s") == 1
