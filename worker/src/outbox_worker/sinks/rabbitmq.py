"""Target `rabbitmq`: a batch is written at once and counts as delivered when the broker has confirmed all of it.

AtLeastOnce: after any fault the whole batch is published again, every message with the same `message_id`.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands, frame, header

from outbox_core.errors import ConfigurationError, HandlerError, TransientError
from outbox_core.report import Reason
from outbox_worker.amqp import CHANNEL, AmqpConnection
from outbox_worker.broker import read_broker_address
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outbox_core.message import Batch, Message
    from outbox_core.spec import RabbitmqTarget

_WINDOW: Final = 4_194_304
"""Bytes encoded before they are written: a batch of large messages is not held twice."""
_SHORT: Final = 255
"""Bytes that AMQP's short strings hold."""
_PLACEHOLDER: Final = re.compile(r"\{(\w*)\}")
_FRAME_OVERHEAD: Final = 8


class RabbitmqSink:
    """Publisher of one processor."""

    def __init__(self, target: RabbitmqTarget, directory: Path, *, timeout: float, processor_id: str, pod: str) -> None:
        """Keep the settings; nothing is opened.

        Args:
            target: the resource's words.
            directory: the mounted Secret of `target.connection`.
            timeout: seconds for one batch.
            processor_id: named in headers and in the broker's list of connections.
            pod: who publishes, named in headers: a receiver can tell whose a duplicate was.

        """
        self._target = target
        self._directory = directory
        self._timeout = timeout
        self._processor_id = processor_id
        self._pod = pod
        self._connection: AmqpConnection | None = None
        self._methods: dict[str, bytes] = {}

    def check(self) -> None:
        """Look at the Secret and the routing key. The broker itself is asked when there is something to publish."""
        read_broker_address(self._directory)
        unknown = set(_PLACEHOLDER.findall(self._target.routing_key)) - {"messageType", "publicationId", "partitionKey"}
        if unknown:
            raise ConfigurationError(
                f"target.rabbitmq.routingKey names {sorted(unknown)}; it knows {{messageType}}, {{publicationId}} and "
                "{partitionKey}"
            )

    def changed(self) -> bool:
        """Nothing that is read only once: the Secret is read at every connect."""
        return False

    def keep_alive(self) -> None:
        """Heartbeat; a connection that the broker closed meanwhile is dropped and made again when needed."""
        if self._connection is not None:
            try:
                self._connection.keep_alive()
            except (TransientError, ConfigurationError):
                self.close()

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def deliver(self, batch: Batch, epoch: int) -> int:
        """Publish the batch and await every confirm."""
        deadline = time.monotonic() + self._timeout
        try:
            connection = self._open()
            for window in self._encode(batch, epoch, connection):
                connection.publish(window, deadline=deadline)
            connection.await_confirms(deadline=deadline)
            self._judge(connection)
        except BaseException as err:
            self.close()  # its unanswered messages would be counted for the next batch
            if isinstance(err, Interrupted) and not err.draining and len(batch) == 1:  # of several, half may be in time
                raise TransientError(
                    "the broker did not confirm one message within delivery.timeout; it is published until it does",
                    reason=Reason.TARGET_UNAVAILABLE,
                ) from err
            raise
        return len(batch)

    def _open(self) -> AmqpConnection:
        if self._connection is None:
            address = read_broker_address(self._directory)
            self._connection = AmqpConnection(address, name=f"outbox {self._processor_id} {self._pod}")
        return self._connection

    def _judge(self, connection: AmqpConnection) -> None:
        """Raise if not every message was taken by a queue."""
        if connection.returned:
            first = connection.returned[0]
            exchange = f"exchange {first.exchange!r}" if first.exchange else "the default exchange"
            raise TransientError(
                f"{len(connection.returned)} messages of the batch reach no queue ({first.reply}): {exchange} has no "
                f"binding for routing key {first.routing_key!r}; bind a queue, or set target.rabbitmq.mandatory to "
                "false to let the broker drop them",
                reason=Reason.MESSAGE_UNROUTABLE,
            )
        if nacked := connection.confirms.take_nacked():
            raise HandlerError(
                f"the broker refused {len(nacked)} messages of the batch (nack); see its log: a full queue with "
                "overflow reject-publish does this",
                reason=Reason.MESSAGE_REJECTED,
            )

    def _encode(self, batch: Batch, epoch: int, connection: AmqpConnection) -> Iterator[bytes]:
        """Give out the batch's frames in windows, taking a delivery tag for every message."""
        pieces: list[bytes] = []
        size = 0
        for message in batch:
            connection.confirms.publish()
            for piece in self._frames(message, epoch, connection.frame_max - _FRAME_OVERHEAD):
                pieces.append(piece)
                size += len(piece)
            if size >= _WINDOW:
                yield b"".join(pieces)
                pieces, size = [], 0
        if pieces:
            yield b"".join(pieces)

    def _frames(self, message: Message, epoch: int, largest: int) -> Iterator[bytes]:
        payload = message.data.encode()
        for name, value in (("message_id", message.message_id), ("type", message.message_type)):
            if len(value.encode()) > _SHORT:
                raise HandlerError(
                    f"the message at {message.checkpoint} cannot be published: its {name} is longer than the "
                    f"{_SHORT} bytes that AMQP allows",
                    reason=Reason.MESSAGE_REJECTED,
                )
        yield self._method(message)
        yield frame.marshal(
            header.ContentHeader(body_size=len(payload), properties=self._properties(message, epoch)), CHANNEL
        )
        for start in range(0, len(payload), largest):
            piece = payload[start : start + largest]
            # What pamqp's ContentBody gives, without its copies: type 3, channel, size, payload, end mark.
            yield b"\x03" + CHANNEL.to_bytes(2, "big") + len(piece).to_bytes(4, "big") + piece + b"\xce"

    def _method(self, message: Message) -> bytes:
        key = (
            self._target.routing_key.replace("{messageType}", message.message_type)
            .replace("{publicationId}", message.publication_id)
            .replace("{partitionKey}", message.partition_key or "")
        )
        if key not in self._methods:
            if len(key.encode()) > _SHORT:
                raise HandlerError(
                    f"the message at {message.checkpoint} cannot be published: its routing key is longer than the "
                    f"{_SHORT} bytes that AMQP allows",
                    reason=Reason.MESSAGE_REJECTED,
                )
            if len(self._methods) > 10_000:
                self._methods.clear()
            publish = commands.Basic.Publish(
                exchange=self._target.exchange, routing_key=key, mandatory=self._target.mandatory
            )
            self._methods[key] = frame.marshal(publish, CHANNEL)
        return self._methods[key]

    def _properties(self, message: Message, epoch: int) -> commands.Basic.Properties:
        headers: dict[str, Any] = {
            "x-outbox-publication": message.publication_id,
            "x-outbox-checkpoint": str(message.checkpoint),
            "x-outbox-processor": self._processor_id,
            "x-outbox-pod": self._pod,
            "x-outbox-epoch": epoch,
        }
        if message.partition_key is not None:
            headers["x-outbox-partition-key"] = message.partition_key
        return commands.Basic.Properties(
            content_type="application/json",
            headers=headers,
            delivery_mode=2 if self._target.persistent else 1,
            message_id=message.message_id,
            timestamp=message.scheduled,
            message_type=message.message_type,
        )
