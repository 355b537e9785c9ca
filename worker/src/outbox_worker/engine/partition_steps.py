"""Mode Partitioned: how a partition is owned, and how it is read up to a barrier."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError
from outbox_core.message import Batch
from outbox_core.plain import plain_count
from outbox_core.ports import Feed
from outbox_core.processor import outcomes
from outbox_core.progress.barrier import describe_barrier, describe_key
from outbox_core.progress.checkpoint import MAX_POSITION, Checkpoint
from outbox_core.progress.coverage import as_snapshot_range, covers
from outbox_core.report import Reason
from outbox_core.spec import PartitionKey
from outbox_worker.engine.owner_steps import StartingUnit
from outbox_worker.logs import get_logger
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints, starts

if TYPE_CHECKING:
    from outbox_core.processor.state import ProcessorState
    from outbox_core.progress.barrier import Partitioning
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.feeds.cursor import CursorFeed
    from outbox_worker.feeds.partition_reader import PartitionReader
    from outbox_worker.ownership.membership import Membership
    from outbox_worker.postgres.connection import Connection

_log = get_logger("outbox.worker")
PASSING_SECONDS: Final = 5.0
"""Between two looks of an idle partition whether there are messages of others behind its checkpoint."""


class Partition(StartingUnit):
    """One partition of a processor: with a lease of its own, as many as the database says."""

    def __init__(self, context: StepContext, membership: Membership) -> None:
        super().__init__(context)
        self._membership = membership
        self._count = membership.count
        self._by = describe_key(context.config.delivery.message_key or PartitionKey())

    @override
    def after_claim(self, connection: Connection) -> None:
        """Say how many partitions the resource wants, and learn how many there are."""
        config, key, membership = self._context.config, self._context.key, self._membership
        if self._context.config.has_remote_target:
            # The barrier is a place of this database: it means nothing to another database's messages.
            there = partitions.fetch_count(connection, key)
            if there is not None and there != membership.asked:
                raise ConfigurationError(
                    f"processor {key.processor_id!r} has {plain_count(there, 'partition')}, asked for: "
                    f"{membership.asked}. The number cannot be changed where the messages are in another database. "
                    f"Ask for {there}, or use another processorId",
                    reason=Reason.PARTITIONS_DIFFER,
                )
        there = partitions.ask(
            connection, key, config.resource, generation=config.generation, count=membership.asked, by=self._by
        )
        membership.note_count(there)

    @override
    def check_mode(self, connection: Connection) -> None:
        key = self._context.key
        there = partitions.fetch(connection, key)
        if there is not None:
            self._check_key(there.count, there.by)
        elif checkpoints.load_all(connection, key):
            self._check_key(None, None)

    @override
    def after_refusal(self, connection: Connection) -> outcomes.StepOutcome | None:
        """Another process has it, or there is no such partition any more."""
        there = partitions.fetch_count(connection, self._context.key)
        return outcomes.Revoked() if self._membership.note_count(there) else None

    @override
    def after_load(self) -> outcomes.StepOutcome | None:
        # Checked under the lease: a lease granted since then holds under this number, for a change ends them all.
        return outcomes.Revoked() if self._membership.outdated else None

    @override
    def is_stored(self, connection: Connection) -> bool:
        return partitions.fetch_count(connection, self._context.key) is not None

    @override
    def load(self, connection: Connection, lease: outcomes.HeldLease) -> checkpoints.Start | None:
        """Load the partition's checkpoint; the first of all partitions writes down where they all start."""
        config, key = self._context.config, self._context.key
        # Before the tamper check of the checkpoint: from here on the lease is locked against a change
        # of the number; the checkpoint of a partition that was removed is not one that was tampered with.
        answer, stored = self._begin(connection, lease, None), None
        if answer.owned and answer.count in (None, self._count):
            stored = checkpoints.load_untampered(connection, key)
        if answer.owned and answer.count is None and stored is None:
            # Computed once for all partitions: one that is first owned later must not start later.
            answer = self._begin(connection, lease, self.find_start(connection))
        if not answer.owned or not self._is_as_asked(answer):
            return None
        if answer.begun and config.start_from.processor_id is not None:
            other = self.find_other(connection, config.start_from.processor_id)
            if other.partitioned_like(self._count, self._by):
                starts.spread(connection, key, lease, other.pairs)
        if answer.begun:
            self.after_claim(connection)
        if stored is None:
            stored = checkpoints.load_untampered(connection, key)
        if stored is None:
            raise ConfigurationError(
                f"partition {key.partition} of processor {key.processor_id!r} has lost its checkpoint row: it was "
                "deleted. Put it back with `outbox rewind`, or by hand, then the partition goes on",
                reason=Reason.CHECKPOINT_OLDER,
            )
        checkpoints.check_kind(key, config.source, stored.pair)
        return checkpoints.Start(stored.pair, start_from_used=answer.begun)

    def _begin(self, connection: Connection, lease: outcomes.HeldLease, start: Checkpoint | None) -> partitions.Begun:
        return partitions.begin(connection, self._context.key, lease, count=self._count, by=self._by, start=start)

    def _is_as_asked(self, found: partitions.Begun) -> bool:
        """Say whether the processor is partitioned as this process believes; it may learn another number.

        Raises:
            ConfigurationError: it is partitioned by another key, or not at all.

        """
        self._check_key(found.count, found.by)
        self._membership.note_count(found.count)
        return found.count == self._count

    def _check_key(self, count: int | None, by: str | None) -> None:
        if by != self._by:
            there = f"has {plain_count(count, 'partition')} by {by}" if count else "is not partitioned"
            asked = plain_count(self._count, "partition")
            raise ConfigurationError(
                f"processor {self._context.key.processor_id!r} {there} here, and asked for is {asked} by "
                f"{self._by}: the same keys would go to other checkpoints. Ask for what is there, or use "
                "another processorId",
                reason=Reason.PARTITIONS_DIFFER,
            )


