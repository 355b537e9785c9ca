"""Where our worker hands messages to, how often it has, and what the ledger reads there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pamqp import commands
from typing_extensions import override

from tests.tools.ledger.account import Handled

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        return Handled(message_id.strip('"'), found.key, found.sequence, found.cents, found.handler)

    @override
    def close(self) -> None:
        self._closing.close()
