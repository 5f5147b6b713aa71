"""The table in the docs is what the code computes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvkeep import cli
from kvkeep.models.state_sizes import HEADER, read_groups, rows, state_groups
from kvkeep.schema import ConfigError, UnsupportedModel

DOCS = Path(__file__).parent.parent / "docs"


def test_the_command_prints_the_table_of_the_docs() -> None:
    lines = (DOCS / "state-sizes.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    files = sorted((DOCS / "configs").glob("*.json"))
    assert len(files) >= 10
    assert tuple(cell.strip() for cell in table[0].strip("|").split("|")) == HEADER
    shown = CliRunner().invoke(cli.app, ["sizes", "--markdown", *map(str, files)]).output
    assert shown.rstrip().splitlines() == table


def test_a_smaller_dtype_and_page() -> None:
    config = json.loads((DOCS / "configs" / "llama-3.1-8b.json").read_text())
    (group,) = state_groups(config, 16, "fp8_e4m3")
    assert group.page_bytes == 2 * 32 * 16 * 8 * 128


@pytest.mark.parametrize(
    ("config", "dtype", "error"),
    [
        ({"model_type": "jamba"}, "bfloat16", UnsupportedModel),
        ({"model_type": "no such model"}, "bfloat16", UnsupportedModel),
        ({"model_type": "llama"}, "int3", ConfigError),
    ],
)
def test_refusals(config: dict[str, str], dtype: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        state_groups(config, 16, dtype)


EAGLE3 = '{"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64}'
SIZES = ', "intermediate_size": 1, "num_attention_heads": 4, "vocab_size": 9}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ('{"a": 1}\n{"b": 2}', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        (EAGLE3, "lacks intermediate_size, num_attention_heads, vocab_size"),
        ('{"model_type": "no such model"}', "no such model"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "by zero"),
        (EAGLE3[:-1] + SIZES.replace("4", '"4"'), "unsupported operand"),
    ],
)
def test_what_is_no_config_is_told_in_a_line(
    tmp_path: Path, content: str | bytes | None, message: str
) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        read_groups(file, 64, "bfloat16")
    told = str(caught.value)
    assert told.startswith(str(file))
    assert "\n" not in told
    assert len(told) < 310 + len(str(file))


def test_numbers_that_only_python_s_json_knows_are_read(tmp_path: Path) -> None:
    """Published configs of recurrent models have ``"time_step_limit": [0.0, Infinity]``."""
    config = json.loads((DOCS / "configs" / "lfm2-1.2b.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps(config | {"limit": float("inf")}))
    assert "Infinity" in (tmp_path / "x.json").read_text()
    assert read_groups(tmp_path / "x.json", 64, "bfloat16")


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / f"[red]x{'y' * 70}.json"
    file.write_text((DOCS / "configs" / "llama-3.1-8b.json").read_text())
    lines = CliRunner().invoke(cli.app, ["sizes", str(file)]).output.splitlines()
    start = next(i for i, line in enumerate(lines) if "[red]x" in line)
    assert "".join(line.split()[0] for line in lines[start:]) == file.stem


@pytest.mark.parametrize("given", ["llama-3.1-8b", "llama-3.1-8b/config.json", "."])
def test_a_model_s_directory_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    directory = tmp_path / "llama-3.1-8b"
    directory.mkdir()
    (directory / "config.json").write_text((DOCS / "configs" / "llama-3.1-8b.json").read_text())
    monkeypatch.chdir(directory if given == "." else tmp_path)
    (row,) = rows([Path(given)], 64, "bfloat16")
    assert row[0] == "llama-3.1-8b"
    assert CliRunner().invoke(cli.app, ["sizes", given]).output.splitlines()[1].split()[0] == row[0]
