"""Files of ``deploy/`` name what exists. ``python -m scripts.ops`` runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_metrics import at_start

from kvkeep.server.config import ServerConfig
from kvkeep.settings import make, settings_of

DEPLOY = Path(__file__).parent.parent / "deploy"
SELECTOR = re.compile(r"\b(kvkeep_\w+)(?:\{([^}]*)\})?")
OPEN = {"job", "instance", "le"}  # labels that Prometheus adds, or that nobody selects


@pytest.fixture(scope="module")
def page() -> str:
    return at_start()


def dashboard() -> list[dict[str, Any]]:
    panels = json.loads((DEPLOY / "grafana/kvkeep.json").read_text())["panels"]
    return [panel for panel in panels if panel["type"] != "row"]


def shown() -> list[str]:
    return [target["expr"] for panel in dashboard() for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def unknown(expression: str, page: str) -> list[str]:
    """Selectors of which the page of metrics has no series."""
    names = "|".join(re.findall(r"# HELP kvkeep_(\w+)", page))
    wrong = []
    for name, labels in SELECTOR.findall(expression):
        series = [line for line in page.splitlines() if re.match(rf"{name}(\{{| )", line)]
        for label, how, value in re.findall(r'(\w+)(=~?)"([^"]*)"', labels):
            values = value.split("|") if how == "=~" else [re.escape(value)]
            wrong += [
                f"{name}{{{label}={one}}}"
                for one in values
                if label not in OPEN
                and not any(re.search(rf'\b{label}="{one}"', line) for line in series)
            ]
        if not series or not re.fullmatch(rf"kvkeep_({names})(_bucket|_sum|_count)?", name):
            wrong.append(name)
    return wrong


class TestMetrics:
    def test_the_dashboard_shows_what_exists(self, page: str) -> None:
        assert [wrong for one in shown() if (wrong := unknown(one, page))] == []

    def test_rules_ask_for_what_exists(self, page: str) -> None:
        assert [wrong for rule in rules() if (wrong := unknown(rule["expr"], page))] == []

    def test_what_does_not_exist_is_found(self, page: str) -> None:
        for wrong in (
            "kvkeep_hits_total",
            'kvkeep_hit_tokens_total{tier="disk"}',
            'kvkeep_storage_faults_total{kind=~"full|fuller"}',
            'kvkeep_hit_tokens_total{level="host"}',
        ):
            assert unknown(wrong, page), wrong

    def test_the_dashboard_shows_them_all(self, page: str) -> None:
        names = {
            re.sub("_(bucket|sum|count)$", "", x) for e in shown() for x, _ in SELECTOR.findall(e)
        }
        given_as_ratio = {"kvkeep_speculative_rounds_total", "kvkeep_speculative_tokens_total"}
        assert set(re.findall(r"# HELP (kvkeep_\w+)", page)) - names == given_as_ratio

    def test_accept_length_by_tier_comes_first(self) -> None:
        first = dashboard()[0]["targets"][0]["expr"]
        assert "kvkeep_accept_length_sum" in first
        assert "by (tier)" in first

    def test_every_alert_is_tested(self) -> None:
        tests = (DEPLOY / "prometheus/rules_test.yml").read_text()
        alerts = [rule["alert"] for rule in rules() if "alert" in rule]
        assert [name for name in alerts if f'alertname="{name}"' not in tests] == []
        assert all(rule["annotations"]["summary"] for rule in rules() if "alert" in rule)


class TestServers:
    def settings(self) -> ServerConfig:
        """What kvkeep.yaml says, read as the server does."""
        from kvkeep.cli.options import chosen

        every = settings_of(ServerConfig)
        return make(ServerConfig, chosen(every, {}, DEPLOY / "kvkeep.yaml"))

    def test_the_grace_of_servers_fits(self) -> None:
        grace = self.settings().shutdown_grace_seconds
        unit = (DEPLOY / "systemd/kvkeep.service").read_text()
        assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > grace
        pod = documents("kubernetes/kvkeep.yaml")[-1]["spec"]["template"]["spec"]
        slept = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > slept + grace

    def test_paths_and_ports_are_those_of_the_settings(self) -> None:
        settings = self.settings()
        storage = settings.engine.storage_dir
        assert storage
        pod = documents("kubernetes/kvkeep.yaml")[-1]["spec"]["template"]
        container = pod["spec"]["containers"][0]
        mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
        assert storage.parent in mounts
        assert settings.engine.model.parent in mounts
        assert container["ports"][0]["containerPort"] == settings.port
        assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(settings.port)
        image = (DEPLOY / "Dockerfile").read_text()
        assert f"VOLUME {storage.parent}\n" in image
        assert f"EXPOSE {settings.port}\n" in image
        assert "USER 10001\n" in image
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001

    def test_probes_ask_for_endpoints(self, page: str) -> None:
        container = documents("kubernetes/kvkeep.yaml")[-1]["spec"]["template"]["spec"][
            "containers"
        ][0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = container[probe]["httpGet"]["path"]
            assert f'kvkeep_http_responses_total{{endpoint="{path}",status="200"}}' in page


def test_labels_are_bounded(page: str) -> None:
    """A label takes few values; nothing that a client says becomes one."""
    labels = {
        name for text in re.findall(r"\{([^}]*)\}", page) for name in re.findall(r'(\w+)="', text)
    }
    known = {"tier", "lane", "why", "kind", "group", "endpoint", "status", "outcome", "le"}
    assert labels == known
    assert len(page.splitlines()) < 1000
