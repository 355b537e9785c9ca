"""A Spark processor on the real cluster: the operator's one driver, executor pods, the same contract as a worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.demo.processes import find_process

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.support.room import Resource, Room

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(500)]

APPLICATION = "def transform(messages):\n    return messages.select('position', 'message_id')\n"
STATEMENT = "INSERT INTO public.handled SELECT position, message_id FROM batch"


def spark_processor(room: Room) -> Resource:
    claim: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "query", "namespace": room.namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    room.cluster.apply(claim)
    return room.processor(
        "orders",
        engine="Spark",
        target={"sql": {"statement": STATEMENT}},
        spark={
            "application": {"module": "orders", "configMapRef": {"name": "code"}},
            "trigger": {"processingTime": "1s"},
            "config": {"spark.kubernetes.executor.request.cores": "250m"},
            "volumes": [{"name": "query", "claimName": "query", "mountPath": "/var/lib/outbox"}],
        },
    )


def executors(room: Room) -> list[str]:
    pods = room.cluster.items("Pod", room.namespace, "spark-role=executor")
    return [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"]


def until_handled_once(room: Room, orders: Resource, count: int) -> None:
    orders.until(f"{count} messages are handled", lambda: len(room.handled()) >= count, 180)
    assert room.handled() == sorted(set(room.handled()))


def test_the_driver_goes_on_after_its_pod_is_lost_and_says_what_is_missing(rooms: Rooms) -> None:
    with rooms.room() as room:
        room.config_map("code", orders="def something_else(messages): ...\n")
        orders = spark_processor(room)
        said = orders.until_condition("Ready", "False", "ApplicationMissing", within=180)
        assert "transform" in said["message"]
        room.config_map("code", orders=APPLICATION)
        orders.until_ready(within=180)
        room.shop.produce(50)
        until_handled_once(room, orders, 50)
        assert executors(room), "the reading is done by executor pods"
        pods = room.cluster.items("Pod", room.namespace)
        jvms = {pod["metadata"]["name"]: find_process(pod, "java") for pod in pods}
        assert len(jvms) == 2, "driver and executor"
        for name, pid in jvms.items():
            assert "/opt/outbox/classes.jsa" in Path(f"/proc/{pid}/maps").read_text(), (
                f"{name} loads every class itself"
            )
        (driver,) = orders.pods("driver")
        assert driver["metadata"]["name"] == "orders-driver-0"

        room.cluster.delete("Pod", room.namespace, driver["metadata"]["name"])
        room.shop.produce(50)
        until_handled_once(room, orders, 100)
        assert orders.status["conflicts"].get("open") is None

        orders.spec(suspend=True)
        orders.until_condition("Ready", "True", "Suspended", within=120)
        assert orders.pods("driver") == []
        orders.until("no executor is left", lambda: not executors(room), 60)
