"""The chart's monitors, alerts and dashboard on a real Prometheus that scrapes real pods."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.acceptance.scenarios.modes import COMPETING, PARTITIONED
from tests.chart.chart import CHART, helm, of_kind, the
from tests.support.kubernetes.cluster import REGISTRY, wait
from tests.support.kubernetes.operator import RELEASE, installed
from tests.support.kubernetes.prometheus import Prometheus
from tests.support.kubernetes.room import BY_PAIRS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.cluster import Body, Cluster
    from tests.support.kubernetes.room import Resource, Room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(280)]

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}
METRIC = re.compile(r"\b(?:outbox|process)_\w+")
FIRE_AT_ONCE = "1s"
"""In place of each rule's `for`: that a rule fires is what is looked at here; when it does, promtool's cases say."""


def render_monitoring(namespace: str) -> list[Body]:
    """Render what the chart makes for Prometheus beside the operator that `installed` installs."""
    values = {
        "image": {"registry": REGISTRY, "tag": "dev"},
        "clusterId": "acceptance",
        "watchNamespaces": [namespace],
        "metrics": {"serviceMonitor": {"enabled": True}},
        "monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}},
    }
    done = helm("template", RELEASE, str(CHART), "--namespace", namespace, "--kube-version", "1.34.4", values=values)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.safe_load_all(done.stdout) if body]


@pytest.fixture
def processors(cluster: Cluster, room: Room) -> Iterator[list[Resource]]:
    """One of each kind that has metrics of its own, with messages."""
    with installed(cluster, room.namespace, [room.namespace]):
        ordered = room.processor("orders", source=BY_PAIRS, delivery=PARTITIONED, worker={"replicas": 2})
        competing = room.processor("parcels", processorId="parcels", delivery=COMPETING)
        sharing = room.processor("bills", worker={"shared": "small"})
        for each in (ordered, competing, sharing):
            each.until_ready()
        yield [ordered, competing, sharing]


@pytest.fixture
def prometheus(cluster: Cluster, room: Room, processors: list[Resource], tmp_path: Path) -> Iterator[Prometheus]:
    """A server that does what the chart's monitors and rules say."""
    manifests = render_monitoring(room.namespace)
    pods, service = the(manifests, "PodMonitor"), the(manifests, "ServiceMonitor")
    token = write_token(cluster, pods, tmp_path)
    rules = the(manifests, "PrometheusRule")["spec"]
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = FIRE_AT_ONCE
    with Prometheus(cluster, tmp_path, [pods, service], token, rules) as server:
        room.shop.produce(40, "customer-1")
        wait("every pod is scraped", lambda: scraped(server) == 5, within=30, explain=lambda: str(server.targets()))
        yield server


def write_token(cluster: Cluster, monitor: Body, folder: Path) -> Path:
    """Read the Secret that a PodMonitor names, in its own namespace, as the Prometheus operator does."""
    asked = monitor["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]
    secret = cluster.need("Secret", monitor["metadata"]["namespace"], asked["name"])
    path = folder / "token"
    path.touch(0o600)
    path.write_bytes(base64.b64decode(secret["data"][asked["key"]]))
    return path


def scraped(server: Prometheus) -> int:
    """How many targets answered: two pods of one processor, one of each other, and the operator."""
    return sum(target["health"] == "up" for target in server.targets())


def fill_in(expression: str, namespace: str) -> str:
    """Put in what Grafana puts in for its variables."""
    for name, value in {"$namespace": namespace, "$name": ".*", "$__rate_interval": "20s"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_every_query_of_the_dashboard_and_every_alert_finds_its_series(
    room: Room, processors: list[Resource], prometheus: Prometheus
) -> None:
    asked = {
        f"{title} {target['refId']}": fill_in(target["expr"], room.namespace)
        for title, panel in PANELS.items()
        for target in panel["targets"]
    }
    assert len(asked) > 30

    def without_series() -> list[str]:
        return [name for name, query in asked.items() if not prometheus.query(query)]

    wait("a series for each query", lambda: not without_series(), within=60, explain=lambda: f"{without_series()}")

    alerts = prometheus.alerts()
    assert len(alerts) == 17
    for name, rule in alerts.items():
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), name
        for metric in METRIC.findall(rule["query"]):
            assert prometheus.query(metric), f"{name} asks for {metric}, which no pod serves"
    firing = [name for name, rule in alerts.items() if rule["state"] == "firing"]
    assert firing == [], "three processors that work, and an operator that leads"

    by_resource = prometheus.query(f'outbox_processor_ready{{namespace="{room.namespace}"}}')
    assert {series["metric"]["name"] for series in by_resource} == {"bills", "orders", "parcels"}
    all_handled = {"bills": 40.0, "orders": 40.0, "parcels": 40.0}
    wait("each has handled all", lambda: handled(prometheus) == all_handled, within=30)

    room.server.shut(room.shop)
    orders = processors[0]
    found = orders.until_condition("Ready", "False", "DatabaseUnavailable", within=60)
    assert found["message"].endswith("; see docs/runbook.md#databaseunavailable")

    def summaries() -> set[str]:
        alerts = prometheus.alerts()["OutboxProcessorNotReady"]["alerts"]
        return {each["annotations"]["summary"] for each in alerts if each["state"] == "firing"}

    summary = f"{room.namespace}/orders is not ready for 10 minutes: DatabaseUnavailable"
    wait("its alert fires", lambda: summary in summaries(), within=30, explain=lambda: f"{prometheus.alerts()}")


def handled(server: Prometheus) -> dict[str, float]:
    """Messages by resource, as workers count them."""
    found = server.query("sum by (name) (outbox_messages_handled_total)")
    return {series["metric"]["name"]: float(series["value"][1]) for series in found}


def test_workers_refuse_who_has_no_token(
    cluster: Cluster, room: Room, processors: list[Resource], tmp_path: Path
) -> None:
    """The control of the test above: the token is what opens /metrics."""
    wrong = tmp_path / "token"
    wrong.write_text("not-the-token")
    manifests = render_monitoring(room.namespace)
    rules = of_kind(manifests, "PrometheusRule")[0]["spec"]
    with Prometheus(cluster, tmp_path, [the(manifests, "PodMonitor")], wrong, rules) as server:

        def refused() -> bool:
            return [target["lastError"].split(" status ")[-1] for target in server.targets()] == [
                "401 Unauthorized"
            ] * 4

        wait("all four refuse", refused, within=30, explain=lambda: str(server.targets()))
