"""Messages as AMQP 0-9-1 frames, of which what many messages share is encoded once.

The layout of a content header is section 4.2.6.1 of the AMQP 0-9-1 specification; the types in its table of headers
are those of RabbitMQ's errata (https://www.rabbitmq.com/amqp-0-9-1-errata). A library that encodes each field of each
message took 26 us for one, most of what the worker did.

Frames are put together as text (`outbox_worker.targets.values`), and become bytes a window at a time.
"""

from __future__ import annotations

from math import floor
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pamqp import commands, encode, frame

from outbox_core.errors import HandlerError
from outbox_worker.targets.values import KEPT, PLACEHOLDER, build_refusal, characters, fill_template, read_trace, utf8

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outbox_core.message import Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import RabbitmqTarget

CHANNEL: Final = 1
PLACE: Final = "x-outbox-checkpoint"
"""The header that names a message that comes back."""
_WINDOW: Final = 65_536
"""Bytes encoded before they are written: the broker works while the next ones are encoded."""
_SHORT: Final = 255
"""Bytes that AMQP's short strings hold."""
_FRAME: Final = Struct(">BHI")
_FRAME_END: Final = "\xce"
_FRAME_OVERHEAD: Final = _FRAME.size + len(_FRAME_END)
_BEGINNING: Final = Struct(">BHIHH")
"""The frame of a content header up to class and weight; the size of the body and the flags follow."""
_CONTENT_SIZE: Final = 14
"""Bytes of class, weight, size and flags."""
_LONG: Final = Struct(">I")
_LONG_LONG: Final = Struct(">Q")
_BASIC: Final = 60
_HEADER_FRAME: Final = 2
_BODY_FRAME: Final = 3
# Which properties are there: bit 15 is the first of AMQP's list.
_CONTENT_TYPE: Final = 1 << 15
_HEADERS_AND_DELIVERY_MODE: Final = 1 << 13 | 1 << 12
_MESSAGE_ID: Final = 1 << 7
_DATED: Final = 1 << 6
_TYPE: Final = 1 << 5
_FLAGS: Final = Struct(">H")

_Shape: TypeAlias = tuple[str | None, str | None, int, int | None, int, int, bool, bool]
"""What of a message decides what stands between its values: type, publication, lengths of place, key, id and trace
context, whether it has a payload and a time."""
_Layout: TypeAlias = tuple[str, str, str, str, str]
"""What stands before the size of the body, the place, the key, the id, and the body."""


