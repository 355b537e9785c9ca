"""The operator as a pod, installed by the chart, and rooms for scenarios: a namespace and a database each."""

from __future__ import annotations

import os
import queue
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.scenarios import Running, find_selected
from tests.support.kubernetes.cluster import Cluster, ensure_cluster, install_crd, namespaces, wait
from tests.support.kubernetes.operator import OperatorProcess, installed
from tests.support.kubernetes.room import Room
from tests.support.kubernetes.shop import DatabaseServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.operator import Installed

ROOMS = 6


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    ensure_cluster()
    found = Cluster()
    install_crd(found)
    return found


@pytest.fixture(scope="session")
def server(cluster: Cluster) -> Iterator[DatabaseServer]:
    with namespaces(cluster, "db") as (namespace,):
        yield DatabaseServer(cluster, namespace)


@dataclass
class Rooms:
    """Namespaces that the installed operator serves, lent to one scenario at a time and emptied after it."""

    cluster: Cluster
    server: DatabaseServer
    free: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Lend a namespace with a fresh database, its Secret `db` and the table `handled`."""
        namespace = self.free.get(timeout=300)
        made = Room(self.cluster, self.server, namespace, self.server.make())
        made.secret()
        made.prepare()
        try:
            yield made
        finally:
            self._empty(namespace)
            self.free.put(namespace)

    def _empty(self, namespace: str) -> None:
        self._delete("OutboxProcessor", namespace)
        # Release jobs still need the Secret.
        wait("pods and jobs are gone", lambda: not self._busy(namespace), within=90)
        for kind in ("Job", "ConfigMap", "Secret"):
            self._delete(kind, namespace)

    def _delete(self, kind: str, namespace: str) -> None:
        for body in self.cluster.items(kind, namespace):
            if body["metadata"]["name"] != "kube-root-ca.crt":
                self.cluster.delete(kind, namespace, body["metadata"]["name"])

    def _busy(self, namespace: str) -> list[str]:
        pods = [p for p in self.cluster.items("Pod", namespace) if p["status"].get("phase") in ("Pending", "Running")]
        return [pod["metadata"]["name"] for pod in pods]


@pytest.fixture(scope="session")
def rooms(cluster: Cluster, server: DatabaseServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rooms]:
    names = [f"room{number}" for number in range(ROOMS)]
    with namespaces(cluster, "system", *names) as (system, *served):
        found = Rooms(cluster, server)
        for namespace in served:
            found.free.put(namespace)
        with operator_of(cluster, system, served, tmp_path_factory.mktemp("operator")):
            yield found


@pytest.fixture(scope="session")
def running(request: pytest.FixtureRequest, rooms: Rooms) -> Running:
    """All selected scenarios of all files, so that they fill the time of the slowest together."""
    return Running(find_selected(request.session), rooms)


@pytest.fixture
def room(cluster: Cluster, server: DatabaseServer) -> Iterator[Room]:
    """A namespace that the installed operator does not serve, and a database."""
    with namespaces(cluster, "own") as (namespace,):
        made = Room(cluster, server, namespace, server.make())
        made.secret()
        made.prepare()
        yield made


@pytest.fixture
def release(cluster: Cluster, room: Room) -> Iterator[Installed]:
    """The chart without its pod, serving that room, for processes with the rights that it gives."""
    with installed(cluster, room.namespace, [room.namespace], pods=0) as found:
        yield found


@contextmanager
def operator_of(cluster: Cluster, system: str, served: list[str], folder: Path) -> Iterator[None]:
    """Run the operator as the chart installs it; with OUTBOX_TEST_OPERATOR=process from the checkout, to develop it."""
    if os.environ.get("OUTBOX_TEST_OPERATOR") != "process":
        with installed(cluster, system, served):
            yield
        return
    with installed(cluster, system, served, pods=0) as release, OperatorProcess(release, folder):
        yield
