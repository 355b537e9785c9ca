"""Who may reach whom, by the NetworkPolicies of a release and the labels that the operator gives to pods.

The local cluster's network plugin carries no policy out: what they admit is worked out here by Kubernetes' rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from outbox_operator.api.naming import labels_of
from outbox_operator.api.observed import Role
from tests.chart.chart import (
    FULL_NAME,
    MATRIX,
    NAMESPACE,
    NAMESPACED,
    ROOT,
    SERVED,
    Manifest,
    Values,
    of_kind,
    render,
    the,
)

SHOP, OTHER = SERVED
NAMED_PORTS = {"http": 8081}
"""Of the operator's pod."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as policies see it."""

    namespace: str
    labels: dict[str, str]


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for each in selector.get("matchExpressions", []):
        value = labels.get(each["key"])
        assert each["operator"] in ("In", "Exists"), each
        if value is None or (each["operator"] == "In" and value not in each["values"]):
            return False
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def is_peer(peer: dict[str, Any], source: Pod, namespace: str) -> bool:
    """A peer without a namespace selector is of the policy's own namespace."""
    assert peer.keys() <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace}):
            return False
    elif source.namespace != namespace:
        return False
    return matches(peer.get("podSelector", {}), source.labels)


def admits(rule: dict[str, Any], source: Pod, namespace: str, port: int) -> bool:
    ports = [NAMED_PORTS.get(each["port"], each["port"]) for each in rule.get("ports", [])]
    peers = rule.get("from", [])
    return (not ports or port in ports) and (not peers or any(is_peer(peer, source, namespace) for peer in peers))


def reaches(policies: list[Manifest], source: Pod, target: Pod, port: int) -> bool:
    """A pod that no policy selects is open; else one rule of one policy must admit the source."""
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == target.namespace and matches(policy["spec"]["podSelector"], target.labels)
    ]
    assert all("Ingress" in spec["policyTypes"] for spec in selecting)
    rules = [rule for spec in selecting for rule in spec["ingress"]]
    return not selecting or any(admits(rule, source, target.namespace, port) for rule in rules)


def own(role: Role, namespace: str = SHOP) -> Pod:
    return Pod(namespace, labels_of("orders", role))


OPERATOR = Pod(NAMESPACE, the(render({}), "Deployment")["spec"]["template"]["metadata"]["labels"])
SECOND_OPERATOR = Pod("elsewhere", OPERATOR.labels)
NEIGHBOUR = Pod(SHOP, {"app": "shop"})
PROMETHEUS = Pod("monitoring", {"app.kubernetes.io/name": "prometheus"})

REACHES = [
    pytest.param(OPERATOR, own(Role.WORKER), 8080, True, id="the operator asks a worker"),
    pytest.param(OPERATOR, own(Role.DRIVER), 8080, True, id="the operator asks a driver"),
    pytest.param(OPERATOR, own(Role.WORKER), 9090, False, id="the operator, and another port"),
    pytest.param(SECOND_OPERATOR, own(Role.WORKER), 8080, False, id="an operator of another release"),
    pytest.param(NEIGHBOUR, own(Role.WORKER), 8080, False, id="a pod of the same namespace"),
    pytest.param(Pod(NAMESPACE, {"app": "any"}), own(Role.WORKER), 8080, False, id="a pod beside the operator"),
    pytest.param(PROMETHEUS, own(Role.WORKER), 8080, False, id="Prometheus that was not named"),
    pytest.param(own(Role.EXECUTOR), own(Role.DRIVER), 7078, True, id="an executor calls its driver"),
    pytest.param(own(Role.DRIVER), own(Role.EXECUTOR), 40123, True, id="a driver calls an executor"),
    pytest.param(own(Role.EXECUTOR), own(Role.EXECUTOR), 7079, True, id="executors exchange blocks"),
    pytest.param(own(Role.EXECUTOR, OTHER), own(Role.DRIVER), 7078, False, id="an executor of another namespace"),
    pytest.param(own(Role.WORKER), own(Role.DRIVER), 7078, False, id="a worker calls a driver"),
    pytest.param(own(Role.CLAIM), own(Role.WORKER), 8080, False, id="a job's pod asks a worker"),
    pytest.param(OPERATOR, own(Role.CLAIM), 9999, False, id="a job's pod serves nobody"),
    pytest.param(PROMETHEUS, NEIGHBOUR, 80, True, id="pods that are not ours stay as they are"),
    pytest.param(NEIGHBOUR, own(Role.WORKER, "elsewhere"), 8080, True, id="a namespace that was not named"),
    pytest.param(PROMETHEUS, OPERATOR, 8081, True, id="the operator's metrics, unless somebody is named for them"),
    pytest.param(PROMETHEUS, OPERATOR, 9999, False, id="another port of the operator"),
]


@pytest.mark.parametrize(("source", "target", "port", "open_"), REACHES)
@pytest.mark.parametrize(
    "values", [NAMESPACED, {"networkPolicy": {"namespaces": list(SERVED)}}], ids=["served", "all served, two named"]
)
def test_who_reaches_whom(values: Values, source: Pod, target: Pod, port: int, *, open_: bool):
    assert reaches(of_kind(render(values), "NetworkPolicy"), source, target, port) is open_


def test_who_is_named_may_read_metrics_and_nobody_else():
    policies = of_kind(render(MATRIX["everything watched"]), "NetworkPolicy")
    for target, port in ((own(Role.WORKER), 8080), (own(Role.DRIVER), 8080), (OPERATOR, 8081)):
        assert reaches(policies, PROMETHEUS, target, port)
        assert not reaches(policies, NEIGHBOUR, target, port)
    assert not reaches(policies, PROMETHEUS, own(Role.DRIVER), 7078)


@pytest.mark.parametrize("values", [{}, MATRIX["everything watched"]], ids=["everyone", "who is named"])
def test_the_pod_of_helm_test_reaches_the_operator_and_nothing_else(values: Values):
    manifests = render(values)
    tester = Pod(NAMESPACE, the(manifests, "Pod")["metadata"]["labels"])
    policies = of_kind(manifests, "NetworkPolicy")
    assert reaches(policies, tester, OPERATOR, 8081)
    assert not reaches(policies, tester, OPERATOR, 9999)
    assert reaches(policies, tester, own(Role.WORKER), 8080) is ("networkPolicy" not in values)
    assert all(not matches(policy["spec"]["podSelector"], tester.labels) for policy in policies)


def test_a_release_for_all_namespaces_bounds_its_own_pod_and_without_policies_none():
    (policy,) = of_kind(render({}), "NetworkPolicy")
    assert (policy["metadata"]["namespace"], policy["metadata"]["name"]) == (NAMESPACE, FULL_NAME)
    assert of_kind(render({**NAMESPACED, "networkPolicy": {"enabled": False}}), "NetworkPolicy") == []


def test_the_security_page_shows_what_the_chart_renders():
    page = (ROOT / "docs" / "security.md").read_text()
    (block,) = re.findall(r"```yaml\n(apiVersion: networking.*?)```", page, re.DOTALL)
    shown = list(yaml.safe_load_all(block))
    text = yaml.safe_dump_all(of_kind(render({"networkPolicy": {"namespaces": ["shop"]}}), "NetworkPolicy")[1:])
    # The page's release has the name and namespace of the pages before it.
    text = text.replace(FULL_NAME, "outbox-operator").replace(NAMESPACE, "outbox-system")
    rendered = list(yaml.safe_load_all(text.replace("instance: outbox\n", "instance: outbox-operator\n")))
    for each in rendered:
        del each["metadata"]["labels"]
    assert shown == rendered
