"""Which operator serves a namespace, and what a person reads where none does."""

from __future__ import annotations

import pytest
import yaml

from outbox_cli.cluster.resources import is_looked_at
from outbox_cli.cluster.serving import Operator, decide_service, parse_operators, serving

EAST = Operator("outbox-system", "east", ("shop", "shop-test"), 1)
EVERYWHERE = Operator("outbox-system", "everywhere", (), 1)
DOWN = Operator("outbox-system", "east", ("shop",), 0)


@pytest.mark.parametrize(
    ("operators", "looked_at", "said"),
    [
        pytest.param([EAST], True, None, id="served"),
        pytest.param([EAST], False, None, id="served, and not looked at yet"),
        pytest.param([EVERYWHERE], False, None, id="served as every namespace is"),
        pytest.param([], False, "no operator is installed in this cluster", id="no operator"),
        pytest.param(
            [],
            True,
            "an operator has looked at them, and no Deployment has its label app.kubernetes.io/component=operator now: "
            "if it was uninstalled, nothing happens to resources and their status stays as it is",
            id="an operator that was uninstalled, or that no chart installed",
        ),
        pytest.param(
            [Operator("other", "west", ("lake",), 1)],
            False,
            "no operator serves namespace shop: its resources get no status, no Event and no pods (other/west "
            "serves lake)",
            id="another namespace's operator",
        ),
        pytest.param(
            [Operator("other", "west", ("lake", "sea"), 1, "west-coast")],
            False,
            "helm -n other upgrade west-coast charts/outbox-operator --reset-then-reuse-values "
            "--set 'watchNamespaces={lake,sea,shop}'",
            id="how to have it served",
        ),
        pytest.param([DOWN], False, "outbox-system/east serves namespace shop and is not ready", id="not ready"),
        pytest.param(
            [EAST, EVERYWHERE],
            True,
            "the operators outbox-system/east and outbox-system/everywhere both serve namespace shop",
            id="two operators",
        ),
        pytest.param(None, True, None, id="Deployments may not be listed, and it has a status"),
        pytest.param(None, False, "no operator has looked at it yet. Perhaps none serves", id="not listed, no status"),
    ],
)
def test_what_is_wrong_with_how_a_namespace_is_served(operators, looked_at, said):
    found = decide_service(operators, "shop", looked_at=looked_at)
    assert found is None if said is None else said in (found or "")


def test_who_serves_a_namespace_is_named():
    assert serving([EAST, EVERYWHERE], "lake") == ["outbox-system/everywhere"]
    assert serving([EAST], "lake") == []
    assert serving(None, "lake") is None


def test_a_deployment_of_the_chart_is_read_with_its_release():
    """As the chart writes it; a Deployment that was changed by hand may have lost its labels."""
    text = """
    metadata: {name: east-outbox-operator, namespace: system, labels: {app.kubernetes.io/instance: east}}
    spec: {template: {spec: {containers: [{name: operator, env: [{name: OUTBOX_WATCH_NAMESPACES, value: "a,b"}]}]}}}
    status: {readyReplicas: 2}
    """
    body = yaml.safe_load(text)
    assert parse_operators([body]) == [Operator("system", "east-outbox-operator", ("a", "b"), 2, "east")]
    del body["metadata"]["labels"]
    assert "upgrade RELEASE charts" in (decide_service(parse_operators([body]), "shop", looked_at=False) or "")


def test_an_operator_of_something_else_is_none_of_ours():
    foreign = "{metadata: {name: a, namespace: b}, spec: {template: {spec: {containers: [{name: x}]}}}}"
    assert parse_operators([yaml.safe_load(foreign)]) == []


@pytest.mark.parametrize(
    ("status", "expected"), [({}, False), ({"observedGeneration": 1}, False), ({"observedGeneration": 2}, True)]
)
def test_a_resource_is_looked_at_once_its_present_spec_is(status, expected):
    assert is_looked_at({"metadata": {"generation": 2}, "status": status}) is expected
