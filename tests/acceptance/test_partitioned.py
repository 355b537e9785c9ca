"""A divided processor on the cluster: three pods share the partitions; one is killed, and the others take its share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.scenarios import Scenarios
from tests.support.kubernetes.cluster import ApiError
from tests.support.kubernetes.room import BY_PAIRS

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.acceptance.scenarios import Running
    from tests.support.kubernetes.room import Resource, Room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(560)]

scenarios = Scenarios()

COUNT = 6
LEASE = 15.0
"""The default."""
DELIVERY = {"mode": "Partitioned", "partitions": {"count": COUNT}}


def owners(room: Room) -> dict[int, str]:
    rows = room.shop.query("SELECT partition, pod FROM outbox.processor_leases WHERE expires_at > clock_timestamp()")
    return dict(rows)


def owned_by_metrics(orders: Resource, pod: str) -> float:
    """How many partitions a pod's metrics say that it has."""
    return sum(value for name, value in orders.metrics(pod).items() if name.startswith("outbox_partition_owned{"))


def until_shared(room: Room, orders: Resource, *shares: int, within: float = 60) -> dict[int, str]:
    def look() -> dict[int, str]:
        found = list(owners(room).values())
        return owners(room) if sorted(found.count(pod) for pod in set(found)) == sorted(shares) else {}

    return orders.until(f"shares of {shares}", look, within)


def test_three_pods_share_and_survive_the_loss_of_one(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", delivery=DELIVERY, worker={"replicas": 3})
        orders.until_ready()
        before = until_shared(room, orders, 2, 2, 2)
        room.shop.produce(300)
        orders.until("300 messages are handled", lambda: len(room.handled()) >= 300)
        orders.until(
            "status says who owns what",
            lambda: {p["partition"]: p.get("pod") for p in orders.status.get("partitions", [])} == owners(room),
        )
        # Another process may tell this than told the partitions: one that has not looked at leases yet names itself.
        orders.until("status says how many own them", lambda: orders.status["owner"]["pod"] == "3 pods")
        orders.until(
            "each pod's metrics say which it has",
            lambda: [owned_by_metrics(orders, pod) for pod in set(before.values())] == [2, 2, 2],
            within=15,
        )

        victim = before[0]
        room.cluster.delete("Pod", room.namespace, victim, grace=0)
        lost = time.monotonic()
        orders.until(
            "the others own its share", lambda: len(owners(room)) == COUNT and victim not in owners(room).values()
        )
        print(f"all partitions are owned again after {time.monotonic() - lost:.1f} s")
        assert time.monotonic() - lost < LEASE + 1.0
        room.shop.produce(300)
        orders.until("600 messages are handled", lambda: len(room.handled()) >= 600)
        assert len(room.handled()) == len(set(room.handled())) == 600
        until_shared(room, orders, 2, 2, 2)


@scenarios.add_at_night
def scaling_moves_partitions_and_the_key_cannot_change(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", delivery=DELIVERY, worker={"replicas": 1})
        orders.until_ready()
        until_shared(room, orders, 6)
        orders.spec(worker={"replicas": 2})
        until_shared(room, orders, 3, 3)
        orders.spec(worker={"replicas": 1})
        until_shared(room, orders, 6)
        room.shop.produce(100)
        orders.until("100 messages are handled", lambda: len(room.handled()) >= 100)
        assert len(room.handled()) == len(set(room.handled())) == 100
        with pytest.raises(ApiError, match=r"partitions\.key cannot be changed"):
            orders.spec(delivery={**DELIVERY, "partitions": {"count": COUNT, "key": {"column": "message_type"}}})
        with pytest.raises(ApiError, match="mode cannot be changed"):
            orders.spec(delivery={"mode": "Ordered", "partitions": None})


@scenarios.add
def an_edited_checkpoint_stops_its_partition_and_a_person_decides(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", source=BY_PAIRS, delivery=DELIVERY, worker={"replicas": 2})
        orders.until_ready()
        until_shared(room, orders, 3, 3)
        room.shop.produce(100)
        orders.until("100 messages are handled", lambda: len(room.handled()) >= 100)
        room.shop.query(
            "UPDATE outbox.processor_checkpoints c SET "
            "last_processed_transaction_id = (last_processed_transaction_id::text::bigint + 1)::text::xid8 "
            "WHERE partition = (SELECT partition FROM outbox.processor_checkpoints ORDER BY stored_at DESC LIMIT 1) "
            "RETURNING partition"
        )
        room.shop.produce(100)
        said = orders.until_condition("CheckpointHealthy", "False", "CheckpointAhead", within=60)
        assert "code 2" in said["message"]
        assert len(orders.pods()) == 2, "the other partitions go on"
        conflict = orders.status["conflicts"]["open"]
        orders.annotate(**{"rewind-checkpoint": f"{conflict['id']}={conflict['expected']}"})
        orders.until("200 messages are handled", lambda: len(room.handled()) >= 200, 120)
        assert len(room.handled()) == len(set(room.handled())) == 200
        orders.until_ready()


@scenarios.add
def the_number_of_partitions_changes_by_a_rollout(rooms: Rooms) -> None:
    """A writer that is open when the barrier is drawn keeps it waiting, and status says so."""
    with rooms.room() as room:
        orders = room.processor("orders", source=BY_PAIRS, delivery=DELIVERY, worker={"replicas": 2})
        orders.until_ready()
        until_shared(room, orders, 3, 3)
        room.shop.produce(200)
        orders.until("200 messages are handled", lambda: len(room.handled()) >= 200)
        with room.shop.connect() as writer, writer.transaction():
            writer.execute("SELECT pg_current_xact_id()")
            orders.spec(delivery={**DELIVERY, "partitions": {"count": 4}})
            orders.until_condition("Reconciling", "True", "ChangingPartitions", within=90)
            # Before a worker has drawn the barrier it says that.
            waits = "changing partitions 6 -> 4"
            orders.until(
                "it waits for the writer", lambda: waits in orders.condition("Reconciling").get("message", ""), 90
            )
        orders.until("status has the new number", lambda: orders.status.get("partitioning", {}).get("count") == 4, 90)
        orders.until_ready()
        until_shared(room, orders, 2, 2)
        room.shop.produce(200)
        orders.until("400 messages are handled", lambda: len(room.handled()) >= 400)
        assert len(room.handled()) == len(set(room.handled())) == 400
        orders.until(
            "status has the new partitions",
            lambda: [p["partition"] for p in orders.status["partitions"]] == [0, 1, 2, 3],
        )


@pytest.mark.parametrize("name", scenarios.names)
def test_scenario(running: Running, name: str) -> None:
    assert running.finish(name, within=540)
