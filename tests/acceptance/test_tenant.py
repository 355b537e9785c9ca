"""A tenant who wants root: a service account that has verbs on outboxprocessors and on nothing else.

The API server refuses it by the chart's policies; where they are absent, the operator does. Both say the same.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from outbox_operator.api.pod_rules import REMEDY, find_all_violations
from outbox_operator.api.resources import parse_processor
from outbox_operator.api.shapes import SEPARATOR
from outbox_operator.rendering.pods import build_worker_pod
from outbox_operator.settings import Images
from tests.chart.chart import FULL_NAME, render, the
from tests.support.kubernetes.cluster import ApiError, Cluster, namespaces, wait
from tests.support.kubernetes.operator import OperatorProcess, installed
from tests.support.kubernetes.room import Resource
from tests.support.manifests import manifest, worker
from tests.support.overlay_cases import cases, combined
from tests.support.overlays import ALLOWED, PLACE, RESTRICTED, asking, beside, own, pod, volume

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.cluster import Body

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(280)]

RBAC = "rbac.authorization.k8s.io"
LEGACY = "from-before"
PRIVILEGED = own(securityContext={"privileged": True})
ROOT = [
    pytest.param(PRIVILEGED, "spec.containers[worker].securityContext.privileged: must be false", id="privileged"),
    pytest.param(pod(hostPID=True), "spec.hostPID: is not allowed", id="hostPID"),
    pytest.param(volume(hostPath={"path": "/"}), "spec.volumes[extra].hostPath: is not allowed", id="hostPath"),
    pytest.param(pod(serviceAccountName="admin"), "spec.serviceAccountName: is not allowed", id="service account"),
    pytest.param(
        volume(secret={"secretName": "foreign"}), "spec.volumes[extra].secret.secretName: must be", id="Secret, volume"
    ),
    pytest.param(
        own(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "foreign", "key": "k"}}}]),
        "spec.containers[worker].env[A].valueFrom.secretKeyRef.name: must be",
        id="Secret, variable",
    ),
    pytest.param(
        beside(envFrom=[{"secretRef": {"name": "foreign"}}]),
        "spec.containers[proxy].envFrom[].secretRef.name: must be",
        id="Secret, all variables",
    ),
    pytest.param(
        volume(projected={"sources": [{"secret": {"name": "foreign"}}]}),
        "spec.volumes[extra].projected.sources[].secret.name: must be",
        id="Secret, projected",
    ),
]


def make_tenant(cluster: Cluster, namespace: str) -> Cluster:
    """A service account that may do everything with outboxprocessors, and nothing else."""
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    rule = {"apiGroups": ["outbox-operator.dev"], "resources": ["outboxprocessors"], "verbs": verbs}
    meta = {"name": "tenant", "namespace": namespace}
    cluster.apply({"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": meta, "rules": [rule]})
    return make_account(cluster, namespace, "tenant", "Role", "tenant")


def make_account(cluster: Cluster, namespace: str, name: str, kind: str, role: str) -> Cluster:
    """A service account with this role in its namespace; answers a connection as it."""
    meta = {"name": name, "namespace": namespace}
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    binding = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", **meta}],
    }
    cluster.apply(binding)
    return Cluster(f"{namespace}:{name}")


def refusal_of(tenant: Cluster, body: Body) -> str:
    """What the API server says against it; empty: it is taken."""
    try:
        tenant.create(body, dry_run=True)
    except ApiError as err:
        return err.message
    return ""


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[list[str]]:
    """Two namespaces with the chart's policies and driver role; in the first is a resource from before them."""
    with namespaces(cluster, "tenant", "lax") as names:
        cluster.create(manifest(names[0], asking(PRIVILEGED), LEGACY))
        manifests = render({"watchNamespaces": names, "clusterId": "tenant"}, names[0])
        made = [body for body in manifests if body["kind"].startswith("ValidatingAdmissionPolicy")]
        made.append(the(manifests, "ClusterRole", driver_role(names)))
        assert len(made) == 5, "two policies with their bindings, and the role"
        try:
            for body in made:
                cluster.apply(body)
            refused = manifest(names[0], asking(pod(hostPID=True)))
            wait("the policy is at work", lambda: refusal_of(cluster, refused), within=30)
            yield names
        finally:
            for body in made:
                cluster.delete(body["kind"], "", body["metadata"]["name"])


def driver_role(served: list[str]) -> str:
    return f"{served[0]}:{FULL_NAME}:spark-driver"


@pytest.fixture(scope="module")
def namespace(served: list[str]) -> str:
    return served[0]


@pytest.fixture(scope="module")
def tenant(cluster: Cluster, namespace: str) -> Cluster:
    return make_tenant(cluster, namespace)


