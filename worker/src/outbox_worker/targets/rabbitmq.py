"""Target `rabbitmq`: a batch is written at once and counts as delivered when the broker has confirmed all of it.

AtLeastOnce: what is published again has the same `message_id`. A message that the broker returns (its header names it)
or refuses (its delivery tag does) is named in the error; what the broker took beside it is not published again by this
process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.processor.taken import TakenMessages
from outbox_core.report import Reason
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.amqp.broker import read_broker_address
from outbox_worker.targets.amqp.connection import AmqpConnection
from outbox_worker.targets.amqp.encoder import PLACE, MessageEncoder
from outbox_worker.targets.templates import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import RabbitmqTarget
    from outbox_worker.settings import Settings
    from outbox_worker.targets.amqp.connection import Returned

_WINDOW: Final = 65_536
"""Bytes encoded before they are written: the broker works while the next ones are encoded."""


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
        self._encoder = MessageEncoder(target, processor_id=processor_id, pod=pod)
        self._connection: AmqpConnection | None = None
        self._taken = TakenMessages()

    @override
    def check(self) -> None:
        """Look at the Secret and the routing key. The broker itself is asked when there is something to publish."""
        read_broker_address(self._directory)
        unknown = set(PLACEHOLDER.findall(self._target.routing_key)) - {"messageType", "publicationId", "partitionKey"}
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
        if connection.returned:
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
                frames = self._encoder.encode(message, epoch, connection.frame_max)
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


def _place(returned: Returned) -> str | None:
    """Return the place of a returned message, as it was published; None: the broker does not give headers back."""
    place = returned.headers.get(PLACE)
    return None if place is None else str(place)


def _unroutable(returned: Returned) -> HandlerError:
    exchange = f"exchange {returned.exchange!r}" if returned.exchange else "the default exchange"
    return HandlerError(
        f"no queue takes the message ({returned.reply}): {exchange} has no binding for routing key "
        f"{returned.routing_key!r}; bind a queue, or set target.rabbitmq.mandatory to false to let the broker drop "
        "such messages",
        reason=Reason.MESSAGE_UNROUTABLE,
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
