"""What target `kafka` sends to a real broker, in which order, and whom it blames for an answer."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import string
import time
import uuid
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox_core.config import ProcessorConfig
from outbox_core.errors import ConfigurationError, HandlerError, MessagesFailedError, TransientError
from outbox_core.message import Batch, Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Reason
from outbox_core.spec import PartitionKey
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.kafka import KafkaSink
from outbox_worker.targets.librdkafka import transaction
from outbox_worker.targets.librdkafka.producer import KafkaProducer
from outbox_worker.targets.librdkafka.records import Record, RecordBuilder
from outbox_worker.targets.librdkafka.rounds import Round
from outbox_worker.targets.librdkafka.settings import read_broker_settings
from tests.support.nightly import at_night
from tests.support.servers.kafka import Topic, headers
from tests.support.servers.postgres import free_port
from tests.support.worker import build_config

SMALL = {"max_message_bytes": "2000"}
TOO_LARGE = "".join(random.Random(1).choices(string.ascii_letters, k=4000))
"""Compression does not make it small enough, here and below."""
HUGE = "".join(random.Random(1).choices(string.ascii_letters, k=400_000))


@pytest.fixture
def make(kafka, tmp_path):
    """Build sinks; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def build(topic, delivery=None, *, keys=None, secure=False):
            directory = tmp_path / "secret"
            (kafka.secure_files if secure else kafka.files)(directory, **(keys or {}))
            target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic}}
            config = ProcessorConfig.model_validate(build_config(None, target, delivery=delivery or {}))
            assert config.target is not None
            assert config.target.kafka is not None
            sink = KafkaSink(config.target.kafka, directory, config, "pod-0")
            return stack.enter_context(contextlib.closing(sink))

        yield build


def message(number, key="k", **fields):
    chosen: dict[str, Any] = {"message_id": f"m-{number}", "message_type": "Placed", "data": f'{{"n": {number}}}'}
    chosen |= {"metadata": None, "scheduled": None} | fields
    return Message(100, number, publication_id="shop", partition_key=key, **chosen)


def batch(*messages):
    return Batch(Checkpoint(0, 0), messages[-1].checkpoint, messages, len(messages), full=True)


def failed(sink, *messages):
    with pytest.raises(MessagesFailedError) as caught:
        sink.deliver(batch(*messages), 1)
    return {place.position: err for place, err in caught.value.failed.items()}


