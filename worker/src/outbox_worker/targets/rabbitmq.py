"""Target `rabbitmq`: a batch is written at once and counts as delivered when the broker has confirmed all of it.

AtLeastOnce: what is published again has the same `message_id`. A message that the broker returns (its header names it)
or refuses (its delivery tag does) is named in the error; what the broker took beside it is not published again by this
process.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands, frame, header
from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.processor.taken import TakenMessages
from outbox_core.report import Reason
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.amqp.broker import read_broker_address
from outbox_worker.targets.amqp.connection import CHANNEL, AmqpConnection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import RabbitmqTarget
    from outbox_worker.settings import Settings
    from outbox_worker.targets.amqp.connection import Returned

_WINDOW: Final = 4_194_304
"""Bytes encoded before they are written: a batch of large messages is not held twice."""
_SHORT: Final = 255
"""Bytes that AMQP's short strings hold."""
_PLACEHOLDER: Final = re.compile(r"\{(\w*)\}")
_FRAME_OVERHEAD: Final = 8
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_PLACE: Final = "x-outbox-checkpoint"
"""The header that names a message that comes back."""


@dataclass(slots=True)
class _Attempt:
    """One attempt at a batch: the messages to publish, those given a delivery tag, and why some failed."""

    messages: list[Message]
    tags: dict[int, Message] = field(default_factory=dict)
    failed: dict[Checkpoint, HandlerError] = field(default_factory=dict)


