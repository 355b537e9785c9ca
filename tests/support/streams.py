"""Streams of RabbitMQ as an independent client reads them: rstream, which shares nothing with the worker's own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

from rstream import AMQPMessage, Consumer, ConsumerOffsetSpecification, MessageContext, OffsetType, amqp_decoder

if TYPE_CHECKING:
    from tests.support.servers.rabbitmq import RabbitmqServer

STREAM = {"x-queue-type": "stream"}
"""What makes a queue a stream, when it is declared."""
QUIET_SECONDS = 0.5
_INDEX_ENTRY = Struct(">QQQIB")
"""Of a chunk: first offset, time, epoch, where it begins in its segment, kind."""
_CHUNK_HEAD = Struct(">BBHI")
"""Magic, kind, entries, messages."""
_FILE_HEAD = 8
_USER_CHUNK = 0
"""The kind of a chunk of messages."""


@dataclass(frozen=True)
class Entry:
    """One message of a stream."""

    message_id: str
    subject: str | None
    content_type: str | None
    creation_time: int | None
    headers: dict[str, Any]
    body: bytes
    at: float
    """When the broker had it, in seconds since 1970."""
    offset: int


def read_stream(
    server: RabbitmqServer, stream: str, count: int, seconds: float = 30.0, *, offset: int = 0
) -> list[Entry]:
    """Return all that a stream has from an offset on, once that is `count` messages or more and nothing more comes."""
    return asyncio.run(_read(server, stream, count, seconds, offset))


async def _read(server: RabbitmqServer, stream: str, count: int, seconds: float, offset: int) -> list[Entry]:
    found: list[Entry] = []

    async def take(message: AMQPMessage, context: MessageContext) -> None:
        found.append(_entry(message, context))

    consumer = Consumer("127.0.0.1", server.stream_port, username="tests", password="s3cret word")
    try:
        first = ConsumerOffsetSpecification(OffsetType.OFFSET, offset)
        await consumer.subscribe(stream, take, decoder=amqp_decoder, offset_specification=first)
        until, known, since = time.monotonic() + seconds, -1, time.monotonic()
        while len(found) < count or time.monotonic() - since < QUIET_SECONDS:
            assert time.monotonic() < until, f"{len(found)} messages of {count} in stream {stream}"
            if len(found) != known:
                known, since = len(found), time.monotonic()
            await asyncio.sleep(0.05)
    finally:
        await consumer.close()
    return found


def count_written(server: RabbitmqServer, stream: str) -> int:
    """Return how many messages a stream has, from the files of its node.

    The broker itself counts them anew every five seconds, which is too seldom to measure with. Layout of the files:
    osiris, `src/osiris_log.erl`. The folder is named for the virtual host, `/`, and the stream. What the broker notes
    of publishers is in chunks of its own, which have offsets too: a new segment begins with one.
    """
    next_offset = notes = 0
    for path in sorted(Path(server.directory).glob(f"data/*/stream/__{stream}_*/*.index")):
        entries = path.read_bytes()[_FILE_HEAD:]
        whole = entries[: len(entries) // _INDEX_ENTRY.size * _INDEX_ENTRY.size]
        found = list(_INDEX_ENTRY.iter_unpack(whole))
        notes += sum(kind != _USER_CHUNK for *_, kind in found)
        if found:
            first, _, _, place, _ = found[-1]
            with path.with_suffix(".segment").open("rb") as segment:
                segment.seek(place)
                head = segment.read(_CHUNK_HEAD.size)
            next_offset = first + (_CHUNK_HEAD.unpack(head)[3] if len(head) == _CHUNK_HEAD.size else 0)
    return int(next_offset - notes)


def _entry(message: AMQPMessage, context: MessageContext) -> Entry:
    about = message.properties
    headers = {_text(name): _text(value) for name, value in (message.application_properties or {}).items()}
    return Entry(
        str(_text(about.message_id)), _text(about.subject), _text(about.content_type), about.creation_time, headers,
        bytes(message.body), context.timestamp / 1000, context.offset,
    )  # fmt: skip


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
