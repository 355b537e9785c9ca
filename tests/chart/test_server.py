"""The real API server's opinion: objects are valid, pods admitted as restricted, rights what they should be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.chart.chart import FULL_NAME, MATRIX, NAMESPACED, Manifest, Values, of_kind, render, the
from tests.chart.permissions import CLUSTER_ID, FORBIDDEN, Call, calls_of, key_calls, leader_calls, served_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.chart.conftest import Kubectl, Place

pytestmark = pytest.mark.cluster

RBAC_KINDS = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "ServiceAccount"}
AGGREGATED = ("rbac.authorization.k8s.io/aggregate-to-view", "rbac.authorization.k8s.io/aggregate-to-edit")
DRY_RUN = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "--field-manager=t")


@pytest.fixture(scope="module")
def valid() -> list[Manifest]:
    """CRDs that are known to be valid: most releases have the same, whose rules the API server compiles each time."""
    return []


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_every_object_is_valid(values: Values, kubectl: Kubectl, place: Place, valid: list[Manifest]):
    # The Prometheus operator's own kind is not on this cluster; test_render looks at it.
    objects = [m for m in render(place.of(values), place.release) if not m["apiVersion"].startswith("monitoring.")]
    objects = [m for m in objects if m not in valid]
    done = kubectl.run(*DRY_RUN, objects=objects)
    assert done.returncode == 0, done.stderr
    assert "would violate PodSecurity" not in done.stderr
    assert len(done.stdout.splitlines()) == len(objects)
    valid += of_kind(objects, "CustomResourceDefinition")


def _pod(template: dict[str, Any], namespace: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": namespace, "labels": template["metadata"]["labels"]},
        # The account is made with the release; admission asks for it first.
        "spec": {key: value for key, value in template["spec"].items() if key != "serviceAccountName"},
    }


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_pods_are_admitted_as_restricted(values: Values, kubectl: Kubectl, place: Place):
    manifests = render(place.of(values), place.release)
    pods = [_pod(the(manifests, "Deployment")["spec"]["template"], place.release)]
    pods += [_pod(pod, place.release) for pod in of_kind(manifests, "Pod")]
    for pod in pods:
        done = kubectl.run("create", "--dry-run=server", objects=[pod])
        assert done.returncode == 0, done.stderr


def test_a_laxer_pod_is_not_admitted(kubectl: Kubectl, place: Place):
    """So that the test above means something."""
    lax = {"securityContext": {"allowPrivilegeEscalation": True}}
    pod = _pod(the(render(lax, place.release), "Deployment")["spec"]["template"], place.release)
    done = kubectl.run("create", "--dry-run=server", objects=[pod])
    assert done.returncode != 0
    assert 'violates PodSecurity "restricted' in done.stderr


def _rights(values: Values, namespace: str) -> list[Manifest]:
    """The release's roles, bindings and account, without what would reach the cluster's own roles."""
    objects = [m for m in render(values, namespace) if m["kind"] in RBAC_KINDS]
    return [m for m in objects if not any(label in m["metadata"]["labels"] for label in AGGREGATED)]


@pytest.fixture(scope="module", params=["cluster-wide", "namespaced"])
def rights(request: pytest.FixtureRequest, kubectl: Kubectl, place: Place) -> Iterator[str]:
    """A release's rights without the release; gives the mode."""
    objects = _rights({} if request.param == "cluster-wide" else place.of(NAMESPACED), place.release)
    kubectl.must("apply", "--server-side", "--field-manager=t", objects=objects)
    try:
        yield request.param
    finally:
        kubectl.must("delete", "--wait=false", objects=objects)


def _review(call: Call, namespace: str, account: str) -> Manifest:
    resource, _, subresource = call.resource.partition("/")
    attributes = {
        "namespace": namespace,
        "verb": call.verb,
        "group": call.group,
        "resource": resource,
        "subresource": subresource,
        "name": call.name,
    }
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": account, "resourceAttributes": attributes},
    }


