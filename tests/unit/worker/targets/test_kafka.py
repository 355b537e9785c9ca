"""Target `kafka`, what is decided without a broker: the Secret, topics and headers, whose fault an answer is."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime
from traceback import format_exception
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, TransientError
from outbox_core.message import Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Reason
from outbox_core.spec import PartitionKey
from outbox_worker.targets.librdkafka import answers, threads
from outbox_worker.targets.librdkafka.checkpoint_topic import CheckpointTopic
from outbox_worker.targets.librdkafka.producer import KafkaProducer
from outbox_worker.targets.librdkafka.records import RecordBuilder, build_topic
from outbox_worker.targets.librdkafka.rounds import Refused, find_blamed
from outbox_worker.targets.librdkafka.settings import (
    LARGEST_MESSAGE,
    ROUND_BYTES,
    BrokerSettings,
    read_broker_settings,
)
from tests.support.servers.certificates import make_certificates

SETTINGS = BrokerSettings("kafka:1", tls=False)
LOGIN = {"username": "outbox", "password": "s3cret"}


def write(directory, **keys):
    for name, value in ({"bootstrapServers": "kafka:9092"} | keys).items():
        (directory / name.replace("_crt", ".crt")).write_text(value)
    return directory


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def message(**fields):
    chosen: dict[str, Any] = {
        "message_id": "m-1", "message_type": "Placed", "publication_id": "shop", "partition_key": "k", "data": "{}",
        "metadata": None, "scheduled": None,
    }  # fmt: skip
    return Message(7, 8, **(chosen | fields))


@pytest.mark.parametrize("most", [0, 3, 6])
def test_a_client_is_not_made_where_its_threads_cannot_be_started(monkeypatch, most):
    """Librdkafka ends the process then, or hangs in it: a pod's process ids are limited."""
    begun: list[threading.Thread] = []

    class Limited(threading.Thread):
        @override
        def start(self):
            if len(begun) == most:
                raise RuntimeError("can't start new thread")
            begun.append(self)
            super().start()

    monkeypatch.setattr(threads, "Thread", Limited)
    told = r"cannot start the 7 threads of a Kafka client: raise its limit \(the pod's process ids, ulimit -u\)"
    settings = BrokerSettings("kafka:1,kafka:2,kafka:3", tls=False)
    with pytest.raises(TransientError, match=told):
        KafkaProducer(settings, "orders")
    with pytest.raises(TransientError, match=told):
        CheckpointTopic("checkpoints", settings, "orders", deadline=0.0)
    assert not any(each.is_alive() for each in begun)