class TestWhatIsSent:
    def test_key_value_headers_and_trace_context(self, kafka, make):
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        stored = f'{{"traceparent": "{trace}", "tracestate": "a=b", "other": 1}}'
        at = datetime(2026, 1, 2, tzinfo=UTC)
        with kafka.topic() as topic:
            payload = '{"n":1.50,  "a": "ä"}'
            assert (
                make(topic.name).deliver(batch(message(1, "Zürich", data=payload, metadata=stored, scheduled=at)), 7)
                == 1
            )
            topic.wait_for(1)
            (found,) = topic.read()
        assert (found.key(), found.value()) == ("Zürich".encode(), payload.encode()), "the payload's own bytes"
        assert headers(found) == {
            "x-outbox-checkpoint": "100:1", "x-outbox-processor": "orders", "x-outbox-pod": "pod-0",
            "x-outbox-epoch": "7", "x-outbox-message-id": "m-1", "x-outbox-message-type": "Placed",
            "x-outbox-publication": "shop", "x-outbox-partition-key": "Zürich",
            "x-outbox-scheduled": "2026-01-02T00:00:00+00:00", "traceparent": trace, "tracestate": "a=b",
        }  # fmt: skip

    def test_without_a_key_and_without_a_payload(self, kafka, make):
        with kafka.topic() as topic:
            make(topic.name).deliver(batch(message(1, None), message(2, "k", data=None), message(3, "k", data="")), 1)
            topic.wait_for(3)
            found = {headers(each)["x-outbox-message-id"]: each for each in topic.read()}
        assert found["m-1"].key() is None
        assert "x-outbox-partition-key" not in headers(found["m-1"])
        assert found["m-2"].value() is None
        assert headers(found["m-2"])["x-outbox-tombstone"] == "true"
        assert not found["m-3"].value()
        assert "x-outbox-tombstone" not in headers(found["m-3"])

    def test_a_key_of_the_payload(self, kafka, make):
        with kafka.topic() as topic:
            make(topic.name, {"key": {"data": ["customer"]}}).deliver(batch(message(1, data='{"customer": "anna"}')), 1)
            topic.wait_for(1)
            assert [each.key() for each in topic.read()] == [b"anna"]

    def test_topics_are_made_of_the_message(self, kafka, make):
        with kafka.topic() as one, kafka.topic() as two:
            sink = make("{messageType}")
            sink.deliver(batch(message(1, message_type=one.name), message(2, message_type=two.name)), 1)
            assert (one.wait_for(1), two.wait_for(1)) == (["m-1"], ["m-2"])

    def test_what_makes_no_topic_is_named_and_the_others_go_through(self, kafka, make):
        with kafka.topic() as topic:
            named = failed(
                make("{messageType}"),
                message(1, "a", message_type=topic.name), message(2, "b", message_type=None),
                message(3, "c", message_type="Order Placed"), message(4, "d", message_type=".."),
                message(5, "e", message_type=topic.name),
            )  # fmt: skip
            assert sorted(topic.wait_for(2)) == ["m-1", "m-5"]
        assert sorted(named) == [2, 3, 4]
        assert "null in its row" in str(named[2])
        assert "'Order Placed'" in str(named[3])


