"""kvkeep.output"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvkeep.output import writable, write_json, write_json_lines
from kvkeep.schema import ConfigError


def test_nothing_is_made_or_changed_by_asking(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("as it was")
    assert [writable(new), writable(old)] == [new, old]
    assert writable(Path(os.devnull)) == Path(os.devnull)
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "as it was"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/x.json", "there is no directory"),
        ("file/x.json", "there is no directory"),
        ("directory", "it is a directory"),
        ("closed/x.json", "permission denied"),
        ("x" * 300, "File name too long"),
    ],
)
def test_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    for directory in ("directory", "closed"):
        (tmp_path / directory).mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "closed")
    with pytest.raises(ConfigError, match=f"cannot write .*: .*{why}"):
        writable(tmp_path / name)


def test_figures_are_written_for_people_and_programs(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [1, 2.5], "b": None})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == {"a": [1, 2.5], "b": None}
    assert text.startswith("{\n  ")
    assert text.endswith("}\n")


def test_lines_for_programs(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "x.jsonl", [{"a": "b\nc"}, [1]])
    text = (tmp_path / "x.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [{"a": "b\nc"}, [1]]
    assert text.endswith("]\n")


def test_a_disk_that_is_full_at_last_is_no_traceback() -> None:
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left on device"):
        write_json(Path("/dev/full"), {})
