"""Helm against the real cluster: install, upgrade, roll back, uninstall; what stays, and what runs on undisturbed."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.chart.chart import CHART, FULL_NAME, RELEASE, Manifest, Values, helm
from tests.chart.conftest import Kubectl, Place, eventually, make_place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

CRD = "outboxprocessors.outbox-operator.dev"
REGISTRY = os.environ.get("OUTBOX_REGISTRY") or "localhost"
"""Where tests/tools/cluster/images.sh has put the images, tagged dev."""


@dataclass(frozen=True, slots=True)
class Helm:
    """Helm in one namespace."""

    kubectl: Kubectl
    namespace: str

    def __call__(self, verb: str, *arguments: str, values: Values | None = None) -> str:
        """Run `helm VERB RELEASE …`; it has to succeed."""
        kubeconfig = self.kubectl.kubeconfig
        done = helm(verb, RELEASE, *arguments, "--namespace", self.namespace, values=values, kubeconfig=kubeconfig)
        if done.returncode != 0:
            seen = self.kubectl.run("describe", "pods", "--namespace", self.namespace).stdout
            raise AssertionError(f"helm {verb}: {done.stderr}\n{seen[-4000:]}")
        return done.stdout


@pytest.fixture
def place(kubectl: Kubectl) -> Iterator[Place]:
    """Namespaces of one test: a processor outlives the release that made its workers."""
    with make_place(kubectl) as made:
        yield made


@pytest.fixture
def kept_crd(kubectl: Kubectl) -> Iterator[list[str]]:
    """The CRD as it was, after the test; gives what `helm install` needs when another release has it."""
    before = kubectl.get("crd", CRD)
    yield ["--take-ownership"] if before else []
    if before:
        del before["status"], before["metadata"]["resourceVersion"]
        kubectl.must("replace", objects=[before])
    elif not _others(kubectl):
        kubectl.must("delete", "crd", CRD, "--ignore-not-found")


def _others(kubectl: Kubectl) -> list[str]:
    """Namespaces of processors that are not this test's."""
    if kubectl.get("crd", CRD) is None:
        return []
    items = kubectl.items("outboxprocessors", "--all-namespaces")
    return [item["metadata"]["namespace"] for item in items if not item["metadata"]["namespace"].startswith("chart-")]


@pytest.fixture
def alone(kubectl: Kubectl) -> Iterator[None]:
    """No other operator serves every namespace meanwhile: a demo leaves one behind on the local cluster."""
    labels = "app.kubernetes.io/name=outbox-operator,app.kubernetes.io/component=operator"
    found = kubectl.items("deployments", "--all-namespaces", "--selector", labels)
    others = [item for item in found if not _environment(item)["OUTBOX_WATCH_NAMESPACES"] and item["spec"]["replicas"]]
    names = [f"{item['metadata']['namespace']}/{item['metadata']['name']}" for item in others]
    assert not others or not os.environ.get("KUBECONFIG"), f"{names} would serve this test's namespaces too"
    for item in others:
        _scale(kubectl, item, 0)
    yield
    for item in others:
        _scale(kubectl, item, item["spec"]["replicas"])


def _scale(kubectl: Kubectl, deployment: Manifest, replicas: int) -> None:
    metadata = deployment["metadata"]
    name = ("deployment", metadata["name"], "--namespace", metadata["namespace"])
    kubectl.must("scale", *name, f"--replicas={replicas}")
    chosen = f"app.kubernetes.io/instance={metadata['labels']['app.kubernetes.io/instance']}"
    pods = ("pods", "--namespace", metadata["namespace"], "--selector", chosen)
    eventually(f"{replicas} pods of {name}", lambda: len(kubectl.items(*pods)) == replicas, within=60)


@pytest.fixture
def release(kubectl: Kubectl, place: Place, kept_crd: list[str], alone: None) -> Iterator[Helm]:
    run = Helm(kubectl, place.release)
    yield run
    run("uninstall", "--ignore-not-found", "--wait", "--timeout", "60s")
    kubectl.must("delete", "clusterrole", _driver_role(place), "--ignore-not-found")


def _driver_role(place: Place) -> str:
    return f"{place.release}:{FULL_NAME}:spark-driver"


def _values(place: Place, **more: Any) -> Values:
    images = {"registry": REGISTRY, "tag": "dev"}
    return {"image": images, "watchNamespaces": [place.served[0]], "clusterId": "chart-test", **more}


def _bare_values(place: Place, **more: Any) -> Values:
    """Where it is about the CRD alone: no pods, and no policies, which the control plane takes seconds to compile."""
    return _values(place, replicas=0, podTemplates={"admissionPolicies": False}, **more)


