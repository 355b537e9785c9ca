"""A message as AMQP 0-9-1 frames, of which what many messages share is encoded once.

The layout of a content header is section 4.2.6.1 of the AMQP 0-9-1 specification; the types in its table of headers
are those of RabbitMQ's errata (https://www.rabbitmq.com/amqp-0-9-1-errata). A library that encodes each field of each
message took 26 us for one, most of what the worker did.
"""

from __future__ import annotations

from datetime import UTC, datetime
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands, encode, frame

from outbox_worker.targets.templates import PLACEHOLDER, build_refusal, fill_template
from outbox_worker.targets.trace_context import read_trace

if TYPE_CHECKING:
    from outbox_core.message import Message
    from outbox_core.spec import RabbitmqTarget

CHANNEL: Final = 1
PLACE: Final = "x-outbox-checkpoint"
"""The header that names a message that comes back."""
_SHORT: Final = 255
"""Bytes that AMQP's short strings hold."""
_KEPT: Final = 10_000
"""Routing keys whose frame is kept."""
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_FRAME: Final = Struct(">BHI")
_FRAME_END: Final = b"\xce"
_FRAME_OVERHEAD: Final = _FRAME.size + len(_FRAME_END)
_HEADER: Final = Struct(">HHQH")
"""Class, weight, size of the body, flags."""
_LONG: Final = Struct(">I")
_TIMESTAMP: Final = Struct(">Q")
_BASIC: Final = 60
_HEADER_FRAME: Final = 2
_BODY_FRAME: Final = 3
# Which properties are there: bit 15 is the first of AMQP's list.
_CONTENT_TYPE: Final = 1 << 15
_HEADERS_AND_DELIVERY_MODE: Final = 1 << 13 | 1 << 12
_MESSAGE_ID: Final = 1 << 7
_DATED: Final = 1 << 6
_TYPE: Final = 1 << 5
_JSON: Final = encode.short_string("application/json")


class MessageEncoder:
    """Encodes the messages of one processor."""

    def __init__(self, target: RabbitmqTarget, *, processor_id: str, pod: str) -> None:
        """Prepare what is the same in every message.

        Args:
            target: exchange, routing key, and how messages are kept.
            processor_id: header `x-outbox-processor`.
            pod: header `x-outbox-pod`.

        """
        self._target = target
        self._fixed_key = None if PLACEHOLDER.search(target.routing_key) else target.routing_key
        self._delivery_mode = b"\x02" if target.persistent else b"\x01"
        self._same = _field("x-outbox-processor", processor_id) + _field("x-outbox-pod", pod)
        self._of_epoch: tuple[int, bytes] = (-1, b"")
        self._methods: dict[str, bytes] = {}

    def encode(self, message: Message, epoch: int, frame_max: int) -> list[bytes]:
        """Return the frames that publish a message: method, content header, payload.

        Args:
            message: what to publish.
            epoch: header `x-outbox-epoch`.
            frame_max: bytes that the broker takes in one frame.

        Raises:
            HandlerError: AMQP cannot express the message.

        """
        payload = b"" if message.data is None else message.data.encode()
        content = self._content(message, epoch, len(payload))
        if len(content) > frame_max - _FRAME_OVERHEAD:
            largest = frame_max - _FRAME_OVERHEAD
            raise build_refusal(message, f"its headers are longer than the {largest} bytes of the broker's frame_max")
        key = self._fixed_key
        if key is None:
            field = "target.rabbitmq.routingKey"
            key = fill_template(self._target.routing_key, message, field=field, without_key="")
        frames = [self._methods.get(key) or self._method(message, key), _frame(_HEADER_FRAME, content)]
        step = frame_max - _FRAME_OVERHEAD
        frames += [_frame(_BODY_FRAME, payload[start : start + step]) for start in range(0, len(payload), step)]
        return frames

    def _method(self, message: Message, key: str) -> bytes:
        """Encode `basic.publish`, which only the routing key changes."""
        if len(key.encode()) > _SHORT:
            raise build_refusal(message, f"its routing key is longer than the {_SHORT} bytes that AMQP allows")
        if len(self._methods) >= _KEPT:
            self._methods.clear()
        publish = commands.Basic.Publish(
            exchange=self._target.exchange, routing_key=key, mandatory=self._target.mandatory
        )
        return self._methods.setdefault(key, frame.marshal(publish, CHANNEL))

    def _content(self, message: Message, epoch: int, size: int) -> bytes:
        """Encode the content header's payload: the properties that are there, in AMQP's order."""
        flags = _HEADERS_AND_DELIVERY_MODE | _MESSAGE_ID
        content_type = kind = dated = b""
        if message.data is not None:
            flags |= _CONTENT_TYPE
            content_type = _JSON
        # AMQP counts seconds from 1970 without a sign.
        if message.scheduled is not None and message.scheduled >= _EPOCH:
            flags |= _DATED
            dated = _TIMESTAMP.pack(int(message.scheduled.timestamp()))
        if message.message_type is not None:
            flags |= _TYPE
            kind = _short(message, "type", message.message_type)
        headers = self._headers(message, epoch)
        return b"".join(
            (
                _HEADER.pack(_BASIC, 0, size, flags),
                content_type,
                _LONG.pack(len(headers)),
                headers,
                self._delivery_mode,
                _short(message, "message_id", message.message_id),
                dated,
                kind,
            )
        )

    def _headers(self, message: Message, epoch: int) -> bytes:
        if self._of_epoch[0] != epoch:
            self._of_epoch = (epoch, self._same + _field("x-outbox-epoch", epoch))
        headers = self._of_epoch[1] + _text(_PLACE_NAME, str(message.checkpoint))
        if message.publication_id is not None:
            headers += _text(_PUBLICATION_NAME, message.publication_id)
        if message.partition_key is not None:
            headers += _text(_KEY_NAME, message.partition_key)
        if message.data is None:
            headers += _TOMBSTONE
        for name, value in read_trace(message.metadata).items():
            headers += _field(name, value)
        return headers


def _field(name: str, value: Any) -> bytes:
    """Encode one entry of the table of headers."""
    return encode.short_string(name) + encode.encode_table_value(value)


_PLACE_NAME: Final = encode.short_string(PLACE)
_PUBLICATION_NAME: Final = encode.short_string("x-outbox-publication")
_KEY_NAME: Final = encode.short_string("x-outbox-partition-key")
_TOMBSTONE: Final = _field("x-outbox-tombstone", True)


def _text(name: bytes, value: str) -> bytes:
    """Encode one entry whose value is text, the name given as encoded."""
    encoded = value.encode()
    return b"%bS%b%b" % (name, _LONG.pack(len(encoded)), encoded)


def _short(message: Message, name: str, value: str) -> bytes:
    encoded = value.encode()
    if len(encoded) > _SHORT:
        raise build_refusal(message, f"its {name} is longer than the {_SHORT} bytes that AMQP allows")
    return bytes((len(encoded),)) + encoded


def _frame(kind: int, payload: bytes) -> bytes:
    return b"%b%b%b" % (_FRAME.pack(kind, CHANNEL, len(payload)), payload, _FRAME_END)