@pytest.mark.parametrize(("template", "said"), ROOT)
def test_the_api_server_refuses_a_tenant_who_wants_root(tenant: Cluster, namespace: str, template: Body, said: str):
    refusal = refusal_of(tenant, manifest(namespace, asking(template)))
    assert "pod-templates." in refusal
    assert f"{PLACE}.{said}" in refusal
    assert refusal.endswith(REMEDY)


def test_the_tenant_can_do_nothing_but_processors(tenant: Cluster, namespace: str):
    """So that what it gets, it gets by a resource."""
    assert tenant.create(manifest(namespace, worker()), dry_run=True)["metadata"]["name"] == "orders"
    for kind in ("Pod", "Secret", "ConfigMap", "ServiceAccount"):
        with pytest.raises(ApiError, match="forbidden"):
            tenant.items(kind, namespace)


@pytest.mark.parametrize(("spec", "violations"), cases())
def test_the_api_server_finds_what_the_operator_finds(
    tenant: Cluster, namespace: str, spec: Body, violations: list[str]
):
    said = violations_in(refusal_of(tenant, manifest(namespace, spec)))
    assert said == set(violations)


def violations_in(refusal: str) -> set[str]:
    """Take the violations out of the API server's refusal; none where it takes the object."""
    if not refusal:
        return set()
    _, marked, rest = refusal.partition("denied request: ")
    assert marked, refusal
    return set(rest.removesuffix(f". {REMEDY}").split(SEPARATOR))


def test_both_judge_any_podtemplate_alike_and_what_they_take_is_restricted(
    cluster: Cluster, tenant: Cluster, namespace: str, random_cases: int
):
    seed = int(os.environ.get("OUTBOX_SEED", random.randrange(2**32)))
    taken = 0
    for spec in combined(seed, random_cases):
        theirs = violations_in(refusal_of(tenant, manifest(namespace, spec)))
        assert theirs == set(find_all_violations(spec)), f"seed {seed}: {spec}"
        try:
            refusal = "" if theirs else refusal_of(cluster, pod_of(namespace, spec))
        except ValidationError:
            continue  # the operator refuses it for its shape
        taken += not theirs
        assert "violates PodSecurity" not in refusal, f"seed {seed}: {spec}"
    assert taken > random_cases // 6


def pod_of(namespace: str, spec: Body) -> Body:
    """The pod that the operator would have made."""
    body = {**manifest(namespace, spec), "metadata": {"name": "orders", "namespace": namespace, "uid": "u"}}
    template = build_worker_pod(parse_processor(body, "here"), Images())
    template["spec"].pop("priorityClassName", None)  # the class is not there
    meta = {**template["metadata"], "name": "orders", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", **template, "metadata": meta}


@pytest.mark.parametrize("field", ["subPath", "subPathExpr"])
def test_no_mount_leaves_its_volume(cluster: Cluster, namespace: str, field: str):
    mount = {"name": "tmp", "mountPath": "/x", field: "../../etc"}
    assert "must not contain '..'" in refusal_of(cluster, pod_of(namespace, asking(own(volumeMounts=[mount]))))


@pytest.mark.parametrize("template", ALLOWED)
def test_a_pod_of_an_allowed_podtemplate_is_taken_as_restricted(cluster: Cluster, namespace: str, template: Body):
    assert refusal_of(cluster, pod_of(namespace, asking(template))) == ""


def test_what_is_there_cannot_be_changed_for_the_worse_and_can_be_deleted(
    cluster: Cluster, tenant: Cluster, namespace: str
):
    tenant.create(manifest(namespace, worker(suspend=True), "orders"))
    with pytest.raises(ApiError) as refusal:
        tenant.patch("OutboxProcessor", namespace, "orders", {"spec": {"worker": {"podTemplate": PRIVILEGED}}})
    assert "privileged: must be false" in refusal.value.message
    tenant.delete("OutboxProcessor", namespace, "orders")

    with pytest.raises(ApiError):
        tenant.patch("OutboxProcessor", namespace, LEGACY, {"spec": {"suspend": True}})
    noted = tenant.patch("OutboxProcessor", namespace, LEGACY, {"metadata": {"finalizers": ["example.com/wait"]}})
    assert noted["metadata"]["finalizers"] == ["example.com/wait"]
    tenant.delete("OutboxProcessor", namespace, LEGACY)
    tenant.patch("OutboxProcessor", namespace, LEGACY, {"metadata": {"finalizers": None}})
    assert cluster.get("OutboxProcessor", namespace, LEGACY) is None


EXECUTOR: Body = {"name": "executor", "image": "spark:1", "securityContext": RESTRICTED}


def executor_of(namespace: str, **changed: Any) -> Body:
    spec = {
        "automountServiceAccountToken": False,
        "serviceAccountName": "orders-driver",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [EXECUTOR],
        **changed,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "executor", "namespace": namespace}, "spec": spec}


