"""Streams of RabbitMQ as an independent client reads them: rstream, which shares nothing with the worker's own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rstream import AMQPMessage, Consumer, ConsumerOffsetSpecification, OffsetType, amqp_decoder

if TYPE_CHECKING:
    from tests.support.servers.rabbitmq import RabbitmqServer

STREAM = {"x-queue-type": "stream"}
"""What makes a queue a stream, when it is declared."""
QUIET_SECONDS = 0.5


@dataclass(frozen=True)
class Entry:
    """One message of a stream."""

    message_id: str
    subject: str | None
    content_type: str | None
    creation_time: int | None
    headers: dict[str, Any]
    body: bytes


def read_stream(server: RabbitmqServer, stream: str, count: int, seconds: float = 30.0) -> list[Entry]:
    """Return all that a stream has, once that is `count` messages or more and nothing more comes."""
    return asyncio.run(_read(server, stream, count, seconds))


async def _read(server: RabbitmqServer, stream: str, count: int, seconds: float) -> list[Entry]:
    found: list[Entry] = []

    async def take(message: AMQPMessage, _context: Any) -> None:
        found.append(_entry(message))

    consumer = Consumer("127.0.0.1", server.stream_port, username="tests", password="s3cret word")
    try:
        first = ConsumerOffsetSpecification(OffsetType.FIRST, None)
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


def _entry(message: AMQPMessage) -> Entry:
    about = message.properties
    headers = {_text(name): _text(value) for name, value in (message.application_properties or {}).items()}
    return Entry(
        str(_text(about.message_id)), _text(about.subject), _text(about.content_type), about.creation_time, headers,
        bytes(message.body),
    )  # fmt: skip


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
