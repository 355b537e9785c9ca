"""Modes and cursors beside each other: a lost consumer, and a stranger's transaction that stalls one of them only."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.acceptance.scenarios import Scenarios, until_handled
from tests.support.kubernetes.cluster import namespaces
from tests.support.kubernetes.shop import DatabaseServer

if TYPE_CHECKING:
    import psycopg

    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.room import Resource, Room

LEASE = 20.0
"""A third of the default of mode Competing: the promise says how long after a lease of any length."""
TAKEN_OVER = LEASE + 5.0
"""Seconds in which what a lost consumer had is handled, from its end."""
TOLD = 10.0
"""Seconds from the begin of a stall to the condition."""
GATE = 7
COMPETING = {"mode": "Competing", "competing": {}, "pollInterval": "100ms"}
PARTITIONED = {"mode": "Partitioned", "partitions": {"count": 2}, "pollInterval": "100ms"}
scenarios = Scenarios()


def read_by(room: Room, name: str, cursor: str = "", **spec: Any) -> Resource:
    """Create a processor that writes into a table of its own name."""
    room.shop.query(f"CREATE TABLE {name} (position bigint)")
    source = {"connection": {"secretRef": {"name": "db"}}} | ({"cursor": cursor} if cursor else {})
    target = {"sql": {"statement": f"INSERT INTO public.{name} SELECT position FROM batch"}}
    return room.processor(name, source=source, target=target, **spec)


def count_in(room: Room, table: str) -> int:
    counted: int = room.shop.query(f"SELECT count(*) FROM {table}")[0][0]
    return counted


@scenarios.add
def what_a_lost_consumer_had_comes_back_within_its_lease(rooms: Rooms) -> None:
    with rooms.room() as room:
        # Whoever has a batch waits here without a transaction id, until the test opens.
        statement = (
            f"INSERT INTO public.handled SELECT position, message_id FROM pg_advisory_xact_lock_shared({GATE}), batch"
        )
        processor = room.processor(
            "consumers",
            target={"sql": {"statement": statement}},
            delivery={**COMPETING, "competing": {"leaseDuration": f"{LEASE:.0f}s"}, "batchSize": 10},
            worker={"replicas": 3},
        )
        processor.until_ready()
        processor.until("three consumers", lambda: processor.status.get("owner", {}).get("pod") == "3 pods")
        with room.shop.connect() as gate:
            gate.execute("SELECT pg_advisory_lock(%s)", [GATE])
            room.shop.produce(60)
            consumers = processor.until("each consumer has a batch", lambda: three_holders(gate))
            victim, other = consumers[:2]
            processor.until(
                "a pod's metrics count what is in hand",
                lambda: processor.metrics(other)['outbox_unfinished_batches{processor="consumers"}'] == 3,
            )
            assert processor.metrics(other)['outbox_consumers{processor="consumers"}'] == 3
            room.cluster.delete("Pod", room.namespace, victim, grace=0)
            lost = time.monotonic()
        until_handled(room, processor, 60, within=TAKEN_OVER)
        taken = time.monotonic() - lost
        print(f"what the lost consumer had was handled after {taken:.1f} s, with a lease of {LEASE:.0f} s")
        assert taken <= TAKEN_OVER
        assert len(set(room.handled())) == 60


def three_holders(connection: psycopg.Connection[Any]) -> list[str]:
    rows = connection.execute("SELECT DISTINCT pod FROM outbox.competing_batches WHERE owner IS NOT NULL").fetchall()
    return [row[0] for row in rows] if len(rows) == 3 else []


@scenarios.add_at_night
def a_strangers_open_transaction_stalls_one_cursor_only_and_is_named(rooms: Rooms) -> None:
    # On a server of its own: the transaction holds back every database of its server, and so would every scenario's.
    with namespaces(rooms.cluster, "stall") as (place,), rooms.room() as lent:
        server = DatabaseServer(rooms.cluster, place)
        room = replace(lent, server=server, shop=server.make())
        stranger = server.make()
        server.run(f"GRANT pg_read_all_stats TO {room.shop.user}")
        room.secret()
        ordered = read_by(room, "ordered", "TransactionOrder")
        others = [
            read_by(room, "snapshots", "Snapshot"),
            read_by(room, "partitions", "Snapshot", delivery=PARTITIONED),
            read_by(room, "competing", delivery=COMPETING),
        ]
        for each in (ordered, *others):
            each.until_ready()
        room.shop.produce(2, key="a")
        ordered.until("2 messages are handled", lambda: count_in(room, "ordered") == 2)
        ordered.until_condition("SourceCurrent", "True")
        with stranger.connect() as connection:
            connection.execute("SET application_name = 'nightly-report'")
            with connection.transaction():
                (pid,) = connection.execute("SELECT pg_backend_pid() FROM pg_current_xact_id()").fetchone() or (0,)
                room.shop.produce(3, key="a")
                began = time.monotonic()
                for each in others:
                    each.until("5 messages are handled", lambda name=each.name: count_in(room, name) == 5, within=5)  # type: ignore[misc]
                said = ordered.until_condition("SourceCurrent", "False", "HighWaterMarkStalled", within=TOLD)
                print(f"the stall was told after {time.monotonic() - began:.1f} s: {said['message']}")
                assert time.monotonic() - began <= TOLD
                for word in (f"session {pid} ", "'nightly-report'", f"database {stranger.name}", "open for "):
                    assert word in said["message"]
                stalled_by_metrics(ordered, pid)
                assert count_in(room, "ordered") == 2, "what lies behind an open transaction is not read"
                assert ordered.condition("Ready")["status"] == "True"
                assert [each.condition("SourceCurrent")["status"] for each in others] == ["True"] * 3
        ordered.until("5 messages are handled", lambda: count_in(room, "ordered") == 5)
        ordered.until_condition("SourceCurrent", "True", "HighWaterMarkMoves")
        assert [count_in(room, each.name) for each in others] == [5] * 3


def stalled_by_metrics(ordered: Resource, pid: int) -> None:
    """See the holder in the metrics of the pod, with its age."""
    metrics = ordered.metrics()
    assert metrics['outbox_high_water_mark_stalled{processor="ordered"}'] == 1
    (holder,) = [name for name in metrics if name.startswith("outbox_high_water_mark_holder_age_seconds")]
    assert f'pid="{pid}"' in holder
    assert metrics[holder] > 0
