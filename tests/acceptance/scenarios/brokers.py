"""Targets `kafka` (Transactional) and `rabbitmqStream` on the cluster, over TLS: each message once over a lost worker.

The brokers are processes of this test's, which pods reach at this machine's address.
"""

from __future__ import annotations

import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tests.acceptance.scenarios import Scenarios
from tests.support.kubernetes.shop import build_secret
from tests.support.servers.kafka import KafkaServer, Topic
from tests.support.servers.rabbitmq import RabbitmqServer
from tests.support.streams import STREAM, read_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.room import Resource, Room

scenarios = Scenarios()

DELIVERY = {"pollInterval": "100ms", "leaseDuration": "5s", "retry": {"initialBackoff": "200ms", "maxBackoff": "1s"}}
PAIRS = {"connection": {"secretRef": {"name": "db"}}, "cursor": "TransactionOrder"}
TAKE_OVER_SECONDS = 90
STORED = "SELECT last_processed_position FROM outbox.processor_checkpoints"
OWNER = "SELECT pod FROM outbox.processor_leases WHERE token IS NOT NULL AND expires_at > clock_timestamp()"
END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"


@scenarios.add
def a_topic_has_each_message_once_though_the_worker_is_lost_before_its_checkpoint(rooms: Rooms) -> None:
    with rooms.room() as room, closing(KafkaServer(host=find_address(room))) as server:
        room.cluster.apply(build_secret(room.namespace, "kafka", server.secure_secret))
        name = server.create_topic("orders")
        target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": name}}
        delivery = DELIVERY | {"guarantee": "Transactional"}
        orders = room.processor("orders", source=PAIRS, target=target, delivery=delivery)
        with closing(Topic(server, name)) as topic:
            has_each_message_once(room, orders, topic.wait_for)


@scenarios.add_at_night
def a_stream_has_each_message_once_though_the_worker_is_lost_before_its_checkpoint(rooms: Rooms) -> None:
    with rooms.room() as room, closing(RabbitmqServer(host=find_address(room))) as server:
        room.cluster.apply(build_secret(room.namespace, "broker", server.secure_stream_secret))
        with server.queue("orders", **STREAM):
            target = {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": "orders"}}
            orders = room.processor("orders", source=PAIRS, target=target, delivery=DELIVERY)

            def read(count: int) -> list[str]:
                return [each.message_id for each in read_stream(server, "orders", count)]

            lost, successor = has_each_message_once(room, orders, read)
        assert lost != successor
        log = room.cluster.log(room.namespace, successor)
        assert "the stream has messages beyond the checkpoint" in log


def find_address(room: Room) -> str:
    """Return this machine's address on its way to pods."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((room.shop.host, 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def has_each_message_once(room: Room, orders: Resource, read: Callable[[int], list[str]]) -> tuple[str, str]:
    """Lose the worker between publishing and its checkpoint; return its pod, and the one that went on.

    Args:
        room: where messages are stored.
        orders: the processor.
        read: waits until a consumer sees so many messages; returns the ids of all that it sees.

    """
    orders.until_ready()
    ids = store(room, 5, 0)
    assert read(5) == ids
    before = orders.until("its checkpoint", lambda: room.shop.query(STORED))
    with room.shop.connect() as holder:
        holder.execute("BEGIN")
        # Its transaction id is above the messages', so that it holds the row only, and no high-water mark.
        ids += store(room, 10, 5, then=lambda: holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE"))
        assert read(15) == ids
        ((lost,),) = room.shop.query(OWNER)
        room.cluster.delete("Pod", room.namespace, lost, grace=0)

        def others() -> list[Any]:
            # What the lost one has asked for is not to be done by its server process once the row is free.
            room.shop.query(END_SESSIONS, f"outbox {orders.name} {lost}")
            return [pod for (pod,) in room.shop.query(OWNER) if pod != lost]

        (successor,) = orders.until("another pod owns it", others, within=TAKE_OVER_SECONDS)
        assert room.shop.query(STORED) == before, "the batch was stored: no pod was lost before that"
        holder.execute("ROLLBACK")
    ids += store(room, 5, 15)
    orders.until("all is stored", lambda: room.shop.query(STORED) == [(20,)])
    assert read(20) == ids
    orders.until_ready()
    return lost, successor


def store(room: Room, count: int, first: int, then: Callable[[], Any] = lambda: None) -> list[str]:
    """Store messages of one key in one transaction; `then` is called before it ends."""
    ids = [f"m-{number}" for number in range(first, first + count)]
    with room.shop.connect() as connection, connection.transaction():
        connection.execute(
            "INSERT INTO outbox.messages (message_id, message_type, partition_key, data) "
            "SELECT id, 'OrderPlaced', 'order-1', '{}' FROM unnest(%s::text[]) WITH ORDINALITY AS m (id, n) ORDER BY n",
            [ids],
        )
        then()
    return ids
