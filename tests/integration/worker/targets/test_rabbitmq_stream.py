"""Target `rabbitmqStream` against a real broker: each message once, over kills, freezes, rewinds and restarts."""

from __future__ import annotations

import json
import signal
import time
import uuid
from random import Random

import pytest

from tests.support.servers.postgres import wait_until
from tests.support.servers.proxy import Relay
from tests.support.streams import STREAM, count_written, read_stream
from tests.support.worker import build_config


def build_target(stream):
    return {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": stream}}


@pytest.fixture
def stream(rabbitmq):
    name = f"orders-{uuid.uuid4().hex[:8]}"
    with rabbitmq.queue(name, **STREAM):
        yield name


def start(outbox, workers, rabbitmq, stream, uri=None, **fields):
    config = build_config(outbox.database, build_target(stream), **fields)
    return workers.start(config, outbox.database.uri(), target=uri or rabbitmq.stream_uri)


def read_ids(rabbitmq, stream, count):
    return [each.message_id for each in read_stream(rabbitmq, stream, count)]


def test_what_the_broker_notes_of_publishers_is_no_message(outbox, workers, rabbitmq):
    """A new segment of a stream begins with such a note, which has an offset: the tests' own count leaves it out."""
    ids = outbox.produce(6000)
    segments = {"x-stream-max-segment-size-bytes": 500_000}
    with rabbitmq.queue(name := f"orders-{uuid.uuid4().hex[:8]}", **STREAM, **segments):
        start(outbox, workers, rabbitmq, name).wait_for("all is stored", lambda r: r.handled == 6000, 30)
        wait_until(lambda: count_written(rabbitmq, name) == 6000, "the files have 6,000 messages", 10)
        found = read_stream(rabbitmq, name, 6000)
    assert [each.message_id for each in found] == ids
    assert found[-1].offset > 6000


def test_messages_arrive_in_order_with_their_properties(outbox, workers, rabbitmq, stream):
    ids = outbox.produce(2500)
    outbox.connection.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) "
        "SELECT 'large', 'Large', jsonb_build_object('text', repeat('ä', 150000))"
    )
    worker = start(outbox, workers, rabbitmq, stream)
    worker.wait_for("all is stored", lambda r: r.handled == 2501, 30)
    found = read_stream(rabbitmq, stream, 2501)
    assert [each.message_id for each in found] == [*ids, "large"]
    first = found[0]
    assert (first.subject, first.content_type, json.loads(first.body)) == (
        "OrderPlaced", "application/json", {"n": 1, "total": 10},
    )  # fmt: skip
    expected = {
        "x-outbox-publication": "shop", "x-outbox-partition-key": "order-1", "x-outbox-processor": "orders",
        "x-outbox-pod": "pod-0", "x-outbox-epoch": 1,
    }  # fmt: skip
    assert expected.items() <= first.headers.items()
    assert first.headers["x-outbox-checkpoint"].endswith(":1")
    assert json.loads(found[-1].body) == {"text": "ä" * 150_000}
    assert outbox.stored() == outbox.last()


def test_killed_between_confirm_and_checkpoint_the_stream_has_each_once(outbox, workers, rabbitmq, stream):
    ids = outbox.produce(10)
    first = start(outbox, workers, rabbitmq, stream, delivery={"leaseDuration": "3s"})
    first.wait_for("all is stored", lambda r: r.handled == 10)
    # The checkpoint's row is locked: the batch is published and confirmed, and its checkpoint cannot be stored.
    holder = outbox.database.direct(autocommit=False)
    with outbox.connection.transaction():
        more = outbox.produce(10, start=10)
        # Its transaction id is above the messages': it holds the row, not the high-water mark.
        holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
    assert read_ids(rabbitmq, stream, 20) == ids + more
    first.kill()
    outbox.end_waiting_sessions()
    holder.rollback()
    late = outbox.produce(5, start=20)
    second = start(outbox, workers, rabbitmq, stream, delivery={"leaseDuration": "3s"})
    second.wait_for("all is stored", lambda r: r.handled == 15)
    assert read_ids(rabbitmq, stream, 25) == ids + more + late
    assert "the stream has messages beyond the checkpoint" in second.log()


