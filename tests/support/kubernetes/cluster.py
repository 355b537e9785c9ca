"""The real cluster for tests: objects over one API connection, namespaces, waiters that explain.

Nothing here knows the operator's code: a test sees what a user sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kubernetes import client, config

from tests.chart.chart import tool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).resolve().parents[3]
STATE: Final = Path(os.environ.get("OUTBOX_STATE") or "/var/lib/outbox-operator")
REGISTRY: Final = os.environ.get("OUTBOX_REGISTRY") or "localhost"
POLL_SECONDS: Final = (0.1, 0.7)
"""Between two looks: at first, and after some seconds. A look costs the API server and this process 5 ms or more."""
RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}

PLURALS: Final = {
    "OutboxProcessor": ("/apis/outbox-operator.dev/v1alpha1", "outboxprocessors"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "ReplicaSet": ("/apis/apps/v1", "replicasets"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Job": ("/apis/batch/v1", "jobs"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "ClusterRole": ("/apis/rbac.authorization.k8s.io/v1", "clusterroles"),
    "ValidatingAdmissionPolicy": ("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicies"),
    "ValidatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1",
        "validatingadmissionpolicybindings",
    ),
    "CustomResourceDefinition": ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "EndpointSlice": ("/apis/discovery.k8s.io/v1", "endpointslices"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    **{
        kind: ("/api/v1", plural)
        for kind, plural in {
            "Pod": "pods",
            "Service": "services",
            "ConfigMap": "configmaps",
            "Secret": "secrets",
            "ServiceAccount": "serviceaccounts",
            "PersistentVolumeClaim": "persistentvolumeclaims",
            "Event": "events",
            "Namespace": "namespaces",
            "ResourceQuota": "resourcequotas",
        }.items()
    },
}

Body = dict[str, Any]


def kubeconfig() -> Path:
    """The cluster that tests run on: the user's own, or the local one."""
    return Path(os.environ.get("KUBECONFIG") or STATE / "kubeconfig")


def ensure_cluster() -> Path:
    """Wait for the cluster that `tests/run.sh` brings up, or start the local one unless it is up.

    Returns: its kubeconfig.
    """
    if coming := os.environ.get("OUTBOX_CLUSTER_COMING"):
        status = Path(coming, "status")
        wait("the cluster is up", status.exists, within=280, explain=Path(coming, "log").read_text)
        assert status.read_text() == "0\n", f"the cluster did not come up:\n{Path(coming, 'log').read_text()[-4000:]}"
    elif not os.environ.get("KUBECONFIG"):
        subprocess.run([ROOT / "tests" / "tools" / "cluster" / "up.sh"], check=True, capture_output=True)
    return kubeconfig()


