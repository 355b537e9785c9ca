"""Target `kafka` with guarantee Transactional: who reads committed messages sees each once, whatever is killed."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from tests.support.nightly import at_night
from tests.support.servers.kafka import Topic, headers
from tests.support.servers.postgres import wait_until
from tests.support.worker import build_config

QUICK = {"initialBackoff": "50ms", "maxBackoff": "200ms"}
DELIVERY = {"guarantee": "Transactional", "retry": QUICK}
SMALL = "100"
"""Bytes: less than a record of a checkpoint topic, more than the 78 of a marker that ends a transaction: a broker that
cannot write that answers CONCURRENT_TRANSACTIONS until it is started again."""
PARTITIONED = {"mode": "Partitioned", "partitions": {"count": 3}}


@pytest.fixture
def records():
    """The name of a checkpoint topic of its own: what another test killed leaves open would be waited for."""
    return f"records-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(outbox, workers, kafka, records):
    """Start a worker whose target is a topic, in transactions of Kafka."""

    def started(topic, delivery=None, **fields):
        chosen = {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic, "checkpointTopic": records}
        target = {"kafka": chosen}
        config = build_config(outbox.database, target, delivery=DELIVERY | (delivery or {}), **fields)
        home = workers.prepare(config, outbox.database.uri())
        kafka.files(home / "connections/target")
        return workers.launch(home)

    return started


def await_first(kafka, topic):
    """Wait until something is in a topic, though it be open, and read no more of it."""
    settings = {"bootstrap.servers": kafka.servers, "group.id": "first", "isolation.level": "read_uncommitted"}
    consumer = Consumer(settings | {"enable.auto.commit": False, "fetch.wait.max.ms": 5, "log_level": 0})
    with contextlib.closing(consumer):
        consumer.assign([TopicPartition(topic.name, number, OFFSET_BEGINNING) for number in range(2)])
        wait_until(lambda: consumer.poll(0.5) is not None, "the first round is sent", 30)


def insert_large(outbox, key, name, size):
    """Store a message that compression does not make much smaller."""
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) SELECT %s, %s, 't', "
        "jsonb_build_object('text', string_agg(md5(n::text), '')) FROM generate_series(1, %s / 32) AS n",
        (key, name, size),
    )


def by_key(messages):
    found: dict[bytes | None, list[str]] = {}
    for each in messages:
        found.setdefault(each.key(), []).append(headers(each)["x-outbox-message-id"])
    return found


def assert_once(topic, ids):
    """Each is there once, those of a key in order, and a moment later still."""
    wait_until(lambda: len(topic.read()) >= len(ids), f"{len(ids)} messages", 90)
    time.sleep(1)
    keys = {each: f"order-{int(each.split('-')[1]) % 7}".encode() for each in ids}
    assert sorted(topic.ids()) == sorted(ids)
    for key, arrived in by_key(topic.read()).items():
        assert arrived == [each for each in ids if keys[each] == key]


@pytest.mark.parametrize(
    ("delivery", "cursor"),
    [
        pytest.param({}, "TransactionOrder", id="Ordered"),
        pytest.param({}, "Snapshot", id="Snapshot", marks=pytest.mark.nightly),
        pytest.param(PARTITIONED, "TransactionOrder", id="Partitioned", marks=pytest.mark.nightly),
        pytest.param(PARTITIONED, "Snapshot", id="Partitioned, Snapshot"),
    ],
)
def test_killed_between_commit_and_checkpoint_each_message_is_there_once(outbox, kafka, start, delivery, cursor):
    ids = outbox.produce(10)
    source = {"source": {"cursor": cursor}}
    # The checkpoint's row is locked: the batch is published and committed, and its checkpoint cannot be stored.
    with kafka.topic(partitions=1) as topic:
        first = start(topic.name, {"leaseDuration": "3s"} | delivery, **source)
        first.wait_for("all is stored", lambda r: r.handled == 10)
        holder = outbox.database.direct(autocommit=False)
        with outbox.connection.transaction():
            ids += outbox.produce(10, start=10)
            # Its transaction id is above the messages': it holds the row, not the high-water mark.
            holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
        some = 1 if delivery else 10  # of several partitions the first one waits, and all others with it
        topic.wait_for(10 + some)
        first.kill()
        outbox.end_waiting_sessions()
        holder.rollback()
        ids += outbox.produce(5, start=20)
        second = start(topic.name, {"leaseDuration": "3s"} | delivery, **source)
        second.wait_for("all is stored", lambda r: r.handled == 15)
        assert_once(topic, ids)
        assert {headers(each)["x-outbox-pod"] for each in topic.read()} == {"pod-0", "pod-1"}


def test_who_made_the_row_and_could_not_begin_believes_later_that_others_published(outbox, kafka, start, records):
    """It made the row, and could not write its first record; until that is written a row counts as new."""
    with kafka.topic(partitions=1) as topic:
        kafka.create_topic(records, 1, cleanup_policy="compact", max_message_bytes=SMALL)
        delivery = {"leaseDuration": "3s", "circuitBreaker": {"openFor": "200ms"}}
        first = start(topic.name, delivery)
        first.wait_state("Unavailable", "InvalidConfiguration")
        first.send(signal.SIGSTOP)
        kafka.set_topic(records, "max.message.bytes", "1000000")
        second = start(topic.name, delivery)
        ids = outbox.produce(10)
        second.wait_for("all is stored", lambda r: r.handled == 10)
        first.send(signal.SIGCONT)
        first.wait_state("Standby")
        more, holder = outbox.produce_locked(10, start=10)
        topic.wait_for(20)
        second.kill()
        outbox.end_waiting_sessions()
        holder.rollback()
        first.wait_for("all is stored", lambda r: r.handled == 10)
        assert_once(topic, ids + more)


def test_what_is_asked_for_again_by_deleting_the_row_comes_though_who_begins_dies_before_its_record(
    outbox, kafka, start, records
):
    """The row is deleted with what is kept of it. What the last record names was published before that."""
    with kafka.topic(partitions=1) as topic:
        delivery = {"leaseDuration": "3s"}
        first = start(topic.name, delivery)
        ids = outbox.produce(5)
        first.wait_for("all is stored", lambda r: r.handled == 5)
        more, holder = outbox.produce_locked(5, start=5)
        topic.wait_for(10)
        first.kill()
        outbox.end_waiting_sessions()
        holder.rollback()
        outbox.connection.execute("DELETE FROM outbox.processor_checkpoints")
        outbox.connection.execute("DELETE FROM outbox.shadow_checkpoints")
        kafka.set_topic(records, "max.message.bytes", SMALL)
        second = start(topic.name, delivery)
        second.wait_state("Unavailable", "InvalidConfiguration")
        second.kill()
        kafka.set_topic(records, "max.message.bytes", "1000000")
        third = start(topic.name, delivery)
        third.wait_for("all is stored again", lambda r: r.handled == 10)
        assert topic.wait_for(20) == [*ids, *more, *ids, *more]


@pytest.mark.parametrize("how", [*at_night(signal.SIGKILL), signal.SIGSTOP])
def test_an_owner_that_dies_or_freezes_in_the_middle_of_a_transaction(outbox, kafka, start, how):
    """One batch of many rounds. What is open is taken back; one that was frozen wakes, and publishes nothing more."""
    delivery = {"batchSize": 60_000, "leaseDuration": "3s"}
    with kafka.topic(partitions=2) as topic:
        first = start(topic.name, delivery)
        first.wait_state("Active")
        second = start(topic.name, delivery)
        second.wait_state("Standby")
        ids = outbox.produce(60_000)
        await_first(kafka, topic)
        first.send(how)
        assert topic.read() == [], "the transaction is not committed yet"
        second.wait_for("all is stored", lambda r: r.handled == 60_000, 90)
        more = outbox.produce(10, start=60_000)
        second.wait_for("it goes on", lambda r: r.handled == 60_010)
        if how is signal.SIGSTOP:
            first.send(signal.SIGCONT)
            first.wait_state("Standby")
        assert_once(topic, ids + more)
        assert {headers(each)["x-outbox-pod"] for each in topic.read()} == {"pod-1"}
        with contextlib.closing(Topic(kafka, topic.name, isolation="read_uncommitted")) as reader:
            assert len(reader.read()) > 60_010, "what the first one sent was taken back"


def test_asked_to_stop_while_former_owners_are_not_shut_out_it_stops_at_once(outbox, kafka, start):
    with kafka.topic(partitions=1) as topic, kafka.frozen():
        worker = start(topic.name, PARTITIONED)
        wait_until(lambda: worker.log().count('"lease acquired"') == 3, "all leases are acquired", 30)
        assert worker.terminate(10) == 0
        live = "SELECT count(*) FROM outbox.processor_leases WHERE expires_at > clock_timestamp()"
        assert outbox.connection.execute(live).fetchone() == (0,)


def test_a_frozen_owner_that_wakes_after_its_successor_worked(outbox, kafka, start):
    with kafka.topic(partitions=1) as topic:
        ids = outbox.produce(5)
        first = start(topic.name)
        first.wait_for("all is stored", lambda r: r.handled == 5)
        second = start(topic.name)
        second.wait_state("Standby")
        first.send(signal.SIGSTOP)
        second.wait_state("Active")
        ids += outbox.produce(5, start=5)
        second.wait_for("the rest is stored", lambda r: r.handled == 5)
        first.send(signal.SIGCONT)
        first.wait_state("Standby")
        second.kill()
        first.wait_state("Active")
        ids += outbox.produce(5, start=10)
        first.wait_for("it works again", lambda r: r.handled == 10)
        assert_once(topic, ids)


@pytest.mark.parametrize(
    "delivery",
    [pytest.param({}, id="Ordered", marks=pytest.mark.nightly), pytest.param(PARTITIONED, id="Partitioned")],
)
def test_a_broker_that_is_killed_while_a_backlog_is_published(outbox, kafka, start, delivery):
    ids = outbox.produce(10_000)
    with kafka.topic(partitions=2) as topic:
        worker = start(topic.name, {"batchSize": 100, "timeout": "10s"} | delivery)
        worker.wait_for("some are published", lambda r: r.handled >= 200)
        kafka.stop()
        assert worker.report().handled < 10_000
        kafka.start()
        worker.wait_for("all is stored", lambda r: r.handled == 10_000, 120)
        assert_once(topic, ids)


def test_replicas_that_are_killed_in_turn(outbox, kafka, start):
    ids = outbox.produce(10_000)
    delivery = PARTITIONED | {"batchSize": 20}
    with kafka.topic(partitions=2) as topic:
        running = [start(topic.name, delivery), start(topic.name, delivery)]
        for _ in range(3):
            victim = running.pop(0)
            victim.wait_for("it works", lambda r: r.handled >= 500)
            victim.kill()
            running.append(start(topic.name, delivery))
        handled = [each.wait_for("it answers", lambda _: True).handled for each in running]
        assert sum(handled) < 10_000
        topic.wait_for(10_000, 120)
        assert_once(topic, ids)


@pytest.mark.parametrize(
    "delivery",
    [
        pytest.param({}, id="Ordered"),
        pytest.param({"blocks": "Key"}, id="Ordered, key", marks=pytest.mark.nightly),
        pytest.param(PARTITIONED, id="Partitioned", marks=pytest.mark.nightly),
    ],
)
def test_a_message_that_is_too_large_becomes_a_dead_letter_and_the_others_are_there_once(
    outbox, kafka, start, delivery
):
    ids = outbox.produce(150)
    insert_large(outbox, "other", "too-large", 400_000)
    ids += outbox.produce(150, start=150)
    end = {"whenExhausted": "DeadLetter", "retry": {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"}}
    with kafka.topic(max_message_bytes="100000") as topic:
        worker = start(topic.name, end | delivery)

        def dead():
            return outbox.connection.execute("SELECT message_id, error_class FROM outbox.dead_letters").fetchall()

        wait_until(lambda: dead() == [("too-large", "MSG_SIZE_TOO_LARGE")], "it is a dead letter", 40)
        assert_once(topic, ids)
        worker.wait_for("it goes on", lambda r: r.state == "Active")


def test_a_held_message_whose_settlement_a_kill_prevents_is_there_once(outbox, kafka, start):
    """Its topic is missing first; the transaction that settles it waits for a lock, while it is published already."""
    outbox.connection.execute(
        "CREATE FUNCTION public.wait_for_test() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN OLD; END $$; "
        "CREATE TRIGGER wait_for_test BEFORE DELETE ON outbox.held_messages "
        "FOR EACH ROW EXECUTE FUNCTION public.wait_for_test()"
    )
    delivery = {"blocks": "Key", "leaseDuration": "3s", "retry": {"initialBackoff": "1s", "maxBackoff": "1s"}}
    with kafka.topic(partitions=1, max_message_bytes="100000") as topic:
        first = start(topic.name, delivery)
        ids = outbox.produce(3)
        insert_large(outbox, "order-9", "message-9", 160_000)
        first.wait_for("the others are stored", lambda r: r.handled == 3)
        holder = outbox.database.direct(autocommit=False)
        holder.execute("SELECT pg_advisory_xact_lock(4711)")
        kafka.set_topic(topic.name, "max.message.bytes", "1000000")
        topic.wait_for(4)
        first.kill()
        outbox.end_waiting_sessions()
        holder.rollback()
        second = start(topic.name, delivery)
        held = "SELECT count(*) FROM outbox.held_messages"
        wait_until(lambda: outbox.connection.execute(held).fetchone() == (0,), "it is settled", 30)
        ids += outbox.produce(3, start=3)
        second.wait_for("it goes on", lambda r: r.handled >= 3)
        topic.wait_for(7)
        time.sleep(1)
        assert topic.ids() == [*ids[:3], "message-9", *ids[3:]]


@pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"])
def test_what_a_person_rewinds_is_published_again(outbox, kafka, start, cursor):
    """To the very place before the last batch: where the row would stand had a crash prevented the last store."""
    source = {"source": {"cursor": cursor}}
    with kafka.topic(partitions=1) as topic:
        worker = start(topic.name, **source)
        first = outbox.produce(5)
        worker.wait_for("the first are stored", lambda r: r.handled == 5)
        before, position = outbox.stored(), outbox.last().split(":")[1]
        second = outbox.produce(5, start=5)
        worker.wait_for("all is stored", lambda r: r.handled == 10)
        assert worker.terminate() == 0
        again = start(topic.name, **source)
        again.wait_state("Active")
        assert again.terminate() == 0
        place = before.split(":") if cursor == "TransactionOrder" else ("0", str(int(position) + 1))
        outbox.connection.execute(
            "SELECT outbox.rewind_processor_checkpoint("
            "'orders', 0, %s::text::xid8, %s::text::bigint, 'once more', 'me')",
            place,
        )
        start(topic.name, **source).wait_for("they are stored again", lambda r: r.handled == 5)
        assert topic.wait_for(15) == first + second + second


def test_a_transaction_that_hides_the_record_is_named_and_its_end_is_enough(outbox, kafka, start, records):
    kafka.create_topic(records, 1, cleanup_policy="compact")
    settings = {"bootstrap.servers": kafka.servers, "transactional.id": records, "log_level": 0}
    other = Producer(settings)
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(records, b"", key=b"other")
    other.flush(30)
    outbox.produce(1)
    with kafka.topic() as topic:
        worker = start(topic.name, {"timeout": "3s"})
        hidden = "has a transaction that began at offset 0 of partition 0"
        report = worker.wait_for("it names what hides the record", lambda r: hidden in (r.message or ""), 30)
        assert report.reason == "TargetUnavailable"
        other.abort_transaction(30)
        worker.wait_for("it goes on by itself", lambda r: r.handled == 1)


def test_a_topic_of_records_that_cannot_be_made_is_named_with_the_remedy(outbox, kafka, start, workers):
    kafka.set_password("modest", "s3cret")
    kafka.allow("modest")
    kafka.allow("modest", "TRANSACTIONAL_ID", "outbox/orders/*", "WRITE", "DESCRIBE")
    outbox.produce(1)
    with kafka.topic() as topic:
        target = {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic.name, "checkpointTopic": "not-made"}
        home = workers.prepare(
            build_config(outbox.database, {"kafka": target}, delivery=DELIVERY), outbox.database.uri()
        )
        kafka.secure_files(home / "connections/target", username="modest", password="s3cret")
        worker = workers.launch(home)
        report = worker.wait_state("Unavailable", "PermissionDenied")
        assert "needs the topic not-made" in report.message
        assert "create it with cleanup.policy=compact" in report.message
        assert topic.read() == []
        kafka.create_topic("not-made", 1, cleanup_policy="compact")
        kafka.allow("modest", "TOPIC", "not-made", "READ")
        worker.wait_for("it goes on by itself", lambda r: r.handled == 1)


@pytest.mark.parametrize("deleted", ["messages", "records"])
def test_a_topic_that_is_deleted_while_the_worker_runs_is_named_long_before_the_timeout(
    outbox, kafka, start, records, deleted
):
    name = f"orders-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, 1)
    worker = start(name)
    outbox.produce(3)
    worker.wait_for("the first are stored", lambda r: r.handled == 3)
    gone = name if deleted == "messages" else records
    kafka.delete_topic(gone)
    ids = outbox.produce(3, start=3)
    wait_until(lambda: f"has no topic {gone}" in worker.log(), "it names the topic", 30)
    if deleted == "messages":
        kafka.create_topic(name, 1)
    worker.wait_for("it goes on by itself", lambda r: r.handled == 6 and r.state == "Active", 30)
    with contextlib.closing(Topic(kafka, name)) as topic:
        assert topic.wait_for(3)[-3:] == ids
    kafka.delete_topic(name)
