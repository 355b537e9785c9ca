"""Processors on the real cluster, as a user sees them; the operator is a pod that the chart installed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.scenarios import Scenarios
from tests.support.cluster import Resource, wait

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.support.cluster import Room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(560)]

RESTORED_WITHIN = 10.0
scenarios = Scenarios()


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, rooms: Rooms) -> Scenarios:
    wanted = [name for item in request.session.items if (name := _scenario_of(item))]
    rooms.server.prepare(len(wanted))
    scenarios.start(wanted, rooms)
    return scenarios


def _scenario_of(item: Any) -> str:
    """Name the scenario of a selected test of this module."""
    if getattr(item, "originalname", "") != "test_scenario" or item.module.__name__ != __name__:
        return ""
    name: str = item.callspec.params["name"]
    return name


def until_handled(room: Room, resource: Resource, count: int, within: float = 120) -> None:
    resource.until(f"{count} messages are handled", lambda: len(room.handled()) >= count, within)


def until_owner(resource: Resource, within: float = 120) -> None:
    resource.until_condition("OwnershipGranted", "True", within=within)


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
def a_duplicate_runs_nothing_names_the_owner_and_takes_over(rooms: Rooms) -> None:
    with ExitStack() as stack:
        one, two = stack.enter_context(rooms.room()), stack.enter_context(rooms.room())
        rooms.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "db", "namespace": two.namespace},
                "stringData": one.shop.secret,
            }
        )
        owner = one.processor("orders")
        owner.until_ready()
        duplicate = two.processor("copy", processorId="orders")
        said = duplicate.until_condition("OwnershipGranted", "False", "ClaimHeld")
        assert f"{one.namespace}/orders" in said["message"]
        duplicate.until_condition("Ready", "False", "ClaimHeld")
        duplicate.until_condition("Stalled", "True", "ClaimHeld")
        wait(
            "a try was refused by the database",
            lambda: duplicate.status["ownership"]["tries"] >= 1,
            within=30,
            explain=lambda: rooms.cluster.explain(two.namespace),
        )
        assert duplicate.pods() == []
        assert rooms.cluster.need("Deployment", two.namespace, "copy-worker")["spec"]["replicas"] == 0
        assert owner.condition("Ready")["status"] == "True"
        started = time.monotonic()
        owner.delete()
        duplicate.until_ready(within=60)
        print(f"taken over {time.monotonic() - started:.1f} s after the owner was deleted")
        one.shop.produce(3)
        duplicate.until("it handles", lambda: len(one.handled()) == 3)
        duplicate.until_event("OwnershipGranted")


@scenarios.add
def a_foreign_owner_by_force_stops_it_and_it_returns_by_itself(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(3)
        until_handled(room, orders, 3)
        room.shop.query(
            "SELECT outbox.claim_processor('orders', 'elsewhere', 'shop', 'orders', 'foreign', p_force => true)"
        )
        said = orders.until_condition("OwnershipGranted", "False", "ClaimHeld")
        assert "elsewhere/shop/orders" in said["message"]
        orders.until_no_pods()
        assert any("elsewhere/shop/orders" in event for event in orders.events())
        room.shop.query("SELECT outbox.release_claim('orders', 'foreign')")
        started = time.monotonic()
        orders.until_ready(within=90)
        print(f"owner again {time.monotonic() - started:.1f} s after the outsider stopped")
        room.shop.produce(3)
        until_handled(room, orders, 6)
        assert len(set(room.handled())) == 6


def conflict(room: Room, orders: Resource, change: int) -> dict[str, Any]:
    """Edit the checkpoint row behind the owner's back; answer the open conflict."""
    orders.until_ready()
    room.shop.produce(5)
    until_handled(room, orders, 5)
    room.shop.query(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position + %s", change
    )
    room.shop.produce(1)
    said = orders.until_condition("CheckpointHealthy", "False")
    opened: dict[str, Any] = orders.status["conflicts"]["open"]
    assert opened["expected"] in said["message"]
    assert opened["stored"] in said["message"]
    orders.until_condition("Stalled", "True")
    orders.until_no_pods()
    assert len(room.handled()) == 5, "nothing is handled while a conflict is open"
    orders.until_event("CheckpointConflict")
    return opened


