"""An owner of several partitions begins, in transactions of a real broker: it shuts former owners out at one time."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.librdkafka.checkpoint_topic import CheckpointTopic
from tests.integration.worker.kafka.test_kafka_sink import count_threads, message
from tests.integration.worker.kafka.test_kafka_transaction_sink import batch, deliver_begin, ids, make, own, start

__all__ = ["make", "own"]

PARTITIONS = range(4)
DELIVERY = {"mode": "Partitioned", "partitions": {"count": len(PARTITIONS)}}


@pytest.fixture
def made(monkeypatch):
    """Count who connects to read a checkpoint topic."""
    found, make_clients = [], CheckpointTopic.__init__

    def count(reader, *given):
        found.append(reader)
        make_clients(reader, *given)

    monkeypatch.setattr(CheckpointTopic, "__init__", count)
    return found


def of(partition, *numbers):
    return replace(batch(*map(message, numbers)), partition=partition)


def own_all(sink, epoch):
    for partition in PARTITIONS:
        sink.begin_owner(start(epoch, partition=partition))


def leave_open(sink, topic, partition):
    """Begin a transaction that nothing ends."""
    producer = sink._publishers[partition].producer
    producer.begin_transaction(1e9)
    producer._producer.produce(topic.name, b"open", b"k", headers=[("x-outbox-message-id", b"open")])
    producer._producer.flush()


def shut_out(sink, epoch, partitions=PARTITIONS):
    """As the loop does: ask for one after the other, until it is done for all. How often each was asked for."""
    asked, left, until = dict.fromkeys(partitions, 0), list(partitions), time.monotonic() + 30
    while left:
        assert time.monotonic() < until, f"asked {asked}"
        waits = {partition: sink.shut_out("here", partition, epoch) for partition in left}
        asked.update({partition: asked[partition] + 1 for partition in left})
        left = [partition for partition, seconds in waits.items() if seconds]
        time.sleep(min((waits[partition] for partition in left), default=0))
    return asked


def test_all_are_shut_out_before_anything_is_read_and_are_read_by_the_same_clients(kafka, make, made):
    with kafka.topic(partitions=1) as topic:
        old, new = make(topic.name, DELIVERY), make(topic.name, DELIVERY)
        own_all(old, 1)
        for partition in PARTITIONS:
            old.deliver(of(partition, 10 + partition), 1)
            leave_open(old, topic, partition)
        made.clear()
        asked = shut_out(new, 2)
        assert min(asked.values()) > 1, "none is waited for"
        for partition in PARTITIONS:
            with pytest.raises(TransientError, match="another producer took over"):
                old._publishers[partition].producer.commit(old._topic, partition, b"k", b"{}", 1e9)
        own_all(new, 2)
        assert len(made) == 1
        for partition in PARTITIONS:
            new.deliver(of(partition, 10 + partition, 20 + partition), 2)
        assert sorted(topic.wait_for(8)) == ids(*(number + each for number in (10, 20) for each in PARTITIONS))


def test_what_is_committed_while_another_partition_is_read_is_known(kafka, make):
    """The clients that read are there before the former owner commits, and before it is shut out."""
    with kafka.topic(partitions=1) as topic:
        old, new = make(topic.name, DELIVERY), make(topic.name, DELIVERY)
        own_all(old, 1)
        shut_out(new, 2, [0])
        old.deliver(of(1, 1), 1)
        reader = new._reader
        shut_out(new, 2, [1])
        new.begin_owner(start(2))
        assert new._reader is reader
        new.begin_owner(start(2, partition=1))
        assert new._reader is None
        new.deliver(of(1, 1, 2), 2)
        assert topic.wait_for(2) == ids(1, 2)


def test_one_that_is_not_allowed_leaves_the_others_alone(kafka, make, own):
    keys = {"username": own, "password": "s3cret"}
    kafka.set_password(own, "s3cret")
    with kafka.topic(partitions=1) as topic, kafka.topic(partitions=4) as checkpoints:
        for partition in (0, 1, 3):
            kafka.allow(own, "TRANSACTIONAL_ID", f"outbox/{own}/here/{partition}", "WRITE", "DESCRIBE")
        kafka.allow(own, "TOPIC", checkpoints.name, "READ", "WRITE")
        kafka.allow(own, "TOPIC", topic.name, "WRITE")
        sink = make(topic.name, DELIVERY, secure=True, keys=keys, checkpoints=checkpoints.name)
        with pytest.raises(ConfigurationError, match=f"transactional id outbox/{own}/here/2") as caught:
            shut_out(sink, 1)
        assert caught.value.reason is Reason.PERMISSION_DENIED
        shut_out(sink, 1, (0, 1, 3))
        for partition in (0, 1, 3):
            sink.begin_owner(start(1, partition=partition))
            sink.deliver(of(partition, partition + 1), 1)
        assert topic.wait_for(3) == ids(1, 2, 4)


def test_an_owner_of_another_epoch_begins_anew(kafka, make):
    """The lease was lost before it had begun, and another owner was there."""
    with kafka.topic(partitions=1) as topic:
        first, second = make(topic.name), make(topic.name)
        shut_out(first, 1, [0])
        second.begin_owner(start(2))
        second.deliver(of(0, 1), 2)
        assert first.shut_out("here", 0, 3) > 0, "another producer"
        first.begin_owner(start(3))
        with pytest.raises(TransientError, match="another producer took over"):
            second.deliver(of(0, 2), 2)
        first.deliver(of(0, 1, 2), 3)
        assert topic.wait_for(2) == ids(1, 2)


def test_one_that_was_shut_out_itself_does_not_begin(kafka, make):
    with kafka.topic(partitions=1) as topic:
        first, second = make(topic.name), make(topic.name)
        shut_out(first, 1, [0])
        second.begin_owner(start(2))
        with pytest.raises(TransientError, match="the owner with epoch 2 has begun"):
            first.begin_owner(start(1))
        second.deliver(of(0, 1), 2)
        assert topic.wait_for(1) == ids(1)


def test_a_broker_that_does_not_answer_is_not_waited_for_and_is_told_in_the_end(kafka, make):
    with kafka.topic(partitions=1) as topic:
        sink = make(topic.name, {"timeout": "2s"} | DELIVERY)
        with kafka.frozen():
            began = time.process_time(), time.monotonic()
            with pytest.raises(TransientError, match=r"delivery\.timeout|cannot be reached") as caught:
                shut_out(sink, 1)
            assert caught.value.reason is Reason.TARGET_UNAVAILABLE
            assert time.process_time() - began[0] < (time.monotonic() - began[1]) / 2
        for partition in PARTITIONS:
            deliver_begin(sink, start(1, partition=partition))
        sink.deliver(of(3, 1), 1)
        assert topic.wait_for(1) == ids(1)


def test_what_has_not_begun_is_closed_with_the_target(kafka, make):
    with kafka.topic(partitions=1) as topic:
        sink = make(topic.name, DELIVERY)
        gc.collect()
        before = count_threads()
        gc.disable()  # nothing waits for the collector
        try:
            shut_out(sink, 1, [0])
            sink.shut_out("here", 1, 1)
            sink.close()
            assert count_threads() <= before
        finally:
            gc.enable()


def test_clients_that_nothing_reads_with_any_more_are_closed(kafka, make):
    with kafka.topic(partitions=1) as topic:
        sink = make(topic.name, DELIVERY)
        shut_out(sink, 1, [0, 1])
        sink.begin_owner(start(1))
        assert sink._reader is not None
        sink.keep_alive()
        assert sink._reader is not None
        sink._reader.begin(time.monotonic())
        sink.keep_alive()
        assert sink._reader is None
        sink.begin_owner(start(1, partition=1))
        sink.deliver(of(1, 1), 1)
        assert topic.wait_for(1) == ids(1)
