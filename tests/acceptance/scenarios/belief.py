"""Pods that lie about a resource, and clients that may not ask: what its own pods say decides, and nobody else."""

from __future__ import annotations

import base64
import hashlib
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from outbox_core.report import Reason, Report, ResourceRef, WorkerState
from tests.acceptance.scenarios import Scenarios, recovers
from tests.support.kubernetes.asking import ask_pod, call_pod, key_of
from tests.support.kubernetes.cluster import REGISTRY, wait

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.cluster import Body
    from tests.support.kubernetes.room import Resource, Room

scenarios = Scenarios()

LIAR = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked", self.path, file=sys.stderr, flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["LIE"].encode())
    do_POST = do_GET
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""
"""Says the same to everybody, and tells its log who asked."""

CHANGING = """
import itertools, json
from outbox_worker.observe.health import HealthServer
count, honest = itertools.count(), HealthServer.get
def lie(server, path):
    status, kind, text = honest(server, path)
    if path == "/status":
        said = {"state": "Retrying", "reason": "HandlerFailed", "message": f"lie {next(count)}"}
        text = json.dumps(json.loads(text) | said).encode()
    return status, kind, text
HealthServer.get = lie
def handle(batch, connection):
    pass
"""
"""A handler that makes its worker report something else each time it is asked."""

ENDLESS = """
import json
from outbox_worker.observe.health import HealthServer
honest = HealthServer.get
def lie(server, path):
    status, kind, text = honest(server, path)
    if path == "/status":
        report = json.loads(text)
        report["lag"] = {"messages": 10**30, "seconds": float("inf")}
        text = json.dumps(report).encode()
    return status, kind, text
HealthServer.get = lie
def handle(batch, connection):
    pass
"""
"""A handler that makes its worker report numbers that no status can hold."""


def refusal(room: Room, orders: Resource) -> str:
    """A report of the resource's process that the claim is another's, with a path as its name."""
    meta = orders.read()["metadata"]
    holder = ResourceRef(cluster="acceptance", namespace="kube-system", name="../../../../api/v1", uid="gone")
    report = Report(
        processor_id=orders.name,
        resource=ResourceRef(cluster="acceptance", namespace=room.namespace, name=orders.name, uid=meta["uid"]),
        generation=meta["generation"],
        pod="liar",
        pod_uid="liar",
        instance="liar",
        time=datetime.now(UTC),
        state=WorkerState.CLAIM_REFUSED,
        reason=Reason.CLAIM_HELD,
        claim_holder=holder,
    )
    return report.model_dump_json(by_alias=True)


@contextmanager
def liar(room: Room, orders: Resource, name: str, *owners: Body) -> Iterator[str]:
    """A pod with the resource's labels that says its claim is refused; gives its name."""
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "worker",
        "image": f"{REGISTRY}/outbox-worker:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", LIAR],
        "env": [{"name": "LIE", "value": refusal(room, orders)}],
        "securityContext": restricted,
    }
    marked = {
        "app.kubernetes.io/managed-by": "outbox-operator",
        "outbox-operator.dev/processor": orders.name,
        "outbox-operator.dev/role": "worker",
    }
    # Where a ReplicaSet has one pod too many, it takes another away.
    costs = {"controller.kubernetes.io/pod-deletion-cost": "1000"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": room.namespace,
            "labels": marked,
            "annotations": costs,
            "ownerReferences": list(owners),
        },
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        },
    }
    room.cluster.create(body)
    try:
        yield name
    finally:
        room.cluster.delete("Pod", room.namespace, name, grace=0)


def is_ready(room: Room, name: str) -> bool:
    pod = room.cluster.get("Pod", room.namespace, name) or {"status": {}}
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())


