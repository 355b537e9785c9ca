"""The messages of a batch that a real broker returns, refuses, or cannot be told of are named, each with its reason."""

from __future__ import annotations

import contextlib
import uuid
from datetime import UTC, datetime

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.errors import HandlerError, MessagesFailedError
from outbox_core.message import Batch, Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.rabbitmq import RabbitmqSink
from tests.support.servers.postgres import wait_until
from tests.support.servers.proxy import Relay
from tests.support.worker import build_config


@pytest.fixture
def queue_name():
    return f"names-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def sink(rabbitmq, tmp_path):
    """A publisher whose routing key is the message's type."""
    (tmp_path / "uri").write_text(rabbitmq.uri)
    target = {"rabbitmq": {"connection": {"secretRef": {"name": "b"}}, "routingKey": "{messageType}"}}
    config = ProcessorConfig.model_validate(build_config(None, target, delivery={"timeout": "20s"}))
    assert config.target is not None
    assert config.target.rabbitmq is not None
    with contextlib.closing(RabbitmqSink(config.target.rabbitmq, tmp_path, config, "pod-0")) as made:
        yield made


def message(number, message_type, **fields):
    chosen = {"message_id": f"m-{number}", "partition_key": None, "data": "{}"} | fields
    return Message(
        100, number, message_type=message_type, publication_id="shop", metadata=None,
        scheduled=datetime.now(UTC), **chosen,
    )  # fmt: skip


def batch(*messages):
    return Batch(Checkpoint(0, 0), messages[-1].checkpoint, messages, len(messages), full=True)


def failed(sink, *messages):
    with pytest.raises(MessagesFailedError) as caught:
        sink.deliver(batch(*messages), 1)
    return {place.position: err.reason.value for place, err in caught.value.failed.items()}


def arrived(client, queue_name):
    return [each.message_id for each in client.drain(queue_name)]


def test_returned_messages_are_named_and_the_others_are_published_once(sink, rabbitmq, queue_name):
    messages = [message(n, "nowhere" if n % 100 == 7 else queue_name, data=f'"{"x" * n}"') for n in range(300)]
    with rabbitmq.queue(queue_name) as client:
        for _ in range(3):
            assert failed(sink, *messages) == dict.fromkeys((7, 107, 207), "MessageUnroutable")
        assert arrived(client, queue_name) == [each.message_id for each in messages if each.message_type == queue_name]
        with rabbitmq.queue("nowhere") as late:
            assert sink.deliver(batch(*messages), 1) == 300
            assert arrived(late, "nowhere") == ["m-7", "m-107", "m-207"]
        assert arrived(client, queue_name) == []


def test_refused_messages_are_named(sink, rabbitmq, queue_name):
    with rabbitmq.queue(queue_name, **{"x-max-length": 2, "x-overflow": "reject-publish"}) as client:
        messages = [message(n, queue_name) for n in range(5)]
        names = failed(sink, *messages)
        assert set(names.values()) == {"MessageRejected"}
        taken = arrived(client, queue_name)
        assert taken == [f"m-{n}" for n in range(5) if n not in names]
        assert sink.deliver(batch(*messages[:2]), 1) == 2
        assert set(arrived(client, queue_name)) == {"m-0", "m-1"} - set(taken)


def test_a_refusal_ends_with_its_cause_also_where_the_broker_would_keep_it_for_the_channel(sink, rabbitmq, queue_name):
    """A quorum queue that is full as its policy of a length goes goes on to refuse what comes by the same channel."""
    policy = ("-p", "/", queue_name, f"^{queue_name}$", '{"max-length": 2, "overflow": "reject-publish"}')
    with rabbitmq.queue(queue_name, **{"x-queue-type": "quorum"}) as client:
        rabbitmq.control("set_policy", *policy, "--apply-to", "queues")
        messages = [message(n, queue_name) for n in range(9)]
        wait_until(lambda: _is_refused(sink, messages), "the queue is full")
        rabbitmq.control("clear_policy", "-p", "/", queue_name)
        taken = arrived(client, queue_name)
        assert sink.deliver(batch(*messages), 1) == 9
        assert {*taken, *arrived(client, queue_name)} == {each.message_id for each in messages}


def _is_refused(sink, messages):
    try:
        sink.deliver(batch(*messages), 1)
    except HandlerError:
        return True
    return False


def test_an_alarm_while_refusals_are_noted_loses_nothing(sink, rabbitmq, queue_name, monkeypatch):
    def ring(*_, **__):
        raise Interrupted(draining=False)

    messages = [message(n, queue_name) for n in range(5)]
    with rabbitmq.queue(queue_name, **{"x-max-length": 2, "x-overflow": "reject-publish"}) as client:
        monkeypatch.setattr("outbox_worker.targets.rabbitmq.HandlerError", ring)
        with pytest.raises(Interrupted):
            sink.deliver(batch(*messages), 1)
        monkeypatch.undo()
        coming = client.consume(queue_name)  # now there is room
        assert sink.deliver(batch(*messages), 1) == 5
        assert sorted(next(coming).message_id for _ in messages) == [each.message_id for each in messages]


def test_a_channel_that_the_broker_closes_while_nothing_is_awaited_ends_no_process(
    sink, rabbitmq, queue_name, tmp_path
):
    relay = Relay(rabbitmq.port)
    (tmp_path / "uri").write_text(rabbitmq.uri.replace(f":{rabbitmq.port}", f":{relay.port}"))
    rabbitmq.control("eval", "application:set_env(rabbit, max_message_size, 1000).")
    try:
        with rabbitmq.queue(queue_name):
            sink.deliver(batch(message(1, queue_name)), 1)
            relay.hang()
            large = batch(message(2, queue_name, data=f'"{"x" * 2000}"'))
            sink.begin(large, 1)
            relay.heal()
            wait_until(lambda: sink.keep_alive() or not sink.is_under_way(large), "the channel is closed")
            with pytest.raises(HandlerError, match="larger than"):
                sink.deliver(large, 1)
    finally:
        rabbitmq.control("eval", "application:set_env(rabbit, max_message_size, 134217728).")
        relay.close()


def test_what_the_protocol_cannot_express_is_named_and_the_others_are_published(sink, rabbitmq, queue_name):
    with rabbitmq.queue(queue_name) as client:
        names = failed(
            sink,
            message(1, queue_name),
            message(2, "t" * 256),
            message(3, queue_name, message_id="i" * 256),
            message(4, queue_name, partition_key="k" * 200_000),
            message(5, "nowhere"),
            message(6, queue_name),
        )
        assert names == {
            2: "MessageRejected", 3: "MessageRejected", 4: "MessageRejected", 5: "MessageUnroutable"
        }  # fmt: skip
        assert arrived(client, queue_name) == ["m-1", "m-6"]


def test_a_message_that_fails_alone_is_reported_with_its_own_error(sink):
    with pytest.raises(HandlerError, match="'nowhere'") as caught:
        sink.deliver(batch(message(1, "nowhere")), 1)
    assert not isinstance(caught.value, MessagesFailedError)


def test_another_lease_publishes_again_what_a_rewind_asks_for(sink, rabbitmq, queue_name):
    messages = [message(1, queue_name), message(2, "nowhere")]
    with rabbitmq.queue(queue_name) as client:
        failed(sink, *messages)
        with pytest.raises(MessagesFailedError):
            sink.deliver(batch(*messages), 2)
        assert arrived(client, queue_name) == ["m-1", "m-1"]
