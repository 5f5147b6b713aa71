"""kvkeep.settings, the classes made of settings, and what is derived from them"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvkeep import cli
from kvkeep.cli.options import chosen, with_options
from kvkeep.core.policy import EVICTION, Policy, lfu
from kvkeep.engine.build import open_store
from kvkeep.engine.config import GIB, EngineConfig
from kvkeep.schema import Component, ConfigError, Group, Identity, Schema
from kvkeep.server import run as server_run
from kvkeep.server.config import ApiConfig, ServerConfig
from kvkeep.settings import MEMORY, Setting, check, make, setting, settings_of
from kvkeep.stores import registry
from kvkeep.stores.labels import Label

ALL = settings_of(ServerConfig)
MODEL = Path("model")
CLASSES = (Policy, EngineConfig, ApiConfig, ServerConfig)


def of(name: str) -> Setting:
    return next(one for one in ALL if one.name == name)


# --- descriptions


@pytest.mark.parametrize("kind", CLASSES)
def test_every_field_is_described(kind: type) -> None:
    described = {one.name for one in settings_of(kind)}
    assert {x.name for x in fields(kind)} <= described | {"policy", "engine", "api"}


def test_no_name_means_two_settings() -> None:
    names = [one.name for one in ALL]
    flags = [flag for one in ALL for flag in one.flags]
    assert len(names) == len(set(names))
    assert len(flags) == len(set(flags))


def test_defaults_keep_their_own_rules() -> None:
    for one in ALL:
        if one.default is not MISSING:
            one.check(one.default)


# --- checks at construction


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Policy(prefetch_share=1.5), "prefetch_share must be in (0, 1], not 1.5"),
        (lambda: Policy(prefetch_share=0), "prefetch_share must be in (0, 1], not 0"),
        (lambda: Policy(write_ahead=1.0), "write_ahead must be in [0, 1), not 1.0"),
        (lambda: Policy(write_hits=0), "write_hits must be at least 1, not 0"),
        (lambda: Policy(write_hits=1.5), "write_hits must be a whole number, not 1.5"),
        (lambda: Policy(write_hits=True), "write_hits must be a whole number, not True"),
        (lambda: Policy(stall_seconds=0), "stall_seconds must be above 0, not 0"),
        (lambda: Policy(snapshot_pages=0), "snapshot_pages must be at least 1, not 0"),
        (lambda: Policy(prefetch_seconds=-1), "prefetch_seconds must be at least 0, not -1"),
        (lambda: Policy(recompute="no"), "recompute must be one of auto, never, not 'no'"),
        (lambda: Policy(write=None), "write must be text, not None"),
        (lambda: Policy(eviction=lfu), "eviction must be text, not <function lfu"),
        (lambda: EngineConfig(model="m"), "model must be a path, not 'm'"),
        (lambda: EngineConfig(model=MODEL, page_size="64"), "page_size must be a whole number"),
        (lambda: EngineConfig(model=MODEL, host_bytes=-1), "host_bytes must be at least 0"),
        (lambda: EngineConfig(model=MODEL, topk=2), "topk must be 1, not 2"),
        (lambda: EngineConfig(model=MODEL, disable_cuda_graph=1), "must be true or false, not 1"),
    ],
)
def test_what_a_setting_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("one", [x for x in ALL if x.kind in (int, float)], ids=lambda x: x.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_is_one(one: Setting, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{one.name} must be a (whole )?number, not"):
        one.check(value)
    with pytest.raises(ConfigError, match=r"--x must be a (whole )?number, not"):
        one.read(value, "--x")


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"least": 1}, "at least 1"), ({"above": 1}, "above 1"),
        ({"most": -1}, "at most -1"), ({"below": -1}, "below -1"),
        ({"least": 1, "most": 2}, "in [1, 2]"), ({"above": 1, "below": 2}, "in (1, 2)"),
        ({"least": 1, "most": 1}, "1"),
    ],
)  # fmt: skip
def test_a_range_in_words(bounds: dict[str, float], words: str) -> None:
    @dataclass(frozen=True)
    class One:
        x: float = setting(1.0, MEMORY, "x", **bounds)

    with pytest.raises(ConfigError, match=re.escape(f"x must be {words}, not 0") + "$"):
        check(One(0))


def test_any_finite_amount_has_its_bytes() -> None:
    assert of("host_bytes").read(1e308, "") == int(1e308) * GIB
    assert of("host_bytes").read(0.1, "") == round(0.1 * GIB)


def test_a_policy_names_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Policy("lfu").order is lfu
    monkeypatch.setitem(EVICTION, "other", lfu)
    assert Policy("other").order is lfu


def test_values_go_to_the_class_whose_they_are() -> None:
    config = make(ServerConfig, {"model": MODEL, "port": 1, "page_size": 2, "write_hits": 3})
    engine = EngineConfig(model=MODEL, page_size=2, policy=Policy(write_hits=3))
    assert config == ServerConfig(port=1, engine=engine)
    with pytest.raises(ConfigError, match="there is no setting pages"):
        make(ServerConfig, {"model": MODEL, "pages": 2})
    with pytest.raises(ConfigError, match="model is missing: --model-path sets it"):
        make(ServerConfig, {})


# --- the command line


def run(command: str, *words: object) -> str:
    result = CliRunner().invoke(
        cli.app, [command, *map(str, words)], env={"COLUMNS": "500"}, catch_exceptions=False
    )
    return result.output


def shown(help_text: str, one: Setting) -> tuple[str, str]:
    """The panel that lists a setting, and its line there."""
    panel = ""
    for line in help_text.splitlines():
        if found := re.match(r"╭─ (\w+)", line):
            panel = found[1]
        if re.search(rf"{one.flags[0]}[, ]", line.split("  ")[0] + " "):
            return panel, line
    raise AssertionError(f"{one.flags[0]} is not listed")


def test_help_shows_every_setting_and_its_default() -> None:
    text = run("serve", "--help")
    for one in ALL:
        panel, line = shown(text, one)
        assert panel == one.panel
        assert one.help in line
        assert all(flag in line for flag in one.flags)
        assert all(choice in line for choice in one.choices)
        assert (f"[default: {one.shown}]" in line) == (
            one.shown is not None and one.shown is not False
        )


def another(one: Setting) -> tuple[str, Any]:
    """A value that is not the default, as written and as the field has it."""
    if one.name == "topk":
        return "1", 1
    if one.name == "otlp_traces_endpoint":
        return "http://a/v1/traces", "http://a/v1/traces"
    if one.choices:
        return (word := list(one.choices)[-1]), word
    if one.unit > 1:
        return "0.5", one.unit // 2
    values = {bool: True, int: 6, float: 0.75, str: "file", Path: Path("else")}
    return str(values[one.kind]), values[one.kind]


@pytest.mark.parametrize(
    ("name", "flag"), [(one.name, flag) for one in ALL for flag in one.flags], ids=str
)
def test_every_flag_sets_its_setting(name: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr(server_run, "serve", served.append)
    one = of(name)
    written, value = another(one)
    run(
        "serve",
        "m",
        "--draft",
        "d",
        "--hicache-storage-dir",
        "s",
        flag,
        *[written] * (one.kind is not bool),
    )
    base = {"model": Path("m"), "draft": Path("d"), "storage_dir": Path("s")}
    if name == "model":  # the argument wins
        value = Path("m")
    assert served == [make(ServerConfig, base | {name: value})]


@dataclass(frozen=True)
class Fresh:
    """A setting of tomorrow's."""

    new_thing: int = setting(3, MEMORY, "A thing that is new.", least=2)

    def __post_init__(self) -> None:
        check(self)


