"""Target `rabbitmq`: a batch is written at once and counts as delivered when the broker has confirmed all of it.

AtLeastOnce: what is published again has the same `message_id`. A message that the broker returns (its header names it)
or refuses (its delivery tag does) is named in the error; what the broker took beside it is not published again by this
process.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.ports import PipelinedTarget
from outbox_core.processor.taken import TakenMessages
from outbox_core.report import Reason
from outbox_worker.targets.amqp.broker import read_broker_address
from outbox_worker.targets.amqp.connection import AmqpConnection
from outbox_worker.targets.amqp.encoder import MessageEncoder
from outbox_worker.targets.values import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import RabbitmqTarget
    from outbox_worker.settings import Settings
    from outbox_worker.targets.amqp.connection import Returned

_MOST_UNDER_WAY: Final = 3
"""Batches of a partition: one that is confirmed and stored, one that the broker works on, one that is being written."""


@dataclass(slots=True)
class _Attempt:
    """One attempt at a batch: the messages to publish, those given a delivery tag, and why some failed.

    The tags are one range: the next batch is begun when all of this one is written.
    """

    batch: Batch
    messages: list[Message]
    first: int = 0
    """The delivery tag of the first one that has one."""
    tagged: list[Message] = field(default_factory=list)
    failed: dict[Checkpoint, HandlerError] = field(default_factory=dict)

    @property
    def tags(self) -> range:
        """The delivery tags; none: nothing was published."""
        return range(self.first, self.first + len(self.tagged))


class RabbitmqSink(PipelinedTarget):
    """Publisher of one processor."""

    most_under_way = _MOST_UNDER_WAY
    awaits_confirms = False

    def __init__(self, target: RabbitmqTarget, directory: Path, config: ProcessorConfig, pod: str) -> None:
        """Keep the settings; `directory` is the mounted Secret of `target.connection`. Nothing is opened."""
        self._target = target
        self._directory = directory
        self._timeout = config.delivery.timeout.total_seconds()
        self._name = f"outbox {config.processor_id} {pod}"
        self._encoder = MessageEncoder(target, processor_id=config.processor_id, pod=pod)
        self._connection: AmqpConnection | None = None
        self._begun: list[_Attempt] = []
        self._was_refused = False
        """A broker may go on to refuse what comes by the same channel when its reason to do so is over."""
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
            except OutboxError:  # what it says of messages under way, `deliver` hears again
                self.close()

    @override
    def close(self) -> None:
        """Drop the connection, and what was begun on it; remember what of that the broker took."""
        connection, begun = self._connection, self._begun
        self._connection, self._begun, self._was_refused = None, [], False
        if connection is None:
            return
        returned = {each.place for each in connection.returned}
        if None not in returned:
            for attempt in begun:
                tagged = zip(attempt.tags, attempt.tagged, strict=True)
                accepted = (each for tag, each in tagged if connection.confirms.is_accepted(tag))
                unnamed = (each for each in accepted if each.checkpoint not in attempt.failed)
                self._taken.add(attempt.batch, (each for each in unnamed if each.pair not in returned))
        connection.close()

    @override
    def begin(self, batch: Batch, epoch: int) -> None:
        with self._closing_at_fault():
            before = self._begun_of(batch.partition)
            if before and before[-1].batch.examined != batch.after:
                self._end_begun(before)
            self._publish(batch, epoch)

    @override
    def is_under_way(self, batch: Batch) -> bool:
        return any(each.batch is batch for each in self._begun)

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        with self._closing_at_fault():
            begun = self._begun_of(batch.partition)
            if begun and begun[0].batch is batch:
                attempt = begun[0]
            else:
                self._end_begun(begun)
                attempt = self._publish(batch, epoch)
            self._await_answers(attempt)
        return self._taken.conclude(batch, attempt.messages, attempt.failed)

    @contextmanager
    def _closing_at_fault(self) -> Iterator[None]:
        """Close after any fault: messages without an answer would be counted for the next batch."""
        try:
            yield
        except BaseException as err:
            several = len(self._begun) > 1
            self.close()
            if several and isinstance(err, HandlerError):
                raise TransientError(
                    f"{err}; several batches were under way, so each is published by itself to find the message",
                    reason=err.reason,
                ) from err
            raise

    def _begun_of(self, partition: int) -> list[_Attempt]:
        return [each for each in self._begun if each.batch.partition == partition]

    def _end_begun(self, attempts: list[_Attempt]) -> None:
        """Await what becomes of batches that are not delivered, because one before them failed.

        Their messages are handed over again, in other batches: what the broker took of them is not published again.
        """
        for each in attempts:
            self._await_answers(each)
            accepted = (message for message in each.tagged if message.checkpoint not in each.failed)
            self._taken.add(each.batch, accepted)

    def _publish(self, batch: Batch, epoch: int) -> _Attempt:
        if self._was_refused and not self._begun:
            self.close()
        attempt = _Attempt(batch, self._taken.left_of(batch, epoch))
        self._begun.append(attempt)
        if attempt.messages:
            deadline, connection = time.monotonic() + self._timeout, self._open()
            encoded = self._encoder.encode(attempt.messages, epoch, connection.frame_max, attempt.failed)
            for messages, window in encoded:
                tag = connection.confirms.publish(len(messages))
                attempt.first = attempt.first or tag
                attempt.tagged += messages
                connection.publish(window, deadline=deadline)
        return attempt

    def _await_answers(self, attempt: _Attempt) -> None:
        if attempt.tags:
            connection = self._open()
            connection.await_confirms(attempt.tags[-1], deadline=time.monotonic() + self._timeout)
            self._name_failed(attempt, connection)
        self._begun.remove(attempt)

    def _open(self) -> AmqpConnection:
        if self._connection is None:
            address = read_broker_address(self._directory)
            self._connection = AmqpConnection(address, name=self._name)
        return self._connection

    def _name_failed(self, attempt: _Attempt, connection: AmqpConnection) -> None:
        if connection.returned:
            places = {message.pair: (each, message.checkpoint) for each in self._begun for message in each.messages}
            for returned in connection.returned:
                found = places.get(returned.place or "")
                if found is None:
                    raise _unroutable(returned)
                owner, place = found
                owner.failed[place] = _unroutable(returned)
            connection.returned.clear()
        for tag in (each for each in connection.confirms.nacked if each in attempt.tags):
            self._was_refused = True
            attempt.failed[attempt.tagged[tag - attempt.first].checkpoint] = HandlerError(
                "the broker refused the message (nack); see its log: a full queue with overflow reject-publish does "
                "this",
                reason=Reason.MESSAGE_REJECTED,
            )
        connection.confirms.forget_nacked(attempt.tags)  # not before: an alarm between would let them count as taken


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
    return RabbitmqSink(target, settings.target, config, settings.pod)
