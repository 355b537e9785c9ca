"""What one partition reads of the outbox: its batches, and the SELECT of messages that are to be held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.spec import Mode
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.ownership.leases import LeaseLook
from outbox_worker.postgres.reading.arrivals import PartitionArrivals
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from outbox_worker.postgres.reading.payloads import PayloadBound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.postgres.reading.ahead import ReadAhead
    from outbox_worker.postgres.reading.arrivals import Seen
    from outbox_worker.postgres.reading.read_range import Relation
    from outbox_worker.postgres.reading.shared_look import SharedLook


def reader_of(
    config: ProcessorConfig,
    partition: int,
    barrier: Checkpoint | None = None,
    ahead: ReadAhead | None = None,
    lease_look: LeaseLook | None = None,
    payloads: PayloadBound | None = None,
    look: SharedLook | None = None,
) -> MessageReader:
    """Return the reader of one partition, up to the barrier; a processor that is not partitioned has number 0 only."""
    partitions = config.delivery.partitions
    part = None if partitions is None else Slice(partition, partitions, barrier)
    return MessageReader(
        config.source, part, remote_target=config.has_remote_target, ahead=ahead, lease_look=lease_look,
        payloads=payloads, shared=look,
    )  # fmt: skip


def partitioned_into(config: ProcessorConfig, count: int) -> ProcessorConfig:
    """Return the configuration with as many partitions as there are, instead of those that were asked for."""
    delivery = config.delivery
    if delivery.partitions is None or delivery.partitions.count == count:
        return config
    partitions = delivery.partitions.model_copy(update={"count": count})
    return config.model_copy(update={"delivery": delivery.model_copy(update={"partitions": partitions})})


class PartitionReader:
    """Reads one partition; shared by what fetches its batches, acknowledges them and names their messages."""

    def __init__(self, context: StepContext) -> None:
        """Read without a barrier until one is asked for."""
        self._context = context
        self._source = context.databases.source
        self._has_remote_target = context.config.has_remote_target
        # A number that was handed over with a message must be no other message's after a crash of this server.
        self._reads_durably = self._has_remote_target or context.config.numbers_messages
        self._key = context.config.delivery.message_key
        # What was noted for another partition is not in the transaction at whose end no crash takes it back any more.
        self._look = None if self._reads_durably else context.databases.look
        self._ahead = context.databases.ahead if context.target.needs_payload else None
        delivery = context.config.delivery
        self._payloads = PayloadBound(delivery.byte_limit, delivery.batch_limit)
        self.source_timeline: int | None = None
        """On which the checkpoint was found to be the source's; None: not looked at, or both are one database."""
        self.lease_look = self._make_lease_look()
        self.stop_at(None)

    def stop_at(self, barrier: Checkpoint | None) -> None:
        """Read no further than the barrier from now on."""
        config, partition = self._context.config, self._context.key.partition
        self.messages = reader_of(config, partition, barrier, self._ahead, self.lease_look, self._payloads, self._look)
        shared = None if self._reads_durably else self._context.databases.arrivals
        self._arrivals = None if shared is None else PartitionArrivals(shared, self.messages.slots)

    def _make_lease_look(self) -> LeaseLook | None:
        """For what is handed over and cannot be recalled; else the store looks at the lease, with the effects."""
        context = self._context
        if context.transactional_target or self._has_remote_target or context.config.delivery.mode is Mode.COMPETING:
            return None
        return LeaseLook(context.key, context.config.delivery.lease_duration)

    def read_ahead(self, after: Checkpoint, limit: int, run: str) -> None:
        """Let the server look, in this run of it, for the full batch that `read` will be asked for next."""
        self.messages.read_ahead(after, limit, run, durably=self._reads_durably)

    def find_end(self, after: Checkpoint) -> Seen | None:
        """Return the look that says that nothing is to be read after this place; None: read. Ask before each `read`."""
        return None if self._arrivals is None else self._arrivals.find_end(self._source.connection, after)

    def read(self, after: Checkpoint, limit: int, *, with_messages: bool = False) -> Batch:
        """Read the outbox, as much of it as the target needs, or with all messages: not with their large payloads."""
        read = self.messages.fetch_outline if with_messages else self.messages.fetch_extent
        if self._context.target.needs_payload:
            read = self.messages.fetch
        connection = self._source.connection()
        if not self._reads_durably or self.messages.take_ahead(connection, after, limit):
            batch = read(connection, after, limit)
            if self._arrivals is not None:
                self._arrivals.note(batch)
            return batch
        return remote_target.read_durably(
            connection, lambda: read(connection, after, limit), lambda batch: not batch.examined.is_same(after),
            self.source_timeline,
        )  # fmt: skip

    def in_source(self, batch: Batch) -> Relation:
        """Return the SELECT of the messages of the batch's range that are not excluded, for the source's database."""
        rows = self.messages.keyed_relation(batch.after, batch.examined, self._key, count=batch.examined_count)
        return holding.without_excluded(rows, batch.excluded) if batch.excluded else rows

    def relation(self, batch: Batch) -> Relation:
        """Return the SELECT of the batch's messages, carried to the checkpoint's database if it is another one.

        Only before some are excluded: those are not among the batch's messages any more.
        """
        if batch.messages:  # where it is known where they are, looking them up costs less than reading the range again
            return self.picked(batch, [message.checkpoint for message in batch])
        return self._carried(
            self.messages.keyed_relation(batch.after, batch.examined, self._key, count=batch.examined_count)
        )

    def picked(self, batch: Batch, pairs: Iterable[Checkpoint]) -> Relation:
        """Return the SELECT of some of the batch's messages, carried in the same way."""
        by_position = batch.examined.snapshot_range is not None
        return self._carried(self.messages.picked_keyed_relation(pairs, self._key, by_position=by_position))

    def _carried(self, rows: Relation) -> Relation:
        return holding.carry(self._source.connection(), rows) if self._has_remote_target else rows