def test_what_a_frozen_owner_had_sent_and_arrives_late_is_dropped(outbox, workers, rabbitmq, stream):
    relay = Relay(rabbitmq.stream_port)
    try:
        uri = rabbitmq.stream_uri.replace(f":{rabbitmq.stream_port}", f":{relay.port}")
        ids = outbox.produce(5)
        first = start(outbox, workers, rabbitmq, stream, uri)
        first.wait_for("all is stored", lambda r: r.handled == 5)
        second = start(outbox, workers, rabbitmq, stream)
        second.wait_state("Standby")
        relay.hang()
        more = outbox.produce(10, start=5)
        first.wait_for("it has read them", lambda r: r.lag is not None and r.lag.messages == 10)
        first.send(signal.SIGSTOP)
        second.wait_for("the successor published them", lambda r: r.handled == 10)
        late = outbox.produce(5, start=15)
        second.wait_for("and what came then", lambda r: r.handled == 15)
        relay.heal()
        first.send(signal.SIGCONT)
        first.wait_state("Standby")
        assert read_ids(rabbitmq, stream, 20) == ids + more + late
    finally:
        relay.close()


@pytest.mark.nightly
def test_killed_again_and_again_at_any_moment_the_stream_has_each_once_in_order(outbox, workers, rabbitmq, stream):
    random = Random(7)
    produced = 0
    config = build_config(outbox.database, build_target(stream), delivery={"batchSize": 10})
    for _ in range(5):
        for count in (random.randint(1, 19) for _ in range(40)):
            outbox.produce(count, start=produced)
            produced += count
        worker = workers.start(config, outbox.database.uri(), target=rabbitmq.stream_uri)
        worker.wait_for("it handles", lambda r: r.state == "Active" and r.handled > 0)
        time.sleep(random.random() * 0.1)
        worker.kill()
    start(outbox, workers, rabbitmq, stream)
    wait_until(lambda: outbox.stored() == outbox.last(), "all is stored", 40)
    rows = outbox.connection.execute("SELECT message_id FROM outbox.messages ORDER BY transaction_id, position")
    assert read_ids(rabbitmq, stream, produced) == [row[0] for row in rows]


BATCH = 10
STUCK = {"batchSize": BATCH, "leaseDuration": "10s"}


@pytest.fixture
def stuck(outbox, workers, rabbitmq, stream):
    """A worker whose first batch of a backlog cannot be stored, the ids of all, and what holds its row."""
    worker = start(outbox, workers, rabbitmq, stream, delivery=STUCK)
    ids = outbox.produce(1)
    worker.wait_for("one is stored", lambda r: r.handled == 1)
    more, holder = outbox.produce_locked(99, start=1)
    ids += more
    wait_until(lambda: count_written(rabbitmq, stream) == 1 + 2 * BATCH, "the next batch is published too")
    yield worker, ids, holder
    holder.close()


def test_the_next_batch_is_published_while_the_one_before_is_stored_and_no_more(outbox, rabbitmq, stream, stuck):
    worker, ids, holder = stuck
    time.sleep(0.5)
    assert count_written(rabbitmq, stream) == 1 + 2 * BATCH
    holder.rollback()
    worker.wait_for("all is stored", lambda r: r.handled == 100)
    assert outbox.stored() == outbox.last()
    assert read_ids(rabbitmq, stream, 100) == ids


def test_killed_with_a_batch_behind_the_one_that_is_stored_each_is_there_once(
    outbox, workers, rabbitmq, stream, stuck
):  # fmt: skip
    worker, ids, holder = stuck
    worker.kill()
    outbox.end_waiting_sessions()
    holder.rollback()
    second = start(outbox, workers, rabbitmq, stream, delivery=STUCK)
    second.wait_for("all is stored", lambda r: r.handled == 99)
    assert read_ids(rabbitmq, stream, 100) == ids
    wait_until(lambda: count_written(rabbitmq, stream) == 100, "and none twice")


