"""The real cluster for tests: objects over one API connection, namespaces, a database pod, waiters that explain.

Nothing here knows the operator's code: a test sees what a user sees.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.request import urlopen

import psycopg
from kubernetes import client, config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).resolve().parents[2]
STATE: Final = Path(os.environ.get("OUTBOX_STATE") or "/var/lib/outbox-operator")
REGISTRY: Final = os.environ.get("OUTBOX_REGISTRY") or "localhost"
POLL_SECONDS: Final = 0.25
RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}

PLURALS: Final = {
    "OutboxProcessor": ("/apis/outbox-operator.dev/v1alpha1", "outboxprocessors"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Job": ("/apis/batch/v1", "jobs"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "ClusterRole": ("/apis/rbac.authorization.k8s.io/v1", "clusterroles"),
    "CustomResourceDefinition": ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions"),
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
        }.items()
    },
}

Body = dict[str, Any]


def kubeconfig() -> Path:
    """The cluster that tests run on: the user's own, or the local one."""
    return Path(os.environ.get("KUBECONFIG") or STATE / "kubeconfig")


def ensure_cluster() -> Path:
    """Start the local cluster unless it is up; answer its kubeconfig."""
    if not os.environ.get("KUBECONFIG"):
        subprocess.run([ROOT / "tests" / "cluster" / "up.sh"], check=True, capture_output=True)
    return kubeconfig()


