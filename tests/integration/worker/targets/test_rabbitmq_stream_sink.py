"""What target `rabbitmqStream` sends to a real broker, with which numbers, and what the broker does with those."""

from __future__ import annotations

import contextlib
import time
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.errors import ConfigurationError, HandlerError, MessagesFailedError, TransientError
from outbox_core.message import Batch, Held, Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.numbering import Numbering
from outbox_core.spec import Blocks
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.rabbitmq_stream import RabbitmqStreamSink
from outbox_worker.targets.streams.connection import StreamConnection
from outbox_worker.waiting import wait_ready
from tests.support.servers.proxy import Relay
from tests.support.streams import STREAM, read_stream
from tests.support.worker import build_config

HUGE = "x" * 1_100_000
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stream(rabbitmq):
    name = f"orders-{uuid.uuid4().hex[:8]}"
    with rabbitmq.queue(name, **STREAM):
        yield name


@pytest.fixture
def make(rabbitmq, stream, tmp_path):
    """Build sinks; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def build(blocks=Blocks.KEY, *, uri=None, timeout=10.0):
            target = {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": stream}}
            delivery = {"blocks": blocks, "timeout": f"{timeout}s"}
            config = ProcessorConfig.model_validate(build_config(None, target, delivery=delivery))
            assert config.target is not None
            assert config.target.rabbitmq_stream is not None
            directory = tmp_path / uuid.uuid4().hex
            directory.mkdir()
            (directory / "uri").write_text(uri or rabbitmq.stream_uri)
            sink = RabbitmqStreamSink(config.target.rabbitmq_stream, directory, config, "pod-0")
            return stack.enter_context(contextlib.closing(sink))

        yield build


def message(number, **fields):
    chosen: dict[str, Any] = {
        "message_id": f"m-{number}", "message_type": "Placed", "data": f'{{"n": {number}}}', "publication_id": "shop",
        "partition_key": f"k-{number}", "metadata": None, "scheduled": None,
    }  # fmt: skip
    return Message(100, number, **chosen | fields)


def batch(*messages, excluded=(), space=""):
    """Messages of which the first has the number of its position."""
    places = [each.checkpoint.position for each in messages] + list(excluded)
    after = Checkpoint(0, 0, numbering=Numbering(space, min(places) - 1) if space else None)
    out = tuple(Checkpoint(100, position) for position in excluded)
    return Batch(after, Checkpoint(100, max(places)), messages, len(messages), full=True, excluded=out)


def held(*messages):
    return Batch(
        Checkpoint(0, 0), messages[-1].checkpoint, messages, len(messages), full=False,
        held=tuple(Held(each.checkpoint, "k", each.message_id) for each in messages),
    )  # fmt: skip


@pytest.fixture
def read(rabbitmq, stream):
    def ids(count):
        return [each.message_id for each in read_stream(rabbitmq, stream, count)]

    return ids


def test_properties_trace_context_and_a_tombstone(rabbitmq, stream, make):
    at = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    metadata = f'{{"traceparent": "{TRACE}", "tracestate": "a=b", "other": 1}}'
    first = message(1, data='{"n":1.50,  "a": "ä"}', metadata=metadata, scheduled=at, partition_key="Zürich")
    nothing = message(2, data=None, message_type=None, publication_id=None, partition_key=None)
    assert make().deliver(batch(first, nothing, space="s"), 7) == 2
    one, two = read_stream(rabbitmq, stream, 2)
    assert (one.message_id, one.subject, one.content_type, one.creation_time) == (
        "m-1", "Placed", "application/json", int(at.timestamp() * 1000),
    )  # fmt: skip
    assert one.body.decode() == first.data
    assert one.headers == {
        "x-outbox-processor": "orders", "x-outbox-pod": "pod-0", "x-outbox-epoch": 7, "x-outbox-checkpoint": "100:1",
        "x-outbox-publication": "shop", "x-outbox-partition-key": "Zürich", "traceparent": TRACE, "tracestate": "a=b",
    }  # fmt: skip
    assert (two.subject, two.content_type, two.creation_time, two.body) == (None, None, None, b"")
    assert two.headers["x-outbox-tombstone"] is True
    assert "x-outbox-publication" not in two.headers


def test_what_is_published_again_by_another_process_is_dropped_and_confirmed(make, read):
    space = uuid.uuid4().hex
    first, second = make(), make()
    messages = [message(n) for n in range(1, 11)]
    assert first.deliver(batch(*messages[:6], space=space), 1) == 6
    assert second.deliver(batch(*messages[:3], space=space), 2) == 3
    assert second.deliver(batch(*messages[3:], space=space), 2) == 7
    assert first.deliver(batch(*messages, space=space), 1) == 10
    assert read(10) == [each.message_id for each in messages]


def test_numbers_of_another_name_are_others(make, read):
    for space in (uuid.uuid4().hex, uuid.uuid4().hex):
        assert make().deliver(batch(message(1), message(2), space=space), 1) == 2
    assert read(4) == ["m-1", "m-2"] * 2


def test_what_is_excluded_now_has_its_number_for_a_successor(make, read):
    """Behind it nothing was published with a number."""
    space = uuid.uuid4().hex
    make().deliver(batch(message(1), message(3), excluded=[2], space=space), 1)
    make().deliver(batch(message(1), message(2), message(3), space=space), 2)
    assert sorted(read(4)) == ["m-1", "m-2", "m-3", "m-3"]


@pytest.mark.parametrize(("blocks", "behind"), [(Blocks.KEY, ["m-3"]), (Blocks.PARTITION, [])])
def test_a_message_that_failed_can_still_be_published(make, read, blocks, behind):
    """As when the broker is given a larger frame_max; it is named, and what is behind takes no number from it."""
    space = uuid.uuid4().hex
    sink = make(blocks)
    with pytest.raises(MessagesFailedError) as caught:
        sink.deliver(batch(message(1), message(2, data=HUGE), message(3), space=space), 1)
    assert [(place.position, "frame_max" in str(err)) for place, err in caught.value.failed.items()] == [(2, True)]
    assert read(1 + len(behind)) == ["m-1", *behind]
    with pytest.raises(HandlerError, match="100:2 cannot be published"):
        sink.deliver(batch(message(2, data=HUGE), space=space), 1)
    assert make(blocks).deliver(batch(message(1), message(2), message(3), space=space), 2) == 3
    assert read(3 + len(behind)) == ["m-1", *behind, "m-2", "m-3"]


@pytest.mark.parametrize("limit", [4_194_304, 0], ids=["larger", "none"])
def test_a_message_may_be_as_large_as_the_brokers_own_limit(rabbitmq, make, read, limit):
    with broker_limit(rabbitmq, limit):
        assert make().deliver(batch(message(1), message(2, data=HUGE), message(3), space="s"), 1) == 3
        assert read(3) == ["m-1", "m-2", "m-3"]


@contextlib.contextmanager
def broker_limit(rabbitmq, limit):
    """Set `stream.frame_max` for connections to come, as far as its listeners have it."""
    change = (
        "[ranch:set_protocol_options(Name, Options#{{frame_max => {}}}) || Name <- maps:keys(ranch:info()), "
        "Options <- [ranch:get_protocol_options(Name)], is_map_key(frame_max, Options)]."
    )
    rabbitmq.control("eval", change.format(limit))
    try:
        yield
    finally:
        rabbitmq.control("eval", change.format(1_048_576))


def test_held_messages_are_published_although_later_ones_have_numbers(make, read):
    space = uuid.uuid4().hex
    sink = make()
    sink.deliver(batch(message(5), message(6), space=space), 1)
    assert sink.deliver(held(message(2), message(4)), 1) == 2
    sink.deliver(batch(message(7), space=space), 1)
    assert read(5) == ["m-5", "m-6", "m-2", "m-4", "m-7"]


@pytest.mark.parametrize("blocks", Blocks)
def test_held_messages_do_not_wait_for_one_that_fails_again(make, read, blocks):
    """Redriven dead letters: those that are not named are settled, so they must be in the stream."""
    with pytest.raises(MessagesFailedError) as caught:
        make(blocks).deliver(held(message(1, data=HUGE), message(2), message(3)), 1)
    assert [place.position for place in caught.value.failed] == [1]
    assert read(2) == ["m-2", "m-3"]


def test_what_the_broker_did_not_confirm_is_published_again_and_in_the_stream_once(rabbitmq, make, read):
    relay = Relay(rabbitmq.stream_port)
    try:
        sink = make(uri=rabbitmq.stream_uri.replace(f":{rabbitmq.stream_port}", f":{relay.port}"), timeout=1.0)
        space = uuid.uuid4().hex
        messages = [message(n) for n in range(1, 2001)]
        sink.deliver(batch(*messages[:5], space=space), 1)
        relay.hang()
        with pytest.raises(TransientError, match="did not answer in time"):
            sink.deliver(batch(*messages[5:], space=space), 1)
        relay.heal()
        assert sink.deliver(batch(*messages[5:], space=space), 1) == 1995
        assert read(2000) == [each.message_id for each in messages]
    finally:
        relay.close()


def test_a_batch_that_was_begun_is_delivered_without_being_sent_again(make, read):
    sink, space = make(), uuid.uuid4().hex
    first, second = batch(message(1), message(2), space=space), batch(message(3), message(4), space=space)
    sink.begin(first, 1)
    assert sink.is_under_way(first)
    assert sink.deliver(first, 1) == 2
    assert not sink.is_under_way(first)
    sink.begin(second, 1)
    assert not sink.is_under_way(batch(message(3), message(4), space=space)), "the very one that was begun"
    assert sink.deliver(second, 1) == 2
    assert read(4) == ["m-1", "m-2", "m-3", "m-4"]


def test_a_fault_ends_what_was_begun_and_it_comes_again_once(rabbitmq, make, read):
    relay = Relay(rabbitmq.stream_port)
    try:
        sink = make(uri=rabbitmq.stream_uri.replace(f":{rabbitmq.stream_port}", f":{relay.port}"))
        space = uuid.uuid4().hex
        sink.deliver(batch(message(1), space=space), 1)
        following = batch(message(2), message(3), space=space)
        relay.hang()
        sink.begin(following, 1)
        relay.cut()
        with pytest.raises(TransientError):
            sink.deliver(following, 1)
        assert not sink.is_under_way(following)
        relay.heal()
        assert sink.deliver(following, 1) == 2
        assert sink.deliver(batch(message(4), space=space), 1) == 1
        assert read(4) == ["m-1", "m-2", "m-3", "m-4"]
    finally:
        relay.close()


def test_of_what_was_begun_and_is_not_delivered_nothing_is_repeated(make, read):
    """Held messages have no number: what the stream has of them is remembered."""
    sink = make()
    sink.begin(held(message(1), message(2)), 1)
    assert sink.deliver(held(message(1), message(2), message(3)), 1) == 3
    assert read(3) == ["m-1", "m-2", "m-3"]


def test_what_an_alarm_kept_from_being_sent_does_not_count(make, read, monkeypatch):
    def ring(*_, **__):
        raise Interrupted(draining=False)

    sink, messages = make(), (message(1), message(2))
    monkeypatch.setattr(StreamConnection, "publish", ring)
    with pytest.raises(Interrupted):
        sink.deliver(held(*messages), 1)
    monkeypatch.undo()
    assert sink.deliver(held(*messages), 1) == 2
    assert read(2) == ["m-1", "m-2"]


def test_an_idle_connection_that_the_broker_closed_is_made_anew(rabbitmq, make, read):
    relay = Relay(rabbitmq.stream_port)
    try:
        sink = make(uri=rabbitmq.stream_uri.replace(f":{rabbitmq.stream_port}", f":{relay.port}"))
        sink.deliver(batch(message(1), space="s"), 1)
        relay.cut()
        sink.keep_alive()
        relay.heal()
        assert sink.deliver(batch(message(2), space="s"), 1) == 1
        assert read(2) == ["m-1", "m-2"]
    finally:
        relay.close()


def test_an_answer_counts_although_the_broker_has_closed_since(rabbitmq, make, monkeypatch):
    """It answers that there is no such virtual host and closes: a process that reads late finds both at once."""
    monkeypatch.setattr("outbox_worker.targets.amqp.wire.wait_ready", late)
    with pytest.raises(ConfigurationError, match="refuses the virtual host nowhere"):
        make(uri=rabbitmq.stream_uri + "nowhere").deliver(batch(message(1)), 1)


def late(*arguments):
    """As in a process that has no processor for a while."""
    time.sleep(0.2)
    return wait_ready(*arguments)
