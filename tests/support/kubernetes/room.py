"""One scenario on the cluster: a namespace with a database, and the resources that are applied there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tests.support.kubernetes.asking import ask_pod
from tests.support.kubernetes.cluster import Body, Cluster, wait
from tests.support.kubernetes.shop import DatabaseServer, Shop, build_secret

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")


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
        asked = next(p for p in self.pods() if pod in ("", p["metadata"]["name"]))
        status, text = ask_pod(self.cluster, asked, "/metrics")
        assert status == 200, text
        lines = [line for line in text.splitlines() if not line.startswith("#")]
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
        self.cluster.apply(build_secret(self.namespace, name, {**self.shop.secret, **changed}))

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
"""A source for scenarios about the stored pair; a resource that names no cursor reads snapshot ranges."""


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
