"""The compacted topic in which target `kafka` writes down what its transactions published."""

from __future__ import annotations

import gc
import time
import uuid
import weakref
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.librdkafka.checkpoint_topic import CheckpointTopic
from outbox_worker.targets.librdkafka.settings import BrokerSettings
from tests.integration.worker.kafka.test_kafka_sink import count_threads, message
from tests.integration.worker.kafka.test_kafka_transaction_sink import (
    batch,
    deliver,
    deliver_begin,
    held,
    ids,
    make,
    own,
    start,
)

__all__ = ["make", "own"]


def test_it_is_made_compacted_with_a_partition_for_each_of_the_processors(kafka, make, own):
    sink = make("orders", {"mode": "Partitioned", "partitions": {"count": 3}})
    sink.begin_owner(start(1, partition=2))
    name = f"outbox-checkpoints-{own}"
    assert len(kafka.admin().list_topics(name).topics[name].partitions) == 3
    assert kafka.topic_setting(name, "cleanup.policy") == "compact"


def test_more_partitions_are_added(kafka, make):
    with kafka.topic(partitions=1) as topic, kafka.topic(partitions=1) as checkpoints:
        sink = make(topic.name, {"mode": "Partitioned", "partitions": {"count": 4}}, checkpoints=checkpoints.name)
        sink.begin_owner(start(1, partition=3))
        sink.deliver(replace(batch(message(1)), partition=3), 1)
        assert topic.wait_for(1) == ids(1)
        assert len(kafka.admin().list_topics(checkpoints.name).topics[checkpoints.name].partitions) == 4


def test_two_processes_add_partitions_at_a_time(kafka, make, monkeypatch):
    count_partitions, owners = CheckpointTopic._count_partitions, iter((1, 2))

    def lose(looked_at, client):
        """After the look the other process adds them."""
        found = count_partitions(looked_at, client)
        if found == 1 and (other := next(owners, None)) is not None:
            make(topic.name, delivery, checkpoints=checkpoints.name).begin_owner(start(1, partition=other))
        return found

    delivery = {"mode": "Partitioned", "partitions": {"count": 4}}
    with kafka.topic(partitions=1) as topic, kafka.topic(partitions=1) as checkpoints:
        sink = make(topic.name, delivery, checkpoints=checkpoints.name)
        monkeypatch.setattr(CheckpointTopic, "_count_partitions", lose)
        sink.begin_owner(start(1))
        assert sink.deliver(batch(message(1)), 1) == 1


def test_without_compaction_a_record_that_is_gone_is_forgotten(kafka, make):
    with kafka.topic(partitions=1) as topic, kafka.topic(partitions=1) as checkpoints:
        first, second = (make(topic.name, checkpoints=checkpoints.name) for _ in range(2))
        first.begin_owner(start(1))
        first.deliver(held(message(1)), 1)
        first.deliver(batch(message(201)), 1)
        kafka.delete_records(checkpoints.name, before=first._publishers[0].published.offsets[False])
        second.begin_owner(start(2))
        assert second.deliver(batch(message(201), message(202)), 2) == 2
        assert topic.wait_for(3) == ids(1, 201, 202)


def test_a_user_who_may_do_too_little_is_told_what_is_missing(kafka, make):
    user, processor = f"poor-{uuid.uuid4().hex[:6]}", f"poor-{uuid.uuid4().hex[:6]}"
    kafka.set_password(user, "s3cret")
    keys = {"username": user, "password": "s3cret"}
    with kafka.topic(partitions=1) as topic:
        sink = make(topic.name, processor=processor, secure=True, keys=keys)
        checkpoints = f"outbox-checkpoints-{processor}"

        def refusal():
            with pytest.raises(ConfigurationError) as caught:
                deliver_begin(sink, start(1))
            return caught.value

        said = refusal()
        assert said.reason is Reason.PERMISSION_DENIED
        assert f"user {user}" in str(said)
        assert f"transactional id outbox/{processor}/here/0" in str(said)
        kafka.allow(user, "TRANSACTIONAL_ID", f"outbox/{processor}/*", "WRITE", "DESCRIBE")
        said = refusal()
        assert checkpoints in str(said)
        kafka.allow(user, "TOPIC", checkpoints, "READ", "WRITE")
        said = refusal()
        assert f"needs the topic {checkpoints}" in str(said)
        assert "create it with cleanup.policy=compact" in str(said)
        assert "target.kafka.checkpointTopic" in str(said)
        kafka.create_topic(checkpoints, 1, cleanup_policy="compact")
        deliver_begin(sink, start(1))
        kafka.allow(user, "TOPIC", topic.name, "WRITE")
        deliver(sink, batch(message(1)), 1)
        assert topic.wait_for(1) == ids(1)


def test_a_record_that_is_too_large_for_it(kafka, make):
    with kafka.topic(partitions=1) as topic, kafka.topic(partitions=1, max_message_bytes="500") as checkpoints:
        sink = make(topic.name, checkpoints=checkpoints.name)
        sink.begin_owner(start(1))
        with pytest.raises(ConfigurationError, match=f"too large for topic {checkpoints.name}.*batchSize"):
            sink.deliver(batch(*map(message, range(1, 200))), 1)
        assert sink.deliver(batch(*map(message, range(1, 10))), 1) == 9
        assert topic.wait_for(9) == ids(*range(1, 10))


def test_a_record_that_a_person_deleted_is_forgotten(kafka, make):
    with kafka.topic(partitions=1) as topic:
        first, second = make(topic.name), make(topic.name)
        first.begin_owner(start(1))
        first.deliver(batch(message(1)), 1)
        producer = Producer({"bootstrap.servers": kafka.servers})
        producer.produce(first._topic, None, first._unit(start(1)).key(held=False), partition=0)
        assert producer.flush(30) == 0
        second.begin_owner(start(2))
        assert second.deliver(batch(message(1)), 2) == 1
        assert topic.wait_for(2) == ids(1, 1)


def test_who_has_begun_keeps_the_threads_of_a_producer_and_no_others(kafka, make):
    with kafka.topic(partitions=1) as topic:
        sink = make(topic.name)
        gc.collect()
        before = count_threads()
        gc.disable()  # nothing waits for the collector
        try:
            sink.begin_owner(start(1))
            sink.close()
            assert count_threads() <= before
        finally:
            gc.enable()


def test_a_refused_question_keeps_nothing_of_who_asked(kafka):
    """An error knows the frames that it passed. Where those know the error, a producer in them would go on to live."""

    class Kept:
        pass

    def ask():
        kept = Kept()
        try:
            reader.find_end(7)  # there is no such partition
        except TransientError:
            return weakref.ref(kept)

    with kafka.topic(partitions=1) as topic:
        settings = BrokerSettings(kafka.servers, tls=False)
        reader = CheckpointTopic(topic.name, settings, "a reader", time.monotonic() + 0.5)
        gc.disable()  # nothing waits for the collector
        try:
            asked = ask()
            assert asked is not None
            assert asked() is None
        finally:
            gc.enable()
            reader.close()
