"""Least privilege: the rendered rules are the table of calls, no more and no less."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from outbox_operator.api import admission, naming
from outbox_operator.watch import store
from tests.chart.chart import FULL_NAME, MATRIX, NAMESPACE, SERVED, Manifest, Values, environment, of_kind, render, the
from tests.chart.permissions import CLUSTER_ID, FORBIDDEN, Call, calls_of, key_calls, leader_calls, served_calls

CLUSTER_NAME = f"{NAMESPACE}:{FULL_NAME}"
DRIVER_ROLE = f"{CLUSTER_NAME}:spark-driver"
NAMESPACED_ROLE = f"{CLUSTER_NAME}:processors"


def _allowed(role: Manifest) -> set[Call]:
    calls = list(calls_of(role["rules"]))
    assert [call for call, times in Counter(calls).items() if times > 1] == [], "said twice"
    return set(calls)


def _bound(manifests: list[Manifest]) -> list[tuple[str, str | None, str]]:
    """(role, namespace of the binding, its subject) of every binding."""
    bindings = of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding")
    found = []
    for binding in bindings:
        (subject,) = binding["subjects"]
        account = f"{subject['namespace']}/{subject['name']}"
        found.append((binding["roleRef"]["name"], binding["metadata"].get("namespace"), account))
    return found


def test_cluster_wide_rules_are_the_table():
    manifests = render({})
    role = the(manifests, "ClusterRole", CLUSTER_NAME)
    assert _allowed(role) == served_calls(DRIVER_ROLE) | {CLUSTER_ID}
    account = f"{NAMESPACE}/{FULL_NAME}"
    assert sorted(_bound(manifests), key=str) == [
        (CLUSTER_NAME, None, account),
        (f"{FULL_NAME}-keys", NAMESPACE, account),
        (f"{FULL_NAME}-leader", NAMESPACE, account),
    ]


def test_a_given_cluster_id_needs_no_look_at_kube_system():
    role = the(render(MATRIX["cluster-wide with a name"]), "ClusterRole", CLUSTER_NAME)
    assert _allowed(role) == served_calls(DRIVER_ROLE)


def test_namespaced_rules_are_the_table_in_each_namespace_and_nowhere_else():
    manifests = render(MATRIX["namespaced"])
    roles = {r["metadata"]["namespace"]: r for r in of_kind(manifests, "Role")}
    assert roles.keys() == {*SERVED, NAMESPACE}
    for namespace in SERVED:
        assert _allowed(roles[namespace]) == served_calls(DRIVER_ROLE)
    assert of_kind(manifests, "ClusterRoleBinding") == []
    account = f"{NAMESPACE}/{FULL_NAME}"
    assert sorted(_bound(manifests)) == [
        *((NAMESPACED_ROLE, namespace, account) for namespace in SERVED),
        (f"{FULL_NAME}-keys", NAMESPACE, account),
        (f"{FULL_NAME}-leader", NAMESPACE, account),
    ]


@pytest.mark.parametrize("case", ["defaults", "namespaced", "scheduling"])
def test_lease_is_one_of_the_releases_namespace(case: str):
    manifests = render(MATRIX[case])
    lease = environment(manifests)["OUTBOX_LEASE_NAME"]
    role = the(manifests, "Role", f"{lease}-leader")
    assert role["metadata"]["namespace"] == NAMESPACE
    assert _allowed(role) == leader_calls(lease)


@pytest.mark.parametrize("case", ["defaults", "namespaced", "scheduling"])
def test_of_secrets_the_releases_own_two_can_be_read_by_name(case: str):
    manifests = render(MATRIX[case])
    told = environment(manifests)
    name = told["OUTBOX_KEY_SECRET"].removesuffix("-key")
    role = the(manifests, "Role", f"{name}-keys")
    assert role["metadata"]["namespace"] == NAMESPACE
    assert _allowed(role) == key_calls(name)
    made = {secret["metadata"]["name"]: secret for secret in of_kind(manifests, "Secret")}
    assert made.keys() == {told["OUTBOX_KEY_SECRET"], told["OUTBOX_METRICS_SECRET"]}
    assert not any("data" in secret or "stringData" in secret for secret in made.values()), "never the same twice"


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_no_rule_has_a_wildcard_a_secret_to_read_or_a_non_resource_url(values: Values):
    roles: list[dict[str, Any]] = [*of_kind(render(values), "Role"), *of_kind(render(values), "ClusterRole")]
    for role in roles:
        for rule in role["rules"]:
            assert "nonResourceURLs" not in rule
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert "*" not in words
            if any(word.startswith("secrets") for word in words):
                assert rule["verbs"] == ["create"] or rule["resourceNames"], "all Secrets could be read"


def test_the_table_and_the_forbidden_calls_do_not_meet():
    release = leader_calls(FULL_NAME) | key_calls(FULL_NAME)
    named = {call for call in served_calls(DRIVER_ROLE) | release | {CLUSTER_ID} if call.name}
    unnamed = (served_calls(DRIVER_ROLE) | release) - named
    assert unnamed & FORBIDDEN == set()
    assert named & FORBIDDEN == set()


def test_the_table_is_about_the_kinds_that_the_operator_talks_to():
    """`kube.py` is its only way to the API server, and refuses kinds that it has no path for."""
    kinds = {(group, plural) for group, _, plural in naming.RESOURCES.values()}
    ours = {(call.group, call.resource) for call in served_calls(DRIVER_ROLE) | leader_calls(FULL_NAME)}
    named_elsewhere = {
        ("rbac.authorization.k8s.io", "clusterroles"),
        ("outbox-operator.dev", "outboxprocessors/status"),
    }
    assert kinds == ours - named_elsewhere


def _resources_with(*verbs: str) -> set[str]:
    calls = served_calls(DRIVER_ROLE)
    resources = {(call.group, call.resource) for call in calls}
    return {name for group, name in resources if all(Call(group, name, verb) in calls for verb in verbs)}


def test_what_is_watched_and_what_is_applied_is_the_operators_own_list():
    plurals = {kind: plural for kind, (*_, plural) in naming.RESOURCES.items()}
    assert _resources_with("list", "watch") == {plurals[kind] for kind in store.WATCHED_KINDS}
    assert _resources_with("get", "create", "patch", "delete") == {plurals[kind] for kind in store.OWNED_KINDS}


def test_a_driver_may_do_what_executors_need():
    role = the(render({}), "ClusterRole", DRIVER_ROLE)
    resources = {(call.group, call.resource) for call in _allowed(role)}
    # The last one does not exist: the right to it marks a driver for the admission policy.
    assert resources == {("", "pods"), ("", "configmaps"), ("outbox-operator.dev", admission.MARKER)}


def test_people_see_and_edit_processors_with_the_rights_they_have():
    manifests = render({})
    view, edit = (the(manifests, "ClusterRole", f"{CLUSTER_NAME}:{name}") for name in ("view", "edit"))
    aggregated = "rbac.authorization.k8s.io/aggregate-to-"
    assert [view["metadata"]["labels"][f"{aggregated}{to}"] for to in ("view", "edit", "admin")] == ["true"] * 3
    assert f"{aggregated}view" not in edit["metadata"]["labels"]
    assert {call.verb for call in _allowed(view)} == {"get", "list", "watch"}
    assert {call.resource for call in _allowed(edit)} == {"outboxprocessors", "outboxprocessors/scale"}
    without = render({"rbac": {"aggregate": False}})
    assert not any(m["metadata"]["name"].endswith((":view", ":edit")) for m in of_kind(without, "ClusterRole"))