def _processor(namespace: str) -> list[Manifest]:
    """One that cannot reach its database: its workers run and say so."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "nowhere", "namespace": namespace},
        "stringData": {"uri": "postgresql://outbox@postgres.invalid/shop"},
    }
    processor = {
        "apiVersion": "outbox-operator.dev/v1alpha1",
        "kind": "OutboxProcessor",
        "metadata": {"name": "orders", "namespace": namespace},
        "spec": {"source": {"connection": {"secretRef": {"name": "nowhere"}}}, "target": {"log": {}}},
    }
    return [secret, processor]


def _deployment(kubectl: Kubectl, place: Place) -> Any:
    return kubectl.get("deployment", FULL_NAME, "--namespace", place.release)


def _environment(deployment: Any) -> dict[str, str]:
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    return {item["name"]: item.get("value", "") for item in container["env"]}


def _answer(kubectl: Kubectl, place: Place, path: str) -> str:
    """Ask the operator through its Service."""
    service = f"/api/v1/namespaces/{place.release}/services/http:{FULL_NAME}-metrics:8081/proxy"
    return kubectl.must("get", "--raw", f"{service}{path}")


def _running_worker(kubectl: Kubectl, namespace: str) -> str | None:
    """The uid of the processor's one running pod."""
    alive = _running_workers(kubectl, namespace)
    return alive[0] if len(alive) == 1 else None


def _running_workers(kubectl: Kubectl, namespace: str) -> list[str]:
    selector = "outbox-operator.dev/processor=orders"
    items = kubectl.items("pods", "--namespace", namespace, "--selector", selector)
    alive = [pod for pod in items if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]]
    return [pod["metadata"]["uid"] for pod in alive]


def _observed(kubectl: Kubectl, namespace: str) -> bool:
    processor = kubectl.get("outboxprocessor", "orders", "--namespace", namespace)
    status = processor.get("status", {})
    current = status.get("observedGeneration") == processor["metadata"]["generation"]
    return current and any(condition["type"] == "Ready" for condition in status.get("conditions", []))


def test_install_and_uninstall(release: Helm, kubectl: Kubectl, place: Place, kept_crd: list[str]):
    worker = _installed(release, kubectl, place, kept_crd)
    _uninstalled(release, kubectl, place, worker)


@pytest.mark.nightly
def test_install_upgrade_rollback_uninstall(release: Helm, kubectl: Kubectl, place: Place, kept_crd: list[str]):
    worker = _installed(release, kubectl, place, kept_crd)
    _upgraded(release, kubectl, place)
    assert _running_worker(kubectl, place.served[0]) == worker, "an upgrade of the operator alone moved a worker"
    _rolled_back(release, kubectl, place, worker)
    _uninstalled(release, kubectl, place, worker)
    _installed_again(release, kubectl, place, worker)


def _installed(release: Helm, kubectl: Kubectl, place: Place, kept_crd: list[str]) -> str:
    """Install the chart; return the uid of the worker that the operator made."""
    served = place.served[0]
    said = release("install", str(CHART), *kept_crd, "--wait", "--timeout", "120s", values=_values(place))
    assert f"kubectl -n {place.release} rollout status deploy/{FULL_NAME}" in said
    assert "A processor in any other namespace gets no status" in said
    assert "For Prometheus set networkPolicy.metricsFrom" in said
    assert f"kubectl -n {place.release} delete secret {FULL_NAME}-key {FULL_NAME}-metrics-token" in said
    assert _deployment(kubectl, place)["status"]["availableReplicas"] == 2
    budget = kubectl.get("poddisruptionbudget", FULL_NAME, "--namespace", place.release)
    assert budget["spec"]["maxUnavailable"] == 1
    _answer(kubectl, place, "/readyz")
    assert "# TYPE" in _answer(kubectl, place, "/metrics")

    kubectl.must("create", objects=_processor(served))
    eventually("the operator's first look", lambda: _observed(kubectl, served), within=30)
    worker: str = eventually("a worker in a restricted namespace", lambda: _running_worker(kubectl, served), within=60)
    return worker


def _rolled_back(release: Helm, kubectl: Kubectl, place: Place, worker: str) -> None:
    release("rollback", "1", "--wait", "--timeout", "120s")
    deployment = _deployment(kubectl, place)
    assert (_environment(deployment)["OUTBOX_LOG_LEVEL"], deployment["spec"]["replicas"]) == ("INFO", 2)
    assert kubectl.get("poddisruptionbudget", FULL_NAME, "--namespace", place.release) is not None
    assert _running_worker(kubectl, place.served[0]) == worker, "a rollback moved a worker"
    assert "Succeeded" in release("test", "--timeout", "60s")
    log = kubectl.must("logs", f"deployment/{FULL_NAME}", "--namespace", place.release, "--all-pods=true")
    assert [line for line in log.splitlines() if "orbidden" in line] == []


