"""The table in the docs is what the code computes."""

import json
from pathlib import Path

import pytest

from kvkeep.models.state_sizes import HEADER, rows, state_groups
from kvkeep.schema import ConfigError, UnsupportedModel

DOCS = Path(__file__).parent.parent / "docs"


def test_the_table_in_the_docs() -> None:
    lines = (DOCS / "state-sizes.md").read_text().splitlines()
    table = [tuple(c.strip() for c in x.strip("|").split("|")) for x in lines if x.startswith("|")]
    files = sorted((DOCS / "configs").glob("*.json"))
    assert len(files) >= 10
    assert table[0] == HEADER
    assert table[2:] == list(rows(files, 64, "bfloat16"))


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