class MessageEncoder:
    """Encodes the messages of one processor."""

    def __init__(self, target: RabbitmqTarget, *, processor_id: str, pod: str) -> None:
        """Prepare what is the same in every message: headers `x-outbox-processor` and `x-outbox-pod` among it."""
        self._target = target
        places = set(PLACEHOLDER.findall(target.routing_key))
        self._fixed = None if places else self._encode_method(target.routing_key)
        self._by_key = "partitionKey" in places
        self._delivery_mode = "\x02" if target.persistent else "\x01"
        self._same = _field("x-outbox-processor", processor_id) + _field("x-outbox-pod", pod)
        self._for: tuple[int, int] = (-1, 0)
        self._of_owner = ""
        self._step = 0
        self._layouts: dict[_Shape, _Layout] = {}
        self._sizes: dict[int, tuple[str, str, str]] = {}
        self._stamped = (0, characters(_LONG_LONG.pack(0)))
        self._methods: dict[tuple[str | None, str | None, str | None], str] = {}

    def encode(
        self, messages: Iterable[Message], epoch: int, frame_max: int, refused: dict[Checkpoint, HandlerError]
    ) -> Iterator[tuple[list[Message], bytes]]:
        """Give out the frames that publish messages: method, content header, payload of each, in windows.

        `frame_max` are the bytes that the broker takes in one frame; `refused` gets what AMQP cannot express.
        """
        if self._for != (epoch, frame_max):
            self._for = (epoch, frame_max)
            self._of_owner = self._same + _field("x-outbox-epoch", epoch)
            self._step = frame_max - _FRAME_OVERHEAD
            self._layouts.clear()
            self._sizes.clear()
        pieces: list[str] = []
        encoded: list[Message] = []
        size = 0
        for message in messages:
            try:
                frames = self._encode_one(message)
            except HandlerError as err:
                refused[message.checkpoint] = err
                continue
            pieces.append(frames)
            encoded.append(message)
            size += len(frames)
            if size >= _WINDOW:
                yield encoded, "".join(pieces).encode("latin-1")
                pieces, encoded, size = [], [], 0
        if pieces:
            yield encoded, "".join(pieces).encode("latin-1")

    def _encode_one(self, message: Message) -> str:
        transaction_id, position, name, kind, publication, key, data, metadata, scheduled, _ = message
        place, body, key_size = f"{transaction_id}:{position}", data or "", None
        if not (name.isascii() and body.isascii()):
            name, body = utf8(name), utf8(body)
        if key is not None:
            key_size = len(key := key if key.isascii() else utf8(key))
        stamp = "" if scheduled is None else self._stamp(scheduled.timestamp())
        trace = "" if metadata is None else "".join(_field(*each) for each in read_trace(metadata).items())
        shape = (kind, publication, len(place), key_size, len(name), len(trace), data is None, stamp == "")
        before, properties, named, mode, end = self._layouts.get(shape) or self._lay_out(message, shape)
        method = self._fixed or self._method(message)
        total, begin, finish = self._sizes.get(len(body)) or self._measure(len(body))
        if body and not begin:
            body = self._split(body)
        return (
            f"{method}{before}{total}{properties}{place}{named}{key or ''}{trace}{mode}{name}{stamp}{end}"
            f"{begin}{body}{finish}"
        )

    def _stamp(self, moment: float) -> str:
        """Return a time in seconds; nothing where it is before 1970: AMQP counts without a sign."""
        if (seconds := floor(moment)) != self._stamped[0]:
            self._stamped = (seconds, characters(_LONG_LONG.pack(seconds)) if moment >= 0 else "")
        return self._stamped[1]

    def _lay_out(self, message: Message, shape: _Shape) -> _Layout:
        """Encode what stands between the values of every message of this shape: properties in AMQP's order."""
        kind, publication, place_size, key_size, name_size, trace_size, is_tombstone, is_undated = shape
        if name_size > _SHORT:
            raise build_refusal(message, f"its message_id is longer than the {_SHORT} bytes that AMQP allows")
        flags = _HEADERS_AND_DELIVERY_MODE | _MESSAGE_ID
        flags |= 0 if is_tombstone else _CONTENT_TYPE
        flags |= 0 if is_undated else _DATED
        end = _FRAME_END
        if kind is not None:
            flags |= _TYPE
            end = _short(message, "type", kind) + end
        named = "" if publication is None else f"{_PUBLICATION_NAME}{_long(len(utf8(publication)))}{utf8(publication)}"
        named += _TOMBSTONE if is_tombstone else ""
        named += "" if key_size is None else f"{_KEY_NAME}{_long(key_size)}"
        of_place = f"{self._of_owner}{_PLACE_NAME}{_long(place_size)}"
        headers = len(of_place) + place_size + len(named) + (key_size or 0) + trace_size
        content_type = "" if is_tombstone else _JSON
        mode = self._delivery_mode + chr(name_size)
        dated = 0 if is_undated else _LONG_LONG.size
        size = _CONTENT_SIZE + len(content_type) + _LONG.size + headers + len(mode) + name_size + dated + len(end) - 1
        if size > self._step:
            raise build_refusal(
                message, f"its headers are longer than the {self._step} bytes of the broker's frame_max"
            )
        if len(self._layouts) >= KEPT:
            self._layouts.clear()
        before = characters(_BEGINNING.pack(_HEADER_FRAME, CHANNEL, size, _BASIC, 0))
        properties = f"{characters(_FLAGS.pack(flags))}{content_type}{_long(headers)}{of_place}"
        return self._layouts.setdefault(shape, (before, properties, named, mode, end))

    def _measure(self, size: int) -> tuple[str, str, str]:
        """Return the size of a payload as the content header has it, and what stands before and behind its one frame.

        Those are empty where it has no frame, or several.
        """
        if len(self._sizes) >= KEPT:
            self._sizes.clear()
        total = characters(_LONG_LONG.pack(size))
        one = (_begin_body(size), _FRAME_END) if 0 < size <= self._step else ("", "")
        return self._sizes.setdefault(size, (total, *one))

    def _split(self, body: str) -> str:
        parts = (body[start : start + self._step] for start in range(0, len(body), self._step))
        return "".join(f"{_begin_body(len(part))}{part}{_FRAME_END}" for part in parts)

    def _method(self, message: Message) -> str:
        """Return the frame of `basic.publish`, which only the routing key changes."""
        of = (message.message_type, message.publication_id, message.partition_key if self._by_key else None)
        if (found := self._methods.get(of)) is not None:
            return found
        field = "target.rabbitmq.routingKey"
        key = fill_template(self._target.routing_key, message, field=field, without_key="")
        if len(key.encode()) > _SHORT:
            raise build_refusal(message, f"its routing key is longer than the {_SHORT} bytes that AMQP allows")
        if len(self._methods) >= KEPT:
            self._methods.clear()
        return self._methods.setdefault(of, self._encode_method(key))

    def _encode_method(self, key: str) -> str:
        publish = commands.Basic.Publish(
            exchange=self._target.exchange, routing_key=key, mandatory=self._target.mandatory
        )
        return characters(frame.marshal(publish, CHANNEL))


def _long(number: int) -> str:
    return characters(_LONG.pack(number))


def _field(name: str, value: Any) -> str:
    """Encode one entry of the table of headers."""
    return characters(encode.short_string(name) + encode.encode_table_value(value))


def _named(name: str) -> str:
    """Encode the beginning of an entry whose value is text: its length follows."""
    return characters(encode.short_string(name)) + "S"


_JSON: Final = characters(encode.short_string("application/json"))
_PLACE_NAME: Final = _named(PLACE)
_PUBLICATION_NAME: Final = _named("x-outbox-publication")
_KEY_NAME: Final = _named("x-outbox-partition-key")
_TOMBSTONE: Final = _field("x-outbox-tombstone", True)


def _begin_body(size: int) -> str:
    return characters(_FRAME.pack(_BODY_FRAME, CHANNEL, size))


def _short(message: Message, name: str, value: str) -> str:
    encoded = utf8(value)
    if len(encoded) > _SHORT:
        raise build_refusal(message, f"its {name} is longer than the {_SHORT} bytes that AMQP allows")
    return chr(len(encoded)) + encoded
