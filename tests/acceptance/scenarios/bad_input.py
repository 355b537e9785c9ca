"""Bad input: the checkpoint stays, a condition says what to do, and it recovers by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.acceptance.scenarios import Scenarios, recovers, until_handled, until_owner
from tests.support.kubernetes.cluster import wait

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.cluster import Body
    from tests.support.kubernetes.room import Resource

scenarios = Scenarios()


@scenarios.add
def an_invalid_handler_is_named_with_its_traceback(rooms: Rooms) -> None:
    with rooms.room() as room:
        room.config_map("code", orders="import nothing_of_that_name\n")
        target = {"python": {"module": "orders", "configMapRef": {"name": "code"}}}
        orders = room.processor("orders", target=target)
        said = orders.until_condition("Ready", "False", "HandlerInvalid")
        assert "nothing_of_that_name" in said["message"]
        statement = "INSERT INTO public.handled VALUES (%s, %s)"
        mended = (
            "def handle(batch, connection):\n"
            "    for message in batch.messages:\n"
            f"        connection.execute({statement!r}, (message.checkpoint.position, message.message_id))\n"
        )
        room.config_map("code", orders=mended)
        recovers(room, orders)


@scenarios.add
def a_statement_that_fails_stops_with_its_reason_and_resumes_when_changed(rooms: Rooms) -> None:
    with rooms.room() as room:
        delivery = {"retry": {"maxAttempts": 2, "initialBackoff": "100ms", "maxBackoff": "100ms"}}
        target = {"sql": {"statement": "INSERT INTO public.nowhere SELECT position FROM batch"}}
        orders = room.processor("orders", target=target, delivery=delivery)
        orders.until("it is owner", lambda: orders.condition("OwnershipGranted").get("status") == "True")
        room.shop.produce(2)
        said = orders.until_condition("Stalled", "True")
        assert "nowhere" in said["message"]
        assert room.handled() == []
        mended = {"sql": {"statement": "INSERT INTO public.handled SELECT position, message_id FROM batch"}}
        orders.spec(target=mended)
        until_handled(room, orders, 2)
        orders.until_ready()


@scenarios.add
def a_broker_that_is_down_is_named(rooms: Rooms) -> None:
    with rooms.room() as room:
        broker = {"host": "broker.invalid", "port": "5672", "username": "u", "password": "p", "vhost": "/"}
        rooms.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "broker", "namespace": room.namespace},
                "stringData": broker,
            }
        )
        target = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "routingKey": "orders"}}
        orders = room.processor("orders", target=target)
        until_owner(orders)
        room.shop.produce(1)
        said = orders.until_condition("Ready", "False", "TargetUnavailable")
        assert "broker.invalid" in said["message"]
        checkpoint = room.shop.query("SELECT last_processed_position FROM outbox.processor_checkpoints")
        assert checkpoint in ([], [(1,)]), "the first snapshot range's counter"
        orders.spec(target={"rabbitmq": None, "log": {}})
        orders.until_ready()


@scenarios.add
def an_image_that_cannot_be_pulled_is_named(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", worker={"image": "localhost/nothing-of-that-name:1"})
        said = orders.until_condition("WorkersAvailable", "False", "ImageUnavailable")
        assert "nothing-of-that-name" in said["message"]
        orders.spec(worker={"image": None})
        recovers(room, orders)


MISFITS: dict[str, Body] = {
    ".nodeAffinitee: field not declared in schema": {"affinity": {"nodeAffinitee": {}}},
    ".tolerations: expected list": {"tolerations": {}},
    "quantities must match": {"containers": [{"name": "worker", "resources": {"limits": {"memory": "plenty"}}}]},
    "spec.template.spec.dnsPolicy: Unsupported value": {"dnsPolicy": "Nearest"},
}
"""Pods' specs by what the API server says of them: of the first three with status 500, of the last with 422."""
CORRECTED = dict.fromkeys(field for spec in MISFITS.values() for field in spec)


def until_refused(orders: Resource, words: str) -> None:
    def told() -> bool:
        said = orders.condition("Ready")
        return said.get("reason") == "ApplyFailed" and words in said["message"]

    orders.until(f"{words!r} is told", told)


@scenarios.add
def a_pod_template_that_the_api_server_refuses_is_told_in_its_words(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", worker={"podTemplate": {"spec": next(iter(MISFITS.values()))}})
        for words, spec in MISFITS.items():
            orders.spec(worker={"podTemplate": {"spec": {**CORRECTED, **spec}}})
            until_refused(orders, words)
            assert orders.condition("Stalled")["status"] == "True"
        assert "nodeAffinitee" in orders.until_event("ApplyFailed")
        orders.spec(worker={"podTemplate": {"spec": CORRECTED}})
        recovers(room, orders)


@scenarios.add
def a_quota_that_leaves_no_room_is_told_and_tried_again(rooms: Rooms) -> None:
    with rooms.room() as room:
        cluster, place = rooms.cluster, ("ResourceQuota", room.namespace, "few")
        meta = {"name": "few", "namespace": room.namespace}
        hard = {"hard": {"count/deployments.apps": "0"}}
        cluster.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": hard})
        wait("the quota counts", lambda: "used" in cluster.need(*place).get("status", {}), within=60)
        orders = room.processor("orders")
        until_refused(orders, "exceeded quota: few")
        cluster.delete(*place)
        recovers(room, orders)


@scenarios.add
def an_object_of_another_owner_is_not_taken_over(rooms: Rooms) -> None:
    with rooms.room() as room:
        meta = {"name": "orders-processor", "namespace": room.namespace}
        rooms.cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"mine": "yes"}})
        orders = room.processor("orders")
        said = orders.until_condition("Ready", "False", "NameTaken")
        assert "orders-processor" in said["message"]
        assert rooms.cluster.need("ConfigMap", room.namespace, "orders-processor")["data"] == {"mine": "yes"}
        rooms.cluster.delete("ConfigMap", room.namespace, "orders-processor")
        recovers(room, orders)
