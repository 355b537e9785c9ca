"""The real cluster for the chart's tests, and namespaces of their own in it."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import pytest

from tests.chart.chart import Manifest, Values, tool
from tests.support.kubernetes.cluster import ensure_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POLL_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl against one cluster."""

    kubeconfig: Path

    def run(self, *arguments: str, objects: list[Manifest] | None = None) -> subprocess.CompletedProcess[str]:
        """Run it; `objects` go in as `-f -`."""
        command = [str(tool("kubectl")), "--kubeconfig", str(self.kubeconfig), *arguments]
        text = None
        if objects is not None:
            command += ["--filename", "-"]
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    def must(self, *arguments: str, objects: list[Manifest] | None = None) -> str:
        """Run it and take its output; it has to succeed."""
        done = self.run(*arguments, objects=objects)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """`kubectl get -o json`, or None where there is nothing of that name."""
        text = self.must("get", *arguments, "--output", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def items(self, *arguments: str) -> list[Any]:
        """`kubectl get` of as many as there are."""
        listed = self.get(*arguments)
        return listed["items"] if listed else []


def eventually(what: str, look: Callable[[], Any], *, within: float) -> Any:
    """Look again and again until there is something, and return it."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {within:.0f} s in vain: {what}"
        time.sleep(POLL_SECONDS)
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Namespaces that enforce the Pod Security Standard `restricted`: a release's own, and two to serve."""

    release: str
    served: tuple[str, str]
    other: str

    def of(self, values: Values) -> Values:
        """The values of the matrix with namespaces that exist."""
        watched = list(self.served[: len(values.get("watchNamespaces", ()))])
        policies = values.get("networkPolicy", {})
        bounded = list(self.served[: len(policies.get("namespaces", ()))])
        changed = {"watchNamespaces": watched} if watched else {}
        return {**values, **changed, "networkPolicy": {**policies, "namespaces": bounded}}


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    return ensure_cluster()


@pytest.fixture(scope="session")
def kubectl(kubeconfig: Path) -> Kubectl:
    return Kubectl(kubeconfig)


@contextmanager
def make_place(kubectl: Kubectl) -> Iterator[Place]:
    """Make the namespaces, and take them away again."""
    run = token_hex(3)
    names = [f"chart-{run}-{role}" for role in ("release", "one", "two", "other")]
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    objects = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n, "labels": labels}} for n in names]
    kubectl.must("create", objects=objects)
    # A dry run of a pod asks for it; the controller makes it only a moment after the namespace.
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": names[0]}}
    kubectl.must("apply", "--server-side", "--field-manager=t", objects=[account])
    try:
        yield Place(names[0], (names[1], names[2]), names[3])
    finally:
        kubectl.must("delete", "namespace", *names, "--wait=false")


@pytest.fixture(scope="module")
def place(kubectl: Kubectl) -> Iterator[Place]:
    """Namespaces that the tests of a file share."""
    with make_place(kubectl) as made:
        yield made
