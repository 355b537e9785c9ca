"""Target `rabbitmqStream`: a batch is published with numbers of its messages, by which the broker drops what it has.

What is published again after a crash has the same number, so the stream has it once (`outbox_core.progress.numbering`
says when numbers begin anew, and messages may be repeated). Held messages are published without a number.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.processor.taken import TakenMessages
from outbox_core.progress.numbering import list_numbers
from outbox_core.report import Reason
from outbox_worker.logs import get_logger
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.amqp.broker import STREAM, read_broker_address
from outbox_worker.targets.streams.connection import connect_to_leader
from outbox_worker.targets.streams.encoder import StreamEncoder
from outbox_worker.targets.streams.frames import ENTRY_OVERHEAD, PUBLISH_OVERHEAD
from outbox_worker.targets.templates import build_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import RabbitmqStreamTarget
    from outbox_worker.settings import Settings
    from outbox_worker.targets.streams.connection import StreamConnection

_log = get_logger("outbox.worker")
_WINDOW: Final = 65_536
"""Bytes in one frame: the broker works while the next ones are encoded."""


@dataclass(slots=True)
class _Attempt:
    """One attempt at a batch: its messages with their numbers, by which publisher, and why some failed.

    Without a reference numbers mean nothing but to this connection, whose confirms name them.
    """

    numbered: list[tuple[int, Message]]
    reference: str
    publisher: int | None = None
    failed: dict[Checkpoint, HandlerError] = field(default_factory=dict)


class RabbitmqStreamSink(OutsideTransaction):
    """Publisher of one processor to one stream."""

    def __init__(
        self, target: RabbitmqStreamTarget, directory: Path, *, timeout: float, processor_id: str, pod: str
    ) -> None:
        """Keep the settings; nothing is opened.

        Args:
            target: the resource's words.
            directory: the mounted Secret of `target.connection`.
            timeout: seconds for one batch.
            processor_id: named in application properties and in the broker's list of connections.
            pod: who publishes, named in application properties.

        """
        self._stream = target.stream
        self._directory = directory
        self._timeout = timeout
        self._name = f"outbox {processor_id} {pod}"
        self._encoder = StreamEncoder(processor_id=processor_id, pod=pod)
        self._connection: StreamConnection | None = None
        self._unnumbered = 0
        self._taken = TakenMessages()

    @property
    @override
    def numbers_messages(self) -> bool:
        return True

    @override
    def check(self) -> None:
        """Look at the Secret. The broker itself is asked when there is something to publish."""
        read_broker_address(self._directory, STREAM)

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
        """Publish the batch and await every confirm.

        Raises:
            MessagesFailedError: the stream has all messages of the batch but those named.
            HandlerError: the only message of the batch failed.
            OutboxError: the broker did not confirm all of the batch.

        """
        attempt = self._begin(batch, epoch)
        try:
            if attempt.numbered:
                self._publish(attempt, epoch)
        except BaseException as err:
            self._give_up(batch, attempt)
            if isinstance(err, Interrupted) and not err.draining and len(batch) == 1:  # of several, half may be in time
                raise TransientError(
                    "the broker did not confirm one message within delivery.timeout; it is published until it does",
                    reason=Reason.TARGET_UNAVAILABLE,
                ) from err
            raise
        return self._taken.conclude(batch, (message for _, message in attempt.numbered), attempt.failed)

    def _begin(self, batch: Batch, epoch: int) -> _Attempt:
        numbers = list_numbers(batch)
        left = self._taken.left_of(batch, epoch)
        if numbers is None or batch.after.numbering is None:
            first = self._unnumbered + 1
            self._unnumbered += len(left)
            return _Attempt(list(enumerate(left, first)), "")
        reference = f"outbox-{batch.after.numbering.space}"
        kept = {message.checkpoint for message in left}
        both = zip(numbers, batch, strict=True)
        return _Attempt([(number, message) for number, message in both if message.checkpoint in kept], reference)

    def _publish(self, attempt: _Attempt, epoch: int) -> None:
        deadline = time.monotonic() + self._timeout
        connection = self._open()
        attempt.publisher, has = connection.declare(attempt.reference)
        if has >= attempt.numbered[0][0]:
            _log.info(
                "the stream has messages beyond the checkpoint", extra={"first": attempt.numbered[0][0], "has": has}
            )
        for entries in self._encode(attempt, epoch, connection.frame_max):
            connection.publish(attempt.publisher, entries, deadline=deadline)
        connection.await_confirms(attempt.publisher, deadline=deadline)
        connection.take_confirmed(attempt.publisher)

    def _encode(self, attempt: _Attempt, epoch: int, frame_max: int) -> Iterator[list[tuple[int, bytes]]]:
        """Give out what goes into one frame, in order."""
        most = frame_max - PUBLISH_OVERHEAD - ENTRY_OVERHEAD
        entries: list[tuple[int, bytes]] = []
        size = 0
        for number, message in attempt.numbered:
            encoded = self._encoder.encode(message, epoch)
            if len(encoded) > most:
                attempt.failed[message.checkpoint] = build_refusal(
                    message, f"it takes {len(encoded)} bytes, and the broker's frame_max leaves {most} for one message"
                )
                continue
            if entries and size + len(encoded) + ENTRY_OVERHEAD > min(_WINDOW, most):
                yield entries
                entries, size = [], 0
            entries.append((number, encoded))
            size += len(encoded) + ENTRY_OVERHEAD
        if entries:
            yield entries

    def _give_up(self, batch: Batch, attempt: _Attempt) -> None:
        """Drop the connection; remember what of messages without numbers is in the stream."""
        connection = self._connection
        if connection is not None and attempt.publisher is not None and not attempt.reference:
            sent = connection.take_confirmed(attempt.publisher)
            self._taken.add(batch, (message for number, message in attempt.numbered if number in sent))
        self.close()

    def _open(self) -> StreamConnection:
        if self._connection is None:
            address = read_broker_address(self._directory, STREAM)
            self._connection = connect_to_leader(address, self._stream, name=self._name)
        return self._connection


def build(target: RabbitmqStreamTarget, config: ProcessorConfig, settings: Settings) -> RabbitmqStreamSink:
    """Build the target."""
    return RabbitmqStreamSink(
        target,
        settings.connections / "target",
        timeout=config.delivery.timeout.total_seconds(),
        processor_id=config.processor_id,
        pod=settings.pod,
    )
