"""What a consumer of Kafka sees of a topic: all that is committed, in the order of each of its partitions."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from tests.tools.ledger.account import Handled
from tests.tools.ledger.amqp import format_handler

if TYPE_CHECKING:
    from confluent_kafka import Message

_AT_ONCE: Final = 10_000
_LOOK_SECONDS: Final = 1.0


def read_topic(servers: str, topic: str, seconds: float = 60.0) -> list[tuple[float, Handled]]:
    """Read all that is committed in a topic, with the times (seconds since 1970) at which it came, as the topic says.

    Raises:
        TimeoutError: after so many seconds there is a record behind the last that can be read: a transaction is open.
        KafkaException: the broker does not answer.

    """
    deadline, found = time.monotonic() + seconds, []
    with closing(_connect(servers, "read_uncommitted")) as consumer:
        numbers = consumer.list_topics(topic, timeout=seconds).topics[topic].partitions
        places = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in numbers]
        ends = {place.partition: consumer.get_watermark_offsets(place, timeout=seconds)[1] for place in places}
    with closing(_connect(servers, "read_committed")) as consumer:
        consumer.assign(places)
        while any(ends.values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} has records up to {ends} that cannot be read: a transaction is open")
            for message in consumer.consume(_AT_ONCE, timeout=_LOOK_SECONDS):
                error = message.error()
                if error is None:
                    found.append((message.timestamp()[1] / 1000, _as_handled(message)))
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                elif (message.offset() or 0) >= ends[message.partition() or 0]:
                    ends[message.partition() or 0] = 0
    return found


def _connect(servers: str, isolation: str) -> Consumer:
    settings: dict[str, Any] = {"bootstrap.servers": servers, "group.id": "ledger", "enable.auto.commit": False}
    return Consumer(settings | {"isolation.level": isolation, "enable.partition.eof": True})


def _as_handled(message: Message) -> Handled:
    headers = {name: value.decode() for name, value in cast("list[tuple[str, bytes]]", message.headers() or [])}
    handler = format_handler(headers["x-outbox-pod"], headers["x-outbox-epoch"])
    return Handled.read(headers["x-outbox-message-id"], message.value() or b"", handler)
