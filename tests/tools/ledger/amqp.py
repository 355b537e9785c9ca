"""A consumer of a few dozen lines for RabbitMQ: declares, binds, counts and drains a queue over one plain connection.

The product's own publisher is not used here on purpose.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pamqp import body, commands, frame, header

from tests.tools.ledger.account import Handled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_Reply = TypeVar("_Reply")
_CHANNEL = 1
_FRAME_MAX = 131_072
_HEADER = struct.Struct(">BHI")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as the broker handed it over."""

    message_id: str
    message_type: str
    headers: dict[str, Any]
    body: bytes

    def as_handled(self) -> Handled:
        """Read which order message it is from its payload, and who published it from its headers."""
        handler = format_handler(self.headers.get("x-outbox-pod", "?"), self.headers.get("x-outbox-epoch", 0))
        return Handled.read(self.message_id, self.body, handler)


def format_handler(pod: Any, epoch: Any) -> str:
    """Name one life of a publisher: its pod, and the epoch of its lease, because a restarted pod keeps its name."""
    return f"{pod} (epoch {epoch})"


class BrokerError(Exception):
    """The broker closed the connection or answered something else than was asked for."""


class Broker:
    """One connection with one channel."""

    def __init__(self, host: str, port: int, username: str, password: str, vhost: str = "/") -> None:
        """Connect and log in.

        Raises:
            BrokerError: the broker refuses.
            OSError: nobody answers.

        """
        self._socket = socket.create_connection((host, port), timeout=30)
        self._buffer = b""
        self._at = 0
        try:
            self._log_in(username, password, vhost)
        except BaseException:
            self._socket.close()
            raise

    def _log_in(self, username: str, password: str, vhost: str) -> None:
        self._socket.sendall(frame.marshal(header.ProtocolHeader(), 0))
        self._expect(commands.Connection.Start)
        self._send(commands.Connection.StartOk({}, "PLAIN", f"\0{username}\0{password}"), 0)
        tune = self._expect(commands.Connection.Tune)
        self._send(commands.Connection.TuneOk(tune.channel_max, tune.frame_max or _FRAME_MAX, 0), 0)
        self._send(commands.Connection.Open(vhost), 0)
        self._expect(commands.Connection.OpenOk)
        self._send(commands.Channel.Open(), _CHANNEL)
        self._expect(commands.Channel.OpenOk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.close()

    def declare(
        self, queue: str, exchange: str = "", routing_key: str = "#", *, arguments: dict[str, Any] | None = None
    ) -> None:
        """Make a durable queue and, with an exchange named, bind it to that (a durable topic exchange)."""
        made = commands.Queue.Declare(queue=queue, durable=True, arguments=arguments or {})
        self._call(made, commands.Queue.DeclareOk)
        if exchange:
            declare = commands.Exchange.Declare(exchange=exchange, exchange_type="topic", durable=True)
            self._call(declare, commands.Exchange.DeclareOk)
            bind = commands.Queue.Bind(queue=queue, exchange=exchange, routing_key=routing_key)
            self._call(bind, commands.Queue.BindOk)

    def count(self, queue: str) -> int:
        """Messages that wait in the queue."""
        declare = commands.Queue.Declare(queue=queue, passive=True)
        return self._call(declare, commands.Queue.DeclareOk).message_count or 0

    def drain(self, queue: str) -> list[Delivery]:
        """Take everything that waits in the queue, in its order; once, when all is there.

        What comes later is sent to this client too, waits in no queue, and is not returned by another call.
        """
        waiting = self.count(queue)
        if not waiting:
            return []
        self._call(commands.Basic.Consume(queue=queue, no_ack=True, exclusive=True), commands.Basic.ConsumeOk)
        deliveries = self._deliveries()
        return [next(deliveries) for _ in range(waiting)]

    def consume(self, queue: str) -> Iterator[Delivery]:
        """Take whatever comes, for ever; what is on its way when the connection ends is gone.

        Raises:
            BrokerError: the broker closed the connection.
            OSError: nothing came for the socket's timeout, or the connection broke.

        """
        self._call(commands.Basic.Consume(queue=queue, no_ack=True), commands.Basic.ConsumeOk)
        return self._deliveries()

    def publish(self, queue: str, message_id: str, payload: bytes, headers: dict[str, Any] | None = None) -> None:
        """Put one message straight into a queue (for the tests of this client)."""
        properties = commands.Basic.Properties(message_id=message_id, message_type="test", headers=headers or {})
        self._send(commands.Basic.Publish(routing_key=queue), _CHANNEL)
        self._socket.sendall(frame.marshal(header.ContentHeader(0, len(payload), properties), _CHANNEL))
        for start in range(0, len(payload), _FRAME_MAX // 2):
            piece = payload[start : start + _FRAME_MAX // 2]
            self._socket.sendall(frame.marshal(body.ContentBody(piece), _CHANNEL))

    def _deliveries(self) -> Iterator[Delivery]:
        while True:
            self._expect(commands.Basic.Deliver)
            head = self._expect(header.ContentHeader)
            payload = bytearray()
            while len(payload) < head.body_size:
                payload += self._expect(body.ContentBody).value
            properties = head.properties
            headers = {str(key): value for key, value in (properties.headers or {}).items()}
            yield Delivery(properties.message_id or "", properties.message_type or "", headers, bytes(payload))

    def _call(self, command: Any, reply: type[_Reply]) -> _Reply:
        self._send(command, _CHANNEL)
        return self._expect(reply)

    def _send(self, command: Any, channel: int) -> None:
        self._socket.sendall(frame.marshal(command, channel))

    def _expect(self, kind: type[_Reply]) -> _Reply:
        while True:
            got = self._next_frame()
            if isinstance(got, kind):
                return got
            if isinstance(got, commands.Connection.Close | commands.Channel.Close):
                raise BrokerError(f"the broker closed: {got.reply_code} {got.reply_text}")

    def _next_frame(self) -> Any:
        kind_channel_size = self._take(_HEADER.size)
        _kind, _channel, size = _HEADER.unpack(kind_channel_size)
        return frame.unmarshal(kind_channel_size + self._take(size + 1))[2]

    def _take(self, size: int) -> bytes:
        """Cut `size` bytes off what has arrived; what was read ahead stays, without copying it for each frame."""
        while len(self._buffer) - self._at < size:
            more = self._socket.recv(1 << 20)
            if not more:
                raise BrokerError("the broker hung up")
            self._buffer = self._buffer[self._at :] + more
            self._at = 0
        self._at += size
        return self._buffer[self._at - size : self._at]