def _uninstalled(release: Helm, kubectl: Kubectl, place: Place, worker: str) -> None:
    served = place.served[0]
    release("uninstall", "--wait", "--timeout", "60s")
    assert _deployment(kubectl, place) is None
    assert kubectl.items("role,rolebinding", "--namespace", served) == []
    assert kubectl.get("crd", CRD) is not None
    assert kubectl.get("clusterrole", _driver_role(place)) is not None, "drivers go on too"
    assert kubectl.get("outboxprocessor", "orders", "--namespace", served)["spec"]["target"] == {
        "log": {"payload": False}
    }
    assert _running_worker(kubectl, served) == worker, "workers go on without the operator"


def _upgraded(release: Helm, kubectl: Kubectl, place: Place) -> None:
    more = _values(place, logLevel="DEBUG", replicas=1)
    release("upgrade", str(CHART), "--wait", "--timeout", "120s", values=more)
    deployment = _deployment(kubectl, place)
    assert (_environment(deployment)["OUTBOX_LOG_LEVEL"], deployment["status"]["readyReplicas"]) == ("DEBUG", 1)
    assert kubectl.get("poddisruptionbudget", FULL_NAME, "--namespace", place.release) is None, "it would stop a drain"


def _installed_again(release: Helm, kubectl: Kubectl, place: Place, worker: str) -> None:
    """The same release takes the kept CRD and keys over without a word; the operator replaces no pod."""
    served = place.served[0]
    keys, template = _keys(kubectl, place), _workload(kubectl, served)["template"]
    release("install", str(CHART), "--wait", "--timeout", "120s", values=_values(place))
    # What only the new operator does shows that it has decided; the pod template is written in the same request.
    kubectl.must("scale", "outboxprocessor", "orders", "--replicas=2", "--namespace", served)
    eventually("the new operator's first change", lambda: _workload(kubectl, served)["replicas"] == 2, within=60)
    assert _workload(kubectl, served)["template"] == template, "the new operator replaces the workers"
    assert worker in _running_workers(kubectl, served)
    assert _keys(kubectl, place) == keys
    kubectl.must("delete", "outboxprocessor", "orders", "--namespace", served, "--timeout=60s")
    eventually("no worker without its processor", lambda: not _running_workers(kubectl, served), within=60)


def _workload(kubectl: Kubectl, namespace: str) -> Any:
    """The spec of the workers' Deployment."""
    chosen = ("--namespace", namespace, "--selector", "outbox-operator.dev/processor=orders")
    (deployment,) = kubectl.items("deployments", *chosen)
    return deployment["spec"]


def _keys(kubectl: Kubectl, place: Place) -> dict[str, Any]:
    """What the operator has filled the chart's Secrets with."""
    names = (f"{FULL_NAME}-key", f"{FULL_NAME}-metrics-token")
    data = {name: kubectl.get("secret", name, "--namespace", place.release)["data"] for name in names}
    assert all(data.values()), "the operator has not filled them"
    return data


def _description(kubectl: Kubectl) -> str:
    schema = kubectl.get("crd", CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    description: str = schema["description"]
    return description


def test_crd_goes_with_the_release(release: Helm, kubectl: Kubectl, place: Place, kept_crd: list[str], tmp_path: Path):
    """No operator pod is wanted here: it is about the CRD alone."""
    release("install", str(CHART), *kept_crd, values=_bare_values(place))
    first = _description(kubectl)
    newer = tmp_path / "newer"
    shutil.copytree(CHART, newer)
    (path,) = (newer / "files" / "crds").glob("*.yaml")
    crd = yaml.safe_load(path.read_text())
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] = "A newer {{ .Values.text }}."
    path.write_text(yaml.safe_dump(crd))

    release("upgrade", str(newer), values=_bare_values(place))
    assert _description(kubectl) == "A newer {{ .Values.text }}.", "text of the CRD is no template"
    release("rollback", "1")
    assert _description(kubectl) == first
    release("upgrade", str(CHART), values=_bare_values(place, crds={"install": False}))
    assert kubectl.get("crd", CRD)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_another_releases_crd_is_not_taken_silently(release: Helm, kubectl: Kubectl, place: Place, kept_crd: list[str]):
    release("install", str(CHART), *kept_crd, values=_bare_values(place))
    arguments = ("install", "second", str(CHART), "--namespace", place.other)
    second = helm(*arguments, values=_bare_values(place), kubeconfig=kubectl.kubeconfig)
    assert second.returncode != 0
    assert "invalid ownership metadata" in second.stderr
    without = _bare_values(place, crds={"install": False})
    both = helm(*arguments, "--dry-run=server", values=without, kubeconfig=kubectl.kubeconfig)
    assert both.returncode == 0, both.stderr
