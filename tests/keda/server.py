"""KEDA beside the test cluster: its operator and its metrics server as processes on this machine.

The cluster's API server has no certificate for the aggregation layer, so the metrics server cannot know who asks:
it may answer everybody. Nothing else differs from an installation: the kinds are KEDA's, the APIService is, and so is
what the HorizontalPodAutoscaler controller asks.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tests.chart.chart import tool
from tests.support.cache import CACHE
from tests.support.kubernetes.cluster import kubeconfig, wait
from tests.support.servers.postgres import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.cluster import Body, Cluster

NODE = "10.88.0.1"
"""This machine, as the cluster's Services reach it (tests/tools/cluster/network.sh)."""
GROUP = "external.metrics.k8s.io"
KEDA = CACHE / "keda" / "current"


def kubectl(*arguments: str) -> str:
    """Run kubectl; it has to succeed."""
    command = [str(tool("kubectl")), "--kubeconfig", str(kubeconfig()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _certificates(folder: Path) -> None:
    """Make a certificate for both processes, which is its own authority."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=keda"]
    names = f"subjectAltName=DNS:localhost,IP:127.0.0.1,IP:{NODE}"
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run([*command, "-addext", names, *files], check=True, capture_output=True)
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())


def _objects(namespace: str, port: int) -> list[Body]:
    """Lead the API server to the metrics server."""
    name = {"name": "keda-metrics-apiserver", "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{rbac}/v1", "metadata": {"name": "tests-keda-metrics"}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": name,
            "spec": {"ports": [{"port": 443, "targetPort": port}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Endpoints",
            "metadata": name,
            "subsets": [{"addresses": [{"ip": NODE}], "ports": [{"port": port}]}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{GROUP}"},
            "spec": {
                "service": name,
                "group": GROUP,
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
            },
        },
        {
            **role,
            "kind": "ClusterRole",
            "rules": [
                {"apiGroups": [GROUP], "resources": ["*"], "verbs": ["get", "list"]},
                {"nonResourceURLs": ["/apis", "/apis/*", "/openapi/*"], "verbs": ["get"]},
            ],
        },
        {
            **role,
            "kind": "ClusterRoleBinding",
            "subjects": [{"apiGroup": rbac, "kind": "Group", "name": "system:unauthenticated"}],
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "tests-keda-metrics"},
        },
    ]


@contextmanager
def _process(name: str, arguments: list[str], log: Path, namespace: str) -> Iterator[None]:
    environment = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig()),
        "WATCH_NAMESPACE": namespace,
        "POD_NAMESPACE": namespace,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": namespace,
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(KEDA / name), *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.kill()
        process.wait(timeout=30)


@contextmanager
def keda(cluster: Cluster, namespace: str, folder: Path) -> Iterator[None]:
    """Run KEDA for one namespace, and take everything of it away again."""
    assert KEDA.exists(), f"{KEDA} is not there: run tests/tools/cluster/setup.sh keda"
    _certificates(folder)
    grpc, secure = free_port(), free_port()
    at = f"--kubeconfig={kubeconfig()}"
    operator = [
        f"--cert-dir={folder}",
        f"--metrics-service-bind-address=127.0.0.1:{grpc}",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
    ]
    adapter = [
        f"--secure-port={secure}",
        f"--port={free_port()}",
        f"--metrics-service-address=localhost:{grpc}",
        f"--cert-dir={folder}",
        f"--tls-cert-file={folder / 'tls.crt'}",
        f"--tls-private-key-file={folder / 'tls.key'}",
        f"--authentication-kubeconfig={kubeconfig()}",
        f"--authorization-kubeconfig={kubeconfig()}",
        f"--lister-kubeconfig={kubeconfig()}",
        at,
    ]
    crds = str(KEDA / "crds")
    objects = folder / "objects.json"
    objects.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": _objects(namespace, secure)}))
    with ExitStack() as stack:
        kubectl("apply", "--server-side", "-f", crds)
        stack.callback(kubectl, "delete", "--ignore-not-found", "-f", crds)
        kubectl("apply", "--server-side", "-f", str(objects))
        stack.callback(kubectl, "delete", "--ignore-not-found", "-f", str(objects))
        stack.enter_context(_process("operator", operator, folder / "keda-operator.log", namespace))
        stack.enter_context(_process("adapter", adapter, folder / "keda-adapter.log", namespace))

        def available() -> bool:
            path = '{.status.conditions[?(@.type=="Available")].status}'
            return kubectl("get", "apiservice", f"v1beta1.{GROUP}", "-o", f"jsonpath={path}") == "True"

        def explain() -> str:
            logs = "\n".join((folder / f"keda-{name}.log").read_text()[-3000:] for name in ("operator", "adapter"))
            return logs + kubectl("get", "apiservice", f"v1beta1.{GROUP}", "-o", "yaml")

        wait("KEDA's metrics", available, within=60, explain=explain)
        yield
