"""Target `kafka` with guarantee Transactional: a batch and a record about it are one transaction of Kafka.

The row's checkpoint is stored after it, as with AtLeastOnce; the row is the authority for what was examined. Who owns a
partition next shuts the former producer out first, and only then reads the record: what it names and the row has not
passed is not published again (docs/adr/0027-kafka-transactions.md). Several partitions do the first at the same time,
and are read one after the other by the same clients. After any error but a refused message another producer is made.
Then memory is trusted only where nothing is written behind the record that this process committed last
(docs/adr/0030-transactions-without-an-end.md).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.processor.taken import name_failed
from outbox_core.report import Reason
from outbox_core.spec import Blocks
from outbox_worker.logs import get_logger
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.librdkafka.checkpoint_topic import CheckpointTopic
from outbox_worker.targets.librdkafka.published import MOST_HELD, Published, Record, Unit, name_of
from outbox_worker.targets.librdkafka.rounds import Attempt, Rounds, halves
from outbox_worker.targets.librdkafka.settings import read_broker_settings
from outbox_worker.targets.librdkafka.transaction import TransactionalProducer
from outbox_worker.targets.values import check_key

if TYPE_CHECKING:
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.ports import OwnerStart
    from outbox_core.spec.target import KafkaTarget
    from outbox_worker.targets.librdkafka.settings import BrokerSettings

_log = get_logger(__name__)
_BEGINNING_SHARE: Final = 0.9
"""Of delivery.timeout, to begin: at its end the caller interrupts, and could not say what was waited for."""


@dataclass(slots=True)
class _Successor:
    """The producer of an owner that shall begin: it shuts former ones out."""

    epoch: int
    producer: TransactionalProducer
    deadline: float


@dataclass(slots=True)
class _Publisher:
    """The producer of a unit, and what is published and perhaps not stored."""

    producer: TransactionalProducer
    published: Published
    last_epoch: int


class TransactionalKafkaSink(OutsideTransaction):
    """Publisher of one processor: a producer for each partition that this process owns."""

    has_own_transactions = True

    def __init__(self, target: KafkaTarget, directory: Path, config: ProcessorConfig, pod: str) -> None:
        """Keep the settings, as `outbox_worker.targets.kafka.KafkaSink` does; nothing is opened."""
        self._directory, self._processor_id = directory, config.processor_id
        self._name = f"outbox {config.processor_id} {pod}"
        self._timeout = config.delivery.timeout.total_seconds()
        self._rounds = Rounds(target.topic, config, pod)
        self._partitions = 1 if config.delivery.partitions is None else config.delivery.partitions.count
        usual = re.sub(r"[^a-zA-Z0-9._-]", "-", f"outbox-checkpoints-{config.processor_id}")
        self._topic = target.checkpoint_topic or usual
        self._successors: dict[int, _Successor] = {}
        self._reader: CheckpointTopic | None = None
        self._starts: dict[int, OwnerStart] = {}
        self._publishers: dict[int, _Publisher] = {}
        self._committed: dict[int, Published] = {}
        self._ahead: dict[int, tuple[int, int]] = {}
        self._stops = config.delivery.blocking is Blocks.PARTITION
        self._handled: dict[int, set[str]] = {}
        """Of each partition's published fresh messages those of which no more is to be done but to store it."""

    @override
    def check(self) -> None:
        """Look at Secret and key. The brokers themselves are asked when there is an owner."""
        check_key(self._rounds.key, "kafka")
        read_broker_settings(self._directory)

    @override
    def keep_alive(self) -> None:
        """Hear what librdkafka has to say; it looks after its connections by itself."""
        for partition, publisher in list(self._publishers.items()):
            publisher.producer.serve()
            if publisher.producer.is_broken:
                self._drop(partition)
        if self._reader is not None and time.monotonic() > self._reader.deadline:
            self._close_reader()

    @override
    def close(self) -> None:
        """Drop all producers. What they have open is taken back by who comes next, or by the brokers."""
        for partition in {*self._publishers, *self._successors}:
            self._drop(partition)
        self._close_reader()

    def _drop(self, partition: int) -> None:
        for dropped in (self._publishers.pop(partition, None), self._successors.pop(partition, None)):
            if dropped is not None:
                dropped.producer.close()

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    @override
    def shut_out(self, database: str, partition: int, epoch: int) -> float:
        """Let a producer begin, or go on, to shut out the former ones of a unit."""
        successor = self._succeed(database, partition, epoch)
        try:
            return successor.producer.try_shut_out(successor.deadline)
        except BaseException:
            self._drop(partition)
            self._close_reader()
            raise

    def _succeed(self, database: str, partition: int, epoch: int) -> _Successor:
        """Return the producer of an owner that shall begin; nothing of a former one is of use any more."""
        found = self._successors.get(partition)
        if found is None or found.epoch != epoch:
            self._drop(partition)
            self._starts.pop(partition, None)
            self._committed.pop(partition, None)
            self._handled.pop(partition, None)
            deadline = time.monotonic() + self._timeout * _BEGINNING_SHARE
            found = _Successor(epoch, self._make(Unit(database, self._processor_id, partition), deadline), deadline)
            self._successors[partition] = found
        return found

    def _make(self, unit: Unit, deadline: float) -> TransactionalProducer:
        """Make a producer, and what reads the checkpoint topic after it: they connect at the same time."""
        settings = read_broker_settings(self._directory)
        self._open_reader(settings, deadline)
        return TransactionalProducer(settings, self._name, unit.transactional_id, self._timeout)

    @override
    def begin_owner(self, start: OwnerStart) -> None:
        """Shut former owners out, and write down that this one has begun, with what is published and not stored."""
        deadline = time.monotonic() + self._timeout * _BEGINNING_SHARE
        producer = self._succeed(start.database, start.partition, start.epoch).producer
        del self._successors[start.partition]
        publisher = self._open(start, producer, deadline)
        try:
            self._write_start(start, publisher, deadline)
        except BaseException:
            publisher.producer.close()
            raise
        self._publishers[start.partition] = publisher
        self._starts[start.partition] = start

    def _write_start(self, start: OwnerStart, publisher: _Publisher, deadline: float) -> None:
        """Commit the record that a former owner finds, should it make another producer."""
        if publisher.last_epoch > start.epoch:
            self._refuse_later(start, publisher.last_epoch)
        published, place = Published(), ""
        if start.checkpoint is not None:
            published, place = publisher.published, str(start.checkpoint)
            published.fresh = published.unstored(start.checkpoint)
        records = [Record(start.epoch, start.moved, place, place, tuple(published.fresh))]
        if published.fresh:
            published.held = published.as_held()
            records.insert(0, replace(records[0], names=tuple(published.held), held=True))
        for record in records:
            publisher.producer.begin_transaction(deadline)
            linked = replace(record, other=published.offsets.get(not record.held))
            self._commit(start, publisher, linked, published, deadline)

    def _refuse_later(self, start: OwnerStart, epoch: int) -> None:
        """Refuse to begin after a later owner, unless the lease was looked at since it was seen: epochs only rise."""
        seen = (start.epoch, epoch)
        if self._ahead.get(start.partition) != seen:
            self._ahead[start.partition] = seen
            raise _later_owner(epoch, start.epoch)
        _log.warning(
            "the topic knows a later epoch than the database, which was set back; this owner goes on",
            extra={"epoch": start.epoch, "later": epoch, "topic": self._topic},
        )

    def _open(self, start: OwnerStart, producer: TransactionalProducer, deadline: float) -> _Publisher:
        """Let a producer of the unit's name shut the former one out; only then read what that has published.

        In the other order a former owner could commit between the two.
        """
        unit, committed = self._unit(start), self._committed.get(start.partition)
        last_offset = None if committed is None else max(committed.offsets.values())
        try:
            producer.shut_out(deadline)
            began = time.monotonic()
            topic = self._begin_reading(producer.settings, deadline)
            end = topic.find_end(unit.partition)
            # Behind the record is at most the mark of its commit, which brokers may owe (docs/adr/0030).
            is_known = last_offset is not None and last_offset < end <= last_offset + 2
            found = [] if is_known else topic.find(unit, end)
            if not self._successors:
                self._close_reader()
        except BaseException:
            producer.close()
            self._close_reader()
            raise
        _log.info(
            "a producer shut the former ones out",
            extra={
                "partition": start.partition, "epoch": start.epoch, "seconds": round(producer.shut_out_after or 0, 3),
                "seconds_of_reading": round(time.monotonic() - began, 3), "from_memory": is_known,
            },
        )  # fmt: skip
        if committed is not None and is_known:
            return _Publisher(producer, committed, start.epoch)
        return _Publisher(producer, Published.of(found, start.moved), found[0][1].epoch if found else -1)

    def _begin_reading(self, settings: BrokerSettings, deadline: float) -> CheckpointTopic:
        """Return what reads the checkpoint topic; it is kept for those that shut former producers out meanwhile."""
        reader = self._open_reader(settings, deadline)
        reader.begin(deadline)
        reader.ensure(self._partitions)
        return reader

    def _open_reader(self, settings: BrokerSettings, deadline: float) -> CheckpointTopic:
        if self._reader is None:
            self._reader = CheckpointTopic(self._topic, settings, self._name, deadline)
        return self._reader

    def _unit(self, start: OwnerStart) -> Unit:
        return Unit(start.database, self._processor_id, start.partition)

    def _publisher(self, partition: int, epoch: int, deadline: float) -> tuple[OwnerStart, _Publisher]:
        """Return the unit's producer, or another one where that ended."""
        start = self._starts.get(partition)
        if start is None or start.epoch != epoch:
            raise TransientError(
                f"the target has not begun with epoch {epoch} of partition {partition}", reason=Reason.INTERNAL_ERROR
            )
        publisher = self._publishers.get(partition)
        settings = read_broker_settings(self._directory)
        if publisher is not None and publisher.producer.serves(settings):
            return start, publisher
        self._drop(partition)
        publisher = self._open(start, self._make(self._unit(start), deadline), deadline)
        if publisher.last_epoch > epoch:
            publisher.producer.close()
            raise _later_owner(publisher.last_epoch, epoch)
        self._publishers[partition] = publisher
        return start, publisher

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        deadline = time.monotonic() + self._timeout
        attempt: Attempt | None = None
        try:
            start, publisher = self._publisher(batch.partition, epoch, deadline)
            attempt = Attempt(publisher.published.left_of(batch), epoch, deadline)
            if attempt.messages:
                self._keep_excluded(start, publisher, batch, deadline)
                self._publish(start, publisher, batch, attempt)
        except BaseException as err:
            self._drop(batch.partition)
            # Where there was no time to find all that are refused, those of half of the batch may be found.
            if isinstance(err, Interrupted) and not err.draining and not (attempt and attempt.failed):
                raise TransientError(
                    "Kafka did not commit the transaction within delivery.timeout; it is published until it does",
                    reason=Reason.TARGET_UNAVAILABLE,
                ) from err
            raise
        if not (batch.held or (attempt.failed and self._stops)):
            self._note_handled(batch, publisher.published)
        if attempt.failed:
            raise name_failed(batch, attempt.failed)
        return len(batch)

    def _note_handled(self, batch: Batch, published: Published) -> None:
        before = self._handled.get(batch.partition, set())
        self._handled[batch.partition] = (before | set(map(name_of, batch))) & published.fresh.keys()

    def _keep_excluded(self, start: OwnerStart, publisher: _Publisher, batch: Batch, deadline: float) -> None:
        """Name what is published and was passed without being handled among the held ones, before its name goes.

        Behind a message that stops its partition others are published. Where a person has a dead letter tried again
        meanwhile, those of its key wait behind it, and are held.
        """
        published = publisher.published
        excluded = published.find_excluded(batch.after, self._handled.get(batch.partition, ()))
        if not excluded:
            return
        held = list(dict.fromkeys((*published.held, *excluded)))[-2 * MOST_HELD :]
        kept = Published(published.fresh, dict.fromkeys(held), dict(published.offsets))
        place = str(batch.after)
        record = Record(
            start.epoch, start.moved, place, place, tuple(held), held=True, other=published.offsets.get(False)
        )  # fmt: skip
        publisher.producer.begin_transaction(deadline)
        self._commit(start, publisher, record, kept, deadline)
        self._handled.setdefault(batch.partition, set()).update(excluded)

    def _publish(self, start: OwnerStart, publisher: _Publisher, batch: Batch, attempt: Attempt) -> None:
        """Publish all of an attempt but what the brokers refuse; what is refused takes its transaction back."""
        parts = [attempt.messages]
        while True:
            publisher.producer.begin_transaction(attempt.deadline)
            attempt.taken.clear()
            again = self._send(publisher.producer, attempt, parts)
            if again is None:
                break
            parts = again
        if not attempt.taken:
            publisher.producer.abort(attempt.deadline)
            return
        published = publisher.published.with_batch(batch, attempt.taken)
        self._commit(
            start, publisher, published.as_record(batch, start.epoch, start.moved), published, attempt.deadline
        )

    def _send(
        self, producer: TransactionalProducer, attempt: Attempt, parts: list[list[Message]]
    ) -> list[list[Message]] | None:
        """Send all parts in the open transaction. Where something is refused, take it back and return other parts.

        What was refused comes in pieces none of which is refused, because each was tried in a transaction of its own.
        """
        done: list[list[Message]] = []
        waiting = list(parts)
        while waiting:
            part = _without_failed(waiting.pop(0), attempt)
            if not part:
                continue
            sent = self._rounds.send(attempt, part, producer)
            tried = part[: sent.tried]
            waiting.insert(0, part[sent.tried :])
            if sent.refused or sent.again:
                producer.abort(attempt.deadline)
                tried_parts = self._search(producer, attempt, tried) if sent.refused else [tried]
                return [*done, *tried_parts, *waiting]
            done.append(tried)
        return None

    def _search(self, producer: TransactionalProducer, attempt: Attempt, refused: list[Message]) -> list[list[Message]]:
        """Find the messages of a part that the brokers refuse; return the others in pieces that they take."""
        good: list[list[Message]] = []
        waiting = halves(_without_failed(refused, attempt))
        while waiting:
            part = _without_failed(waiting.pop(0), attempt)
            if not part:
                continue
            attempt.taken.clear()
            producer.begin_transaction(attempt.deadline)
            sent = self._rounds.send(attempt, part, producer)
            producer.abort(attempt.deadline)
            tried = part[: sent.tried]
            waiting.insert(0, part[sent.tried :])
            if sent.refused:
                waiting[:0] = halves(_without_failed(tried, attempt))
            elif sent.again:
                waiting.insert(0, tried)
            else:
                good.append(tried)
        return good

    def _commit(
        self, start: OwnerStart, publisher: _Publisher, record: Record, published: Published, deadline: float
    ) -> None:
        key = self._unit(start).key(held=record.held)
        offset = publisher.producer.commit(self._topic, start.partition, key, record.encode(), deadline)
        published.offsets[record.held] = offset
        publisher.published = self._committed[start.partition] = published


def _later_owner(later: int, epoch: int) -> TransientError:
    return TransientError(
        f"the owner with epoch {later} has begun to publish, and this one has epoch {epoch}: the lease is looked at",
        reason=Reason.TARGET_UNAVAILABLE,
    )


def _without_failed(messages: list[Message], attempt: Attempt) -> list[Message]:
    return [each for each in messages if each.checkpoint not in attempt.failed] if attempt.failed else messages