def goes_on(room: Room, orders: Resource, replicas: int, seconds: float) -> None:
    """For a while, the resource is what it was: nothing is scaled down, and nobody else owns it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        workload = room.cluster.need("Deployment", room.namespace, f"{orders.name}-worker")
        assert workload["spec"]["replicas"] == replicas, room.cluster.explain(room.namespace)
        assert orders.status["ownership"]["state"] == "Granted", room.cluster.explain(room.namespace)
        time.sleep(0.3)


@scenarios.add
def a_bare_pod_with_its_labels_is_not_asked_and_is_named(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", worker={"replicas": 2})
        orders.until_ready()
        orders.until("both pods are ready", lambda: orders.status.get("readyReplicas") == 2)
        with liar(room, orders, "bare") as name:
            wait("the liar runs", lambda: is_ready(room, name), within=60)
            goes_on(room, orders, 2, 15)
            said = orders.until_condition("WorkersAvailable", "True")
            assert "pods bare carry this resource's labels and were not made for it" in said["message"]
            orders.until_event("ForeignPod")
            assert orders.status["replicas"] == 2
            assert "asked" not in room.cluster.log(room.namespace, name)
        orders.until("it is no longer named", lambda: "bare" not in orders.condition("WorkersAvailable")["message"])
        recovers(room, orders)


@scenarios.add_at_night
def a_bare_pod_with_its_labels_delays_no_release_of_its_claim(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        orders.spec(suspend=True)
        orders.until_ready("Suspended")
        with liar(room, orders, "bare") as name:
            wait("the liar runs", lambda: is_ready(room, name), within=60)
            orders.delete()
            # A pod of its own would be waited for.
            wait(
                "the claim is released",
                lambda: room.shop.query("SELECT count(*) FROM outbox.processor_claims") == [(0,)],
                within=45,
                explain=lambda: room.cluster.explain(room.namespace),
            )
            assert "asked" not in room.cluster.log(room.namespace, name), "nor is it told of an intent"


@scenarios.add_at_night
def a_forged_owner_reference_makes_no_pod_its_own(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", worker={"replicas": 2})
        orders.until_ready()
        # The garbage collector takes it away once it has seen that there is no such owner.
        with liar(room, orders, "forged", owner_of(room, uid="11111111-2222-4333-8444-555555555555")):
            goes_on(room, orders, 2, 15)
        recovers(room, orders)


@scenarios.add
def a_pod_that_its_replica_set_counts_is_not_believed_without_the_key(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", worker={"replicas": 2})
        orders.until_ready()
        orders.until("both pods are ready", lambda: orders.status.get("readyReplicas") == 2)
        (made,) = room.cluster.items("ReplicaSet", room.namespace)
        with liar(room, orders, "counted") as name:
            wait("the liar runs", lambda: is_ready(room, name), within=60)
            labels = made["spec"]["selector"]["matchLabels"]
            meta = {"labels": labels, "ownerReferences": [owner_of(room)]}
            room.cluster.patch("Pod", room.namespace, name, {"metadata": meta})
            asked = lambda: "asked /status" in room.cluster.log(room.namespace, name)  # noqa: E731 - used once
            wait("the liar is asked", asked, within=20)
            goes_on(room, orders, 2, 15)
            assert is_ready(room, name), "it was taken away before it could do harm"
            orders.until_ready(within=60)
        recovers(room, orders)


def owner_of(room: Room, **changed: str) -> Body:
    """Refer to the room's only ReplicaSet as its pods do."""
    (made,) = room.cluster.items("ReplicaSet", room.namespace)
    meta = made["metadata"]
    reference = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": meta["name"], "uid": meta["uid"]}
    return {**reference, "controller": True, **changed}


def count_changes_while_a_worker_lies(rooms: Rooms) -> int:
    """Count how often a resource changes in 20 seconds in which its worker says something else each time.

    It is asked ten times in them. Anything else is looked at twice; news may add as many.
    """
    with rooms.room() as room:
        room.config_map("code", orders=CHANGING)
        target = {"python": {"module": "orders", "function": "handle", "configMapRef": {"name": "code"}}}
        orders = room.processor("orders", target=target)
        orders.until("the lies are told", lambda: "lie " in orders.condition("Ready").get("message", ""))
        time.sleep(30)  # more than what wakes at once
        versions = set()
        until = time.monotonic() + 20
        while time.monotonic() < until:
            versions.add(orders.read()["metadata"]["resourceVersion"])
            time.sleep(0.3)
        return len(versions)


@scenarios.add_at_night
def a_worker_that_reports_what_no_status_can_hold_is_suspended_all_the_same(rooms: Rooms) -> None:
    with rooms.room() as room:
        room.config_map("code", orders=ENDLESS)
        target = {"python": {"module": "orders", "function": "handle", "configMapRef": {"name": "code"}}}
        orders = room.processor("orders", target=target)
        orders.until("its pod is ready", lambda: orders.status.get("readyReplicas") == 1)
        orders.spec(suspend=True)
        orders.until("it has no pod", lambda: not orders.pods() and orders.status.get("replicas") == 0)
        assert "lag" not in orders.status


@scenarios.add
def only_its_operator_and_prometheus_are_answered(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        (pod,) = orders.pods()
        for path, body in (("/status", None), ("/metrics", None), ("/intent", b'{"intent": "ReleaseClaim"}')):
            assert call_pod(pod, path, {}, body)[0] == 401
        assert call_pod(pod, "/livez", {})[0] == 200
        assert call_pod(pod, "/readyz", {})[0] == 200
        assert ask_pod(room.cluster, pod, "/status")[0] == 200
        token = metrics_token(room, pod)
        bearer = {"Authorization": f"Bearer {token}"}
        status, text = call_pod(pod, "/metrics", bearer)
        assert status == 200
        assert "outbox_state_reason{" in text
        assert call_pod(pod, "/status", bearer)[0] == 401


def metrics_token(room: Room, pod: Body) -> str:
    """The token that the operator of this pod made for Prometheus: others have operators on this cluster too."""
    (container,) = pod["spec"]["containers"]
    hashed = next(each["value"] for each in container["env"] if each["name"] == "OUTBOX_METRICS_TOKEN_SHA256")
    found = [(secret.get("data") or {}).get("token", "") for secret in room.cluster.items("Secret")]
    tokens = [base64.b64decode(token) for token in found]
    return next(token.decode() for token in tokens if hashlib.sha256(token).hexdigest() == hashed)


@scenarios.add
def its_key_is_made_again_when_somebody_deletes_it(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        key = key_of(room.cluster, room.namespace, "orders")
        (secret,) = room.cluster.items("Secret", room.namespace, "outbox-operator.dev/processor=orders")
        name = secret["metadata"]["name"]
        room.cluster.delete("Secret", room.namespace, name)
        (pod,) = orders.pods()
        room.cluster.delete("Pod", room.namespace, pod["metadata"]["name"])
        wait("the key is there again", lambda: room.cluster.get("Secret", room.namespace, name), within=60)
        assert key_of(room.cluster, room.namespace, "orders") == key
        former = pod["metadata"]["name"]
        # The kubelet tries to mount what was missing less and less often.
        orders.until(
            "another pod owns it", lambda: (orders.status.get("owner") or {}).get("pod", former) != former, 180
        )
        recovers(room, orders, 3)