class PartitionFeed(Feed):
    """Reads a partition after its checkpoint, and no further than a barrier."""

    def __init__(
        self, context: StepContext, cursor: CursorFeed, reader: PartitionReader, membership: Membership
    ) -> None:
        self._context = context
        self._cursor = cursor
        self._reader = reader
        self._membership = membership
        self._partitioning: Partitioning | None = None
        self._next_passing = 0.0

    @override
    def fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Read, then look for a barrier: a read before it is asked for cannot have gone beyond it."""
        after = state.cursor
        if after is not None and (seen := self._cursor.find_end(after)) is not None:
            newest = seen.passed if self._passes_now() else None
            nothing = _nothing(after, self._context.key.partition, saw_all=seen.saw_all)
            return _pass(newest, state, outcomes.Fetched(nothing))
        connection, known = self._context.databases.target.connection(), self._partitioning
        barrier = None if known is None else known.barrier
        # Before reading: from here on nothing more can appear below the barrier.
        settled = barrier is not None and partitions.is_settled(connection, barrier)
        newest = self._find_newest()
        fetched = self._cursor.fetch(state)
        now = self._look(connection)
        if not isinstance(fetched, outcomes.Fetched) or now is None:
            return fetched
        if now is not known and self._membership.note_count(now.count):
            return outcomes.Revoked()
        if now is known or now.has_same_barrier(known):
            self._partitioning = now
            if now.next_count is None:
                return _pass(newest, state, fetched)
            return self._stop_at(now, state, fetched, settled=settled)
        self._partitioning = now
        self._reader.stop_at(now.barrier)
        # What was read up to another line, or beyond this one, is dropped: nothing of it was handled.
        return self.fetch(state) if barrier is not None or now.is_beyond_barrier(fetched.batch.examined) else fetched

    def _find_newest(self) -> int | None:
        """Return, now and then, the newest transaction whose messages nothing can join any more; of all partitions.

        Asked before reading: what of it is this partition's, reading finds. Not asked where the messages are in another
        server, whose crash could take the transaction back and not what is stored of it here.
        """
        if not self._passes_now() or self._context.config.has_remote_target:
            return None
        return self._reader.messages.find_newest(self._context.databases.source.connection())

    def _passes_now(self) -> bool:
        if time.monotonic() < self._next_passing:
            return False
        self._next_passing = time.monotonic() + PASSING_SECONDS
        return True

    def _look(self, connection: Connection) -> Partitioning | None:
        """Look for a change; one that was asked for where checkpoints are snapshot ranges still needs its barrier."""
        key = self._context.key
        now = partitions.fetch(connection, key)
        if now is None or now.next_count is None or now.is_drawn:
            return now
        partitions.draw(connection, key, self._context.config.resource.uid)
        return partitions.fetch(connection, key)

    def _stop_at(
        self, now: Partitioning, state: ProcessorState, fetched: outcomes.Fetched, *, settled: bool
    ) -> outcomes.Fetched:
        """End the last batch before the barrier at the barrier.

        Once it is stored, change the number if all are there.
        """
        batch = fetched.batch
        nothing = outcomes.Fetched(_nothing(batch.after, batch.partition))
        if now.is_beyond_barrier(batch.after) or (now.is_at_barrier(batch.after) and now.is_at_barrier(state.stored)):
            if partitions.change(
                self._context.databases.target.connection(), self._context.key, self._context.config.resource.uid
            ):
                _log.info("the number of partitions changed", extra={"barrier": describe_barrier(now)})
            return nothing
        if now.barrier is None:  # another transaction holds the row for longer than we wait
            return nothing if now.is_beyond_barrier(batch.examined) else fetched
        if now.barrier.snapshot_range is not None:
            return _store_end(batch, fetched) if now.is_at_barrier(batch.examined) else fetched
        if not settled or batch.full:
            return fetched
        return outcomes.Fetched(replace(batch, examined=now.barrier), at_once=True)


def _nothing(after: Checkpoint, partition: int, *, saw_all: bool = False) -> Batch:
    return Batch(after, after, (), 0, full=False, partition=partition, saw_all=saw_all)


def _pass(newest: int | None, state: ProcessorState, fetched: outcomes.Fetched) -> outcomes.Fetched:
    """Let messages of others behind an idle partition's checkpoint count as examined: `outbox prune` waits for it."""
    batch, stored = fetched.batch, state.stored
    found = batch.matched_count or batch.excluded or batch.full or batch.waits_for is not None
    if newest is None or stored is None or found:
        return fetched
    if batch.after.snapshot_range is None:
        end = Checkpoint(newest, MAX_POSITION)
        return outcomes.Fetched(replace(batch, examined=end), at_once=True) if end > batch.examined else fetched
    passed = f"{newest + 1}:{newest + 1}:"
    if covers(as_snapshot_range(stored).lower, passed) or not covers(as_snapshot_range(batch.examined).lower, passed):
        return fetched
    return _store_end(batch, fetched)


def _store_end(batch: Batch, fetched: outcomes.Fetched) -> outcomes.Fetched:
    """Let where it ends be stored: an idle partition has moved its lower snapshot in memory only."""
    if batch.matched_count or batch.excluded:
        return fetched
    barrier = replace(batch.examined, position=max(batch.examined.position, batch.after.position + 1))
    return outcomes.Fetched(replace(batch, examined=barrier), at_once=True)