class TestTheSecret:
    @pytest.mark.parametrize(
        ("keys", "protocol"),
        [({}, "plaintext"), ({"tls": "true"}, "ssl"), ({"tls": "false"}, "plaintext"), (LOGIN, "sasl_plaintext"),
         (LOGIN | {"tls": "true"}, "sasl_ssl")],
    )  # fmt: skip
    def test_the_protocol_follows_from_what_is_there(self, tmp_path, keys, protocol):
        config = read_broker_settings(write(tmp_path, **keys)).as_producer("outbox")
        assert config["security.protocol"] == protocol
        assert ("sasl.password" in config) == ("sasl" in protocol)

    def test_an_authority_means_tls(self, tmp_path):
        make_certificates(tmp_path)
        settings = read_broker_settings(write(tmp_path))
        assert settings.tls
        assert settings.as_producer("outbox")["ssl.ca.pem"] == (tmp_path / "ca.crt").read_text().strip()

    def test_mechanism_servers_and_what_is_printed(self, tmp_path):
        keys = LOGIN | {"bootstrapServers": " a.test:1,\n[::1]:2 ", "saslMechanism": "SCRAM-SHA-256\n"}
        settings = read_broker_settings(write(tmp_path, **keys))
        assert settings.servers == "a.test:1,[::1]:2"
        assert settings.as_producer("outbox")["sasl.mechanisms"] == "SCRAM-SHA-256"
        assert "s3cret" not in repr(settings)

    @pytest.mark.parametrize(
        ("keys", "said"),
        [
            ({"bootstrapServers": ""}, "host:port"),
            ({"bootstrapServers": "kafka"}, "host:port"),
            ({"bootstrapServers": "https://kafka:1"}, "host:port"),
            ({"username": "outbox"}, "belong together"),
            ({"password": "s3cret"}, "belong together"),
            (LOGIN | {"saslMechanism": "GSSAPI"}, "one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
            ({"saslMechanism": "PLAIN"}, "needs `username`"),
            ({"tls": "yes"}, "true or false"),
            ({"ca_crt": "no certificate"}, "no PEM certificate"),
            ({"ca_crt": "no certificate", "tls": "false"}, "take one of them away"),
        ],
    )
    def test_what_cannot_be_used_is_said_without_values(self, tmp_path, keys, said):
        with pytest.raises(ConfigurationError, match=said) as caught:
            read_broker_settings(write(tmp_path, **keys))
        assert caught.value.reason is Reason.CONNECTION_SECRET_INVALID
        assert "s3cret" not in "".join(format_exception(caught.value))

    def test_a_folder_that_is_missing(self, tmp_path):
        with pytest.raises(ConfigurationError, match="there is no folder"):
            read_broker_settings(tmp_path / "none")

    def test_the_client_takes_these_settings_and_keeps_the_promises(self):
        """No broker is there: the producer is made, and not asked for anything."""
        for settings in (BrokerSettings("localhost:1", tls=False), BrokerSettings("localhost:1", tls=True, **LOGIN)):
            config = settings.as_producer("outbox")
            Producer(config | {"log_level": 0})  # raises where it does not know one
            assert (config["enable.idempotence"], config["acks"], config["message.timeout.ms"]) == (True, "all", 0)
            # One request for each partition and round; and the largest message has a place in the queue.
            assert config["batch.size"] > ROUND_BYTES
            assert config["queue.buffering.max.kbytes"] * 1024 > LARGEST_MESSAGE == config["message.max.bytes"]


class TestTopics:
    @pytest.mark.parametrize(
        ("template", "topic"),
        [("orders", "orders"), ("a.{messageType}-{publicationId}_{partitionKey}", "a.Placed-shop_k"), ("..a", "..a")],
    )
    def test_they_are_made_of_the_message(self, template, topic):
        assert build_topic(message(), template) == topic

    @pytest.mark.parametrize(
        ("template", "fields", "said"),
        [
            ("{messageType}", {"message_type": None}, "{messageType}, which is null"),
            ("{publicationId}", {"publication_id": None}, "null"),
            ("{partitionKey}", {"partition_key": None}, "null"),
            ("{messageType}", {"message_type": ""}, "1 to 249"),
            ("{messageType}", {"message_type": "a b"}, "'a b'"),
            ("{messageType}", {"message_type": "a\n"}, "1 to 249"),
            ("{messageType}", {"message_type": "."}, "1 to 249"),
            ("{messageType}", {"message_type": ".."}, "1 to 249"),
            ("{messageType}", {"message_type": "Bestellung-ö"}, "1 to 249"),
            ("{messageType}", {"message_type": "a" * 250}, "1 to 249"),
        ],
    )
    def test_what_is_no_topic_is_the_messages_fault(self, template, fields, said):
        with pytest.raises(HandlerError, match=said) as caught:
            build_topic(message(**fields), template)
        assert caught.value.reason is Reason.MESSAGE_REJECTED
        assert "7:8" in str(caught.value)


class TestHeaders:
    @pytest.fixture
    def build(self):
        return RecordBuilder("orders", PartitionKey(), processor_id="billing", pod="pod-0").build

    def test_what_is_null_has_none(self, build):
        least = message(message_type=None, publication_id=None, partition_key=None, data=None)
        assert build(least, 3).headers == [
            ("x-outbox-checkpoint", "7:8"), ("x-outbox-message-id", "m-1"), ("x-outbox-processor", "billing"),
            ("x-outbox-pod", "pod-0"), ("x-outbox-epoch", "3"), ("x-outbox-tombstone", "true"),
        ]  # fmt: skip
        assert ("x-outbox-epoch", "4") in build(least, 4).headers

    def test_each_type_and_publication_has_its_own(self, build):
        of = [("Placed", "shop"), ("Paid", "shop"), ("Placed", None), ("Placed", "shop")]
        for kind, publication in of:
            found = dict(build(message(message_type=kind, publication_id=publication), 3).headers)
            assert (found["x-outbox-message-type"], found.get("x-outbox-publication")) == (kind, publication)

    def test_the_time_and_the_trace(self, build):
        for day in (1, 1, 2):
            at = datetime(2026, 5, day, tzinfo=UTC)
            found = dict(build(message(scheduled=at, metadata=f'{{"traceparent": "{TRACE}"}}'), 1).headers)
            assert found["x-outbox-scheduled"] == f"2026-05-0{day}T00:00:00+00:00"
            assert found["traceparent"] == TRACE
            assert "tracestate" not in found

    @pytest.mark.parametrize("metadata", ["{}", "traceparent", '["traceparent"]', '{"traceparent": "00-no"}', "["])
    def test_what_is_no_trace_is_left_out(self, build, metadata):
        assert "traceparent" not in dict(build(message(metadata=metadata), 1).headers)

    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            (PartitionKey(column="partition_key"), "k"), (PartitionKey(column="other"), None),
            (PartitionKey(data=["n"]), "5"), (PartitionKey(metadata=["n"]), "6"),
        ],
    )  # fmt: skip
    def test_the_key_is_the_one_that_the_resource_names(self, key, expected):
        builder = RecordBuilder("orders", key, processor_id="billing", pod="pod-0")
        assert builder.build(message(partition_key="k", data='{"n": 5}', metadata='{"n": 6}'), 1).key == expected

    def test_the_size_of_a_record_counts_all_of_it(self, build):
        metadata, at = f'{{"traceparent": "{TRACE}"}}', datetime(2026, 5, 1, tzinfo=UTC)
        record = build(message(data="é" * 100, partition_key="k" * 10, metadata=metadata, scheduled=at), 3)
        assert record.size >= 210 + sum(len(name) + len(value or "") + 4 for name, value in record.headers)
        assert build(message(data=None), 3).size > 64