@scenarios.add
def a_checkpoint_edited_ahead_waits_until_a_person_accepts(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        opened = conflict(room, orders, 1)
        assert opened["code"] == 2
        orders.annotate(accept_checkpoint="nonsense")
        orders.until_event("AnnotationInvalid")
        orders.annotate(accept_checkpoint=f"{opened['id']}={opened['stored']}")
        orders.until_ready()
        orders.until("the annotation is gone", lambda: not _annotations(orders))
        orders.until_event("ConflictResolved")
        orders.until_condition("CheckpointHealthy", "True")
        room.shop.produce(2)
        until_handled(room, orders, 7)


@scenarios.add
def a_checkpoint_edited_back_waits_until_a_person_rewinds(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        opened = conflict(room, orders, -1)
        assert opened["code"] == 3
        orders.annotate(rewind_checkpoint=f"{opened['id']}={opened['expected']}")
        until_handled(room, orders, 6)
        orders.until_ready()
        orders.until("the annotation is gone", lambda: not _annotations(orders))
        assert len(set(room.handled())) == len(room.handled()) == 6


def _annotations(resource: Resource) -> list[str]:
    found = resource.read()["metadata"].get("annotations", {})
    return [name for name in found if name.startswith("outbox-operator.dev/")]


@scenarios.add
def a_stranger_is_refused_and_counted(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        answer = room.shop.query("SELECT outbox.store_processor_checkpoint('orders', 99, NULL, '99'::xid8)")
        assert answer == [(4,)]
        orders.until("the stranger is counted", lambda: orders.status["conflicts"]["strangers"] >= 1)
        orders.until_event("StrangerRefused")
        assert orders.condition("Ready")["status"] == "True"


@scenarios.add
def handed_over_the_other_resource_goes_on(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(4)
        until_handled(room, orders, 4)
        heir = room.processor("heir", processorId="orders")
        heir.until_condition("OwnershipGranted", "False", "ClaimHeld")
        orders.spec(handOverTo={"namespace": room.namespace, "name": "heir"})
        orders.until_ready("HandedOver")
        heir.until_ready(within=30)
        assert orders.condition("OwnershipGranted")["status"] == "False"
        assert orders.pods() == []
        room.shop.produce(4)
        until_handled(room, heir, 8)
        assert len(set(room.handled())) == 8


@scenarios.add
def deleted_with_its_secret_gone_it_goes(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        rooms.cluster.delete("Secret", room.namespace, "db")
        orders.delete()
        wait("the resource is gone", lambda: not orders.read(), within=10)
        orders.until_no_pods(within=45)


@scenarios.add
def deleted_with_the_database_gone_it_goes(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        rooms.server.shut(room.shop)
        orders.delete()
        wait("the resource is gone", lambda: not orders.read(), within=10)
        orders.until_no_pods(within=45)
        rooms.server.open(room.shop)


@scenarios.add
def deleted_its_claim_is_free_and_its_checkpoint_stays(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(3)
        until_handled(room, orders, 3)
        orders.spec(suspend=True)
        orders.until_ready("Suspended")
        orders.delete()
        wait(
            "the claim is released",
            lambda: room.shop.query("SELECT count(*) FROM outbox.processor_claims") == [(0,)],
            within=30,
            explain=lambda: rooms.cluster.explain(room.namespace),
        )
        wait("the release job sweeps itself", lambda: not rooms.cluster.items("Job", room.namespace), within=45)
        again = room.processor("orders", startFrom={"type": "End"})
        again.until_ready()
        room.shop.produce(1)
        until_handled(room, again, 4)
        again.until_event("StartFromNotUsed")
        assert len(set(room.handled())) == 4


# --- bad input: the checkpoint stays, a condition says what to do, and it recovers by itself --------------------------


def recovers(room: Room, orders: Resource, count: int = 1) -> None:
    orders.until_ready(within=150)
    room.shop.produce(count)
    until_handled(room, orders, count)


@scenarios.add
def a_missing_secret_is_named(rooms: Rooms) -> None:
    with rooms.room() as room:
        source = {"connection": {"secretRef": {"name": "other-db"}}}
        orders = room.processor("orders", source=source)
        said = orders.until_condition("Ready", "False", "ConnectionSecretInvalid")
        assert "'other-db'" in said["message"]
        room.secret("other-db")
        recovers(room, orders)


@scenarios.add
def a_wrong_password_is_named(rooms: Rooms) -> None:
    with rooms.room() as room:
        room.secret("db", password="wrong")
        orders = room.processor("orders")
        said = orders.until_condition("Ready", "False", "AuthenticationFailed")
        assert said["message"]
        assert room.shop.password not in said["message"]
        room.secret("db")
        recovers(room, orders)


@scenarios.add
def a_database_that_is_down_is_named_and_awaited(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        rooms.server.shut(room.shop)
        said = orders.until_condition("Ready", "False")
        assert said["message"]
        assert orders.pods(), "unknown is never zero"
        assert orders.condition("OwnershipGranted")["status"] == "True"
        rooms.server.open(room.shop)
        recovers(room, orders)


@scenarios.add
def an_absent_schema_is_named_when_it_is_only_verified(rooms: Rooms) -> None:
    with rooms.room() as room:
        source = {"connection": {"secretRef": {"name": "db"}}, "schema": "Verify"}
        orders = room.processor("orders", source=source)
        said = orders.until_condition("Ready", "False", "SchemaMissing")
        assert "outbox migrate" in said["message"]
        manager = room.processor("manager", processorId="manager")
        manager.until_ready()
        recovers(room, orders)


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
        assert checkpoint in ([], [(0,)])
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


@pytest.mark.parametrize("name", scenarios.names)
def test_scenario(running: Scenarios, name: str):
    running.finish(name, within=540)
