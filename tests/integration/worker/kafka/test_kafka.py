"""Target `kafka` against a real broker: keys, order, refusals, outages, logins, duplicates."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml

from tests.support.nightly import at_night
from tests.support.servers.kafka import Topic, headers
from tests.support.servers.postgres import wait_until
from tests.support.worker import FAST, build_config

QUICK = {"initialBackoff": "50ms", "maxBackoff": "200ms"}


@pytest.fixture
def start(outbox, workers, kafka):
    """Start a worker whose target is a topic, with these keys in its Secret."""

    def started(topic, delivery=None, *, keys=None, secure=False, **fields):
        target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic}}
        config = build_config(outbox.database, target, delivery=delivery or {}, **fields)
        home = workers.prepare(config, outbox.database.uri())
        write = kafka.secure_files if secure else kafka.files
        write(home / "connections/target", **(keys or {}))
        return workers.launch(home)

    return started


def insert(outbox, rows):
    """Store messages: (id, key, SQL of the payload)."""
    for name, key, data in rows:
        outbox.connection.execute(
            f"INSERT INTO outbox.messages (partition_key, message_id, message_type, data) VALUES (%s, %s, 't', {data})",
            (key, name),
        )


def large(size):
    """SQL of a payload that compression does not make smaller."""
    text = f"(SELECT string_agg(md5(n::text || '{uuid.uuid4()}'), '') FROM generate_series(1, {size // 32}) AS n)"
    return f"jsonb_build_object('text', {text})"


def by_key(messages):
    found: dict[bytes | None, list[str]] = {}
    for each in messages:
        found.setdefault(each.key(), []).append(headers(each)["x-outbox-message-id"])
    return found


def test_messages_arrive_in_order_per_key_with_their_headers(outbox, kafka, start):
    ids = outbox.produce(2500)
    with kafka.topic(partitions=4) as topic:
        worker = start(topic.name)
        worker.wait_for("all is stored", lambda r: r.handled == 2500, 30)
        assert sorted(topic.wait_for(2500)) == sorted(ids)
        messages = topic.read()
    for key, arrived in by_key(messages).items():
        assert key is not None
        assert arrived == [each for each in ids if each in set(arrived)], "in the order of the outbox"
    first = next(each for each in messages if headers(each)["x-outbox-message-id"] == ids[0])
    assert (first.key(), json.loads(first.value())) == (b"order-1", {"n": 1, "total": 10})
    expected = {
        "x-outbox-publication": "shop", "x-outbox-partition-key": "order-1", "x-outbox-processor": "orders",
        "x-outbox-pod": "pod-0", "x-outbox-epoch": "1", "x-outbox-message-type": "OrderPlaced",
    }  # fmt: skip
    assert expected.items() <= headers(first).items()
    assert headers(first)["x-outbox-checkpoint"].endswith(":1")
    assert outbox.stored() == outbox.last()


def test_a_broker_that_is_down_and_comes_up(outbox, kafka, start):
    with kafka.topic() as topic:
        ids = outbox.produce(5)
        worker = start(topic.name, {"retry": {"maxAttempts": 1} | QUICK}, secure=True)
        worker.wait_for("the first are stored", lambda r: r.handled == 5)
        before = outbox.stored()
        kafka.stop()
        more = outbox.produce(5, start=5)
        report = worker.wait_state("Retrying", "TargetUnavailable")
        assert report.attempt == 0
        assert kafka.tls_servers in report.message
        assert "cannot be reached" in report.message
        assert "s3cret" not in worker.log() + report.model_dump_json()
        assert outbox.stored() == before
        kafka.start()
        worker.wait_for("the rest is stored", lambda r: r.handled == 10, 60)
        assert set(topic.wait_for(10)) == {*ids, *more}
    assert outbox.connection.execute("SELECT count(*) FROM outbox.dead_letters").fetchone() == (0,)


def test_a_topic_that_is_missing_is_waited_for(outbox, kafka, start):
    ids = outbox.produce(3)
    name = f"later-{uuid.uuid4().hex[:8]}"
    worker = start(name, {"retry": {"maxAttempts": 1} | QUICK})
    report = worker.wait_state("Retrying", "MessageUnroutable")
    assert f"has no topic {name}" in report.message
    assert outbox.stored() == "0:0"
    kafka.create_topic(name, 1)
    try:
        worker.wait_for("it goes on by itself", lambda r: r.handled == 3 and r.state == "Active")
        with contextlib.closing(Topic(kafka, name)) as topic:
            assert topic.wait_for(3) == ids
    finally:
        kafka.delete_topic(name)


@pytest.mark.parametrize(
    "delivery",
    [
        pytest.param({"mode": "Ordered"}, id="Ordered", marks=pytest.mark.nightly),
        pytest.param({"mode": "Ordered", "blocks": "Key"}, id="Ordered, key", marks=pytest.mark.nightly),
        pytest.param({"mode": "Partitioned", "partitions": {"count": 3}}, id="Partitioned"),
        pytest.param({"mode": "Competing", "competing": {"leaseDuration": "5s"}}, id="Competing"),
    ],
)
def test_a_message_that_is_too_large_becomes_a_dead_letter_and_the_others_arrive_once(outbox, kafka, start, delivery):
    before = outbox.produce(150)
    insert(outbox, [("too-large", "order-1", large(400_000))])
    after = outbox.produce(150, start=150)
    fields = {"source": {"cursor": None}} if delivery["mode"] == "Competing" else {}
    end = {"whenExhausted": "DeadLetter", "retry": {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"}}
    with kafka.topic(max_message_bytes="100000") as topic:
        worker = start(topic.name, end | delivery, **fields)

        def dead():
            return outbox.connection.execute("SELECT message_id, error_class FROM outbox.dead_letters").fetchall()

        wait_until(lambda: dead() == [("too-large", "MSG_SIZE_TOO_LARGE")], "it is a dead letter", 40)
        # Where keys wait, what comes after it waits behind its dead letter.
        waits = delivery["mode"] == "Partitioned" or delivery.get("blocks") == "Key"
        keys = dict(outbox.connection.execute("SELECT message_id, partition_key FROM outbox.messages").fetchall())
        expected = [*before, *(each for each in after if not (waits and keys[each] == "order-1"))]
        topic.wait_for(len(expected))
        worker.wait_for("it goes on", lambda r: r.state == "Active")
        found = by_key(topic.read())
    assert sorted(each for arrived in found.values() for each in arrived) == sorted(expected)
    if delivery["mode"] != "Competing":
        assert found == {key: [each for each in expected if keys[each] == key.decode()] for key in found}


def test_killed_between_confirm_and_checkpoint_duplicates_keep_their_ids(outbox, kafka, start):
    ids = outbox.produce(10)
    # The checkpoint's row is locked: the batch is published and confirmed, and its checkpoint cannot be stored.
    with kafka.topic(partitions=1) as topic:
        first = start(topic.name, {"leaseDuration": "10s"})
        first.wait_for("all is stored", lambda r: r.handled == 10)
        more, holder = outbox.produce_locked(10, start=10)
        topic.wait_for(20)
        first.kill()
        outbox.end_waiting_sessions()
        holder.rollback()
        second = start(topic.name, {"leaseDuration": "10s"})
        second.wait_for("all is stored", lambda r: r.handled == 10)
        assert topic.wait_for(30) == ids + more + more
        assert [headers(each)["x-outbox-pod"] for each in topic.read()] == ["pod-0"] * 20 + ["pod-1"] * 10


@pytest.mark.nightly
def test_a_broker_that_is_killed_while_a_backlog_is_published(outbox, kafka, start):
    """Nothing is lost, and the first arrivals of each key are in its order."""
    ids = outbox.produce(20_000)
    with kafka.topic(partitions=2) as topic:
        worker = start(topic.name, {"batchSize": 100, "timeout": "5s", "retry": QUICK})
        worker.wait_for("some are published", lambda r: r.handled >= 200)
        kafka.stop()
        assert worker.report().handled < 20_000
        kafka.start()
        worker.wait_for("all is stored", lambda r: r.handled == 20_000, 90)
        wait_until(lambda: set(topic.ids()) == set(ids), "all arrive", 60)
        place = {each: at for at, each in enumerate(ids)}
        for arrived in by_key(topic.read()).values():
            first = [place[each] for each in dict.fromkeys(arrived)]
            assert first == sorted(first)


def test_a_frozen_publisher_hands_nothing_over_after_its_lease(outbox, kafka, start):
    with kafka.topic(partitions=1) as topic:
        ids = outbox.produce(5)
        first = start(topic.name)
        first.wait_for("all is stored", lambda r: r.handled == 5)
        second = start(topic.name)
        second.wait_state("Standby")
        first.send(signal.SIGSTOP)
        second.wait_state("Active")
        more = outbox.produce(5, start=5)
        second.wait_for("the rest is stored", lambda r: r.handled == 5)
        first.send(signal.SIGCONT)
        first.wait_state("Standby")
        assert topic.wait_for(10) == ids + more


@pytest.mark.parametrize("count", [*at_night(1), 4])
def test_a_broker_that_confirms_nothing_uses_up_no_attempt(outbox, kafka, start, count):
    with kafka.topic(partitions=1) as topic:
        worker = start(topic.name, {"timeout": "1s", "retry": {"maxAttempts": 1} | QUICK})
        outbox.produce(1)
        worker.wait_for("one is stored", lambda r: r.handled == 1)
        with kafka.frozen():
            outbox.produce(count, start=1)
            report = worker.wait_state("Retrying", "TargetUnavailable", 40)
            assert "did not confirm" in report.message
        worker.wait_for("all is stored", lambda r: r.handled == 1 + count, 40)
        assert list(dict.fromkeys(topic.wait_for(1 + count))) == [f"message-{n}" for n in range(1, 2 + count)]


def test_a_worker_stops_though_the_broker_does_not_answer(outbox, kafka, start):
    ids = outbox.produce(5)
    with kafka.topic(partitions=1) as topic:
        first = start(topic.name, {"timeout": "2s", "retry": {"initialBackoff": "50ms", "maxBackoff": "50ms"}})
        first.wait_for("the first are stored", lambda r: r.handled == 5)
        with kafka.frozen():
            ids += outbox.produce(5, start=5)
            first.wait_state("Retrying")
            assert first.terminate(60) == 0
        second = start(topic.name)
        second.wait_for("all is stored", lambda r: r.handled == 5)
        assert list(dict.fromkeys(topic.wait_for(10))) == ids


def test_a_wrong_login_is_said_and_recovers(outbox, kafka, start):
    ids = outbox.produce(3)
    with kafka.topic(partitions=1) as topic:
        worker = start(topic.name, secure=True, keys={"password": "guess"})
        report = worker.wait_state("Unavailable", "AuthenticationFailed")
        assert "login of user tests" in report.message
        assert "guess" not in worker.log() + report.model_dump_json()
        (worker.directory / "connections/target/password").write_text(kafka.password)
        assert topic.wait_for(3) == ids


def test_two_replicas_keep_the_order_of_each_key(outbox, kafka, start):
    delivery = {"mode": "Partitioned", "partitions": {"count": 4}}
    ids = outbox.produce(300)
    with kafka.topic(partitions=2) as topic:
        one, two = start(topic.name, delivery), start(topic.name, delivery)
        topic.wait_for(300)
        more = outbox.produce(300, start=300)
        wait_until(lambda: set(topic.ids()) == {*ids, *more}, "all arrive", 60)
        assert one.terminate() == two.terminate() == 0
        place = {each: at for at, each in enumerate([*ids, *more])}
        for arrived in by_key(topic.read()).values():
            first = [place[each] for each in dict.fromkeys(arrived)]
            assert first == sorted(first)


def test_outbox_run(outbox, kafka, tmp_path):
    ids = outbox.produce(3)
    with kafka.topic(partitions=1) as topic:
        target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic.name}}
        spec = {"source": {"connection": {"secretRef": {"name": "db"}}}, "target": target, "delivery": FAST}
        head = {"apiVersion": "outbox-operator.dev/v1alpha1", "kind": "OutboxProcessor", "metadata": {"name": "orders"}}
        (tmp_path / "orders.yaml").write_text(yaml.safe_dump(head | {"spec": spec}))
        (tmp_path / "source").symlink_to(outbox.database.files().directory)
        kafka.secure_files(tmp_path / "target")
        program = Path(sys.executable).with_name("outbox")
        command = [program, "run", "-f", tmp_path / "orders.yaml", "--connections", tmp_path]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, stderr=log)
        try:
            assert topic.wait_for(3) == ids
            wait_until(lambda: outbox.stored() == "0:4", "the counter of the fourth message to come is stored")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
    assert "s3cret" not in (tmp_path / "log").read_text()