class ApiError(Exception):
    """The API server refused a call."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Cluster:
    """One API connection; threads may share it. With `account` (`namespace:name`) it acts as that service account."""

    def __init__(self, account: str = "") -> None:
        self._api: client.ApiClient = config.new_client_from_config(str(kubeconfig()))
        self.server: str = self._api.configuration.host
        """The API server's URL."""
        self.authority: str | None = self._api.configuration.ssl_ca_cert
        """The file of the authority that it is known by; None: the machine's own authorities."""
        self._acting = {"Impersonate-User": f"system:serviceaccount:{account}"} if account else {}

    def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Body:
        """Make a call.

        Raises:
            ApiError: it was refused.

        """
        text = self._fetch(method, path, body, content)
        parsed: Body = json.loads(text) if text else {}
        return parsed

    def _fetch(self, method: str, path: str, body: Any = None, content: str = "application/json") -> bytes:
        headers = {"Accept": "application/json", "Content-Type": content, **self._acting}
        request = self._api.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        answer = self._api.call_api(*request, _request_timeout=30)
        text: bytes = answer.read()
        if answer.status >= 400:
            raise ApiError(answer.status, json.loads(text or b"{}").get("message", str(text[:500])))
        return text

    def log(self, namespace: str, pod: str) -> str:
        """What a pod's only container has printed."""
        return self._fetch("GET", f"{self.path('Pod', namespace, pod)}/log").decode()

    def path(self, kind: str, namespace: str = "", name: str = "") -> str:
        prefix, plural = PLURALS[kind]
        place = f"{prefix}/namespaces/{namespace}" if namespace else prefix
        return "/".join(part for part in (place, plural, name) if part)

    def get(self, kind: str, namespace: str, name: str) -> Body | None:
        try:
            return self.call("GET", self.path(kind, namespace, name))
        except ApiError as err:
            if err.status == 404:
                return None
            raise

    def need(self, kind: str, namespace: str, name: str) -> Body:
        """Fetch an object that has to be there."""
        found = self.get(kind, namespace, name)
        assert found is not None, f"there is no {kind} {namespace}/{name}"
        return found

    def items(self, kind: str, namespace: str = "", labels: str = "", fields: str = "") -> list[Body]:
        query = "&".join(
            f"{key}={value.replace('=', '%3D').replace(',', '%2C')}"
            for key, value in (("labelSelector", labels), ("fieldSelector", fields))
            if value
        )
        found: list[Body] = self.call("GET", self.path(kind, namespace) + (f"?{query}" if query else ""))["items"]
        return found

    def apply(self, body: Body, manager: str = "tests", *, dry_run: bool = False) -> Body:
        """Apply server-side."""
        meta = body["metadata"]
        path = self.path(body["kind"], meta.get("namespace", ""), meta["name"])
        query = f"?fieldManager={manager}&force=true" + ("&dryRun=All" if dry_run else "")
        return self.call("PATCH", path + query, body, "application/apply-patch+yaml")

    def create(self, body: Body, *, dry_run: bool = False) -> Body:
        path = self.path(body["kind"], body["metadata"].get("namespace", ""))
        return self.call("POST", path + "?fieldValidation=Strict" + ("&dryRun=All" if dry_run else ""), body)

    def patch(self, kind: str, namespace: str, name: str, patch: Body, *, subresource: str = "") -> Body:
        path = self.path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return self.call("PATCH", path, patch, "application/merge-patch+json")

    def delete(self, kind: str, namespace: str, name: str, *, grace: int | None = None) -> None:
        body: Body = {"propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self.call("DELETE", self.path(kind, namespace, name), body)
        except ApiError as err:
            if err.status != 404:
                raise

    def make_namespaces(self, *names: str) -> None:
        for name in names:
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}
            self.create(body)
        for name in names:
            # A pod needs it; the controller makes it only a moment after the namespace.
            wait(f"the service account of {name}", partial(self.get, "ServiceAccount", name, "default"), within=30)

    def explain(self, namespace: str) -> str:
        """Say what is there: for a test that waited in vain."""
        lines = [
            json.dumps({"name": body["metadata"]["name"], "status": body.get("status")}, indent=1)
            for body in self.items("OutboxProcessor", namespace)
        ]
        for pod in self.items("Pod", namespace):
            state = [c.get("state") for c in (pod["status"].get("containerStatuses") or [])]
            lines.append(f"pod {pod['metadata']['name']} {pod['status'].get('phase')} {state}")
            try:
                lines += [f"  {line[:300]}" for line in self.log(namespace, pod["metadata"]["name"]).splitlines()[-30:]]
            except ApiError as err:
                lines.append(f"  no log: {err}")
        lines += [
            f"event {event['involvedObject'].get('name')} {event['reason']}: {event['message'][:300]}"
            for event in self.items("Event", namespace)[-30:]
        ]
        return "\n".join(lines)


T = TypeVar("T")


def wait(what: str, look: Callable[[], T], *, within: float, explain: Callable[[], str] | None = None) -> T:
    """Look until what is seen is true, and answer it; a failure says what the cluster looks like."""
    began, (least, most) = time.monotonic(), POLL_SECONDS
    while not (found := look()):
        if (waited := time.monotonic() - began) > within:
            raise AssertionError(f"waited {within:.0f} s in vain: {what}\n{explain() if explain else repr(found)}")
        time.sleep(min(least + waited / 10, most))
    return found


@contextmanager
def namespaces(cluster: Cluster, *roles: str, prefix: str = "op") -> Iterator[list[str]]:
    """Make namespaces, and take them away again."""
    run = token_hex(3)
    names = [f"{prefix}-{run}-{role}" for role in roles]
    cluster.make_namespaces(*names)
    try:
        yield names
    finally:
        for name in names:
            cluster.delete("Namespace", "", name)


def install_crd(cluster: Cluster) -> None:
    """Install the CRD as the checkout has it."""
    crds = ROOT / "crds"
    command = [str(tool("kubectl")), "--kubeconfig", str(kubeconfig()), "apply", "--server-side", "--force-conflicts"]
    subprocess.run([*command, "--field-manager=tests", "-f", str(crds)], check=True, capture_output=True)

    def conditions() -> list[Body]:
        crd = cluster.need("CustomResourceDefinition", "", f"{PLURALS['OutboxProcessor'][1]}.outbox-operator.dev")
        return crd.get("status", {}).get("conditions") or []

    wait("the CRD", lambda: any((c["type"], c["status"]) == ("Established", "True") for c in conditions()), within=30)