class TestRefusals:
    def test_one_that_is_too_large_is_named_and_the_others_arrive_once(self, kafka, make):
        with kafka.topic(**SMALL) as topic:
            sink = make(topic.name, {"blocks": "Nothing"})
            messages = [message(n, f"k{n % 5}", **({"data": TOO_LARGE} if n == 50 else {})) for n in range(1, 101)]
            named = failed(sink, *messages)
            assert list(named) == [50]
            assert isinstance(named[50], HandlerError)
            assert (named[50].reason, named[50].error_class) == (Reason.MESSAGE_REJECTED, "MSG_SIZE_TOO_LARGE")
            assert "max.message.bytes" in str(named[50])
            assert sorted(topic.wait_for(99)) == sorted(f"m-{n}" for n in range(1, 101) if n != 50)
            assert list(failed(sink, *messages)) == [50]
            assert len(topic.read()) == 99, "what was taken is not published again"

    def test_one_alone_is_reported_with_its_own_error(self, kafka, make):
        with kafka.topic(**SMALL) as topic:
            sink = make(topic.name)
            with pytest.raises(HandlerError, match="too large") as caught:
                sink.deliver(batch(message(1, data=TOO_LARGE)), 1)
            assert not isinstance(caught.value, MessagesFailedError)
            assert sink.deliver(batch(message(2)), 1) == 1, "with another producer"
            assert topic.wait_for(1) == ["m-2"]

    def test_one_that_the_client_itself_does_not_send(self, kafka, make):
        with kafka.topic() as topic:
            named = failed(make(topic.name), message(1, "a", data="x" * (33 << 20)), message(2, "b"))
            assert list(named) == [1]
            assert topic.wait_for(1) == ["m-2"]

    def test_a_compacted_topic_takes_no_message_without_a_key(self, kafka, make):
        with kafka.topic(partitions=1, cleanup_policy="compact") as topic:
            named = failed(make(topic.name), message(1, "a"), message(2, None), message(3, "c"))
            assert list(named) == [2]
            assert named[2].error_class == "INVALID_RECORD"
            assert topic.wait_for(2) == ["m-1", "m-3"]

    @pytest.mark.parametrize("begins", [True, False])
    def test_an_alarm_that_ends_a_callback_loses_nothing(self, kafka, make, monkeypatch, begins):
        """The client has forgotten a report by then, and tells no more that this message was refused."""
        send, note, alarms = KafkaProducer.send, Round.note, [Interrupted(draining=False)]

        def send_and_hear(producer, *given):
            sent = send(producer, *given)
            if begins and producer.waiting == 2:  # as where the client's queue is full
                producer._producer.flush(30)
            return sent

        def note_until_alarm(*given):
            if alarms:
                raise alarms.pop()
            note(*given)

        monkeypatch.setattr(KafkaProducer, "send", send_and_hear)
        monkeypatch.setattr(Round, "note", note_until_alarm)
        with kafka.topic(partitions=1, **SMALL) as topic:
            sink, messages = make(topic.name), (message(1, "a"), message(2, "b", data=TOO_LARGE))
            with pytest.raises(Interrupted):
                sink.deliver(batch(*messages), 1)
            assert list(failed(sink, *messages)) == [2]
            assert topic.wait_for(1) == ["m-1"]

    @pytest.mark.parametrize("blocks", ["Key", "Nothing", "Partition"])
    @pytest.mark.parametrize("seed", [0, *at_night(1, 2)])
    def test_each_key_keeps_its_order_and_waits_behind_what_failed(self, kafka, make, blocks, seed):
        """Requests of some 300 messages; refused ones among the first that a producer sends, and among later ones."""
        rng = random.Random(seed)
        bad = set(rng.sample(range(1, 1500), 3)) | {1 + seed}
        messages = [
            message(n, f"k{rng.randrange(12)}", data=HUGE if n in bad else HUGE[: rng.randrange(2500)])
            for n in range(1, 1500)
        ]
        with kafka.topic(partitions=2, max_message_bytes="300000") as topic:
            named = failed(make(topic.name, {"blocks": blocks}), *messages)
            first: dict[str, int] = {}
            for each in messages:
                if each.checkpoint.position in bad:
                    first.setdefault(each.partition_key or "", each.checkpoint.position)
            waits = {
                n for n, each in enumerate(messages, 1) if blocks != "Nothing" and n > first.get(each.partition_key, n)
            }
            assert set(named) == bad | waits
            for n in waits - bad:
                assert "waits behind" in str(named[n])
            expected = [each for n, each in enumerate(messages, 1) if n not in bad | waits]
            topic.wait_for(len(expected))
            found: dict[str, list[str]] = {}
            for each in topic.read():
                found.setdefault(each.key().decode(), []).append(headers(each)["x-outbox-message-id"])
        assert found == {
            key: [each.message_id for each in expected if each.partition_key == key]
            for key in {each.partition_key for each in expected}
        }

    def test_a_round_that_is_handed_over_slowly_keeps_the_order_of_a_key(self, kafka, make, monkeypatch):
        """As where the brokers take their time to say what a topic of it has, or the process gets no processor."""
        find_topic = KafkaProducer.find_topic

        def find_slowly(producer, topic, deadline):
            if producer.waiting:
                time.sleep(1.5)
            find_topic(producer, topic, deadline)

        monkeypatch.setattr(KafkaProducer, "find_topic", find_slowly)
        with kafka.topic(partitions=1, **SMALL) as one, kafka.topic() as two:
            named = failed(
                make("{messageType}"),
                message(1, "a", message_type=one.name), message(2, "b", message_type=one.name, data=TOO_LARGE),
                message(3, "c", message_type=two.name), message(4, "a", message_type=one.name),
            )  # fmt: skip
            assert list(named) == [2]
            assert one.wait_for(2) == ["m-1", "m-4"]
            assert two.wait_for(1) == ["m-3"]


