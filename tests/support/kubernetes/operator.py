"""The operator as the chart installs it: its pod, or a process on this machine with that pod's account and environment.

A process can be killed and started again, and pods are reached by their addresses. Its rights are those that ship: its
token is of the chart's service account, so a call that the chart's roles do not allow fails here too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.error import HTTPError
from urllib.request import urlopen

from tests.chart.chart import CHART, helm
from tests.support.kubernetes.cluster import REGISTRY, kubeconfig
from tests.support.servers.postgres import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.kubernetes.cluster import Cluster

RELEASE = "op"
CLUSTER_ID = "acceptance"
TOKEN_SECONDS = 6 * 3600


@dataclass(frozen=True, slots=True)
class Installed:
    """A release of the chart."""

    cluster: Cluster
    namespace: str
    name: str = f"{RELEASE}-outbox-operator"

    @property
    def environment(self) -> dict[str, str]:
        """What the chart tells a pod of the operator."""
        pod = self.cluster.need("Deployment", self.namespace, self.name)["spec"]["template"]["spec"]
        return {item["name"]: item["value"] for item in pod["containers"][0]["env"] if item.get("value")}

    def write_kubeconfig(self, path: Path, server: str = "") -> None:
        """Write what reaches the API server (or a proxy before it) as the operator's service account."""
        account = self.cluster.path("ServiceAccount", self.namespace, self.name)
        lasting = {"expirationSeconds": TOKEN_SECONDS}
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": lasting}
        token = self.cluster.call("POST", f"{account}/token", asked)["status"]["token"]
        reached = {"server": server or self.cluster.server}
        if not server and self.cluster.authority:
            reached["certificate-authority"] = self.cluster.authority
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "operator",
            "contexts": [{"name": "operator", "context": {"cluster": "tests", "user": "operator"}}],
            "clusters": [{"name": "tests", "cluster": reached}],
            "users": [{"name": "operator", "user": {"token": token}}],
        }
        path.touch(0o600)
        path.write_text(json.dumps(config))


@contextmanager
def installed(
    cluster: Cluster, namespace: str, served: Sequence[str], *, pods: int = 1, **more: Any
) -> Iterator[Installed]:
    """Install the chart, serving these namespaces only: others use the cluster too. Without pods, for processes.

    A release without pods has no admission policies either: the control plane compiles them for five CPU seconds.
    """
    values = {
        "image": {"registry": REGISTRY, "tag": "dev"},
        "clusterId": CLUSTER_ID,
        "crds": {"install": False},
        "watchNamespaces": list(served),
        "replicas": pods,
        "podTemplates": {"admissionPolicies": pods > 0},
        **more,
    }
    release = ("--namespace", namespace, "--wait", "--timeout", "90s")
    done = helm("install", RELEASE, str(CHART), *release, values=values, kubeconfig=kubeconfig())
    assert done.returncode == 0, done.stderr
    try:
        yield Installed(cluster, namespace)
    finally:
        done = helm("uninstall", RELEASE, *release, kubeconfig=kubeconfig())
        assert done.returncode == 0, done.stderr


@dataclass
class OperatorProcess:
    """One operator under one identity: started again, it is the same replica. A context manager starts and stops it.

    Attributes:
        release: whose rights and environment it has.
        folder: where its log and its kubeconfig are.
        server: URL at which it reaches the API server; empty: the API server's own.
        told: environment variables over those that the chart sets; another version of it is told another image.

    """

    release: Installed
    folder: Path
    identity: str = "operator-0"
    server: str = ""
    told: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it in the background."""
        config = self.folder / f"{self.identity}.kubeconfig"
        self.release.write_kubeconfig(config, self.server)
        environment = {
            **os.environ,
            **self.release.environment,
            "POD_NAME": self.identity,
            "POD_NAMESPACE": self.release.namespace,
            "OUTBOX_PORT": str(self.port),
            "KUBECONFIG": str(config),
            **self.told,
        }
        with (self.folder / "operator.log").open("ab") as output:
            command = [sys.executable, "-m", "outbox_operator"]
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """SIGKILL: nothing is released, nothing said."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM."""
        self._end(signal.SIGTERM)

    def get(self, path: str) -> tuple[int, str]:
        """Ask its own port; status 0 while it does not listen yet."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as err:
            return err.code, err.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> dict[str, float]:
        """What it serves at /metrics, by name and labels."""
        lines = [line for line in self.get("metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(timeout=30)
        self.process = None
