"""PostgreSQL on the cluster for tests: one pod, and in it a database for each test."""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

import psycopg

from tests.support.kubernetes.cluster import REGISTRY, Body, Cluster, wait


@dataclass(frozen=True, slots=True)
class Shop:
    """One test's database: on the shared server, with a role of its own, reached by pods through the pod's address."""

    host: str
    name: str
    password: str
    role: str = ""
    """Who owns it; absent: a role of its name."""

    @property
    def user(self) -> str:
        return self.role or self.name

    @property
    def secret(self) -> dict[str, str]:
        return {
            "host": self.host,
            "port": "5432",
            "database": self.name,
            "user": self.user,
            "password": self.password,
        }

    @property
    def libpq(self) -> dict[str, str]:
        """Its address for a program that is started by hand."""
        return {"PGHOST": self.host, "PGDATABASE": self.name, "PGUSER": self.user, "PGPASSWORD": self.password}

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            host=self.host,
            dbname=self.name,
            user=self.user,
            password=self.password,
            autocommit=True,
            connect_timeout=30,
        )

    def query(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement and fetch what it answers."""
        with self.connect() as connection:
            cursor = connection.execute(text.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def produce(self, count: int, key: str | None = None) -> None:
        """Store messages, each in a transaction of its own."""
        with self.connect() as connection:
            for number in range(count):
                connection.execute(
                    "INSERT INTO outbox.messages (message_id, message_type, partition_key, data) "
                    "VALUES (%s, %s, %s, %s)",
                    (f"{token_hex(8)}-{number}", "OrderPlaced", key, json.dumps({"n": number})),
                )


class DatabaseServer:
    """A PostgreSQL pod in a namespace of its own; tests get databases in it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._password = token_hex(12)
        self._lock = threading.Lock()
        self._made: queue.SimpleQueue[Shop] = queue.SimpleQueue()
        cluster.apply(build_secret(namespace, "superuser", {"password": self._password}))
        cluster.apply(_postgres_pod(namespace))
        pod = wait(
            "PostgreSQL",
            lambda: _ready(cluster.get("Pod", namespace, "postgres")),
            within=90,
            explain=lambda: cluster.explain(namespace),
        )
        self.host: str = pod["status"]["podIP"]

    def run(self, text: str) -> list[tuple[Any, ...]]:
        """Run a statement as superuser."""
        with (
            self._lock,
            psycopg.connect(
                host=self.host, user="postgres", dbname="postgres", password=self._password, autocommit=True
            ) as connection,
        ):
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def prepare(self, count: int) -> None:
        """Make databases beforehand: one that is being made holds back the high-water mark of all others."""
        for _ in range(count):
            self._made.put(self._make())

    def make(self) -> Shop:
        """Answer a fresh database with its owner."""
        try:
            return self._made.get_nowait()
        except queue.Empty:
            return self._make()

    def _make(self) -> Shop:
        shop = Shop(self.host, f"shop_{token_hex(4)}", token_hex(8))
        self.run(f"CREATE ROLE {shop.name} LOGIN PASSWORD '{shop.password}'")
        self.run(f"CREATE DATABASE {shop.name} OWNER {shop.name}")
        return shop

    def copy(self, shop: Shop) -> Shop:
        """Copy a database by template, which nobody may be connected to meanwhile; its owner owns the copy too."""
        copied = replace(shop, name=f"{shop.name}_copy", role=shop.user)
        self.shut(shop)
        self.run(f"CREATE DATABASE {copied.name} TEMPLATE {shop.name} OWNER {copied.role}")
        self.open(shop)
        return copied

    def shut(self, shop: Shop) -> None:
        """Make the database refuse everybody, as one that is down."""
        self.run(f"ALTER ROLE {shop.name} CONNECTION LIMIT 0")
        self.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{shop.name}'")

    def open(self, shop: Shop) -> None:
        """Take `shut` back."""
        self.run(f"ALTER ROLE {shop.name} CONNECTION LIMIT -1")


def _ready(pod: Body | None) -> Body:
    conditions = (pod or {}).get("status", {}).get("conditions") or ()
    return pod if pod and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions) else {}


def build_secret(namespace: str, name: str, data: dict[str, str]) -> Body:
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": data}


def _postgres_pod(namespace: str) -> Body:
    secure = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    container = {
        "name": "postgres",
        "image": f"{REGISTRY}/postgres:15",
        "imagePullPolicy": "IfNotPresent",
        "args": ["-c", "max_connections=300", "-c", "max_prepared_transactions=10", "-c", "fsync=off"],
        "env": [{"name": "POSTGRES_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "superuser", "key": "password"}}}],
        "securityContext": secure,
        # Without a request it gets what every other pod and test leaves, on a busy machine nothing.
        "resources": {"requests": {"cpu": "100m"}},
        # Not as a readiness probe: a program started in the pod each second costs a tenth of a processor.
        "startupProbe": {
            "exec": {"command": ["pg_isready", "-q"]},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 90,
        },
        "volumeMounts": [
            {"name": "data", "mountPath": "/var/lib/postgresql/data"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "postgres", "namespace": namespace},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 999,
                "fsGroup": 999,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
        },
    }
