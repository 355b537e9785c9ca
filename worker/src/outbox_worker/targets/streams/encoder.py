"""PURE: a message as AMQP 1.0 writes it, which is what clients of streams expect to read.

Sections and types: OASIS AMQP 1.0, part 3 section 2 (message format) and part 1 section 6 (types). The application
properties are the headers of target `rabbitmq`; what all messages share is encoded once.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import TYPE_CHECKING, Final

from outbox_worker.targets.trace_context import read_trace

if TYPE_CHECKING:
    from outbox_core.message import Message

_PROPERTIES: Final = b"\x00\x53\x73"
_APPLICATION_PROPERTIES: Final = b"\x00\x53\x74"
_DATA: Final = b"\x00\x53\x75"
_NULL: Final = b"\x40"
_TRUE: Final = b"\x41"
_LIST: Final = b"\xd0"
_MAP: Final = b"\xd1"
_COMPOUND: Final = Struct(">II")
_TIMESTAMP: Final = Struct(">cq")
_LONG: Final = Struct(">cq")
_BYTE_LENGTH: Final = 256
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_PAIR: Final = 2


def _variable(short: bytes, long: bytes, value: bytes) -> bytes:
    """Encode with a length of 1 or of 4 bytes."""
    size = len(value)
    if size < _BYTE_LENGTH:
        return b"%b%c%b" % (short, size, value)
    return b"%b%b%b" % (long, size.to_bytes(4, "big"), value)


def _text(value: str) -> bytes:
    return _variable(b"\xa1", b"\xb1", value.encode())


def _compound(kind: bytes, count: int, items: bytes) -> bytes:
    return kind + _COMPOUND.pack(len(items) + 4, count) + items


_JSON: Final = _variable(b"\xa3", b"\xb3", b"application/json")
_PLACE: Final = _text("x-outbox-checkpoint")
_PUBLICATION: Final = _text("x-outbox-publication")
_KEY: Final = _text("x-outbox-partition-key")
_TOMBSTONE: Final = _text("x-outbox-tombstone") + _TRUE


class StreamEncoder:
    """Encodes the messages of one processor."""

    def __init__(self, *, processor_id: str, pod: str) -> None:
        """Prepare what is the same in every message: `x-outbox-processor` and `x-outbox-pod`."""
        self._same = b"".join(map(_text, ("x-outbox-processor", processor_id, "x-outbox-pod", pod)))
        self._of_epoch: tuple[int, bytes] = (-1, b"")

    def encode(self, message: Message, epoch: int) -> bytes:
        """Return properties, application properties and the payload as data; `epoch`: `x-outbox-epoch`."""
        payload = b"" if message.data is None else message.data.encode()
        return b"".join(
            (
                _PROPERTIES,
                _properties(message),
                _APPLICATION_PROPERTIES,
                self._headers(message, epoch),
                _DATA,
                _variable(b"\xa0", b"\xb0", payload),
            )
        )

    def _headers(self, message: Message, epoch: int) -> bytes:
        if self._of_epoch[0] != epoch:
            self._of_epoch = (epoch, self._same + _text("x-outbox-epoch") + _LONG.pack(b"\x81", epoch))
        parts = [self._of_epoch[1], _PLACE, _text(message.pair)]
        count = 4
        if message.publication_id is not None:
            parts += (_PUBLICATION, _text(message.publication_id))
            count += 1
        if message.partition_key is not None:
            parts += (_KEY, _text(message.partition_key))
            count += 1
        if message.data is None:
            parts.append(_TOMBSTONE)
            count += 1
        for name, value in read_trace(message.metadata).items():
            parts += (_text(name), _text(value))
            count += 1
        return _compound(_MAP, count * _PAIR, b"".join(parts))


def _properties(message: Message) -> bytes:
    """message-id, user-id, to, subject, reply-to, correlation-id, content-type, ..., creation-time."""
    subject = _NULL if message.message_type is None else _text(message.message_type)
    content = _NULL if message.data is None else _JSON
    fields = [_text(message.message_id), _NULL, _NULL, subject, _NULL, _NULL, content]
    if message.scheduled is not None:
        milliseconds = (message.scheduled - _EPOCH) // _MILLISECOND
        fields += (_NULL, _NULL, _TIMESTAMP.pack(b"\x83", milliseconds))
    return _compound(_LIST, len(fields), b"".join(fields))