def kill_between_publish_and_store(outbox, worker, rabbitmq, stream, produce, count):
    """Produce, let the worker publish until the stream has `count`, and kill it before it stores its checkpoint."""
    holder = outbox.database.direct(autocommit=False)
    with outbox.connection.transaction():
        produce()
        holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
    read_stream(rabbitmq, stream, count)
    worker.kill()
    outbox.end_waiting_sessions()
    holder.rollback()


def test_a_wider_filter_loses_nothing_of_what_was_published_before_the_kill(outbox, workers, rabbitmq, stream):
    """Under the same numbers the messages of the other type would be dropped in place of those published."""
    first = start(outbox, workers, rabbitmq, stream, source={"messageTypes": ["A"]})
    first.wait_state("Active")
    ids: list[str] = []

    def produce():
        for n in range(10):
            ids.extend(outbox.produce(1, start=n, message_type="AB"[n % 2]))

    kill_between_publish_and_store(outbox, first, rabbitmq, stream, produce, 5)
    start(outbox, workers, rabbitmq, stream, generation=2)
    wait_until(lambda: outbox.stored() == outbox.last(), "all is stored", 40)
    found = read_ids(rabbitmq, stream, 15)
    assert found == ids[::2] + ids


def test_a_rewind_publishes_again(outbox, workers, rabbitmq, stream):
    ids = outbox.produce(10)
    first = start(outbox, workers, rabbitmq, stream)
    first.wait_for("all is stored", lambda r: r.handled == 10)
    assert first.terminate() == 0
    outbox.connection.execute("SELECT outbox.rewind_processor_checkpoint('orders', 0, '0', 0, 'again', 'a person')")
    more = outbox.produce(3, start=10)
    second = start(outbox, workers, rabbitmq, stream)
    second.wait_for("all is stored", lambda r: r.handled == 13)
    assert read_ids(rabbitmq, stream, 23) == ids + ids + more


def test_partitions_each_once_in_order_of_their_keys_over_a_kill_and_another_number(outbox, workers, rabbitmq, stream):
    two = {"mode": "Partitioned", "partitions": {"count": 2}}
    ids = outbox.produce(50)
    first = start(outbox, workers, rabbitmq, stream, delivery=two)
    first.wait_for("all is stored", lambda r: r.handled == 50)
    kill_between_publish_and_store(
        outbox, first, rabbitmq, stream, lambda: ids.extend(outbox.produce(50, start=50)), 51
    )
    second = start(outbox, workers, rabbitmq, stream, delivery=two)
    wait_until(lambda: len(read_ids(rabbitmq, stream, 100)) == 100, "all is published", 40)
    second.wait_for("it owns both", lambda r: r.state == "Active" and r.lag is not None and r.lag.messages == 0)
    assert second.terminate() == 0
    three = {"mode": "Partitioned", "partitions": {"count": 3}}
    third = start(outbox, workers, rabbitmq, stream, delivery=three, generation=2)
    ids += outbox.produce(50, start=100)
    third.wait_for("the rest is published", lambda r: r.handled == 50, 40)
    found = read_stream(rabbitmq, stream, 150)
    assert sorted(each.message_id for each in found) == sorted(ids)
    for key in {each.headers["x-outbox-partition-key"] for each in found}:
        numbers = [int(each.message_id[8:]) for each in found if each.headers["x-outbox-partition-key"] == key]
        assert numbers == sorted(numbers)


