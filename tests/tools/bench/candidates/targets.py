"""Where our worker hands messages to, how often it has, and what the ledger reads there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import Consumer, TopicPartition
from pamqp import commands
from typing_extensions import override

from tests.support.streams import STREAM, count_written, read_stream
from tests.tools.ledger.account import Handled

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from confluent_kafka import Message

    from tests.tools.bench.servers import Place
    from tests.tools.ledger.amqp import Broker, Delivery


class Target(ABC):
    """One target of one processor."""

    handler: str | None = None
    """Python code of the processor."""

    @abstractmethod
    def open(self, place: Place, name: str) -> None:
        """Make what messages go to."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Return `spec.target`."""

    def uri(self) -> str | None:
        """Return the connection `target`, where there is one."""
        return None

    def write_files(self, connections: Path) -> None:  # noqa: B027 - most have no more than a URI
        """Write what a worker's connections have beside that."""

    @abstractmethod
    def count(self) -> int:
        """Return how many messages it has."""

    @abstractmethod
    def take(self) -> Iterable[Handled]:
        """Read and empty it."""

    def close(self) -> None:  # noqa: B027 - a table goes with its database
        """Remove it."""


class Queue(Target):
    """A queue of RabbitMQ that nothing consumes while it is filled."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = ""
        self._closing = ExitStack()

    @override
    def open(self, place: Place, name: str) -> None:
        self.name = name
        self._uri = place.broker.uri
        arguments = {"x-queue-type": self.kind}
        self.client: Broker = self._closing.enter_context(place.broker.queue(name, **arguments))
        self._place = place

    def bind(self, exchange: str) -> None:
        """Let a topic exchange of that name lead to the queue."""
        declare = commands.Exchange.Declare(exchange=exchange, exchange_type="topic", durable=True)
        self.client._call(declare, commands.Exchange.DeclareOk)
        bind = commands.Queue.Bind(queue=self.name, exchange=exchange, routing_key="#")
        self.client._call(bind, commands.Queue.BindOk)

    @override
    def spec(self) -> dict[str, Any]:
        return {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "routingKey": self.name}}

    @override
    def uri(self) -> str:
        return self._uri

    @override
    def count(self) -> int:
        return self.client.count(self.name)

    @override
    def take(self) -> Iterable[Handled]:
        with self._place.broker.client() as reader:
            return [self.read(each) for each in reader.drain(self.name)]

    def read(self, delivery: Delivery) -> Handled:
        """Return what came; the id is in AMQP's own field, but Debezium puts it into a header."""
        found = delivery.as_handled()
        if found.message_id:
            return found
        header = delivery.headers.get("id", "")
        message_id = header.decode() if isinstance(header, bytes) else str(header)
        return replace(found, message_id=message_id.strip('"'))

    @override
    def close(self) -> None:
        self._closing.close()


class Stream(Queue):
    """A stream of RabbitMQ: it keeps what was read, so each run reads on from where the last one ended."""

    def __init__(self) -> None:
        super().__init__(STREAM["x-queue-type"])
        self._taken = self._offset = 0

    @override
    def spec(self) -> dict[str, Any]:
        return {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": self.name}}

    @override
    def uri(self) -> str:
        return self._place.broker.stream_uri

    @override
    def count(self) -> int:
        return count_written(self._place.broker, self.name) - self._taken

    @override
    def take(self) -> Iterable[Handled]:
        entries = read_stream(self._place.broker, self.name, self.count(), 120.0, offset=self._offset)
        self._taken += len(entries)
        self._offset = entries[-1].offset + 1 if entries else self._offset
        return [Handled.read(each.message_id, each.body) for each in entries]


class Topic(Target):
    """A topic of Kafka with one partition, which has one order."""

    def __init__(self) -> None:
        self.name = ""
        self._taken = 0
        self._consumer: Consumer | None = None

    @override
    def open(self, place: Place, name: str) -> None:
        assert place.kafka is not None, "the case does not name Kafka among its servers"
        self._kafka = place.kafka
        self.name = self._kafka.create_topic(name, partitions=1)
        self._consumer = Consumer({"bootstrap.servers": self.servers, "group.id": name, "enable.auto.commit": False})

    @property
    def servers(self) -> str:
        """Return `bootstrap.servers`."""
        return self._kafka.servers

    @override
    def spec(self) -> dict[str, Any]:
        return {"kafka": {"connection": {"secretRef": {"name": "brokers"}}, "topic": self.name}}

    @override
    def write_files(self, connections: Path) -> None:
        self._kafka.files(connections / "target")

    @override
    def count(self) -> int:
        return self._end() - self._taken

    @override
    def take(self) -> Iterable[Handled]:
        """Read on from where the last run ended; a record's place is its number, for nothing here is a transaction."""
        consumer, end = self._open(), self._end()
        consumer.assign([TopicPartition(self.name, 0, self._taken)])
        found: list[Handled] = []
        while len(found) < end - self._taken:
            records = consumer.consume(10_000, timeout=10)
            assert records, f"topic {self.name} ends at {end} and {self._taken + len(found)} is not there"
            found += [_read(each) for each in records]
        self._taken = end
        return found

    def _open(self) -> Consumer:
        assert self._consumer is not None, "the topic is not open"
        return self._consumer

    def _end(self) -> int:
        _, end = self._open().get_watermark_offsets(TopicPartition(self.name, 0), timeout=10)
        return int(end)

    @override
    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


def _read(record: Message) -> Handled:
    """Return what came; the id is in a header, which Debezium calls otherwise."""
    assert record.error() is None, record.error()
    headers = dict(cast("list[tuple[str, bytes]]", record.headers() or []))
    message_id = headers.get("x-outbox-message-id", headers.get("id", b"")).decode()
    return Handled.read(message_id.strip('"'), cast("bytes", record.value()))
