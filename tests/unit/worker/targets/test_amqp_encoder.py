"""What the encoder of the target `rabbitmq` writes, read back by a library that knows nothing of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, frame, header

from outbox_core.message import Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import RabbitmqTarget
from outbox_worker.targets.amqp import encoder as amqp_encoder
from outbox_worker.targets.amqp.encoder import CHANNEL, MessageEncoder
from outbox_worker.targets.values import read_trace

if TYPE_CHECKING:
    from outbox_core.errors import HandlerError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FRAME_MAX = 4096
_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
_messages = st.builds(
    Message,
    transaction_id=st.integers(0, 2**64 - 1),
    position=st.integers(-(2**63), 2**63 - 1),
    message_id=_text,
    message_type=st.none() | _text,
    publication_id=st.none() | _text,
    partition_key=st.none() | _text,
    data=st.none() | st.text(st.characters(codec="utf-8"), max_size=9000),
    metadata=st.none() | st.just(json.dumps({"traceparent": PARENT, "tracestate": "a=1"})) | _text,
    # The library takes seconds after 2106 for milliseconds.
    scheduled=st.none() | st.integers(-(10**9), 4 * 10**9).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
)


@dataclass
class Published:
    """A message as it comes to the broker."""

    method: commands.Basic.Publish
    contents: list[header.ContentHeader] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def content(self) -> header.ContentHeader:
        (found,) = self.contents
        return found

    @property
    def headers(self) -> dict[str, Any]:
        return dict(self.content.properties.headers or {})

    @property
    def payload(self) -> bytes:
        return b"".join(self.bodies)


def message(**changed: Any) -> Message:
    given: dict[str, Any] = {
        "transaction_id": 7,
        "position": 9,
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


def encode(used: MessageEncoder, *messages: Message, epoch: int = 1) -> bytes:
    """Encode messages of which none is refused."""
    refused: dict[Checkpoint, HandlerError] = {}
    windows = list(used.encode(messages, epoch, FRAME_MAX, refused))
    assert not refused
    assert [each for encoded, _ in windows for each in encoded] == list(messages)
    return b"".join(window for _, window in windows)


def read(data: bytes) -> list[Published]:
    """Read messages: each is whole frames of the channel, of which none is longer than what the broker takes."""
    found: list[Published] = []
    while data:
        length, channel, value = frame.unmarshal(data)
        assert channel == CHANNEL
        assert length <= FRAME_MAX
        data = data[length:]
        if isinstance(value, commands.Basic.Publish):
            found.append(Published(value))
        elif isinstance(value, header.ContentHeader):
            found[-1].contents.append(value)
        else:
            assert isinstance(value, body.ContentBody)
            found[-1].bodies.append(value.value)
    for each in found:
        assert each.content.body_size == len(each.payload)
    return found


def read_one(used: MessageEncoder, sent: Message, epoch: int = 1) -> Published:
    """Encode a message and read it back."""
    (found,) = read(encode(used, sent, epoch=epoch))
    return found


def expect(sent: Message, epoch: int) -> tuple[dict[str, Any], bytes]:
    """Return the properties and the payload that a message must have."""
    headers = {
        "x-outbox-checkpoint": str(sent.checkpoint),
        "x-outbox-processor": "billing",
        "x-outbox-pod": "pod-0",
        "x-outbox-epoch": epoch,
        "x-outbox-publication": sent.publication_id,
        "x-outbox-partition-key": sent.partition_key,
        "x-outbox-tombstone": True if sent.data is None else None,
        **read_trace(sent.metadata),
    }
    seconds = None if sent.scheduled is None else sent.scheduled.replace(microsecond=0)
    expected = commands.Basic.Properties(
        content_type=None if sent.data is None else "application/json",
        headers={name: value for name, value in headers.items() if value is not None},
        delivery_mode=2,
        message_id=sent.message_id,
        timestamp=seconds if seconds is not None and seconds.timestamp() >= 0 else None,
        message_type=sent.message_type,
    )
    return dict(expected), (sent.data or "").encode()


@given(st.lists(_messages, max_size=6), st.integers(0, 2**63 - 1))
def test_library_reads_back_every_field_of_each_message(sent: list[Message], epoch: int) -> None:
    found = read(encode(encoder(routingKey="k"), *sent, *sent, epoch=epoch))
    assert {(each.method.exchange, each.method.routing_key) for each in found} <= {("e", "k")}
    assert [(dict(each.content.properties), each.payload) for each in found] == [
        expect(each, epoch) for each in sent
    ] * 2


def test_what_is_kept_of_one_message_is_not_taken_for_another() -> None:
    used = encoder(routingKey="{messageType}.{partitionKey}")
    again = [
        message(),
        message(message_type="OrderPaid", publication_id="payments"),
        message(partition_key=None),
        message(partition_key=""),
        message(data=None),
        message(data=""),
        message(scheduled=None),
        message(scheduled=datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)),
        message(scheduled=datetime.fromtimestamp(-0.5, UTC)),
        message(scheduled=datetime.fromtimestamp(0.5, UTC)),
        message(metadata=json.dumps({"traceparent": PARENT})),
        message(metadata=json.dumps({"traceparent": PARENT[:-1] + "0"})),
        message(position=-10, message_id="é"),
    ]
    for sent in [*again, *reversed(again), *again]:
        found = read_one(used, sent, epoch=3)
        assert (dict(found.content.properties), found.payload) == expect(sent, 3)
        assert found.method.routing_key == f"{sent.message_type}.{sent.partition_key or ''}"


@pytest.mark.parametrize("kept", ["sizes", "keys", "shapes"])
def test_no_more_is_kept_than_is_useful(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amqp_encoder, "KEPT", 3)
    used = encoder(routingKey="{partitionKey}")
    changed: dict[str, Any] = {"sizes": "data", "keys": "partition_key", "shapes": "message_id"}
    sent = [message(**{changed[kept]: "x" * number}) for number in range(1, 20)]
    found = read(encode(used, *sent))
    assert [(dict(each.content.properties), each.payload) for each in found] == [expect(each, 1) for each in sent]
    assert max(len(used._sizes), len(used._methods), len(used._layouts)) <= 3


def test_frames_hold_what_the_broker_takes() -> None:
    found = read_one(encoder(), message(data="é" * 9000))
    most = FRAME_MAX - 8
    assert [len(each) for each in found.bodies] == [most] * 4 + [18000 - 4 * most]
    assert [len(each) for each in read_one(encoder(), message(data="x" * most)).bodies] == [most]
    assert [len(each) for each in read_one(encoder(), message(data="x" * (most + 1))).bodies] == [most, 1]


def test_broker_gets_what_is_encoded_while_the_rest_is() -> None:
    windows = encoder().encode([message(data="x" * 40_000)] * 5, 1, FRAME_MAX, {})
    assert [len(messages) for messages, _ in windows] == [2, 2, 1]


def test_routing_key_is_filled_for_each_message() -> None:
    used = encoder(routingKey="{messageType}.{publicationId}.{partitionKey}")
    found = read(encode(used, *(message(partition_key=key) for key in ("a", None, "a", "b"))))
    assert [each.method.routing_key for each in found] == [
        "OrderPlaced.orders.a", "OrderPlaced.orders.", "OrderPlaced.orders.a", "OrderPlaced.orders.b",
    ]  # fmt: skip


def test_epoch_and_frame_size_are_those_of_the_batch() -> None:
    used = encoder()
    assert [read_one(used, message(), epoch).headers["x-outbox-epoch"] for epoch in (1, 2, 1)] == [1, 2, 1]
    ((_, small),) = used.encode([message(data="x" * 600)], 1, 512, {})
    assert [len(each) for each in read(small)[0].bodies] == [504, 96]


def test_messages_may_be_kept_in_memory_only() -> None:
    found = read_one(encoder(persistent=False, mandatory=False), message())
    assert (found.content.properties.delivery_mode, found.method.mandatory) == (1, False)


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
    refused: dict[Checkpoint, HandlerError] = {}
    sent = [message(), message(position=10, **changed), message(position=11)]
    ((encoded, window),) = encoder(routingKey="{messageType}{partitionKey}").encode(sent, 1, FRAME_MAX, refused)
    assert encoded == [sent[0], sent[2]]
    assert [each.headers["x-outbox-checkpoint"] for each in read(window)] == ["7:9", "7:11"]
    assert list(refused) == [Checkpoint(7, 10)]
    assert re.match(f"the message at 7:10 cannot be published: .*{re.escape(why)}", str(refused[Checkpoint(7, 10)]))


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