def test_a_message_that_no_frame_holds_is_named_and_the_others_arrive_once(outbox, workers, rabbitmq, stream):
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT 'key-' || n, 'message-' || n, 't', jsonb_build_object('text', repeat('x', "
        "CASE n WHEN 3 THEN 1100000 ELSE 5 END)) FROM generate_series(0, 9) AS n"
    )
    delivery = {
        "blocks": "Key", "whenExhausted": "DeadLetter",
        "retry": {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"},
    }  # fmt: skip
    worker = start(outbox, workers, rabbitmq, stream, delivery=delivery)
    worker.wait_for("it is dead", lambda r: r.failures is not None and r.failures.dead_letters == 1, 40)
    wait_until(lambda: outbox.stored() == outbox.last(), "all is passed")
    rows = outbox.connection.execute("SELECT message_id, error_class, error FROM outbox.dead_letters").fetchall()
    assert [row[:2] for row in rows] == [("message-3", "MessageRejected")]
    assert "frame_max" in rows[0][2]
    expected = [f"message-{n}" for n in range(10) if n != 3]
    assert read_ids(rabbitmq, stream, 9) == expected
    more = outbox.produce(3, start=10)
    wait_until(lambda: outbox.stored() == outbox.last(), "all is passed")
    assert read_ids(rabbitmq, stream, 12) == expected + more


def test_what_was_delayed_when_others_were_published_is_not_taken_for_published(outbox, workers, rabbitmq, stream):
    """A successor finds it due: had what is behind it been published with numbers, its own would be dropped."""
    delivery = {"mode": "Partitioned", "partitions": {"count": 2}}
    first = start(outbox, workers, rabbitmq, stream, delivery=delivery)
    first.wait_state("Active")

    def produce():
        outbox.connection.execute(
            "INSERT INTO outbox.messages (partition_key, message_id, message_type, data, deliver_after) "
            "SELECT 'key-' || n, 'message-' || n, 't', '{}', "
            "CASE WHEN n % 3 = 0 THEN clock_timestamp() + interval '3 s' END FROM generate_series(0, 29) AS n"
        )

    kill_between_publish_and_store(outbox, first, rabbitmq, stream, produce, 1)  # of the partition that is first
    query = "SELECT bool_and(deliver_after < clock_timestamp()) FROM outbox.messages WHERE deliver_after IS NOT NULL"
    wait_until(lambda: outbox.connection.execute(query).fetchone() == (True,), "all is due")
    start(outbox, workers, rabbitmq, stream, delivery=delivery)
    last = "SELECT max(last_processed_transaction_id) >= (SELECT max(transaction_id) FROM outbox.messages) "
    last += "AND count(*) FILTER (WHERE last_processed_transaction_id = '0') = 0 FROM outbox.processor_checkpoints"
    wait_until(lambda: outbox.connection.execute(last).fetchone() == (True,), "all is passed")
    assert set(read_ids(rabbitmq, stream, 30)) == {f"message-{n}" for n in range(30)}


def test_a_broker_that_restarts_and_credentials_that_rotate(outbox, workers, rabbitmq, stream):
    rabbitmq.control("add_user", "rotating", "first")
    rabbitmq.control("set_permissions", "rotating", "", "", "")
    try:
        # A broker that takes long to start opens the breaker, which would then wait for longer than the test does.
        delivery = {"circuitBreaker": {"openFor": "200ms"}}
        config = build_config(outbox.database, build_target(stream), delivery=delivery)
        uri = f"rabbitmq-stream://rotating:first@127.0.0.1:{rabbitmq.stream_port}"
        home = workers.prepare(config, outbox.database.uri(), target=uri)
        worker = workers.launch(home)
        ids = outbox.produce(10)
        report = worker.wait_state("Unavailable", "PermissionDenied")
        assert f"does not let user rotating publish to stream '{stream}'" in report.message
        rabbitmq.control("set_permissions", "rotating", "", stream, "")
        worker.wait_for("all is stored", lambda r: r.handled == 10, 40)
        rabbitmq.control("change_password", "rotating", "s3cond")
        rabbitmq.stop()
        ids += outbox.produce(10, start=10)
        report = worker.wait_state("Retrying", "TargetUnavailable")
        assert str(rabbitmq.stream_port) in report.message
        rabbitmq.start()
        report = worker.wait_state("Unavailable", "AuthenticationFailed", 40)
        assert "refuses the login of user rotating" in report.message
        (home / "connections/target/uri").write_text(uri.replace("first", "s3cond"))
        worker.wait_for("the rest is stored", lambda r: r.handled == 20, 40)
        assert read_ids(rabbitmq, stream, 20) == ids
        assert "first@" not in worker.log()
        assert "s3cond" not in worker.log()
    finally:
        rabbitmq.control("delete_user", "rotating")


def test_a_stream_that_is_not_declared_yet_and_one_that_is_made_anew(outbox, workers, rabbitmq):
    name = f"orders-{uuid.uuid4().hex[:8]}"
    outbox.produce(3)
    worker = start(outbox, workers, rabbitmq, name)
    report = worker.wait_state("Retrying", "MessageUnroutable")
    assert f"has no stream '{name}'" in report.message
    assert "target.rabbitmqStream.stream" in report.message
    with rabbitmq.queue(name, **STREAM):
        worker.wait_for("it goes on by itself", lambda r: r.handled == 3 and r.state == "Active")
        assert len(read_ids(rabbitmq, name, 3)) == 3
    with rabbitmq.queue(name, **STREAM):
        more = outbox.produce(3, start=3)
        worker.wait_for("the rest is stored", lambda r: r.handled == 6, 40)
        assert read_ids(rabbitmq, name, 3) == more


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (("s3cret%20word", "guess"), "AuthenticationFailed", "correct the target's Secret"),
        (("/end", "/nowhere"), "ConnectionSecretInvalid", "virtual host nowhere"),
        (("rabbitmq-stream:", "amqp:"), "ConnectionSecretInvalid", "rabbitmq-stream://user:password@host:5552/vhost"),
    ],
    ids=["password", "virtual host", "no URI"],
)
def test_a_wrong_login_is_said_and_recovers(outbox, workers, rabbitmq, stream, change, reason, words):
    outbox.produce(3)
    config = build_config(outbox.database, build_target(stream))
    wrong = f"{rabbitmq.stream_uri}end".replace(*change).removesuffix("end")
    home = workers.prepare(config, outbox.database.uri(), target=wrong)
    worker = workers.launch(home)
    report = worker.wait_state("Unavailable", reason)
    assert words in report.message
    assert "guess" not in worker.log() + report.model_dump_json()
    (home / "connections/target/uri").write_text(rabbitmq.stream_uri)
    assert len(read_ids(rabbitmq, stream, 3)) == 3