class TestTheTargetsOwnFaults:
    def test_an_unknown_topic(self, make):
        began = time.monotonic()
        with pytest.raises(TransientError, match="has no topic nowhere") as caught:
            make("nowhere").deliver(batch(message(1), message(2)), 1)
        assert caught.value.reason is Reason.MESSAGE_UNROUTABLE
        assert time.monotonic() - began < 15

    def test_what_comes_before_an_unknown_topic_is_published_once(self, kafka, make):
        with kafka.topic() as topic:
            sink = make("{messageType}")
            messages = [message(n, message_type="nowhere" if n == 3 else topic.name) for n in range(1, 6)]
            for _ in range(3):
                with pytest.raises(TransientError, match="has no topic nowhere"):
                    sink.deliver(batch(*messages), 1)
            time.sleep(1.5)  # by now what was given up would be there
            assert topic.wait_for(2) == ["m-1", "m-2"]

    def test_what_is_confirmed_before_the_broker_stops_answering_is_published_once(self, kafka, make):
        with kafka.topic(partitions=1) as topic, contextlib.ExitStack() as frozen:
            sink = make(topic.name, {"timeout": "2s"})
            sink.deliver(batch(message(1)), 1)
            producer, send = sink._producer, sink._producer.send

            def send_and_freeze(*given):
                """The first message is confirmed, and then nothing more, in the same round."""
                sent = send(*given)
                producer._producer.flush(30)
                producer.send = send
                frozen.enter_context(kafka.frozen())
                return sent

            producer.send = send_and_freeze
            with pytest.raises(TransientError, match=r"did not confirm all messages within delivery\.timeout"):
                sink.deliver(batch(message(2), message(3)), 1)
            frozen.close()
            assert sink.deliver(batch(message(2), message(3)), 1) == 2
            arrived = topic.wait_for(3)
        assert list(dict.fromkeys(arrived)) == ["m-1", "m-2", "m-3"]
        assert arrived.count("m-2") == 1

    def test_a_topic_that_is_deleted_and_made_again(self, kafka, make):
        name = f"again-{uuid.uuid4().hex[:8]}"
        kafka.create_topic(name, 1)
        sink = make(name)
        sink.deliver(batch(message(1)), 1)
        kafka.delete_topic(name)
        with pytest.raises(TransientError, match=f"has no topic {name}") as caught:
            sink.deliver(batch(message(2), message(3)), 1)
        assert caught.value.reason is Reason.MESSAGE_UNROUTABLE
        kafka.create_topic(name, 1)
        sink.deliver(batch(message(2), message(3)), 1)
        with contextlib.closing(Topic(kafka, name)) as topic:
            assert topic.wait_for(2) == ["m-2", "m-3"]
        kafka.delete_topic(name)

    def test_a_clock_that_the_topic_does_not_take_is_no_messages_fault(self, kafka, make):
        """The client takes the time of each message from the clock; to the broker it is past, unless within one ms."""
        with kafka.topic(message_timestamp_before_max_ms="0") as topic:
            sink = make(topic.name)

            def deliver_some():
                for number in range(1, 200):
                    sink.deliver(batch(message(number)), 1)

            with pytest.raises(TransientError, match=r"INVALID_TIMESTAMP.*clock") as caught:
                deliver_some()
        assert caught.value.reason is Reason.TARGET_UNAVAILABLE

    def test_brokers_that_cannot_be_reached(self, make):
        sink = make("orders", keys={"bootstrapServers": f"127.0.0.1:{free_port()}"})
        began = time.monotonic()
        with pytest.raises(TransientError, match=r"cannot be reached.*refused") as caught:
            sink.deliver(batch(message(1), message(2)), 1)
        assert "ms in state" not in str(caught.value)
        assert caught.value.reason is Reason.TARGET_UNAVAILABLE
        assert 2 < time.monotonic() - began < 20

    def test_a_broker_that_does_not_answer_is_given_up_in_time_and_nothing_is_lost(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name, {"timeout": "2s"})
            sink.deliver(batch(message(1)), 1)
            with kafka.frozen():
                began = time.monotonic()
                with pytest.raises(TransientError, match=r"did not confirm all messages within delivery\.timeout"):
                    sink.deliver(batch(message(2), message(3)), 1)
                sink.close()
                assert time.monotonic() - began < 15
            sink.deliver(batch(message(2), message(3)), 1)
            arrived = topic.wait_for(3)
        assert list(dict.fromkeys(arrived)) == ["m-1", "m-2", "m-3"]

    def test_a_password_that_rotates(self, kafka, make, caplog):
        kafka.set_password("rotated", "first s3cret")
        kafka.allow("rotated")
        keys = {"username": "rotated", "password": "first s3cret"}
        with kafka.topic() as topic, caplog.at_level(logging.DEBUG):
            make(topic.name, secure=True, keys=keys).deliver(batch(message(1)), 1)
            kafka.set_password("rotated", "second s3cret")
            sink = make(topic.name, secure=True, keys=keys)
            with pytest.raises(TransientError, match="refuses the login of user rotated") as caught:
                sink.deliver(batch(message(2)), 1)
            assert caught.value.reason is Reason.AUTHENTICATION_FAILED
            make(topic.name, secure=True, keys=keys | {"password": "second s3cret"})  # writes the same folder
            assert sink.deliver(batch(message(2)), 1) == 1
            assert sorted(topic.wait_for(2)) == ["m-1", "m-2"]
        assert "s3cret" not in caplog.text + str(caught.value)
        assert "outbox_worker.targets.librdkafka.producer" in {each.name for each in caplog.records}

    def test_a_user_who_may_not_write(self, kafka, make):
        kafka.set_password("reader", "s3cret")
        with kafka.topic() as topic:
            sink = make(topic.name, secure=True, keys={"username": "reader", "password": "s3cret"})
            with pytest.raises(ConfigurationError, match=r"does not let user reader write") as caught:
                sink.deliver(batch(message(1), message(2)), 1)
            assert caught.value.reason is Reason.PERMISSION_DENIED
            kafka.allow("reader")
            assert sink.deliver(batch(message(1), message(2)), 1) == 2
            assert topic.wait_for(2) == ["m-1", "m-2"]

    def test_a_certificate_that_is_not_trusted(self, make, tmp_path):
        sink = make("orders", secure=True)
        (tmp_path / "secret" / "ca.crt").unlink()
        (tmp_path / "secret" / "tls").write_text("true")
        with pytest.raises(ConfigurationError, match="certificate is not trusted") as caught:
            sink.deliver(batch(message(1)), 1)
        assert caught.value.reason is Reason.CONNECTION_SECRET_INVALID

    def test_one_that_is_shut_out_in_a_batch_says_so_and_counts_nothing_as_taken(self, kafka, tmp_path, monkeypatch):
        """One wait hears of its end and of the answers: the client calls for those while it raises the other."""
        monkeypatch.setattr(transaction, "_ANSWER_SLICE", 5.0)
        kafka.files(tmp_path / "shared")
        settings, until = read_broker_settings(tmp_path / "shared"), time.monotonic() + 60
        old, new = (transaction.TransactionalProducer(settings, "c", f"{tmp_path}", 30.0) for _ in range(2))
        with kafka.topic(partitions=1) as topic, contextlib.closing(old), contextlib.closing(new):
            old.shut_out(until)
            old.begin_transaction(until)
            sent = Round(settings, [], 0)
            for number in range(3):
                answer = partial(sent.note, message(number), topic.name)
                old.send(Record(topic.name, "k", "v", [], 2), answer, until)
                if number == 0:
                    old._producer.flush()
                    new.shut_out(until)
            with pytest.raises(TransientError, match="another producer took over"):
                old.await_answers(until, lambda: False)
            assert not old.give_up()

    def test_a_producer_that_ends_is_replaced(self, kafka, make):
        def end(sink):
            sink._producer._heard.note_error(KafkaError(KafkaError._FENCED, "as if", fatal=True))

        with kafka.topic() as topic:
            sink = make(topic.name)
            sink.deliver(batch(message(1)), 1)
            first = sink._producer
            first.begin = lambda: end(sink)
            with pytest.raises(TransientError, match="as if"):
                sink.deliver(batch(message(2)), 1)
            assert sink.deliver(batch(message(2)), 1) == 1
            end(sink)  # while nothing is sent
            assert sink.deliver(batch(message(3)), 1) == 1
            end(sink)
            sink.keep_alive()
            assert sink._producer is None
            assert sink.deliver(batch(message(4)), 1) == 1
            assert sorted(topic.wait_for(4)) == ["m-1", "m-2", "m-3", "m-4"]

    def test_a_login_that_is_refused_while_nothing_is_sent_spoils_no_later_batch(self, kafka, make):
        with kafka.topic() as topic:
            sink = make(topic.name)
            sink.deliver(batch(message(1)), 1)
            sink._producer._heard.note_error(KafkaError(KafkaError._AUTHENTICATION, "as if"))
            assert sink.deliver(batch(message(2)), 1) == 1
            assert sorted(topic.wait_for(2)) == ["m-1", "m-2"]

    def test_topics_are_not_remembered_without_end(self, kafka, make, monkeypatch):
        monkeypatch.setattr("outbox_worker.targets.librdkafka.producer._MOST_TOPICS", 1)
        with kafka.topic() as one, kafka.topic() as two:
            sink = make("{messageType}")
            sink.deliver(batch(message(1, message_type=one.name), message(2, message_type=two.name)), 1)
            first = sink._producer
            sink.deliver(batch(message(3, message_type=one.name)), 1)
            assert sink._producer is not first
            assert sorted(one.wait_for(2)) == ["m-1", "m-3"]