def _allowed(kubectl: Kubectl, calls: Iterable[Call], namespace: str, account: str) -> set[Call]:
    """Which of the calls the account may make, as the API server judges."""
    calls = sorted(calls)
    answer = kubectl.must("create", "--output", "json", objects=[_review(call, namespace, account) for call in calls])
    return {call for call, item in zip(calls, _documents(answer), strict=True) if item["status"]["allowed"]}


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """One JSON document after another, as kubectl prints what it created."""
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        document, length = decoder.raw_decode(text[at:].lstrip())
        at = len(text) - len(text[at:].lstrip()) + length
        yield document


def _account(place: Place) -> str:
    return f"system:serviceaccount:{place.release}:{FULL_NAME}"


def _driver_role(place: Place) -> str:
    return f"{place.release}:{FULL_NAME}:spark-driver"


def test_operator_may_do_what_it_does(rights: str, kubectl: Kubectl, place: Place):
    needed = served_calls(_driver_role(place))
    for namespace in place.served:
        assert needed - _allowed(kubectl, needed, namespace, _account(place)) == set()
    own = leader_calls(FULL_NAME) | key_calls(FULL_NAME)
    assert own - _allowed(kubectl, own, place.release, _account(place)) == set()
    may_look = _allowed(kubectl, [CLUSTER_ID], "", _account(place)) == {CLUSTER_ID}
    assert may_look == (rights == "cluster-wide")


def test_operator_may_not_do_what_it_must_never(rights: str, kubectl: Kubectl, place: Place):
    for namespace in (*place.served, place.release, place.other, "kube-system", ""):
        assert _allowed(kubectl, FORBIDDEN, namespace, _account(place)) == set(), f"in {namespace}, {rights}"


def test_operator_leads_and_reads_its_keys_in_its_own_namespace_only(rights: str, kubectl: Kubectl, place: Place):
    own = leader_calls(FULL_NAME) | key_calls(FULL_NAME)
    for namespace in (*place.served, place.other, "kube-node-lease"):
        assert _allowed(kubectl, own, namespace, _account(place)) == set(), rights


def test_namespaced_operator_can_do_nothing_elsewhere(rights: str, kubectl: Kubectl, place: Place):
    needed = served_calls(_driver_role(place))
    expected = needed if rights == "cluster-wide" else set()
    assert _allowed(kubectl, needed, place.other, _account(place)) == expected
    assert _allowed(kubectl, needed, "", _account(place)) == expected


@pytest.mark.parametrize("other", ["cluster-admin", "system:kube-scheduler", "system:node"])
def test_operator_binds_the_driver_role_and_no_other(rights: str, other: str, kubectl: Kubectl, place: Place):
    def bind(role: str) -> str:
        arguments = ("create", "rolebinding", "trial", "--namespace", place.served[0], "--clusterrole", role)
        account = f"--serviceaccount={place.served[0]}:driver"
        return kubectl.run(*arguments, account, "--dry-run=server", "--as", _account(place)).stderr

    assert bind(_driver_role(place)) == "", rights
    assert "is attempting to grant RBAC permissions not currently held" in bind(other)


def test_a_driver_gets_pods_and_no_secret(rights: str, kubectl: Kubectl, place: Place):
    account = f"system:serviceaccount:{place.served[0]}:driver"
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "driver", "namespace": place.served[0]},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": _driver_role(place)},
        "subjects": [{"kind": "ServiceAccount", "name": "driver", "namespace": place.served[0]}],
    }
    kubectl.must("apply", "--server-side", "--field-manager=t", objects=[binding])
    role = next(m for m in _rights({}, place.release) if m["metadata"]["name"] == _driver_role(place))
    granted = set(calls_of(role["rules"]))
    secrets = {Call("", "secrets", verb) for verb in ("get", "list", "create")}
    assert _allowed(kubectl, granted | secrets, place.served[0], account) == granted, rights
    assert _allowed(kubectl, granted | secrets, place.other, account) == set()
