"""What a worker does with its target; the one place that knows whether effects are in the transaction or outside of it.

While a target works the heartbeat keeps its transaction from being idle, and delivery.timeout bounds it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.ports import InTransaction, OutsideTransaction, PipelinedTarget, SearchTarget
from outbox_core.report import Reason
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.message import Batch
    from outbox_core.part import Places
    from outbox_core.ports import GoOn
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.transactions.transaction import Transaction

_Answer = TypeVar("_Answer")


class Effects:
    """Hands batches to the target."""

    def __init__(self, context: StepContext) -> None:
        self._ownership = context.ownership
        self._shutdown = context.shutdown
        self._throttle = context.throttle
        self._timeout = context.config.delivery.timeout.total_seconds()
        target = context.target
        self._inside = target if isinstance(target, InTransaction) else None
        self._outside = target if isinstance(target, OutsideTransaction) else None
        self.are_inside = self._inside is not None
        """Effects are in a transaction of the checkpoint's database."""
        self.are_remembered = self._outside is not None and self._outside.has_own_transactions
        """The target writes down what it has, and by that leaves out what comes again."""
        self._pipelined = target if isinstance(target, PipelinedTarget) else None
        self.most_under_way = 1 if self._pipelined is None else self._pipelined.most_under_way
        """Batches that the target takes before the first one is stored."""
        self.awaits_confirms = self._pipelined is not None and self._pipelined.awaits_confirms
        """It takes the next one only when the one before is confirmed."""

    @property
    def inside(self) -> InTransaction:
        """The target, where effects are in the transaction.

        Raises:
            ConfigurationError: they are outside.

        """
        if self._inside is None:
            raise ConfigurationError("effects in the transaction of the checkpoint need a target in its database")
        return self._inside

    def spend(self, messages: int) -> None:
        """So many messages are handed over: the processor's rate counts them."""
        self._throttle.begin(messages)

    def handle(self, batch: Batch, transaction: Transaction) -> int:
        """Apply the batch in the open transaction, within delivery.timeout; return the messages handled."""
        self.spend(batch.matched_count)
        return self.limited(transaction.connection, partial(self.inside.handle, transaction, batch))

    def open_search(
        self, transaction: Transaction, batch: Batch, places: Places, seconds: float, *, blocks: bool
    ) -> GoOn | None:
        """Return what finds the messages that fail with one call, where the target can do that."""
        if not isinstance(self._inside, SearchTarget):
            return None
        return self._inside.open_search(transaction, batch, places, seconds, blocks=blocks)

    def limited(self, connection: Connection, act: Callable[[], _Answer]) -> _Answer:
        """Do what the target needs in this connection's transaction, within delivery.timeout."""
        self._ownership.enter(connection)
        try:
            return self._shutdown.limited(self._timeout, act)
        except Interrupted as err:
            raise err.as_error("the batch") from err
        finally:
            self._ownership.leave()

    def deliver(self, batch: Batch, epoch: int) -> int:
        """Hand the batch to a target outside, within delivery.timeout; return the messages handled.

        Raises:
            TransientError: the target did not confirm the only message of the batch. Of several, half may be in time.
            OutboxError: it did not take all of them.

        """
        target = self._outside
        if target is None:
            raise ConfigurationError("a target in the database has its effects in a transaction")
        self.spend(batch.matched_count)
        try:
            return self._shutdown.limited(self._timeout, partial(target.deliver, batch, epoch))
        except Interrupted as err:
            if err.draining or len(batch) > 1:
                raise err.as_error("handing the batch over") from err
            raise TransientError(
                "the target did not confirm one message within delivery.timeout; it is handed over until it does",
                reason=Reason.TARGET_UNAVAILABLE,
            ) from err

    def begin(self, batch: Batch, epoch: int) -> None:
        """Let the target begin to take the batch, which is delivered later, within delivery.timeout."""
        target = self._pipelined
        if target is None:
            raise ConfigurationError("a target that takes one batch at a time begins none before its turn")
        try:
            self._shutdown.limited(self._timeout, partial(target.begin, batch, epoch))
        except Interrupted as err:
            raise err.as_error("handing the batch over") from err

    def is_under_way(self, batch: Batch) -> bool:
        """Say whether the target still takes a batch that it began to take."""
        return self._pipelined is not None and self._pipelined.is_under_way(batch)
