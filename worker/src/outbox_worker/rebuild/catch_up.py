"""What a projection has to handle to have all that another one has: counted beforehand, handled in the swap.

Partition by partition: of each, how far it has to go (`outbox_core.progress.coverage`) and what lies between. The
process that makes the swap handles the plans of all partitions, its own and others': they stand still meanwhile
(`rebuilding.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from outbox_core.errors import OutboxError
from outbox_core.message import Batch
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.coverage import decide_catch_up
from outbox_core.report import Reason
from outbox_worker.feeds.partition_reader import reader_of
from outbox_worker.postgres.admin.preview import count_between
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.ownership import partitions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox_core.ports import InTransaction
    from outbox_core.progress.coverage import CatchUpPlan
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.postgres.reading.messages import MessageReader
    from outbox_worker.postgres.transactions.transaction import Transaction

SETTLE_SECONDS: Final = 1.0
"""For which the other processor stands still so that transactions below its end can end."""


class NotNowError(OutboxError):
    """The swap is rolled back and tried again later."""

    reason = Reason.STATEMENT_FAILED


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """One partition: where it is, and its catch-up plan.

    Attributes:
        cursor: up to there everything is examined; at or behind what is stored.
        counts: messages in each range of the plan, as far as they were counted.

    """

    partition: int
    cursor: Checkpoint
    stored: Checkpoint
    catch_up: CatchUpPlan
    counts: tuple[int, ...] = ()

    def decide_checkpoint(self) -> Checkpoint | None:
        """Return what to store once the plan is handled; None: it is stored already."""
        goal = self.catch_up.goal
        if goal.snapshot_range is None:
            return goal if goal > self.stored else None
        if goal.snapshot_range == self.stored.snapshot_range:
            return None
        counter = max(self.cursor.position, self.stored.position)
        return Checkpoint(0, counter + max(1, sum(self.counts)), goal.snapshot_range)


def plan_catch_up(
    places: Mapping[int, tuple[Checkpoint, Checkpoint]], theirs: Sequence[Checkpoint]
) -> list[PartitionPlan]:
    """Decide the catch-up plan of each partition; `places` has of each its cursor and what is stored."""
    return [
        PartitionPlan(partition, cursor, stored, decide_catch_up(cursor, theirs))
        for partition, (cursor, stored) in places.items()
    ]


class CatchUp:
    """Counts and handles what lies between this processor and others."""

    def __init__(self, context: StepContext, target: InTransaction) -> None:
        self._context = context
        self._target = target
        self._readers: dict[int, MessageReader] = {}

    def count(self, plans: Sequence[PartitionPlan], *, cap: int) -> tuple[list[PartitionPlan], int, bool]:
        """Return the plans with their counts, and how many messages that are, exactly up to `cap`; `True`: or more.

        What is counted before it is settled may become more.
        """
        counted, total, at_least = [], 0, False
        for plan in plans:
            counts = []
            for after, up_to in plan.catch_up.ranges:
                if at_least:
                    break
                connection = self._context.databases.source.connection()
                found = count_between(connection, self._reader(plan.partition), after, up_to, cap=cap - total)
                counts.append(found.total)
                total, at_least = total + found.total, found.at_least
            counted.append(replace(plan, counts=tuple(counts)))
        return counted, total, at_least

    def is_settled(self, plans: Sequence[PartitionPlan]) -> bool:
        """Say whether nothing can appear in the plans' ranges any more.

        What ends at a pair must lie below the high-water mark.
        """
        goals = [
            plan.catch_up.goal for plan in plans if plan.catch_up.ranges and plan.catch_up.goal.snapshot_range is None
        ]
        return not goals or partitions.is_settled(self._context.databases.source.connection(), max(goals))

    def wait_settled(self, plans: Sequence[PartitionPlan]) -> None:
        """Wait a moment for transactions that are open below the goal.

        Raises:
            NotNowError: they stay open.

        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self.is_settled(plans):
            if time.monotonic() > deadline:
                raise NotNowError("transactions are open below what the other processor has handled")
            time.sleep(0.01)

    def handle(self, transaction: Transaction, plan: PartitionPlan) -> int:
        """Handle what one plan has; return how many messages the target handled.

        Raises:
            NotNowError: one of them is delayed.

        """
        ranges = zip(plan.catch_up.ranges, plan.counts, strict=True)
        return sum(self._handle_range(transaction, plan.partition, *ends, count) for ends, count in ranges if count)

    def _handle_range(
        self, transaction: Transaction, partition: int, after: Checkpoint, end: Checkpoint, count: int
    ) -> int:
        context, reader = self._context, self._reader(partition)
        batch = Batch(after, end, (), count, full=True, matched_count=count, partition=partition)
        rows = reader.keyed_relation(after, end, context.config.delivery.message_key)
        if context.config.has_remote_target:
            rows = holding.carry(context.databases.source.connection(), rows)
        delayed = holding.find_delayed(transaction.connection, rows)
        if delayed is not None:
            raise NotNowError(f"message {delayed[0].message_id} is delayed, and lies between the two")
        if self._target.needs_payload:
            batch = reader.fetch_range(context.databases.source.connection(), after, end, count)
        return self._target.handle(transaction, batch)

    def _reader(self, partition: int) -> MessageReader:
        if partition not in self._readers:
            self._readers[partition] = reader_of(self._context.config, partition)
        return self._readers[partition]
