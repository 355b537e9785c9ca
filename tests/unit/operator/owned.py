"""Objects as the API server has them, each made by the one before: resource, Deployment, ReplicaSet, pod."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox_operator.api.naming import labels_of
from outbox_operator.api.observed import Role
from outbox_operator.api.resources import KIND
from outbox_operator.watch.store import Store

if TYPE_CHECKING:
    from outbox_operator.watch.store import Body

NAMESPACE = "shop"
LONG_AGO = "2026-01-01T12:00:00Z"


def build_object(kind: str, name: str, owner: Body | None = None, role: Role | None = None, **meta: Any) -> Body:
    """Build an object that `owner` controls, labelled as of the resource `orders`."""
    return {
        "kind": kind,
        "metadata": {
            "namespace": NAMESPACE,
            "name": name,
            "uid": f"uid-of-{kind}-{name}",
            "resourceVersion": "7",
            "creationTimestamp": LONG_AGO,
            "labels": {} if kind == KIND else labels_of("orders", role),
            "ownerReferences": [] if owner is None else [reference_to(owner)],
            **meta,
        },
    }


def reference_to(owner: Body, **changed: Any) -> dict[str, Any]:
    """Refer to an object as its controller does."""
    meta = owner["metadata"]
    return {"kind": owner["kind"], "name": meta["name"], "uid": meta["uid"], "controller": True, **changed}


RESOURCE: Body = build_object(KIND, "orders") | {
    "spec": {"source": {"connection": {"secretRef": {"name": "db"}}}, "target": {"sql": {"statement": "SELECT 1"}}}
}
DEPLOYMENT = build_object("Deployment", "orders-worker", RESOURCE) | {
    "spec": {"replicas": 1, "template": {"metadata": {"labels": {"outbox-operator.dev/template": "current"}}}}
}
REPLICA_SET = build_object("ReplicaSet", "orders-worker-1", DEPLOYMENT)
STATEFUL_SET = build_object("StatefulSet", "orders-driver", RESOURCE)
JOB = build_object("Job", "orders-claim-0", RESOURCE, Role.CLAIM)


def build_pod(name: str, owner: Body | None, role: Role = Role.WORKER, phase: str = "Running", **meta: Any) -> Body:
    return build_object("Pod", name, owner, role, **meta) | {"status": {"phase": phase, "podIP": "127.0.0.1"}}


def store_of(*bodies: Body) -> Store:
    """A store that has seen the objects."""
    store = Store()
    for body in bodies:
        store.put(body)
    return store


EVERYTHING = (RESOURCE, DEPLOYMENT, REPLICA_SET, STATEFUL_SET, JOB)