def test_a_broker_that_has_an_alarm_is_named_as_the_cause(outbox, workers, rabbitmq, stream):
    rabbitmq.control("set_disk_free_limit", "1000000GB")
    try:
        worker = start(outbox, workers, rabbitmq, stream, delivery={"circuitBreaker": {"openFor": "200ms"}})
        outbox.produce(3)
        worker.wait_for("it names the remedy", lambda r: "free its disk or memory" in (r.message or ""))
    finally:
        rabbitmq.control("set_disk_free_limit", "50MB")
    assert len(read_ids(rabbitmq, stream, 3)) == 3


def test_the_port_of_the_other_protocol_is_named(outbox, workers, rabbitmq, stream):
    outbox.produce(1)
    uri = rabbitmq.stream_uri.replace(f":{rabbitmq.stream_port}", f":{rabbitmq.port}")
    worker = start(outbox, workers, rabbitmq, stream, uri)
    report = worker.wait_state("Retrying", "TargetUnavailable", 40)
    assert "their port is 5552" in report.message


def test_tls_with_the_authority_of_the_secret(outbox, workers, rabbitmq, stream):
    outbox.produce(3)
    uri = f"rabbitmq-stream+tls://tests:s3cret%20word@localhost:{rabbitmq.stream_tls_port}/"
    home = workers.prepare(build_config(outbox.database, build_target(stream)), outbox.database.uri(), target=uri)
    worker = workers.launch(home)
    report = worker.wait_state("Unavailable", "ConnectionSecretInvalid")
    assert "certificate is not trusted" in report.message
    (home / "connections/target/ca.crt").write_text((rabbitmq.directory / "ca.crt").read_text())
    assert len(read_ids(rabbitmq, stream, 3)) == 3