class ApiError(Exception):
    """The API server refused a call."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Cluster:
    """One API connection; threads may share it."""

    def __init__(self) -> None:
        self._api: client.ApiClient = config.new_client_from_config(str(kubeconfig()))

    def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Body:
        """Make a call.

        Raises:
            ApiError: it was refused.

        """
        headers = {"Accept": "application/json", "Content-Type": content}
        request = self._api.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        answer = self._api.call_api(*request, _request_timeout=30)
        text = answer.read()
        parsed: Body = json.loads(text) if text else {}
        if answer.status >= 400:
            raise ApiError(answer.status, parsed.get("message", str(text[:500])))
        return parsed

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
        lines += [
            f"event {event['involvedObject'].get('name')} {event['reason']}: {event['message'][:300]}"
            for event in self.items("Event", namespace)[-30:]
        ]
        return "\n".join(lines)


T = TypeVar("T")


def wait(what: str, look: Callable[[], T], *, within: float, explain: Callable[[], str] | None = None) -> T:
    """Look until what is seen is true, and answer it; a failure says what the cluster looks like."""
    deadline = time.monotonic() + within
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within:.0f} s in vain: {what}\n{explain() if explain else found!r}")
        time.sleep(POLL_SECONDS)
    return found


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
        cluster.apply(_secret(namespace, "superuser", {"password": self._password}))
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
        """Make databases beforehand: one that is being made holds back the reading bound of all others."""
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


def _secret(namespace: str, name: str, data: dict[str, str]) -> Body:
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
        "readinessProbe": {"exec": {"command": ["pg_isready", "-q"]}, "periodSeconds": 1, "timeoutSeconds": 5},
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


@dataclass(frozen=True, slots=True)
class Resource:
    """One OutboxProcessor as a test looks at it."""

    cluster: Cluster
    namespace: str
    name: str

    def read(self) -> Body:
        return self.cluster.get("OutboxProcessor", self.namespace, self.name) or {}

    @property
    def status(self) -> Body:
        found: Body = self.read().get("status") or {}
        return found

    def condition(self, kind: str) -> Body:
        """One condition; empty while there is none about the current generation."""
        body = self.read()
        for condition in (body.get("status") or {}).get("conditions") or ():
            current = condition.get("observedGeneration", 0) >= body["metadata"]["generation"]
            if condition["type"] == kind and current:
                found: Body = condition
                return found
        return {}

    def until(self, what: str, look: Callable[[], T], within: float = 120) -> T:
        return wait(f"{self.name}: {what}", look, within=within, explain=lambda: self.cluster.explain(self.namespace))

    def until_condition(self, kind: str, status: str, reason: str = "", within: float = 120) -> Body:
        def look() -> Body:
            found = self.condition(kind)
            return found if found.get("status") == status and reason in ("", found.get("reason")) else {}

        return self.until(f"{kind}={status} {reason}", look, within)

    def until_ready(self, reason: str = "Running", within: float = 120) -> Body:
        return self.until_condition("Ready", "True", reason, within)

    def pods(self, role: str = "worker") -> list[Body]:
        """Pods that have not ended."""
        labels = f"outbox-operator.dev/processor={self.name},outbox-operator.dev/role={role}"
        found = self.cluster.items("Pod", self.namespace, labels)
        return [pod for pod in found if pod["status"].get("phase") not in ("Succeeded", "Failed")]

    def until_no_pods(self, within: float = 120) -> None:
        self.until("no pods", lambda: not self.pods(), within)

    def metrics(self, pod: str = "") -> dict[str, float]:
        """What one of its pods serves at /metrics, by name and labels; without a name, its first one."""
        address = next(p["status"]["podIP"] for p in self.pods() if pod in ("", p["metadata"]["name"]))
        with urlopen(f"http://{address}:8080/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def events(self) -> list[str]:
        found = self.cluster.items("Event", self.namespace, fields=f"involvedObject.name={self.name}")
        return [f"{event['reason']}: {event['message']}" for event in found]

    def until_event(self, reason: str, within: float = 30) -> str:
        def look() -> str:
            return next((event for event in self.events() if event.startswith(f"{reason}:")), "")

        return self.until(f"Event {reason}", look, within)

    def spec(self, **fields: Any) -> Body:
        return self.cluster.patch("OutboxProcessor", self.namespace, self.name, {"spec": fields})

    def annotate(self, **annotations: str) -> None:
        named = {f"outbox-operator.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
        self.cluster.patch("OutboxProcessor", self.namespace, self.name, {"metadata": {"annotations": named}})

    def delete(self) -> None:
        self.cluster.delete("OutboxProcessor", self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class Room:
    """One scenario's namespace and database."""

    cluster: Cluster
    server: DatabaseServer
    namespace: str
    shop: Shop

    def secret(self, name: str = "db", **changed: str) -> None:
        self.cluster.apply(_secret(self.namespace, name, {**self.shop.secret, **changed}))

    def config_map(self, name: str, **files: str) -> None:
        data = {f"{key}.py": text for key, text in files.items()}
        meta = {"name": name, "namespace": self.namespace}
        self.cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data})

    def processor(self, name: str, *, namespace: str = "", **spec: Any) -> Resource:
        """Create a processor that projects messages into a table `handled`; `spec` is laid over that."""
        body = build_processor(name, namespace or self.namespace, **spec)
        self.cluster.create(body)
        return Resource(self.cluster, namespace or self.namespace, name)

    def prepare(self) -> None:
        """Make the table that the default processor writes to; it may exist before our schema does."""
        self.shop.query("CREATE TABLE IF NOT EXISTS handled (position bigint, message_id text)")

    def handled(self) -> list[int]:
        return [row[0] for row in self.shop.query("SELECT position FROM handled ORDER BY position")]


BY_PAIRS: Final[Body] = {"connection": {"secretRef": {"name": "db"}}, "cursor": "TransactionOrder"}
"""A source for scenarios about the stored pair; a resource that names no cursor reads windows."""


def build_processor(name: str, namespace: str, **spec: Any) -> Body:
    """Build a processor that works; `spec` is laid over it."""
    statement = "INSERT INTO public.handled SELECT position, message_id FROM batch"
    return {
        "apiVersion": "outbox-operator.dev/v1alpha1",
        "kind": "OutboxProcessor",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "source": {"connection": {"secretRef": {"name": "db"}}},
            "target": {"sql": {"statement": statement}},
            "delivery": {"pollInterval": "100ms", "retry": {"initialBackoff": "200ms", "maxBackoff": "1s"}},
            **spec,
        },
    }


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
