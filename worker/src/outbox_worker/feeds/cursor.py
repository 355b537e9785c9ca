"""Fresh batches of one partition: read after the checkpoint, and acknowledged by storing the next one.

What of a batch is not handled with it is held in the transaction that stores the checkpoint beyond it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from outbox_core.errors import OutboxError, TransientError
from outbox_core.message import Batch
from outbox_core.ports import Feed, Settling
from outbox_core.processor import outcomes
from outbox_core.processor.failing import POISON_CRASHES, build_poison_error
from outbox_core.processor.state import lease_of
from outbox_core.progress.checkpoint import StoreAnswer
from outbox_core.report import Reason
from outbox_core.spec import CheckpointTime, Mode
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.transactions.transaction import StoreRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox_core.part import Places
    from outbox_core.ports import Settle
    from outbox_core.processor.failing import Failure
    from outbox_core.processor.state import ProcessorState
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.feeds.partition_reader import PartitionReader
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.arrivals import Seen
    from outbox_worker.postgres.transactions.transaction import TransactionRunner


class CursorFeed(Feed):
    """Reads what comes after the checkpoint."""

    def __init__(self, context: StepContext, reader: PartitionReader, runner: TransactionRunner) -> None:
        self._context = context
        self._reader = reader
        self._runner = runner
        self._delivery = context.config.delivery
        self._most = self._delivery.batch_limit
        self._target = context.databases.target

    def find_end(self, after: Checkpoint) -> Seen | None:
        """Return the look that says that `fetch` would find nothing; None: fetch. To be asked before each `fetch`."""
        seen = self._reader.find_end(after)
        return seen if seen is not None and seen.run == self._runner.server_run else None

    @override
    def fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Read at most as many messages as the state and the throttle allow, without those that are not due."""
        after = state.cursor
        if after is None:
            raise TransientError("no checkpoint is loaded", reason=Reason.INTERNAL_ERROR)
        # Each read of a partition merges many index ranges: what is to be searched is read at once, not only counted.
        searched = state.block is not None and self._delivery.mode is Mode.PARTITIONED
        limit = self._limit(state)
        if self._reader.lease_look is not None:
            self._reader.lease_look.ask(lease_of(state))
        batch = self._reader.read(after, limit, with_messages=searched)
        found = batch.matched_count > 0
        if found and (batch.delayed_count or state.blocking):
            batch = self._exclude(state, batch)
            found = batch.matched_count > 0 or bool(batch.excluded)
        if not found:
            self._runner.look_at_run(self._target.connection())
        self._read_ahead(state, batch, limit)
        return outcomes.Fetched(batch)

    def _read_ahead(self, state: ProcessorState, batch: Batch, limit: int) -> None:
        run = self._runner.server_run
        if run is not None and is_backlog(state, batch, limit, self._most):
            self._reader.read_ahead(batch.examined, limit, run)
        else:
            self._reader.messages.forget_ahead()

    def _limit(self, state: ProcessorState) -> int:
        wanted = state.limit or self._most
        if state.poison_search is not None:
            wanted = min(wanted, state.poison_search.next_size)
        return min(wanted, self._context.throttle.limit(self._most))

    def _exclude(self, state: ProcessorState, batch: Batch) -> Batch:
        """Take out of a batch what is not to be handled now: what is delayed, or waits behind a held message."""
        connection = self._target.connection()
        rows = self._reader.relation(batch)
        if self._delivery.mode is Mode.ORDERED and batch.delayed_count:
            batch = holding.cut_at_delayed(connection, batch, rows, lambda most: self._reader.read(batch.after, most))
            if not batch.matched_count or not state.blocking:
                return batch
            rows = self._reader.relation(batch)
        # While failing messages are looked for, the search asks for the places next.
        searched = state.block is not None
        places, excluded = holding.survey(connection, self._context.key, rows, with_places=searched)
        if not excluded:
            return replace(batch, places=places)
        out = set(excluded)
        return replace(
            batch,
            messages=tuple(message for message in batch.messages if message.checkpoint not in out),
            matched_count=batch.matched_count - len(excluded),
            excluded=excluded,
            places=places,
        )


class WholeFeed(Feed):
    """Reads one of several processors of a process, unless one look for all of them says that nothing came."""

    def __init__(self, cursor: CursorFeed) -> None:
        self._cursor = cursor

    @override
    def fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        after = state.cursor
        if after is not None and (seen := self._cursor.find_end(after)) is not None:
            return outcomes.Fetched(Batch(after, after, (), 0, full=False, saw_all=seen.saw_all))
        return self._cursor.fetch(state)


