"""What a projection has to handle to have all that another one has: counted beforehand, handled in the swap.

Partition by partition: of each, how far it has to go (`outbox_core.standing`) and what lies on that way. Whoever makes
the swap handles the way of all partitions, its own and others': they stand still meanwhile (`rebuilding.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from outbox_core.checkpoint import Checkpoint
from outbox_core.errors import OutboxError
from outbox_core.message import Batch
from outbox_core.report import Reason
from outbox_core.standing import decide_way
from outbox_worker.postgres import holding, stop_line
from outbox_worker.postgres.preview import count_between
from outbox_worker.reading import reader_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox_core.ports import TransactionTarget
    from outbox_core.standing import Way
    from outbox_worker.postgres.messages import MessageReader
    from outbox_worker.steps import Parts
    from outbox_worker.transaction import Transaction

SETTLE_SECONDS: Final = 1.0
"""For which the other processor stands still so that transactions below its end can end."""


class NotNowError(OutboxError):
    """The swap is rolled back and tried again later."""

    reason = Reason.STATEMENT_FAILED


@dataclass(frozen=True, slots=True)
class LanePlan:
    """One partition: where it is, and its way.

    Attributes:
        cursor: up to there everything is examined; at or behind what is stored.
        stored: what the database has.
        counts: messages in each range of the way, as far as they were counted.

    """

    partition: int
    cursor: Checkpoint
    stored: Checkpoint
    way: Way
    counts: tuple[int, ...] = ()

    def decide_checkpoint(self) -> Checkpoint | None:
        """Return what to store once the way is handled; None: it is stored already."""
        goal = self.way.goal
        if goal.window is None:
            return goal if goal > self.stored else None
        if goal.window == self.stored.window:
            return None
        counter = max(self.cursor.position, self.stored.position)
        return Checkpoint(0, counter + max(1, sum(self.counts)), goal.window)


def plan_ways(places: Mapping[int, tuple[Checkpoint, Checkpoint]], theirs: Sequence[Checkpoint]) -> list[LanePlan]:
    """Decide the way of each partition; `places` has of each its cursor and what is stored."""
    return [
        LanePlan(partition, cursor, stored, decide_way(cursor, theirs))
        for partition, (cursor, stored) in places.items()
    ]


class CatchUp:
    """Counts and handles what lies between this processor and others."""

    def __init__(self, parts: Parts) -> None:
        """Keep the parts."""
        self._parts = parts
        self._readers: dict[int, MessageReader] = {}

    def count(self, plans: Sequence[LanePlan], *, cap: int) -> tuple[list[LanePlan], int, bool]:
        """Return the plans with their counts, and how many messages that are, exactly up to `cap`; `True`: or more.

        What is counted before it is settled may become more.
        """
        counted, total, at_least = [], 0, False
        for plan in plans:
            counts = []
            for after, up_to in plan.way.ranges:
                if at_least:
                    break
                connection = self._parts.databases.reading.connection()
                found = count_between(connection, self._reader(plan.partition), after, up_to, cap=cap - total)
                counts.append(found.total)
                total, at_least = total + found.total, found.at_least
            counted.append(replace(plan, counts=tuple(counts)))
        return counted, total, at_least

    def is_settled(self, plans: Sequence[LanePlan]) -> bool:
        """Say whether nothing can appear on the ways any more: what ends at a pair must lie below the reading bound."""
        goals = [plan.way.goal for plan in plans if plan.way.ranges and plan.way.goal.window is None]
        return not goals or stop_line.is_settled(self._parts.databases.reading.connection(), max(goals))

    def wait_settled(self, plans: Sequence[LanePlan]) -> None:
        """Wait a moment for transactions that are open below the goal.

        Raises:
            NotNowError: they stay open.

        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self.is_settled(plans):
            if time.monotonic() > deadline:
                raise NotNowError("transactions are open below what the other processor has handled")
            time.sleep(0.01)

    def handle(self, transaction: Transaction, plan: LanePlan) -> int:
        """Handle what lies on one way; return how many messages the target handled.

        Raises:
            NotNowError: one of them is delayed.

        """
        ranges = zip(plan.way.ranges, plan.counts, strict=True)
        return sum(self._handle_range(transaction, plan.partition, *ends, count) for ends, count in ranges if count)

    def _handle_range(
        self, transaction: Transaction, partition: int, after: Checkpoint, end: Checkpoint, count: int
    ) -> int:
        parts, reader = self._parts, self._reader(partition)
        target = cast("TransactionTarget", parts.target)
        batch = Batch(after, end, (), count, full=True, matched_count=count, partition=partition)
        rows = reader.keyed_relation(after, end, parts.config.delivery.message_key)
        if parts.databases.apart:
            rows = holding.carry(parts.databases.reading.connection(), rows)
        delayed = holding.find_delayed(transaction.connection, rows)
        if delayed is not None:
            raise NotNowError(f"message {delayed[0].message_id} is delayed, and lies between the two")
        if target.needs_payload:
            batch = reader.fetch_range(parts.databases.reading.connection(), after, end)
        return target.handle(transaction, batch)

    def _reader(self, partition: int) -> MessageReader:
        if partition not in self._readers:
            self._readers[partition] = reader_of(self._parts.config, partition)
        return self._readers[partition]
