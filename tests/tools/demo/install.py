"""Step 3: namespaces, Secrets with random passwords, PostgreSQL and RabbitMQ as pods, and the operator's chart."""

from __future__ import annotations

import base64
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from tests.tools.demo.database import Database
from tests.tools.demo.place import (
    CHART,
    CLUSTER_ID,
    EXAMPLES,
    EXCHANGE,
    MANIFESTS,
    NAMESPACE,
    OPERATOR_NAMESPACE,
    OTHER_NAMESPACE,
    QUEUE,
    RELEASE,
)
from tests.tools.demo.waiting import DemoError, wait_for
from tests.tools.ledger.amqp import Broker, BrokerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.tools.demo.cluster import Cluster
    from tests.tools.demo.place import Place
    from tests.tools.demo.progress import Progress

READY_WITHIN: Final = 90.0
OURS: Final = ("app.kubernetes.io/part-of", "outbox-demo")
"""The label of every namespace in namespaces.yaml."""
CRD: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/outboxprocessors.outbox-operator.dev"
NAMESPACES: Final = (NAMESPACE, OTHER_NAMESPACE, OPERATOR_NAMESPACE)
GATE: Final = MANIFESTS.parent / "gate.sql"


class Installation:
    """What the demo puts into the cluster, and how to reach it from here."""

    def __init__(self, place: Place, cluster: Cluster, progress: Progress) -> None:
        """Keep what is needed; nothing is touched."""
        self._place, self._cluster, self._progress = place, cluster, progress
        self._forwards = ExitStack()

    def clear(self) -> None:
        """Take away what an earlier demo left in the cluster; that one may have ended anywhere.

        Raises:
            DemoError: a cluster of the user's own has an outbox-operator, or namespaces, that are not the demo's.

        """
        looked = {name: self._cluster.get(f"/api/v1/namespaces/{name}") for name in NAMESPACES}
        if not self._place.local and (foreign := find_foreign(looked, self._cluster.get(CRD))):
            raise DemoError(f"this cluster has what the demo did not make and would take away: {', '.join(foreign)}")
        found = [name for name, namespace in looked.items() if namespace]
        if not found:
            return
        with self._progress.step("taking away what an earlier demo left in the cluster"):
            for namespace in (NAMESPACE, OTHER_NAMESPACE):
                self._cluster.kubectl("delete", "obp", "--all", "-n", namespace, "--wait=false", check=False)
            command = ["helm", "uninstall", RELEASE, "-n", OPERATOR_NAMESPACE, "--ignore-not-found", "--wait"]
            self._cluster.run(*command, check=False)
            self._cluster.kubectl("delete", "namespace", *found, "--wait=true", "--timeout=120s")

    def install(self) -> None:
        """Bring everything up; the chart and the servers at once."""
        with self._progress.step("namespaces that enforce `restricted`, Secrets with random passwords, servers"):
            self._cluster.kubectl("apply", "-f", str(MANIFESTS / "namespaces.yaml"))
            self._make_secrets()
            for name in ("postgres", "rabbitmq"):
                self._apply_template(f"{name}.yaml")
        with self._progress.step("helm install of the operator from charts/, CRDs included"):
            self._helm_install()
        with self._progress.step("PostgreSQL is ready, on a volume"):
            self._wait_rolled_out("postgres")

    def _wait_rolled_out(self, name: str) -> None:
        self._cluster.kubectl("rollout", "status", f"statefulset/{name}", "-n", NAMESPACE, "--timeout=120s")

    def prepare_database(self) -> tuple[Database, Database]:
        """Make role, database, the outbox's and the shop's tables, and the gate; return administrator and shop."""
        host, port = self._reach("postgres", 5432)
        password = self._secret("postgres-admin")["password"]
        server = Database(host, port, password, user="postgres", name="postgres")
        wait_for("PostgreSQL answers", lambda: self._answers(server), within=READY_WITHIN)
        user = self._secret("orders-db")
        with server.connect() as connection:
            if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [user["user"]]).fetchone() is None:
                role, name = sql.Identifier(user["user"]), sql.Identifier(user["database"])
                login = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(user["password"]))
                connection.execute(login)
                connection.execute(sql.SQL("GRANT pg_read_all_stats TO {}").format(role))
                connection.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(name, role))
        shop = Database(host, port, user["password"], user=user["user"], name=user["database"])
        self._migrate(shop)
        with shop.connect() as connection:
            connection.execute((EXAMPLES / "orders.sql").read_bytes())
        administrator = Database(host, port, password, user="postgres", name=user["database"])
        with administrator.connect() as connection:
            connection.execute(GATE.read_bytes())
        return administrator, shop

    def _migrate(self, shop: Database) -> None:
        """Bring the outbox's schema in before the first worker, so that producers need not wait for it."""
        with TemporaryDirectory(prefix="outbox-demo-") as directory:
            shop.write_secret_files(Path(directory))
            outbox = Path(sys.executable).with_name("outbox")
            self._cluster.run(str(outbox), "migrate", "--connection", directory)

    def open_broker(self) -> Broker:
        """Wait for RabbitMQ and connect; the exchange and the queue are there afterwards."""
        self._wait_rolled_out("rabbitmq")
        host, port = self._reach("rabbitmq", 5672)
        user = self._secret("orders-broker")

        def connect() -> Broker | None:
            try:
                return Broker(host, port, user["username"], user["password"])
            except (OSError, BrokerError):
                return None

        broker, _ = wait_for("RabbitMQ answers", connect, within=READY_WITHIN)
        broker.declare(QUEUE, EXCHANGE)
        return broker

    def close(self) -> None:
        """End the port forwards, if any."""
        self._forwards.close()

    def _make_secrets(self) -> None:
        database = {"host": f"postgres.{NAMESPACE}.svc", "port": "5432", "database": "shop", "user": "outbox"}
        broker = {"host": f"rabbitmq.{NAMESPACE}.svc", "port": "5672", "username": "outbox", "vhost": "/"}
        kept = self._kept("orders-db")
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            self._apply_secret("orders-db", namespace, {**database, "password": kept})
        self._apply_secret("orders-broker", NAMESPACE, {**broker, "password": self._kept("orders-broker")})
        self._apply_secret("postgres-admin", NAMESPACE, {"password": self._kept("postgres-admin")})

    def _kept(self, name: str) -> str:
        """Return the password that an earlier run gave, which the volume remembers, or a new one."""
        return self._secret(name).get("password") or secrets.token_urlsafe(18)

    def _secret(self, name: str) -> dict[str, str]:
        secret = self._cluster.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}") or {}
        return {key: base64.b64decode(value).decode() for key, value in (secret.get("data") or {}).items()}

    def _apply_secret(self, name: str, namespace: str, values: dict[str, str]) -> None:
        secret: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace},
            "stringData": values,
        }
        self._cluster.apply(secret)

    def _apply_template(self, name: str) -> None:
        text = Template((MANIFESTS / name).read_text()).substitute(registry=self._place.registry)
        self._cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=text)

    def _helm_install(self) -> None:
        self._cluster.run(
            *("helm", "upgrade", "--install", RELEASE, str(CHART), "--namespace", OPERATOR_NAMESPACE),
            *("--set", f"image.registry={self._place.registry}", "--set", f"image.tag={self._place.tag}"),
            *("--set", f"clusterId={CLUSTER_ID}", "--set", f"watchNamespaces={{{NAMESPACE},{OTHER_NAMESPACE}}}"),
            *("--take-ownership", "--wait", "--timeout", "90s"),
        )

    def _reach(self, service: str, port: int) -> tuple[str, int]:
        """Return an address of the service that works from here."""
        if self._place.local:
            found = self._cluster.get(f"/api/v1/namespaces/{NAMESPACE}/services/{service}") or {}
            return found["spec"]["clusterIP"], port
        return "127.0.0.1", self._forward(service, port)

    def _forward(self, service: str, port: int) -> int:
        command = ["kubectl", "port-forward", "-n", NAMESPACE, f"service/{service}", f":{port}"]
        process = subprocess.Popen(
            command, env=self._cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._forwards.callback(end_process, process)
        line = process.stdout.readline() if process.stdout else ""
        if " -> " not in line:
            raise DemoError(f"kubectl port-forward to service {service} ended: is it there, and may you?")
        return int(line.split(" -> ")[0].rpartition(":")[2])

    @staticmethod
    def _answers(server: Database) -> bool:
        try:
            return server.one("SELECT true") == (True,)
        except psycopg.OperationalError:
            return False


def find_foreign(namespaces: Mapping[str, dict[str, Any] | None], crd: dict[str, Any] | None) -> list[str]:
    """Name what somebody else installed: namespaces without the demo's label, a CRD that belongs to another release."""
    key, value = OURS
    labels = {name: found["metadata"].get("labels") or {} for name, found in namespaces.items() if found}
    foreign = [f"namespace {name}" for name, own in labels.items() if own.get(key) != value]
    if crd is not None:
        annotations = crd["metadata"].get("annotations") or {}
        if annotations.get("meta.helm.sh/release-namespace") != OPERATOR_NAMESPACE:
            foreign.append(f"the CRD {crd['metadata']['name']} of another installation")
    return foreign


def end_process(process: subprocess.Popen[str]) -> None:
    """End a helper process."""
    process.terminate()
    process.wait(10)
