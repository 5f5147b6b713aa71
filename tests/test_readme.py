"""The documents are true of the code: examples run, names exist, links lead somewhere."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/kvkeep"
README, DESIGN, CONTRIBUTING = (
    ROOT / name for name in ("README.md", "docs/design.md", "CONTRIBUTING.md")
)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_library_example() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    names: dict[str, object] = {}
    exec(code, names)
    names["cache"].close()  # type: ignore[attr-defined]


def test_every_file_in_the_tree_exists() -> None:
    tree = re.search(r"src/kvkeep/\n(.*?)```", README.read_text(), re.S)
    assert tree
    above: list[str] = []
    for indent, name in re.findall(r"^( +)(\S+)", tree[1], re.M):
        above = [*above[: len(indent) // 2 - 1], name]
        assert SOURCE.joinpath(*above).exists(), above


def anchors(document: Path) -> set[str]:
    """What GitHub makes of its headings."""
    titles = re.findall(r"^#+ (.*)", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            file = document.parent / name if name else document
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


# --- names that are quoted as code


class Names:
    """What the files below some folders define."""

    def __init__(self, *folders: str) -> None:
        files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
        self.known = {"None", "GPU_PYTHON", "mypy", "ruff"}  # of Python, make and tools
        self.members: dict[str, set[str]] = {}  # by class
        for file in files:
            if file != Path(__file__):  # it has names that do not exist
                self.known |= {file.stem, file.parent.name}
                self._add(ast.parse(file.read_text()))

    def _add(self, tree: ast.Module) -> None:
        self.known.update(_defined(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.members.setdefault(node.name, set()).update(_defined(node))

    def missing(self, quoted: str) -> str | None:
        """The part of a quotation that exists nowhere; None: it is fine, or no path and no name."""
        if re.fullmatch(r"[\w./-]*/[\w./-]*|[\w-]+\.(py|md|svg|toml)", quoted):
            if re.search(r"NAME|^/|^\.venv", quoted):  # to be filled in, a route, an environment
                return None
            places = ROOT, SOURCE, SOURCE / "core"
            return None if any((place / quoted).exists() for place in places) else quoted
        if "NAME" in quoted or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*(\(\))?", quoted):
            return None
        first, *rest = quoted.removesuffix("()").split(".")
        if first in self.members:
            return next((one for one in rest if one not in self.members[first]), None)
        return next((one for one in (first, *rest) if one not in self.known), None)


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names at any depth, and strings: names of groups, settings and metrics."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name


@pytest.mark.parametrize(
    ("document", "folders"),
    [(DESIGN, ["src"]), (CONTRIBUTING, ["src", "tests", "scripts"])],
    ids=["design", "contributing"],
)
def test_what_is_quoted_as_code_exists(document: Path, folders: list[str]) -> None:
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    quoted = re.findall(r"`([^`\n]+)`", prose)
    assert len(quoted) > 50
    names = Names(*folders)
    assert {one: gone for one in quoted if (gone := names.missing(one))} == {}


def test_a_name_that_does_not_exist_is_found() -> None:
    wrong = ["core/flights.py", "Flights.arrive", "Fleets", "kvkeep.core.tickets", "no_such()"]
    names = Names("src/kvkeep/core")
    assert [one for one in wrong if not names.missing(one)] == []


def test_the_drawing_of_the_core_is_the_contract() -> None:
    drawn = re.search(r"```core\n(.*?)```", DESIGN.read_text(), re.S)
    assert drawn
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [
        one["layers"] for one in contracts["contracts"] if one.get("containers") == ["kvkeep.core"]
    ]
    assert [re.split(r"  +", line)[0] for line in drawn[1].splitlines()] == layers
