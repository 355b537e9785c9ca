"""Monitors, alerts and dashboard of the chart; tests/acceptance/integrations has them on a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox_operator.api.naming import MANAGED_BY, PROCESSOR_LABEL, ROLE_LABEL
from outbox_operator.api.observed import RUNNERS
from outbox_operator.cluster.key_secrets import TOKEN_FIELD
from tests.chart.chart import CHART, FULL_NAME, MATRIX, NAMESPACE, SERVED, environment, of_kind, render, the

CASES = Path(__file__).with_name("alerts.yaml")
ALERTS = CHART / "files" / "alerts.yaml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
WATCHED = MATRIX["everything watched"]
TWO = MATRIX["watched in two namespaces"]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    assert program, "promtool is not there: run tests/tools/cluster/setup.sh monitoring"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def rules_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in the(render(values), "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]


def test_alerts_fire_when_they_should():
    done = promtool("test", "rules", str(CASES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", RULES)
def test_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str):
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name} == {True, False}


def test_rules_are_those_of_the_file(tmp_path: Path):
    assert rules_of(TWO) == list(RULES.values())
    rendered = tmp_path / "rules.yaml"
    rendered.write_text(yaml.safe_dump(the(render(TWO), "PrometheusRule")["spec"]))
    done = promtool("check", "rules", str(rendered))
    assert f"{len(RULES)} rules found" in done.stdout, done.stdout + done.stderr


def test_rules_leave_out_what_is_disabled_and_link_to_the_runbook_where_it_is():
    rules = {rule["alert"]: rule for rule in rules_of(WATCHED)}
    assert set(rules) == set(RULES) - {"OutboxProcessorLagging"}
    page = WATCHED["monitoring"]["runbookUrl"]
    for name, rule in rules.items():
        assert rule["annotations"]["runbook_url"] == f"{page}#{name.lower()}"
    assert environment(render(WATCHED))["OUTBOX_RUNBOOK_URL"] == page
    assert "OUTBOX_RUNBOOK_URL" not in environment(render({}))


def test_a_group_of_which_every_alert_is_left_out_is_left_out():
    """A group with `rules: null` would be refused by the API server."""
    none = [name for name in RULES if name.startswith("OutboxOperator")]
    found = the(render({"monitoring": {"rules": {"enabled": True, "disabled": none}}}), "PrometheusRule")
    assert [group["name"] for group in found["spec"]["groups"]] == ["outbox-processors", "outbox-workers"]


def test_pod_monitor_finds_the_pods_and_the_token():
    manifests = render(WATCHED)
    monitor = the(manifests, "PodMonitor")
    secret = the(manifests, "Secret", f"{FULL_NAME}-metrics-token")
    assert monitor["metadata"]["namespace"] == secret["metadata"]["namespace"] == NAMESPACE
    spec = monitor["spec"]
    assert spec["selector"] == {
        "matchLabels": {"app.kubernetes.io/managed-by": MANAGED_BY},
        "matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": ["worker", "driver"]}],
    }
    assert set(spec["selector"]["matchExpressions"][0]["values"]) == {role.value for role in RUNNERS}
    (endpoint,) = spec["podMetricsEndpoints"]
    credentials = {"name": secret["metadata"]["name"], "key": TOKEN_FIELD}
    assert endpoint["authorization"] == {"credentials": credentials}
    label = re.sub(r"\W", "_", PROCESSOR_LABEL)
    assert endpoint["relabelings"] == [
        {"sourceLabels": [f"__meta_kubernetes_pod_label_{label}"], "targetLabel": "name"}
    ]
    shared = {"sourceLabels": ["name", "resource"], "regex": r"shared\.[^;]+;(.+)", "targetLabel": "name"}
    assert endpoint["metricRelabelings"] == [shared]


def test_pod_monitor_looks_where_the_release_serves():
    assert the(render(WATCHED), "PodMonitor")["spec"]["namespaceSelector"] == {"any": True}
    assert the(render(TWO), "PodMonitor")["spec"]["namespaceSelector"] == {"matchNames": list(SERVED)}


def test_service_monitor_keeps_the_processors_namespace():
    """Without `honorLabels` the label `namespace` of a processor would be that of the operator's pod."""
    (endpoint,) = the(render(WATCHED), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True


def test_dashboard_is_what_the_sidecar_looks_for():
    found = the(render(WATCHED), "ConfigMap", f"{FULL_NAME}-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "Shop"}
    assert list(found["data"]) == ["outbox-processors.json"]
    assert json.loads(found["data"]["outbox-processors.json"]) == json.loads(
        (CHART / "files/dashboard.json").read_text()
    )


def test_panels_are_told_apart_and_do_not_overlap():
    panels = json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) == 23


def test_nothing_of_the_prometheus_operator_is_made_unasked():
    kinds = {manifest["kind"] for manifest in render({})}
    assert kinds.isdisjoint({"PodMonitor", "ServiceMonitor", "PrometheusRule"})
    assert of_kind(render({}), "ConfigMap") == []