class RabbitmqSink(OutsideTransaction):
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
        self._taken = TakenMessages()

    @override
    def check(self) -> None:
        """Look at the Secret and the routing key. The broker itself is asked when there is something to publish."""
        read_broker_address(self._directory)
        unknown = set(_PLACEHOLDER.findall(self._target.routing_key)) - {"messageType", "publicationId", "partitionKey"}
        if unknown:
            raise ConfigurationError(
                f"target.rabbitmq.routingKey names {sorted(unknown)}; it knows {{messageType}}, {{publicationId}} and "
                "{partitionKey}"
            )

    @override
    def keep_alive(self) -> None:
        """Heartbeat; a connection that the broker closed meanwhile is dropped and made again when needed."""
        if self._connection is not None:
            try:
                self._connection.keep_alive()
            except (TransientError, ConfigurationError):
                self.close()

    @override
    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        """Publish what the broker has not taken yet of the batch, and await every confirm.

        Raises:
            MessagesFailedError: the broker took all messages of the batch but those named.
            HandlerError: the only message of the batch failed.
            OutboxError: the broker did not answer for all of the batch.

        """
        attempt = _Attempt(self._taken.left_of(batch, epoch))
        try:
            if attempt.messages:
                self._publish(attempt, epoch)
        except BaseException as err:
            self._give_up(batch, attempt)
            if isinstance(err, Interrupted) and not err.draining and len(batch) == 1:  # of several, half may be in time
                raise TransientError(
                    "the broker did not confirm one message within delivery.timeout; it is published until it does",
                    reason=Reason.TARGET_UNAVAILABLE,
                ) from err
            raise
        return self._taken.conclude(batch, attempt.messages, attempt.failed)

    def _publish(self, attempt: _Attempt, epoch: int) -> None:
        deadline = time.monotonic() + self._timeout
        connection = self._open()
        for window in self._encode(attempt, epoch, connection):
            connection.publish(window, deadline=deadline)
        connection.await_confirms(deadline=deadline)
        self._name_failed(attempt, connection)

    def _give_up(self, batch: Batch, attempt: _Attempt) -> None:
        """Drop the connection, whose unanswered messages would be counted for the next batch; remember what it took."""
        if self._connection is not None:
            confirms, returned = self._connection.confirms, {_place(each) for each in self._connection.returned}
            accepted = (message for tag, message in attempt.tags.items() if confirms.is_accepted(tag))
            if None not in returned:
                self._taken.add(batch, (each for each in accepted if str(each.checkpoint) not in returned))
        self.close()

    def _open(self) -> AmqpConnection:
        if self._connection is None:
            address = read_broker_address(self._directory)
            self._connection = AmqpConnection(address, name=f"outbox {self._processor_id} {self._pod}")
        return self._connection

    def _name_failed(self, attempt: _Attempt, connection: AmqpConnection) -> None:
        """Say which messages no queue took, and which the broker refused.

        Raises:
            HandlerError: the broker does not say which messages it returned.

        """
        places = {str(message.checkpoint): message.checkpoint for message in attempt.messages}
        for returned in connection.returned:
            place = places.get(_place(returned) or "")
            if place is None:
                raise _unroutable(returned)
            attempt.failed[place] = _unroutable(returned)
        connection.returned.clear()
        for tag in connection.confirms.take_nacked():
            attempt.failed[attempt.tags[tag].checkpoint] = HandlerError(
                "the broker refused the message (nack); see its log: a full queue with overflow reject-publish does "
                "this",
                reason=Reason.MESSAGE_REJECTED,
            )

    def _encode(self, attempt: _Attempt, epoch: int, connection: AmqpConnection) -> Iterator[bytes]:
        """Give out the frames in windows, taking a delivery tag for every message that AMQP can express."""
        pieces: list[bytes] = []
        size = 0
        for message in attempt.messages:
            try:
                frames = self._frames(message, epoch, connection.frame_max - _FRAME_OVERHEAD)
            except HandlerError as err:
                attempt.failed[message.checkpoint] = err
                continue
            attempt.tags[connection.confirms.publish()] = message
            pieces += frames
            size += sum(map(len, frames))
            if size >= _WINDOW:
                yield b"".join(pieces)
                pieces, size = [], 0
        if pieces:
            yield b"".join(pieces)

    def _frames(self, message: Message, epoch: int, largest: int) -> list[bytes]:
        payload = b"" if message.data is None else message.data.encode()
        for name, value in (("message_id", message.message_id), ("type", message.message_type)):
            if value is not None and len(value.encode()) > _SHORT:
                raise _inexpressible(message, f"its {name} is longer than the {_SHORT} bytes that AMQP allows")
        content = frame.marshal(
            header.ContentHeader(body_size=len(payload), properties=self._properties(message, epoch)), CHANNEL
        )
        if len(content) > largest + _FRAME_OVERHEAD:
            raise _inexpressible(message, f"its headers are longer than the {largest} bytes of the broker's frame_max")
        frames = [self._method(message), content]
        for start in range(0, len(payload), largest):
            piece = payload[start : start + largest]
            # What pamqp's ContentBody gives, without its copies: type 3, channel, size, payload, end mark.
            frames.append(b"\x03" + CHANNEL.to_bytes(2, "big") + len(piece).to_bytes(4, "big") + piece + b"\xce")
        return frames

    def _method(self, message: Message) -> bytes:
        key = self._routing_key(message)
        if key not in self._methods:
            if len(key.encode()) > _SHORT:
                raise _inexpressible(message, f"its routing key is longer than the {_SHORT} bytes that AMQP allows")
            if len(self._methods) > 10_000:
                self._methods.clear()
            publish = commands.Basic.Publish(
                exchange=self._target.exchange, routing_key=key, mandatory=self._target.mandatory
            )
            self._methods[key] = frame.marshal(publish, CHANNEL)
        return self._methods[key]

    def _routing_key(self, message: Message) -> str:
        values = {
            "messageType": message.message_type,
            "publicationId": message.publication_id,
            "partitionKey": message.partition_key or "",
        }

        def value(place: re.Match[str]) -> str:
            found = values[place[1]]
            if found is None:
                raise _inexpressible(message, f"target.rabbitmq.routingKey names {place[0]}, which is null in its row")
            return found

        return _PLACEHOLDER.sub(value, self._target.routing_key)

    def _properties(self, message: Message, epoch: int) -> commands.Basic.Properties:
        headers: dict[str, Any] = {
            _PLACE: str(message.checkpoint),
            "x-outbox-processor": self._processor_id,
            "x-outbox-pod": self._pod,
            "x-outbox-epoch": epoch,
        }
        if message.publication_id is not None:
            headers["x-outbox-publication"] = message.publication_id
        if message.partition_key is not None:
            headers["x-outbox-partition-key"] = message.partition_key
        if message.data is None:
            headers["x-outbox-tombstone"] = True
        # AMQP counts seconds from 1970 without a sign.
        dated = message.scheduled is not None and message.scheduled >= _EPOCH
        return commands.Basic.Properties(
            content_type=None if message.data is None else "application/json",
            headers=headers,
            delivery_mode=2 if self._target.persistent else 1,
            message_id=message.message_id,
            timestamp=message.scheduled if dated else None,
            message_type=message.message_type,
        )


def _place(returned: Returned) -> str | None:
    """Return the place of a returned message, as it was published; None: the broker does not give headers back."""
    place = returned.headers.get(_PLACE)
    return None if place is None else str(place)


def _unroutable(returned: Returned) -> HandlerError:
    exchange = f"exchange {returned.exchange!r}" if returned.exchange else "the default exchange"
    return HandlerError(
        f"no queue takes the message ({returned.reply}): {exchange} has no binding for routing key "
        f"{returned.routing_key!r}; bind a queue, or set target.rabbitmq.mandatory to false to let the broker drop "
        "such messages",
        reason=Reason.MESSAGE_UNROUTABLE,
    )


def _inexpressible(message: Message, why: str) -> HandlerError:
    return HandlerError(
        f"the message at {message.checkpoint} cannot be published: {why}", reason=Reason.MESSAGE_REJECTED
    )


def build(target: RabbitmqTarget, config: ProcessorConfig, settings: Settings) -> RabbitmqSink:
    """Build the target."""
    return RabbitmqSink(
        target,
        settings.connections / "target",
        timeout=config.delivery.timeout.total_seconds(),
        processor_id=config.processor_id,
        pod=settings.pod,
    )
