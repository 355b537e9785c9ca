"""PURE: a message as AMQP 1.0 writes it, which is what clients of streams expect to read.

Sections and types: OASIS AMQP 1.0, part 3 section 2 (message format) and part 1 section 6 (types). The application
properties are the headers of target `rabbitmq`. What many messages share is encoded once, and a message is put together
as text (`outbox_worker.targets.values`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import TYPE_CHECKING, Final, TypeAlias

from outbox_worker.targets.values import KEPT, characters, read_trace, utf8

if TYPE_CHECKING:
    from outbox_core.message import Message

_PROPERTIES: Final = "\x00\x53\x73"
_APPLICATION_PROPERTIES: Final = "\x00\x53\x74"
_DATA: Final = "\x00\x53\x75"
_NULL: Final = "\x40"
_TRUE: Final = "\x41"
_TIMESTAMP: Final = "\x83"
_LIST: Final = "\xd0"
_MAP: Final = "\xd1"
_TEXT: Final = "\xa1", "\xb1"
_SYMBOL: Final = "\xa3", "\xb3"
_BINARY: Final = "\xa0", "\xb0"
"""The codes of a type, with a length of 1 and of 4 bytes."""
_SIZE: Final = Struct(">I")
_COMPOUND: Final = Struct(">II")
_LONG: Final = Struct(">cq")
_MOMENT: Final = Struct(">q")
_BYTE_LENGTH: Final = 256
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_PAIR: Final = 2

_Shape: TypeAlias = tuple[str | None, str | None, int, int | None, int, int, int, bool, bool]
"""What of a message decides what stands between its values: type, publication, lengths of place, key and id, number and
length of the trace context's headers, whether it has a payload and a time."""
_Layout: TypeAlias = tuple[str, str, str, str]
"""What stands before the id, the time, the place, and the key."""


def _begin(kind: tuple[str, str], size: int) -> str:
    """Return what stands before a value of so many bytes."""
    short, long = kind
    return short + chr(size) if size < _BYTE_LENGTH else long + characters(_SIZE.pack(size))


def _text(value: str) -> str:
    encoded = utf8(value)
    return _begin(_TEXT, len(encoded)) + encoded


def _begin_compound(kind: str, count: int, size: int) -> str:
    return kind + characters(_COMPOUND.pack(size + 4, count))


_JSON: Final = _begin(_SYMBOL, len("application/json")) + "application/json"
_PLACE: Final = _text("x-outbox-checkpoint")
_PUBLICATION: Final = _text("x-outbox-publication")
_KEY: Final = _text("x-outbox-partition-key")
_TOMBSTONE: Final = _text("x-outbox-tombstone") + _TRUE


class StreamEncoder:
    """Encodes the messages of one processor."""

    def __init__(self, *, processor_id: str, pod: str) -> None:
        """Prepare what is the same in every message: `x-outbox-processor` and `x-outbox-pod`."""
        self._same = "".join(map(_text, ("x-outbox-processor", processor_id, "x-outbox-pod", pod)))
        self._epoch = -1
        self._of_owner = ""
        self._layouts: dict[_Shape, _Layout] = {}
        self._stamped: tuple[datetime | None, str] = (None, "")

    def encode(self, message: Message, epoch: int) -> bytes:
        """Return properties, application properties and the payload as data; `epoch`: `x-outbox-epoch`."""
        if self._epoch != epoch:
            self._epoch = epoch
            self._of_owner = self._same + _text("x-outbox-epoch") + characters(_LONG.pack(b"\x81", epoch))
            self._layouts.clear()
        transaction_id, position, name, kind, publication, key, data, metadata, scheduled, _ = message
        place, body, key_size = f"{transaction_id}:{position}", data or "", None
        if not (name.isascii() and body.isascii()):
            name, body = utf8(name), utf8(body)
        if key is not None:
            key_size = len(key := utf8(key))
        headers = () if metadata is None else read_trace(metadata).items()
        trace = "".join(f"{_text(header)}{_text(value)}" for header, value in headers) if headers else ""
        stamp = "" if scheduled is None else self._stamp(scheduled)
        shape = (
            kind, publication, len(place), key_size, len(name), len(headers), len(trace), data is None, stamp == "",
        )  # fmt: skip
        before, dated, owned, named = self._layouts.get(shape) or self._lay_out(shape)
        sized = _begin(_BINARY, len(body))
        text = f"{before}{name}{dated}{stamp}{owned}{place}{named}{key or ''}{trace}{_DATA}{sized}{body}"
        return text.encode("latin-1")

    def _stamp(self, moment: datetime) -> str:
        """Return a time in milliseconds; the messages of a transaction have the same."""
        if moment != self._stamped[0]:
            self._stamped = (moment, characters(_MOMENT.pack((moment - _EPOCH) // _MILLISECOND)))
        return self._stamped[1]

    def _lay_out(self, shape: _Shape) -> _Layout:
        """Encode what stands between the values of every message of this shape.

        Properties: message-id, user-id, to, subject, reply-to, correlation-id, content-type, ..., creation-time.
        """
        kind, publication, place_size, key_size, name_size, traced, trace_size, is_tombstone, is_undated = shape
        identity, moment = _begin(_TEXT, name_size), 0 if is_undated else _MOMENT.size
        dated = _NULL * 2 + (_NULL if kind is None else _text(kind)) + _NULL * 2 + (_NULL if is_tombstone else _JSON)
        dated += "" if is_undated else _NULL * 2 + _TIMESTAMP
        size = len(identity) + name_size + len(dated) + moment
        before = _PROPERTIES + _begin_compound(_LIST, 7 if is_undated else 10, size) + identity

        placed = self._of_owner + _PLACE + _begin(_TEXT, place_size)
        named = "" if publication is None else _PUBLICATION + _text(publication)
        named += _TOMBSTONE if is_tombstone else ""
        named += "" if key_size is None else _KEY + _begin(_TEXT, key_size)
        size = len(placed) + place_size + len(named) + (key_size or 0) + trace_size
        count = 4 + (publication is not None) + is_tombstone + (key_size is not None) + traced
        owned = _APPLICATION_PROPERTIES + _begin_compound(_MAP, count * _PAIR, size) + placed
        if len(self._layouts) >= KEPT:
            self._layouts.clear()
        return self._layouts.setdefault(shape, (before, dated, owned, named))
