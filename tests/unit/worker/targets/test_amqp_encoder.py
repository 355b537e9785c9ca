"""What the encoder of the target `rabbitmq` writes, read back by a library that knows nothing of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, frame, header

from outbox_core.errors import HandlerError
from outbox_core.message import Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import RabbitmqTarget
from outbox_worker.targets.amqp.encoder import CHANNEL, MessageEncoder
from outbox_worker.targets.trace_context import read_trace

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FRAME_MAX = 4096
_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
_messages = st.builds(
    Message,
    checkpoint=st.builds(Checkpoint, st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)),
    message_id=_text,
    message_type=st.none() | _text,
    publication_id=st.none() | _text,
    partition_key=st.none() | _text,
    data=st.none() | st.text(st.characters(codec="utf-8"), max_size=9000),
    metadata=st.none() | st.just(json.dumps({"traceparent": PARENT, "tracestate": "a=1"})) | _text,
    # The library takes seconds after 2106 for milliseconds.
    scheduled=st.none() | st.integers(-(10**9), 4 * 10**9).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
)


def message(**changed: Any) -> Message:
    given: dict[str, Any] = {
        "checkpoint": Checkpoint(7, 9),
        "message_id": "m1",
        "message_type": "OrderPlaced",
        "publication_id": "orders",
        "partition_key": "order-1",
        "data": '{"a": 1}',
        "metadata": None,
        "scheduled": datetime(2026, 1, 2, 3, 4, 5, 678, timezone(timedelta(hours=5))),
    }
    return Message(**(given | changed))


def encoder(**target: Any) -> MessageEncoder:
    spec = RabbitmqTarget.model_validate({"connection": {"secretRef": {"name": "broker"}}, "exchange": "e"} | target)
    return MessageEncoder(spec, processor_id="billing", pod="pod-0")


def read(frames: list[bytes]) -> tuple[commands.Basic.Publish, header.ContentHeader, bytes]:
    """Read the frames of one message; each must be one whole frame of the channel."""
    found = []
    for each in frames:
        length, channel, value = frame.unmarshal(each)
        assert (length, channel) == (len(each), CHANNEL)
        found.append(value)
    publish, content, *bodies = found
    assert isinstance(publish, commands.Basic.Publish)
    assert isinstance(content, header.ContentHeader)
    pieces = [each.value for each in bodies if isinstance(each, body.ContentBody)]
    assert len(pieces) == len(bodies)
    payload = b"".join(pieces)
    assert content.body_size == len(payload)
    return publish, content, payload


@given(_messages, st.integers(0, 2**63 - 1))
def test_library_reads_back_every_field(message: Message, epoch: int) -> None:
    publish, content, payload = read(encoder(routingKey="k").encode(message, epoch, FRAME_MAX))
    assert (publish.exchange, publish.routing_key) == ("e", "k")
    assert payload == (message.data or "").encode()
    headers = {
        "x-outbox-checkpoint": str(message.checkpoint),
        "x-outbox-processor": "billing",
        "x-outbox-pod": "pod-0",
        "x-outbox-epoch": epoch,
        "x-outbox-publication": message.publication_id,
        "x-outbox-partition-key": message.partition_key,
        "x-outbox-tombstone": True if message.data is None else None,
        **read_trace(message.metadata),
    }
    seconds = None if message.scheduled is None else message.scheduled.replace(microsecond=0)
    expected = commands.Basic.Properties(
        content_type=None if message.data is None else "application/json",
        headers={name: value for name, value in headers.items() if value is not None},
        delivery_mode=2,
        message_id=message.message_id,
        timestamp=seconds if seconds is not None and seconds.timestamp() >= 0 else None,
        message_type=message.message_type,
    )
    assert dict(content.properties) == dict(expected)


def test_frames_hold_what_the_broker_takes() -> None:
    frames = encoder().encode(message(data="é" * 9000), 1, FRAME_MAX)
    assert [len(each) for each in frames[2:]] == [FRAME_MAX] * 4 + [18000 - 4 * (FRAME_MAX - 8) + 8]


def test_routing_key_is_filled_for_each_message() -> None:
    encode = encoder(routingKey="{messageType}.{publicationId}.{partitionKey}").encode
    keys = [read(encode(message(partition_key=key), 1, FRAME_MAX))[0].routing_key for key in ("a", None, "a", "b")]
    assert keys == ["OrderPlaced.orders.a", "OrderPlaced.orders.", "OrderPlaced.orders.a", "OrderPlaced.orders.b"]


def test_epoch_is_the_one_of_the_batch() -> None:
    encode = encoder().encode
    epochs = [read(encode(message(), epoch, FRAME_MAX))[1].properties.headers for epoch in (1, 2, 1)]
    assert [each and each["x-outbox-epoch"] for each in epochs] == [1, 2, 1]


def test_messages_may_be_kept_in_memory_only() -> None:
    publish, content, _ = read(encoder(persistent=False, mandatory=False).encode(message(), 1, FRAME_MAX))
    assert (content.properties.delivery_mode, publish.mandatory) == (1, False)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"message_id": "é" * 128}, "its message_id is longer than the 255 bytes"),
        ({"message_type": "t" * 256}, "its type is longer than the 255 bytes"),
        ({"partition_key": "k" * 256}, "its routing key is longer than the 255 bytes"),
        ({"message_type": None}, "{messageType}, which is null"),
        ({"publication_id": "p" * FRAME_MAX, "partition_key": ""}, "its headers are longer than the 4088 bytes"),
    ],
)
def test_what_amqp_cannot_express_is_refused_by_name(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(HandlerError, match=r"the message at 7:9 cannot be published: .*") as refused:
        encoder(routingKey="{messageType}{partitionKey}").encode(message(**changed), 1, FRAME_MAX)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "metadata",
    [None, "{}", "traceparent", "[" * 100_000 + "traceparent", '["traceparent"]', '{"traceparent": 1}']
    + [json.dumps({"traceparent": value}) for value in ("", PARENT.upper(), PARENT + "\n", PARENT[:-1])],
    ids=lambda metadata: str(metadata)[:20],
)
def test_no_trace_is_sent_that_a_receiver_could_not_read(metadata: str | None) -> None:
    assert read_trace(metadata) == {}


def test_stored_trace_is_sent() -> None:
    assert read_trace(json.dumps({"traceparent": PARENT, "tracestate": "a=1", "b": 2})) == {
        "traceparent": PARENT,
        "tracestate": "a=1",
    }
    assert read_trace(json.dumps({"traceparent": PARENT, "tracestate": "é"})) == {"traceparent": PARENT}
