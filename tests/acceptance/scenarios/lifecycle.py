"""Applied, suspended, changed, tampered with: what a processor does and says."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from outbox_operator.api.naming import INTENT_ANNOTATION, PROCESSOR_LABEL
from tests.acceptance.scenarios import Scenarios, until_handled
from tests.support.kubernetes.cluster import ApiError, wait

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.room import Resource, Room

RESTORED_WITHIN = 10.0
scenarios = Scenarios()


@scenarios.add
def applied_it_handles_messages_and_says_so(rooms: Rooms) -> None:
    with rooms.room() as room:
        started = time.monotonic()
        orders = room.processor("orders", worker={"replicas": 2})
        orders.until_ready()
        room.shop.produce(50)
        until_handled(room, orders, 50)
        print(f"apply to the first handled messages: {time.monotonic() - started:.1f} s")
        orders.until("both pods are ready", lambda: orders.status.get("readyReplicas") == 2)
        orders.until("the checkpoint is told", lambda: orders.status.get("checkpoint", {}).get("pair", "0:0") != "0:0")
        status = orders.status
        assert room.handled() == sorted(set(room.handled()))
        assert status["owner"]["pod"] in {pod["metadata"]["name"] for pod in orders.pods()}
        assert orders.condition("Stalled")["status"] == "False"
        assert orders.condition("CheckpointHealthy")["status"] == "True"
        orders.until_condition("SourceCurrent", "True")
        orders.until_condition("Reconciling", "False")


@scenarios.add
def a_drain_takes_one_replica_at_a_time_and_a_single_one_at_once(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", worker={"replicas": 2})
        place = ("PodDisruptionBudget", room.namespace, "orders-worker")
        orders.until("both pods are ready", lambda: orders.status.get("readyReplicas") == 2)

        def allowed() -> int:
            return int(room.cluster.need(*place).get("status", {}).get("disruptionsAllowed", 0))

        orders.until("one may be taken", lambda: allowed() == 1)
        one, other = (pod["metadata"]["name"] for pod in orders.pods())
        evict(room, one)
        with pytest.raises(ApiError, match="disruption budget") as refused:
            evict(room, other)
        assert refused.value.status == 429
        orders.until("its successor is ready", lambda: allowed() == 1)
        # Changed by hand, it is put back; with one replica it goes, and nothing holds a drain up.
        room.cluster.patch(*place, {"spec": {"maxUnavailable": 0}})
        orders.until("it is put back", lambda: room.cluster.need(*place)["spec"]["maxUnavailable"] == 1, within=30)
        orders.spec(worker={"replicas": 1})
        orders.until("no budget", lambda: room.cluster.get(*place) is None, within=30)
        evict(room, orders.until("one pod", lambda: next(iter(standing(orders)), "")))
        orders.until_ready()


def standing(orders: Resource) -> list[str]:
    """The only pod that is not going; none while there are two."""
    found = [pod["metadata"]["name"] for pod in orders.pods() if "deletionTimestamp" not in pod["metadata"]]
    return found if len(found) == 1 else []


def evict(room: Room, pod: str) -> None:
    """Ask for a pod's eviction, as a drain does."""
    meta = {"name": pod, "namespace": room.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
    room.cluster.call("POST", f"{room.cluster.path('Pod', room.namespace, pod)}/eviction", body)


@scenarios.add
def suspended_it_keeps_the_claim_and_goes_on_where_it_was(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(5)
        until_handled(room, orders, 5)
        orders.spec(suspend=True)
        orders.until_ready("Suspended")
        assert orders.pods() == []
        claims = room.shop.query("SELECT name, vacated_at FROM outbox.processor_claims")
        assert claims == [("orders", None)]
        assert orders.condition("Suspended")["status"] == "True"
        assert orders.condition("OwnershipGranted")["status"] == "True"
        room.shop.produce(5)
        orders.spec(suspend=False)
        until_handled(room, orders, 10)
        assert len(set(room.handled())) == 10


@scenarios.add
def created_suspended_it_starts_nothing_and_is_ready(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", suspend=True)
        orders.until_ready("Suspended")
        assert orders.pods() == []
        assert room.shop.query("SELECT to_regclass('outbox.processor_claims')::text") == [(None,)]


@scenarios.add
def a_changed_spec_rolls_without_loss_or_duplicate(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", worker={"replicas": 2})
        orders.until_ready()
        before = {pod["metadata"]["name"] for pod in orders.pods()}
        for size in (7, 11):
            room.shop.produce(20)
            orders.spec(delivery={"batchSize": size})
            room.shop.produce(20)
        until_handled(room, orders, 80)
        orders.until("all pods are new", lambda: not before & {pod["metadata"]["name"] for pod in orders.pods()}, 90)
        orders.until_ready(within=90)
        assert len(room.handled()) == len(set(room.handled())) == 80
        assert orders.status["conflicts"]["count"] == 0


@scenarios.add
def what_is_deleted_or_edited_is_restored(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        cluster, namespace = rooms.cluster, room.namespace
        deployment, config = "orders-worker", "orders-processor"
        image = cluster.need("Deployment", namespace, deployment)["spec"]["template"]["spec"]["containers"][0]["image"]

        def container() -> Any:
            found = cluster.get("Deployment", namespace, deployment) or {}
            listed = found.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [{}])
            return listed[0]

        def meta(kind: str, name: str) -> Any:
            return cluster.need(kind, namespace, name)["metadata"]

        def restored(what: str, look: Any) -> None:
            started = time.monotonic()
            wait(what, look, within=RESTORED_WITHIN, explain=lambda: cluster.explain(namespace))
            print(f"{what} restored in {time.monotonic() - started:.1f} s")

        cluster.delete("ConfigMap", namespace, config)
        restored("a deleted ConfigMap", lambda: cluster.get("ConfigMap", namespace, config))
        cluster.patch("ConfigMap", namespace, config, {"data": {"processor.json": "{}", "more": "x"}})
        restored(
            "an edited ConfigMap",
            lambda: (
                (data := cluster.need("ConfigMap", namespace, config)["data"])["processor.json"] != "{}"
                and "more" not in data
            ),
        )
        cluster.patch("Deployment", namespace, deployment, {"spec": {"replicas": 3}})
        restored(
            "a scaled Deployment", lambda: cluster.need("Deployment", namespace, deployment)["spec"]["replicas"] == 1
        )
        for part, name in (("labels", PROCESSOR_LABEL), ("annotations", INTENT_ANNOTATION)):
            cluster.patch("Deployment", namespace, deployment, {"metadata": {part: {name: "another"}}})
            restored(
                f"one of the {part}",
                lambda part=part, name=name: meta("Deployment", deployment)[part][name] != "another",
            )
        for kind, name in (("Deployment", deployment), ("ConfigMap", config)):
            cluster.patch(kind, namespace, name, {"metadata": {"ownerReferences": None}})
            restored(f"the owner of a {kind}", lambda kind=kind, name=name: meta(kind, name).get("ownerReferences"))
        edited = {"name": "worker", "image": "example.com/other:1", "env": [{"name": "EXTRA", "value": "1"}]}
        template = {"template": {"spec": {"containers": [edited], "nodeSelector": {"disk": "ssd"}}}}
        path = cluster.path("Deployment", namespace, deployment)
        cluster.call("PATCH", path, {"spec": template}, "application/strategic-merge-patch+json")
        restored(
            "an edited container",
            lambda: (
                container().get("image") == image
                and not any(one["name"] == "EXTRA" for one in container().get("env", []))
                and "nodeSelector" not in cluster.need("Deployment", namespace, deployment)["spec"]["template"]["spec"]
            ),
        )
        cluster.delete("Deployment", namespace, deployment)
        restored("a deleted Deployment", lambda: container().get("image") == image)
        orders.until_ready(within=90)


@scenarios.add
def a_pod_template_overlay_reaches_the_pod(rooms: Rooms) -> None:
    with rooms.room() as room:
        overlay = {
            "metadata": {"annotations": {"team": "shop"}},
            "spec": {"containers": [{"name": "worker", "env": [{"name": "OUTBOX_LOG_LEVEL", "value": "DEBUG"}]}]},
        }
        orders = room.processor("orders", worker={"podTemplate": overlay})
        orders.until_ready()
        (pod,) = orders.pods()
        environment = {one["name"] for one in pod["spec"]["containers"][0]["env"]}
        assert {"OUTBOX_LOG_LEVEL", "POD_NAME"} <= environment
        assert pod["metadata"]["annotations"]["team"] == "shop"
        assert pod["spec"]["automountServiceAccountToken"] is False
