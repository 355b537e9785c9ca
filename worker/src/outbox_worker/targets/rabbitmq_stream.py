"""Target `rabbitmqStream`: a batch is published with numbers of its messages, by which the broker drops what it has.

What is published again after a crash has the same number, so the stream has it once. `outbox_core.progress.numbering`
says which messages have none, and when numbers begin anew: those may be repeated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, TransientError
from outbox_core.ports import PipelinedTarget
from outbox_core.processor.taken import TakenMessages
from outbox_core.progress.numbering import list_numbers
from outbox_core.spec import Blocks
from outbox_worker.logs import get_logger
from outbox_worker.targets.amqp.broker import STREAM, read_broker_address
from outbox_worker.targets.streams.connection import connect_to_leader
from outbox_worker.targets.streams.encoder import StreamEncoder
from outbox_worker.targets.streams.frames import ENTRY_OVERHEAD, PUBLISH_OVERHEAD
from outbox_worker.targets.values import build_refusal

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
_PREFIX: Final = "outbox-"
"""Of the names by which the broker keeps numbers."""
_WINDOW: Final = 65_536
"""Bytes in one frame: the broker works while the next ones are encoded."""


_Entries: TypeAlias = list[tuple[int, bytes]]


@dataclass(slots=True)
class _Attempt:
    """One attempt at a batch: what was sent of its messages, and why some failed."""

    batch: Batch
    messages: list[tuple[int | None, Message]]
    """Those that are not known to be in the stream, with their numbers."""
    reference: str
    """The name of the numbers."""
    stops: bool
    """Nothing is sent behind a message that fails."""
    sent: list[Message] = field(default_factory=list)
    unnumbered: dict[tuple[int, int], Message] = field(default_factory=dict)
    """Of `sent`, by publisher and number: that means nothing but to this connection, whose confirms name it."""
    failed: dict[Checkpoint, HandlerError] = field(default_factory=dict)


class RabbitmqStreamSink(PipelinedTarget):
    """Publisher of one processor to one stream."""

    most_under_way = 2
    awaits_confirms = True

    def __init__(self, target: RabbitmqStreamTarget, directory: Path, config: ProcessorConfig, pod: str) -> None:
        """Keep the settings; `directory` is the mounted Secret of `target.connection`. Nothing is opened."""
        self._stream = target.stream
        self._directory = directory
        self._timeout = config.delivery.timeout.total_seconds()
        self._stops = config.delivery.blocking is Blocks.PARTITION
        self._name = f"outbox {config.processor_id} {pod}"
        self._encoder = StreamEncoder(processor_id=config.processor_id, pod=pod)
        self._connection: StreamConnection | None = None
        self._begun: dict[int, _Attempt] = {}
        self._unnumbered = 0
        self._taken = TakenMessages()

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
        """Drop the connection, and what was begun; remember what of messages without numbers is in the stream."""
        connection, begun = self._connection, self._begun
        self._connection, self._begun = None, {}
        if connection is not None:
            for attempt in begun.values():
                unnumbered = attempt.unnumbered.items()
                taken = (message for key, message in unnumbered if key not in connection.outstanding)
                self._taken.add(attempt.batch, taken)
            connection.close()

    @override
    def begin(self, batch: Batch, epoch: int) -> None:
        try:
            self._publish(batch, epoch)
        except BaseException:
            self.close()
            raise

    @override
    def is_under_way(self, batch: Batch) -> bool:
        begun = self._begun.get(batch.partition)
        return begun is not None and begun.batch is batch

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        try:
            if not self.is_under_way(batch):
                self._publish(batch, epoch)
            self._await_confirms()
        except BaseException:
            self.close()
            raise
        attempt = self._begun.pop(batch.partition)
        return self._taken.conclude(batch, attempt.sent, attempt.failed)

    def _publish(self, batch: Batch, epoch: int) -> None:
        if (before := self._begun.get(batch.partition)) is not None:  # it is not delivered, and comes again
            self._await_confirms()
            self._taken.add(before.batch, before.unnumbered.values())
        attempt = self._begun[batch.partition] = self._prepare(batch, epoch)
        if not attempt.messages:
            return
        deadline = time.monotonic() + self._timeout
        connection = self._open()
        for reference, entries, messages in self._encode(attempt, epoch, connection.frame_max):
            publisher, has = connection.declare(reference)
            if has >= entries[0][0]:
                extra = {"first": entries[0][0], "has": has}
                _log.info("the stream has messages beyond the checkpoint", extra=extra)
            attempt.sent += messages
            connection.publish(publisher, entries, deadline=deadline)
            if not reference:  # only now: before, an alarm would let them count as confirmed
                keys = ((publisher, number) for number, _ in entries)
                attempt.unnumbered.update(zip(keys, messages, strict=True))

    def _prepare(self, batch: Batch, epoch: int) -> _Attempt:
        left, numbers = self._taken.left_of(batch, epoch), list_numbers(batch)
        messages = list(zip(numbers, batch, strict=True))
        if len(left) < len(messages):
            pairs = {message.pair for message in left}
            messages = [(number, message) for number, message in messages if message.pair in pairs]
        space = "" if batch.after.numbering is None else batch.after.numbering.space
        # Of held messages those that are not named are settled, so none may be left out unnamed.
        return _Attempt(batch, messages, f"{_PREFIX}{space}", self._stops and not batch.is_retried)

    def _await_confirms(self) -> None:
        """Return when the broker has confirmed all that was published, also of other partitions."""
        if self._connection is not None:
            self._connection.await_confirms(deadline=time.monotonic() + self._timeout)

    def _encode(self, attempt: _Attempt, epoch: int, frame_max: int) -> Iterator[tuple[str, _Entries, list[Message]]]:
        """Give out what goes into one frame, in order, and the name of its numbers; no name: they mean nothing."""
        most = frame_max - PUBLISH_OVERHEAD - ENTRY_OVERHEAD
        window = min(_WINDOW, most)
        entries: _Entries = []
        messages: list[Message] = []
        reference, size = "", 0
        for number, message in attempt.messages:
            encoded = self._encoder.encode(message, epoch)
            takes = len(encoded) + ENTRY_OVERHEAD
            if len(encoded) > most:
                attempt.failed[message.checkpoint] = build_refusal(
                    message, f"it takes {len(encoded)} bytes, and the broker's frame_max leaves {most} for one message"
                )
                if attempt.stops:
                    break
                continue
            # Behind one that is not in the stream none is sent with a number: that one's would come too late.
            own = "" if number is None or attempt.failed else attempt.reference
            if entries and (own != reference or size + takes > window):
                yield reference, entries, messages
                entries, messages, size = [], [], 0
            reference = own
            entries.append((self._next() if number is None or not own else number, encoded))
            messages.append(message)
            size += takes
        if entries:
            yield reference, entries, messages

    def _next(self) -> int:
        self._unnumbered += 1
        return self._unnumbered

    def _open(self) -> StreamConnection:
        if self._connection is None:
            address = read_broker_address(self._directory, STREAM)
            self._connection = connect_to_leader(address, self._stream, name=self._name)
        return self._connection


def build(target: RabbitmqStreamTarget, config: ProcessorConfig, settings: Settings) -> RabbitmqStreamSink:
    """Build the target."""
    return RabbitmqStreamSink(target, settings.target, config, settings.pod)
