"""A Spark processor on the real cluster: the operator's one driver, executor pods, the same contract as a worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tools.demo.processes import find_process

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.room import Resource, Room

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(500)]

APPLICATION = "def transform(messages):\n    return messages.select('position', 'message_id')\n"
STATEMENT = "INSERT INTO public.handled SELECT position, message_id FROM batch"


VOLUMES = [{"name": "query", "claimName": "query", "mountPath": "/var/lib/outbox"}]


def spark_processor(room: Room, **fields: Any) -> Resource:
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
        target=fields.pop("target", {"sql": {"statement": STATEMENT}}),
        spark={
            "application": {"module": "orders", "configMapRef": {"name": "code"}},
            "trigger": {"processingTime": "1s"},
            "config": {"spark.kubernetes.executor.request.cores": "250m"},
            "volumes": VOLUMES,
        }
        | fields,
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


COUNTING = """
from pyspark.sql import functions as f

def transform(messages):
    return messages.groupBy(f.lit("all").alias("what")).agg(f.count("*").alias("messages"))
"""
"""Keeps state: every micro-batch gives out the number of all messages so far."""
KEEP_COUNT = """
    INSERT INTO public.counted (what, messages) SELECT what, messages FROM batch
    ON CONFLICT (what) DO UPDATE SET messages = excluded.messages
"""


@pytest.mark.nightly
def test_state_is_refused_without_a_volume_and_kept_by_two_executors_with_one(rooms: Rooms) -> None:
    with rooms.room() as room:
        room.config_map("code", orders=COUNTING)
        room.shop.query("CREATE TABLE counted (what text PRIMARY KEY, messages bigint)")
        orders = spark_processor(room, target={"sql": {"statement": KEEP_COUNT}}, volumes=[])
        said = orders.until_condition("Ready", "False", "InvalidConfiguration", within=180)
        assert "spark.volumes" in said["message"]
        assert "Aggregate" in said["message"]

        orders.spec(spark={"volumes": VOLUMES, "executor": {"instances": 2}})
        orders.until_ready(within=180)
        room.shop.produce(50)
        orders.until("50 messages are counted", lambda: counted(room) == 50, 180)
        orders.until("both executors run", lambda: len(executors(room)) == 2, 120)
        room.shop.produce(50)
        orders.until("100 messages are counted", lambda: counted(room) == 100, 60)

        room.cluster.delete("Pod", room.namespace, "orders-driver-0")
        room.shop.produce(50)
        orders.until("the count goes on from the state on the volume", lambda: counted(room) == 150, 240)
        assert orders.status["conflicts"].get("open") is None


def counted(room: Room) -> int:
    rows = room.shop.query("SELECT messages FROM counted")
    return int(rows[0][0]) if rows else 0
