"""Target `rabbitmq` with several batches under way: what is stored, repeated and blamed, whatever comes between."""

from __future__ import annotations

import signal
import time

import pytest

from tests.integration.worker.targets.test_rabbitmq import build_target, queue_name, start, wait_count
from tests.support.servers.postgres import wait_until

__all__ = ["queue_name"]

BATCH, UNDER_WAY = 10, 3
BACKLOG = {"batchSize": BATCH, "leaseDuration": "3s"}
# A machine that stalls for seconds must not end the lease before all batches are published.
STUCK = {**BACKLOG, "leaseDuration": "10s"}
FEW = {"retry": {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"}, "whenExhausted": "DeadLetter"}


@pytest.fixture
def stuck(outbox, workers, rabbitmq, queue_name):
    """A worker whose first batch of a backlog cannot be stored, the ids of all, and what holds its row."""
    with rabbitmq.queue(queue_name) as client:
        worker = start(outbox, workers, rabbitmq, build_target(queue_name), delivery=STUCK)
        ids = outbox.produce(1)
        worker.wait_for("one is stored", lambda r: r.handled == 1)
        more, holder = outbox.produce_locked(99, start=1)
        ids += more
        wait_count(client, queue_name, 1 + UNDER_WAY * BATCH)
        yield worker, ids, holder, client
        holder.close()


def test_so_many_are_published_and_no_more_before_the_oldest_is_stored(outbox, stuck, queue_name):
    worker, ids, holder, client = stuck
    time.sleep(0.5)
    assert client.count(queue_name) == 1 + UNDER_WAY * BATCH
    holder.rollback()
    worker.wait_for("all is stored", lambda r: r.handled == 100)
    assert outbox.stored() == outbox.last()
    assert [each.message_id for each in client.drain(queue_name)] == ids


def test_killed_what_was_under_way_comes_again_and_nothing_else(outbox, workers, rabbitmq, stuck, queue_name):
    worker, ids, holder, client = stuck
    worker.kill()
    outbox.end_waiting_sessions()
    holder.rollback()
    second = start(outbox, workers, rabbitmq, build_target(queue_name), delivery=STUCK)
    second.wait_for("all is stored", lambda r: r.handled == 99)
    under_way = ids[: 1 + UNDER_WAY * BATCH]
    assert [each.message_id for each in client.drain(queue_name)] == under_way + ids[1:]


def test_asked_to_stop_it_stores_what_is_under_way_and_begins_no_more(outbox, workers, rabbitmq, stuck, queue_name):
    worker, ids, holder, client = stuck
    worker.send(signal.SIGTERM)
    time.sleep(0.5)  # its main thread waits for the row, and says nothing before it has it
    holder.rollback()
    assert worker.process.wait(20) == 0
    assert client.count(queue_name) == 1 + UNDER_WAY * BATCH
    second = start(outbox, workers, rabbitmq, build_target(queue_name), delivery=STUCK)
    second.wait_for("the rest is stored", lambda r: r.handled == 99 - UNDER_WAY * BATCH)
    assert [each.message_id for each in client.drain(queue_name)] == ids, "each once"


@pytest.mark.parametrize("blocks", ["Partition", "Key", "Nothing"])
def test_a_message_that_no_queue_takes_is_named_and_the_others_come_once(outbox, workers, rabbitmq, queue_name, blocks):
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT n::text, 'message-' || n, CASE n WHEN 25 THEN 'nowhere' ELSE %s END, '{}' "
        "FROM generate_series(1, 200) AS n",
        (queue_name,),
    )
    with rabbitmq.queue(queue_name) as client:
        delivery = BACKLOG | FEW | {"blocks": blocks}
        start(outbox, workers, rabbitmq, build_target("{messageType}"), delivery=delivery)
        wait_until(lambda: outbox.stored() == outbox.last(), "all is passed")
        wait_until(lambda: dead(outbox) == [("message-25", "MessageUnroutable")], "it is a dead letter")
        arrived = [each.message_id for each in client.drain(queue_name)]
    assert sorted(arrived) == sorted(f"message-{n}" for n in range(1, 201) if n != 25)


def test_a_message_for_which_the_broker_closes_the_channel_is_found(outbox, workers, rabbitmq, queue_name):
    """It does not say which one it was: of several batches, no message is blamed before it is alone."""
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT n::text, 'message-' || n, 't', to_jsonb(repeat('x', CASE n WHEN 25 THEN 200000 ELSE 1 END)) "
        "FROM generate_series(1, 200) AS n"
    )
    rabbitmq.control("eval", "application:set_env(rabbit, max_message_size, 100000).")
    try:
        with rabbitmq.queue(queue_name) as client:
            start(outbox, workers, rabbitmq, build_target(queue_name), delivery=BACKLOG | FEW | {"blocks": "Key"})
            wait_until(lambda: outbox.stored() == outbox.last(), "all is passed")
            wait_until(lambda: [name for name, _ in dead(outbox)] == ["message-25"], "it is a dead letter")
            arrived = [each.message_id for each in client.drain(queue_name)]
    finally:
        rabbitmq.control("eval", "application:set_env(rabbit, max_message_size, 134217728).")
    assert set(arrived) == {f"message-{n}" for n in range(1, 201) if n != 25}


def test_a_fault_at_one_partition_lets_no_message_of_another_one_be_overtaken(outbox, workers, rabbitmq, queue_name):
    """All partitions share a connection: what each of them had begun is lost with it, the oldest and those behind."""
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT CASE n % 120 WHEN 7 THEN 'large-' || n ELSE (n % 40)::text END, 'message-' || n, 't', "
        "to_jsonb(repeat('x', CASE n % 120 WHEN 7 THEN 200000 ELSE 1 END)) FROM generate_series(1, 600) AS n"
    )
    rabbitmq.control("eval", "application:set_env(rabbit, max_message_size, 100000).")
    delivery = BACKLOG | FEW | {"mode": "Partitioned", "partitions": {"count": 4}, "leaseDuration": "15s"}
    try:
        with rabbitmq.queue(queue_name) as client:
            worker = start(outbox, workers, rabbitmq, build_target(queue_name), delivery=delivery)
            wait_until(lambda: len(dead(outbox)) == 5, "what is too large are dead letters", seconds=60)
            worker.wait_for("the rest is published", lambda r: r.handled == 595, 60)
            came = [each.message_id for each in client.drain(queue_name)]
    finally:
        rabbitmq.control("eval", "application:set_env(rabbit, max_message_size, 134217728).")
    arrived = list(dict.fromkeys(came))
    assert set(arrived) == {f"message-{n}" for n in range(1, 601) if n % 120 != 7}
    numbers = [int(name.removeprefix("message-")) for name in arrived]
    for key in range(40):
        of_key = [number for number in numbers if number % 40 == key]
        assert of_key == sorted(of_key), f"key {key} in its order"


def dead(outbox):
    rows = outbox.connection.execute("SELECT message_id, error_class FROM outbox.dead_letters").fetchall()
    return [tuple(row) for row in rows]