class TestWhoseFault:
    @pytest.mark.parametrize(
        ("code", "reason", "kind", "said"),
        [
            (KafkaError.SASL_AUTHENTICATION_FAILED, Reason.AUTHENTICATION_FAILED, TransientError, "login of user anna"),
            (KafkaError._AUTHENTICATION, Reason.AUTHENTICATION_FAILED, TransientError, "`saslMechanism`"),
            (KafkaError.TOPIC_AUTHORIZATION_FAILED, Reason.PERMISSION_DENIED, ConfigurationError, "write to topic t"),
            (KafkaError.CLUSTER_AUTHORIZATION_FAILED, Reason.PERMISSION_DENIED, ConfigurationError, "operation Write"),
            (KafkaError.UNKNOWN_TOPIC_OR_PART, Reason.MESSAGE_UNROUTABLE, TransientError, "create the topic"),
            (KafkaError._UNKNOWN_TOPIC, Reason.MESSAGE_UNROUTABLE, TransientError, "no topic t"),
            (KafkaError._DESTROY, Reason.MESSAGE_UNROUTABLE, TransientError, "no topic t"),
            (KafkaError._TRANSPORT, Reason.TARGET_UNAVAILABLE, TransientError, "tried again"),
            (KafkaError._SSL, Reason.TARGET_UNAVAILABLE, TransientError, "tried again"),
            (KafkaError.NOT_ENOUGH_REPLICAS, Reason.TARGET_UNAVAILABLE, TransientError, "NOT_ENOUGH_REPLICAS"),
            (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, Reason.TARGET_UNAVAILABLE, TransientError, "tried again"),
            (KafkaError.INVALID_TIMESTAMP, Reason.TARGET_UNAVAILABLE, TransientError, "clock of the worker's node"),
        ],
    )
    def test_the_targets(self, code, reason, kind, said):
        found = answers.classify_error(KafkaError(code, "said so"), replace(SETTINGS, username="anna"), topic="t")
        assert (found.reason, type(found)) == (reason, kind)
        assert said in str(found)
        assert "kafka:1" in str(found)
        assert "said so" in str(found)
        assert not answers.is_refusal(KafkaError(code))

    @pytest.mark.parametrize(
        ("transaction", "which", "prefix"),
        [("outbox/orders/here/0", "the transactional id outbox/orders/here/0 ", "outbox/orders/"),
         ("", "its transactional id ", "outbox/PROCESSOR_ID/")],
        ids=["named", "of a message"],
    )  # fmt: skip
    def test_transactional_ids_that_are_not_allowed_are_named_by_their_prefix(self, transaction, which, prefix):
        error = KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "said so")
        told = str(answers.classify_error(error, replace(SETTINGS, username="anna"), transaction=transaction))
        assert f"user anna use {which}(" in told
        assert told.endswith(f"with the prefix {prefix}")

    def test_a_certificate_that_is_not_trusted_is_the_secrets(self):
        error = KafkaError(KafkaError._SSL, "handshake: certificate verify failed: self-signed")
        found = answers.classify_error(error, SETTINGS)
        assert (found.reason, type(found)) == (Reason.CONNECTION_SECRET_INVALID, ConfigurationError)
        assert answers.is_login(error)

    @pytest.mark.parametrize("more", ["", ", 3 identical error(s) suppressed"])
    def test_how_long_it_took_is_left_out_or_a_status_would_change_each_time(self, more):
        error = KafkaError(KafkaError._AUTHENTICATION, f"kafka:1: refused (after 326ms in state AUTH_REQ{more})")
        assert "(_AUTHENTICATION: kafka:1: refused)" in str(answers.classify_error(error, SETTINGS))

    @pytest.mark.parametrize("name", ["MSG_SIZE_TOO_LARGE", "INVALID_RECORD", "RECORD_LIST_TOO_LARGE"])
    def test_the_messages(self, name):
        error = KafkaError(getattr(KafkaError, name))
        assert answers.is_refusal(error)
        assert not answers.is_not_tried(error)
        found = answers.build_refusal(error, "orders", Checkpoint(7, 8))
        assert (found.reason, found.error_class) == (Reason.MESSAGE_REJECTED, name)
        assert "topic orders does not take the message at 7:8" in str(found)

    def test_what_is_given_up_for_another_is_nobodys(self):
        for code in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._INVALID_DIFFERENT_RECORD):
            assert answers.is_not_tried(KafkaError(code))
            assert not answers.is_refusal(KafkaError(code))

    def test_only_what_was_alone_in_its_request_is_blamed(self):
        def refused(name, topic, partition):
            error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
            return Refused(message(message_id=name), error, topic, partition)

        several = [refused("a", "t", 0), refused("b", "t", 0), refused("c", "t", 1), refused("d", "u", 0)]
        assert [each.message.message_id for each in find_blamed(several)] == ["c", "d"]
        assert find_blamed([]) == []