def is_backlog(state: ProcessorState, batch: Batch, limit: int, most: int) -> bool:
    """Say whether another batch after this one, as large, will most likely be asked for once this one is handled.

    A batch that is not full has nothing behind it. While a message that fails is looked for, what comes next depends on
    what comes of this batch; so does the size where the rate is limited. A new snapshot range is opened only when it is
    asked for.
    """
    searching = state.limit is not None or state.block is not None or state.poison_search is not None
    snapshot_range = batch.examined.snapshot_range
    return (
        batch.full
        and batch.matched_count > 0
        and batch.waits_for is None
        and limit == most
        and not (searching or state.attempt or state.failures)
        and (snapshot_range is None or snapshot_range.is_open)
    )


class CheckpointSettling(Settling):
    """Acknowledges fresh batches: `request` is the fence, what `settle_with` returns holds what is not handled."""

    def __init__(self, context: StepContext, reader: PartitionReader, runner: TransactionRunner) -> None:
        self._context = context
        self._reader = reader
        self._runner = runner
        self._databases = context.databases
        self._first = context.config.delivery.checkpoint is CheckpointTime.BEFORE_HANDLING

    @override
    def request(self, state: ProcessorState, batch: Batch) -> StoreRequest:
        return StoreRequest(lease_of(state), state.stored, batch.examined, first=self._first)

    @override
    def settle_with(self, state: ProcessorState, batch: Batch, pairs: Iterable[Checkpoint]) -> Settle:
        lease = lease_of(state)
        # Here, not in the transaction, which would be idle while another database is read.
        carried = self._reader.picked(batch, pairs) if self._context.config.has_remote_target else None

        def settle(connection: Connection, done: Batch, failed: tuple[Failure, ...]) -> outcomes.StepOutcome | None:
            if not (done.excluded or failed):
                return None
            rows = carried or self._reader.picked(batch, (*done.excluded, *(each.checkpoint for each in failed)))
            key = self._context.key
            why = holding.hold(connection, key, lease, rows, excluded=done.excluded, failed=failed)
            return None if why is None else outcomes.OwnershipLost(why)

        return settle

    @override
    def places(self, batch: Batch) -> Places:
        found = batch.places or holding.list_range(
            self._databases.target.connection(), self._reader.relation(batch), batch.excluded
        )
        return found.of_messages(batch) if batch.messages else found

    def find_loss(self, state: ProcessorState, batch: Batch) -> outcomes.Rejected | None:
        """Look at the lease right before a batch is handed over that cannot be recalled; or right when it was read."""
        lease, connection = lease_of(state), self._databases.target.connection()
        if self._reader.lease_look is not None and self._reader.lease_look.is_fresh(lease):
            return None
        seconds = self._context.config.delivery.lease_duration
        if ownership.keep_lease(connection, self._context.key, lease, seconds):
            return None
        return self._not_owner(connection, state, batch)

    def mark_in_flight(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome | None:
        """Write messages down before they are tried; say so if one killed too many processes to be tried again."""
        connection = self._databases.target.connection()
        last = holding.find_last(self._databases.source.connection(), self._reader.in_source(batch))
        crashes = holding.mark_in_flight(
            connection, self._context.key, lease_of(state), last or batch.examined,
            in_flight=batch.matched_count, generation=self._context.config.fingerprint,
        )  # fmt: skip
        if crashes < 0:
            return self._not_owner(connection, state, batch)
        if crashes < POISON_CRASHES or batch.matched_count > 1:
            return None
        return outcomes.Failed(build_poison_error(crashes))

    def clear_in_flight(self, state: ProcessorState) -> None:
        """Say that the attempt was answered. Where that cannot be said, this process says so by coming again."""
        with suppress(OutboxError, DatabaseError):
            holding.clear_in_flight(self._databases.target.connection(), self._context.key, lease_of(state))

    def _not_owner(self, connection: Connection, state: ProcessorState, batch: Batch) -> outcomes.Rejected:
        stored = checkpoints.load(connection, self._context.key)
        return outcomes.Rejected(StoreAnswer.NOT_OWNER, state.stored, batch.examined, stored.pair if stored else None)

    def confirm(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Find out about a transaction whose connection broke, before anything else."""
        doubt = state.doubt
        if doubt is None:
            return outcomes.NotCommitted()
        lease, key = lease_of(state), self._context.key
        connection = self._databases.target.connection()
        if doubt.committing:
            settled = checkpoints.settle(connection, key, lease)
            if not settled.owned:
                return outcomes.Rejected(StoreAnswer.NOT_OWNER, doubt.expected, doubt.new, None)
            if settled.pair is not None and settled.pair.is_same(doubt.new):
                # Of a batch that was handled in part nothing says any more how much of that part failed.
                whole = state.batch is not None and doubt.new == state.batch.examined
                return outcomes.Stored(doubt.new, state.batch.matched_count if state.batch and whole else 0)
        answer = self._runner.ask(connection, StoreRequest(lease, doubt.expected, doubt.new))
        if answer is StoreAnswer.STORED:
            return outcomes.NotCommitted()
        stored = checkpoints.load(connection, key)
        return outcomes.Rejected(answer, doubt.expected, doubt.new, stored.pair if stored else None)