class TestWhatItKeeps:
    def test_a_full_queue_is_waited_for(self, kafka, make):
        """Eight messages of 12 MiB in a queue of 64."""
        with kafka.topic(partitions=1, max_message_bytes=str(32 << 20)) as topic:
            messages = [message(n, data="x" * (12 << 20)) for n in range(1, 9)]
            assert make(topic.name).deliver(batch(*messages), 1) == 8
            assert topic.wait_for(8) == [f"m-{n}" for n in range(1, 9)]

    def test_a_closed_producer_leaves_no_thread(self, kafka, make):
        with kafka.topic() as topic:
            sink = make(topic.name)
            gc.disable()  # nothing waits for the collector
            try:
                sink.deliver(batch(message(1)), 1)
                before = count_threads()
                sink.close()
                assert count_threads() < before
            finally:
                gc.enable()


def count_threads():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))


def test_a_broker_that_went_down_is_given_up_whatever_else_the_client_tells(kafka, tmp_path):
    """What it tells of the broker waits beside the messages to be heard: hearing it is no sign that one was taken."""
    kafka.files(tmp_path)
    build = RecordBuilder("PLACE", PartitionKey(), processor_id="orders", pod="pod-0").build
    with kafka.topic() as topic:
        record = build(message(1), 1)._replace(topic=topic.name)
        with contextlib.closing(KafkaProducer(read_broker_settings(tmp_path), "orders")) as producer:
            assert producer.send(record, lambda *_: None, time.monotonic() + 10)
            assert producer.await_answers(time.monotonic() + 10, lambda: False)
            kafka.stop()
            began = time.monotonic()
            assert producer.send(record, lambda *_: None, began + 10)
            time.sleep(1)
            with pytest.raises(TransientError, match="did not confirm"):
                producer.await_answers(began, lambda: False)
            assert producer._heard.down_since is not None
            with pytest.raises(TransientError, match="cannot be reached"):
                producer.await_answers(began + 10, lambda: False)
        kafka.start()