def test_code_in_a_spark_driver_makes_no_pod_that_is_more_than_restricted(cluster: Cluster, served: list[str]):
    """It has a token that may make pods; in a namespace that enforces nothing, too."""
    lax = served[1]
    cluster.patch("Namespace", "", lax, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": None}}})
    driver, builder = (
        make_account(cluster, lax, name, "ClusterRole", driver_role(served)) for name in ("orders-driver", "builder")
    )
    probed = {**EXECUTOR, "livenessProbe": {"httpGet": {"path": "/", "port": 80}}}
    refused = "pod.spec.hostPID: must be false"
    made = executor_of(lax, hostPID=True)
    wait("the policy for pods is at work", lambda: refused in refusal_of(driver, made), within=30)
    assert refusal_of(driver, executor_of(lax, containers=[probed])) == "", "with what the API server fills in"
    for change, said in (
        ({"hostPID": True}, refused),
        ({"volumes": [{"name": "node", "hostPath": {"path": "/"}}]}, "pod.spec.volumes[node].hostPath: is not allowed"),
        ({"automountServiceAccountToken": True}, "pod.spec.automountServiceAccountToken: must be false"),
        ({"containers": [{"name": "x", "image": "x"}]}, "pod.spec.containers[x].securityContext: is missing"),
        (
            {"containers": [{**EXECUTOR, "livenessProbe": {"httpGet": {"host": "10.0.0.1", "port": 80}}}]},
            "pod.spec.containers[executor].livenessProbe.httpGet.host: is not allowed",
        ),
    ):
        assert said in refusal_of(driver, executor_of(lax, **change))
        assert refusal_of(builder, executor_of(lax, **change)) == "", "no driver: not this policy's matter"


@pytest.fixture
def alone(cluster: Cluster) -> Iterator[str]:
    """A namespace without the policies."""
    with namespaces(cluster, "alone") as (name,):
        yield name


MADE = ("Deployment", "StatefulSet", "Job", "Pod", "Service", "RoleBinding", "ConfigMap")


def names(cluster: Cluster, namespace: str) -> set[str]:
    """Name what is there of the kinds that the operator makes."""
    return {f"{kind}/{body['metadata']['name']}" for kind in MADE for body in cluster.items(kind, namespace)}


def test_without_the_policy_the_operator_refuses_and_makes_nothing(cluster: Cluster, alone: str, tmp_path: Path):
    tenant = make_tenant(cluster, alone)
    wishes = {f"wish{number}": (case.values[0], str(case.values[1])) for number, case in enumerate(ROOT)}
    for name, (template, _) in wishes.items():
        tenant.create(manifest(alone, asking(template), name))
    without = installed(cluster, alone, [alone], pods=0, podTemplates={"admissionPolicies": False})
    with without as release, OperatorProcess(release, tmp_path):
        before = names(cluster, alone)
        for name, (_, said) in wishes.items():
            resource = Resource(cluster, alone, name)
            stalled = resource.until_condition("Stalled", "True", "InvalidSpec", within=60)
            assert f"{PLACE}.{said}" in stalled["message"]
            assert stalled["message"].endswith(f"{REMEDY}; see docs/runbook.md#invalidspec")
            assert resource.condition("Ready")["status"] == "False"
        assert names(cluster, alone) == before

        mended = tenant.patch("OutboxProcessor", alone, "wish0", {"spec": {"worker": {"podTemplate": None}}})
        assert "podTemplate" not in mended["spec"]["worker"]
        wait("its Deployment", lambda: cluster.get("Deployment", alone, "wish0-worker"), within=30)
        # What was changed for the worse goes on as it was.
        tenant.patch("OutboxProcessor", alone, "wish0", {"spec": {"worker": {"podTemplate": PRIVILEGED}}})
        Resource(cluster, alone, "wish0").until_condition("Stalled", "True", "InvalidSpec", within=60)
        deployed = cluster.need("Deployment", alone, "wish0-worker")["spec"]["template"]["spec"]["containers"][0]
        assert "privileged" not in deployed["securityContext"]


def test_the_switch_lets_a_podtemplate_ask_for_anything(cluster: Cluster, alone: str, tmp_path: Path):
    tenant = make_tenant(cluster, alone)
    tenant.create(manifest(alone, asking(pod(hostPID=True)), "orders"))
    anything = installed(cluster, alone, [alone], pods=0, podTemplates={"unrestricted": True})
    with anything as release, OperatorProcess(release, tmp_path):
        wait("its Deployment", lambda: cluster.get("Deployment", alone, "orders-worker"), within=60)
        made = cluster.need("Deployment", alone, "orders-worker")
        assert made["spec"]["template"]["spec"]["hostPID"] is True