def test_a_new_setting_needs_its_description_only(tmp_path: Path) -> None:
    made: list[Fresh] = []
    settings = settings_of(Fresh)

    def command(**said: Any) -> None:
        made.append(make(Fresh, chosen(settings, said, tmp_path / "x.toml")))

    (tmp_path / "x.toml").write_text("new_thing = 4")
    app = typer.Typer()
    app.command()(with_options(command, settings))
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert re.search(r"--new-thing +<int> +A thing that is new. \[default: 3\]", text)
    for words in ([], ["--new-thing", "5"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert made == [Fresh(4), Fresh(5)]
    with pytest.raises(ConfigError, match="--new-thing must be at least 2, not 1"):
        CliRunner().invoke(app, ["--new-thing", "1"], catch_exceptions=False)


def test_an_option_that_says_the_default_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("page-size: 16")
    assert chosen(ALL, {"page_size": 64}, file) == {"page_size": 64}


# --- files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.yaml", "model: m\nhicache_size: 0.5\nport: 1\nwrite-policy: write_back\ndraft: null"),
        ("x.yml", "model-path: m\nhicache-size: 0.5\nport: 1\nhicache-write-policy: write_back"),
        ("x.toml", 'model = "m"\nhicache-size = 0.5\nport = 1\nwrite_policy = "write_back"'),
    ],
)
def test_a_file_says_what_flags_would(
    tmp_path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr(server_run, "serve", served.append)
    (tmp_path / name).write_text(text)
    run("serve", "--config", tmp_path / name)
    run("serve", "n", "--config", tmp_path / name, "--port", "30000")
    engine = {"host_bytes": GIB // 2, "policy": Policy(write="write_back")}
    assert served == [
        ServerConfig(port=1, engine=EngineConfig(model=Path("m"), **engine)),
        ServerConfig(port=30000, engine=EngineConfig(model=Path("n"), **engine)),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.yaml", "page-sise: 3", "there is no setting 'page-sise'; did you mean page-size?"),
        ("x.yaml", "qqqq: 3", "there is no setting 'qqqq'"),
        ("x.toml", "[server]\nport = 3", "there is no setting 'server'"),
        ("x.yaml", "3: 3", "there is no setting 3"),
        ("x.yaml", "page-size: 0", "page-size must be at least 1, not 0"),
        ("x.yaml", "page_size: '16'", "page_size must be a whole number, not '16'"),
        ("x.yaml", "page_size: null", "page_size must be a whole number, not None"),
        ("x.toml", "hicache-ratio = nan", "hicache-ratio must be a number, not nan"),
        ("x.yaml", "eviction: fifo", "eviction must be one of lru, lfu, priority, not 'fifo'"),
        ("x.yaml", "eviction: [lru]", "eviction must be text, not ['lru']"),
        ("x.yaml", "draft: a\nspeculative-draft-model-path: b", "model-path is set twice"),
        ("x.yaml", "a: [", "not YAML: while parsing"),
        ("x.yaml", "- a", "not a mapping"),
        ("x.toml", "a = ", "not TOML"),
        ("x.toml", b"\xff", "not TOML"),
        ("x.ini", "a = 3", "ends in .toml, .yaml, .yml"),
        ("x.yaml", None, "No such file or directory"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_in_a_line(
    tmp_path: Path, name: str, text: str | bytes | None, message: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        run("serve", "m", "--config", file)
    told = str(caught.value)
    assert told.startswith(f"{file}: ")
    assert message in told
    assert "\n" not in told


def test_the_file_in_the_readme(tmp_path: Path) -> None:
    readme = Path(__file__).parent.parent / "README.md"
    (text,) = re.findall(r"```yaml\n(.*?)```", readme.read_text(), re.S)
    (tmp_path / "kvkeep.yaml").write_text(text)
    config = make(ServerConfig, chosen(ALL, {}, tmp_path / "kvkeep.yaml"))
    assert config.engine.host_bytes == 40 * GIB
    assert config.engine.policy == Policy(write="write_back")


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    for name in ("x.yaml", "x.toml"):
        (tmp_path / name).touch()
        assert chosen(ALL, {}, tmp_path / name) == {}


# --- storage backends


KV = Component("k", layers=(0,), shape=(16, 8), dtype="F32")
SCHEMA = Schema(Identity("m"), 16, (Group("full", (KV,)),))


def remember(*arguments: object) -> Any:
    """A storage backend of tests."""
    return arguments


class Entry:
    name, value = "memory", f"{__name__}:remember"


def test_a_package_brings_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [Entry] * (group == "kvkeep.stores")
    )
    assert list(registry.backends()) == ["memory", "file"]
    sizes = {SCHEMA.fingerprint(group): group.record_bytes for group in SCHEMA.groups}
    for name in ("memory", Entry.value):
        config = EngineConfig(
            model=MODEL, storage_dir=tmp_path, storage_bytes=GIB, storage_backend=name
        )
        labels = {name: Label("model", "full", 16) for name in sizes}
        assert open_store(config, SCHEMA) == (tmp_path, sizes, GIB, labels)
    with pytest.raises(ConfigError, match="must be one of memory, file, or module:object, not 'x'"):
        EngineConfig(model=MODEL, storage_dir=tmp_path, storage_backend="x")


def test_without_a_directory_there_is_no_storage() -> None:
    assert open_store(EngineConfig(model=MODEL), SCHEMA) is None


# --- imports


def test_the_library_needs_no_command_line() -> None:
    code = (
        "import sys, kvkeep; assert 'numpy' not in sys.modules; kvkeep.Policy(eviction='lfu')\n"
        "print(sorted(sys.modules.keys() & {'typer', 'yaml', 'pydantic', 'torch'}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
