"""The README's code runs as it stands there."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_library_example() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    names: dict[str, object] = {}
    exec(code, names)
    names["cache"].close()  # type: ignore[attr-defined]


def test_every_file_that_it_names_exists() -> None:
    root = README.parent
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (root / target).exists(), target
    tree = re.search(r"src/kvkeep/\n(.*?)```", README.read_text(), re.S)
    assert tree
    for name in re.findall(r"^  (\S+)", tree[1], re.M):
        assert (root / "src/kvkeep" / name).exists(), name
