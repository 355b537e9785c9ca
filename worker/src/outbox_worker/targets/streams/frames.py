"""PURE: frames of RabbitMQ's stream protocol, as far as a publisher needs them.

Its reference is `deps/rabbitmq_stream/docs/PROTOCOL.adoc` of rabbitmq/rabbitmq-server: a frame is its size, a key, a
version, and fields in big endian order; a string has its length before it in 2 bytes, bytes and lists in 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct, error, unpack_from
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SIZE: Final = Struct(">I")
_HEAD: Final = Struct(">HH")
_VERSION: Final = 1
_ANSWER: Final = 0x8000
U8: Final = Struct(">B")
U16: Final = Struct(">H")
U32: Final = Struct(">I")
"""Also how long a list is."""
U64: Final = Struct(">Q")
_PUBLISH: Final = Struct(">IHHBI")
_ENTRY: Final = Struct(">QI")
ENTRY_OVERHEAD: Final = _ENTRY.size
PUBLISH_OVERHEAD: Final = _PUBLISH.size
"""Bytes of a frame that publishes, besides its entries."""


class Key(IntEnum):
    """What a frame is."""

    DECLARE_PUBLISHER = 1
    PUBLISH = 2
    PUBLISH_CONFIRM = 3
    PUBLISH_ERROR = 4
    QUERY_PUBLISHER_SEQUENCE = 5
    METADATA = 15
    METADATA_UPDATE = 16
    PEER_PROPERTIES = 17
    SASL_HANDSHAKE = 18
    SASL_AUTHENTICATE = 19
    TUNE = 20
    OPEN = 21
    CLOSE = 22
    HEARTBEAT = 23


class Code(IntEnum):
    """What the broker answers; others than these are shown by their number."""

    OK = 1
    NO_SUCH_STREAM = 2
    STREAM_NOT_AVAILABLE = 6
    AUTHENTICATION_FAILED = 8
    SASL_ERROR = 9
    REFUSED_FROM_ELSEWHERE = 11
    VIRTUAL_HOST_REFUSED = 12
    FRAME_TOO_LARGE = 14
    INTERNAL_ERROR = 15
    ACCESS_REFUSED = 16
    PRECONDITION_FAILED = 17
    NO_SUCH_PUBLISHER = 18


def describe_code(code: int) -> str:
    """Return an answer for people."""
    try:
        return Code(code).name.lower().replace("_", " ")
    except ValueError:
        return f"code {code}"


class UnreadableError(Exception):
    """A frame that ends too early, or that is none."""


def string(text: str) -> bytes:
    """Encode text of at most 32,767 bytes."""
    encoded = text.encode()
    return U16.pack(len(encoded)) + encoded


def properties(pairs: Mapping[str, str]) -> bytes:
    """Encode a list of names and values."""
    return U32.pack(len(pairs)) + b"".join(string(name) + string(value) for name, value in pairs.items())


def frame(key: Key, *fields: bytes) -> bytes:
    """Put a frame together."""
    body = _HEAD.pack(key, _VERSION) + b"".join(fields)
    return SIZE.pack(len(body)) + body


def publish(publisher: int, entries: list[tuple[int, bytes]]) -> bytes:
    """Put a frame together that publishes messages, each with its number."""
    parts = [b""]
    for each, message in entries:
        parts.append(_ENTRY.pack(each, len(message)))
        parts.append(message)
    body = b"".join(parts)
    return (
        _PUBLISH.pack(PUBLISH_OVERHEAD - SIZE.size + len(body), Key.PUBLISH, _VERSION, publisher, len(entries)) + body
    )


@dataclass(slots=True)
class Received:
    """A frame of the broker: what it is, whether it answers one of ours, and its fields, read one after the other."""

    key: int
    is_answer: bool
    _data: memoryview
    _at: int = 4

    def number(self, form: Struct) -> int:
        """Read a number of this size."""
        try:
            (value,) = form.unpack_from(self._data, self._at)
        except error as err:
            raise UnreadableError from err
        self._at += form.size
        return int(value)

    def longs(self) -> tuple[int, ...]:
        """Read a list of numbers of 8 bytes."""
        count = self.number(U32)
        if count * U64.size > len(self._data) - self._at:
            raise UnreadableError
        values = unpack_from(f">{count}Q", self._data, self._at)
        self._at += count * U64.size
        return values

    def string(self) -> str:
        """Read text; one that is not there is empty."""
        size = self.number(U16)
        if size == 0xFFFF:
            return ""
        text = bytes(self._data[self._at : self._at + size])
        if len(text) < size:
            raise UnreadableError
        self._at += size
        return text.decode(errors="replace")

    def properties(self) -> dict[str, str]:
        """Read a list of names and values."""
        return {self.string(): self.string() for _ in range(self.number(U32))}


def read_frame(body: bytes) -> Received:
    """Read what a frame is.

    Raises:
        UnreadableError: it is too short, or of another version.

    """
    if len(body) < _HEAD.size:
        raise UnreadableError
    key, version = _HEAD.unpack_from(body)
    if version != _VERSION:
        raise UnreadableError
    return Received(key & ~_ANSWER, bool(key & _ANSWER), memoryview(body))
