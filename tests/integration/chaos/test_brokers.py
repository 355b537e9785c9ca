"""Chaos' Kafka, on a real broker: clients are led through the proxy, and the ledger sees what a consumer sees."""

from __future__ import annotations

import json
import struct
import time
from contextlib import closing

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from tests.support.servers.kafka import KafkaServer, Topic
from tests.support.servers.postgres import free_port
from tests.support.servers.proxy import Relay
from tests.support.worker import Workers, build_config
from tests.tools.chaos.processes.pods import shim
from tests.tools.ledger.account import Handled
from tests.tools.ledger.kafka import read_topic

TOPIC = "kafka-ordered"


@pytest.fixture(scope="module")
def broker():
    """A broker with a second listener behind a proxy: (server, where the proxy is)."""
    port = free_port()
    with closing(Relay(port)) as relay, closing(KafkaServer(through={port: relay.port})) as server:
        yield server, f"127.0.0.1:{relay.port}"
        relay.close()  # before the server: clients that are left shall not be led to where none is


@pytest.fixture
def topic(broker):
    server, _ = broker
    server.create_topic(TOPIC, 2, message_timestamp_type="LogAppendTime")
    yield TOPIC
    server.delete_topic(TOPIC)


def transactional(servers) -> Producer:
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "tests", "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    return producer


def publish(producer, *sequences) -> list[Handled]:
    """One order's messages, as a worker publishes them; what the ledger shall make of them."""
    told = {"x-outbox-pod": "worker-1", "x-outbox-epoch": "3"}
    for number in sequences:
        body = json.dumps({"orderKey": "a", "sequence": number, "cents": 5})
        producer.produce(TOPIC, body, key="a", headers=told | {"x-outbox-message-id": f"m-{number}"})
    producer.flush(30)
    return [Handled(f"m-{number}", "a", number, 5, "worker-1 (epoch 3)") for number in sequences]


def test_client_that_comes_through_the_proxy_is_told_to_stay_there(broker):
    _, through = broker
    admin = AdminClient({"bootstrap.servers": through, "log_level": 0})
    assert [f"{each.host}:{each.port}" for each in admin.list_topics(timeout=30).brokers.values()] == [through]


def test_worker_whose_clock_is_days_ahead_begins_and_publishes_in_transactions(broker, topic, outbox, tmp_path):
    server, _ = broker
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("=q", 2 * 86_400 * 1_000_000_000))
    target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic}}
    config = build_config(outbox.database, target, delivery={"guarantee": "Transactional"})
    workers = Workers(tmp_path)
    home = workers.prepare(config, outbox.database.uri())
    server.files(home / "connections/target")
    outbox.produce(3)
    environment = {"LD_PRELOAD": str(shim()), "STEPCLOCK_FILE": str(clock)}
    worker = workers.launch(home, environment=environment)
    try:
        worker.wait_for("all is stored", lambda r: r.handled == 3, 30)
        with closing(Topic(server, topic)) as seen:
            assert len(seen.wait_for(3)) == 3
    finally:
        worker.kill()


def test_ledger_reads_what_is_committed_with_the_brokers_times(broker, topic):
    server, through = broker
    began = time.time()
    producer = transactional(through)
    first = publish(producer, 1, 2)
    producer.commit_transaction(30)
    producer.begin_transaction()
    publish(producer, 3)
    producer.abort_transaction(30)
    producer.begin_transaction()
    last = publish(producer, 3, 4)
    producer.commit_transaction(30)
    found = read_topic(server.servers, topic)
    assert [handled for _, handled in found] == first + last
    assert all(began - 1 < at < time.time() + 1 for at, _ in found)


def test_ledger_does_not_take_an_open_transaction_for_the_end(broker, topic):
    server, through = broker
    producer = transactional(through)
    publish(producer, 1)
    with pytest.raises(TimeoutError, match="a transaction is open"):
        read_topic(server.servers, topic, seconds=3)
    producer.abort_transaction(30)
    assert read_topic(server.servers, topic) == []
