"""Files that are written when the work is done are tried before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvkeep.output import writable, write_json
from kvkeep.schema import ConfigError


@pytest.mark.parametrize("name", ["new.json", "old.json"])
def test_where_a_file_can_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "old.json").write_text("old")
    assert writable(tmp_path / name) == tmp_path / name
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("name", ["none/x.json", "file/x.json", "directory"])
def test_where_no_file_can_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match=rf"cannot write .*{name}"):
        writable(tmp_path / name)


def test_json_is_for_people_too(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"rows": [1.5]})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == {"rows": [1.5]}
    assert text.count("\n") > 1
    assert text.endswith("}\n")
