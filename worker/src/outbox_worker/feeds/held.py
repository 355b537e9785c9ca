"""Held messages of one partition: taken when they are due, and acknowledged under the partition's lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.message import Batch
from outbox_core.part import Place, Places
from outbox_core.ports import Feed, Settling
from outbox_core.processor import outcomes
from outbox_core.processor.state import lease_of
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.reading.payloads import PayloadBound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox_core.ports import Settle
    from outbox_core.processor.failing import Failure
    from outbox_core.processor.state import ProcessorState
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.postgres.connection import Connection

LARGEST_HELD_BATCH: Final = 1000
"""Held messages tried at once: each is written down before."""


class HeldFeed(Feed, Settling):
    """Takes held messages and settles them; they have no checkpoint, so there is nothing to store."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._target = context.databases.target
        delivery = context.config.delivery
        self._payloads = PayloadBound(delivery.byte_limit, min(delivery.batch_limit, LARGEST_HELD_BATCH))

    @override
    def fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        taken = holding.take_due(
            self._target.connection(), self._context.key, lease_of(state), limit=self._limit(state),
            payloads=self._payloads if self._context.target.needs_payload else None,
        )  # fmt: skip
        if not taken.owned:
            return outcomes.OwnershipLost("the lease went before held messages were looked at")
        if not taken.held:
            return outcomes.HeldTaken(None, taken.next_in, taken.blocking)
        here = state.cursor or taken.held[0].checkpoint
        batch = Batch(
            here, here, taken.messages, len(taken.held), full=True, matched_count=len(taken.held),
            partition=self._context.key.partition, held=taken.held,
        )  # fmt: skip
        return outcomes.HeldTaken(batch, 0.0, blocking=True)

    def _limit(self, state: ProcessorState) -> int:
        most = self._context.config.delivery.batch_limit
        most = min(most, self._context.throttle.limit(most, retried=True))
        return min(state.held_limit or LARGEST_HELD_BATCH, most, LARGEST_HELD_BATCH)

    @override
    def request(self, _state: ProcessorState, _batch: Batch) -> None:
        """Store no checkpoint: it has passed them before."""

    @override
    def settle_with(self, state: ProcessorState, _batch: Batch, _pairs: Iterable[Checkpoint] = ()) -> Settle:
        """Return what takes out those that are handled, and writes down what becomes of those that failed."""
        lease = lease_of(state)

        def settle(connection: Connection, done: Batch, failed: tuple[Failure, ...]) -> outcomes.StepOutcome | None:
            out = {each.checkpoint for each in failed}
            handled = [each for each in done.held if each.checkpoint not in out]
            settled = holding.settle(connection, self._context.key, lease, handled)
            left = holding.fail(connection, self._context.key, lease, failed) if failed else 0
            if settled < 0 or left < 0:
                return outcomes.OwnershipLost(holding.NOT_OURS)
            return None if (settled, left) == (len(handled), len(failed)) else outcomes.HeldChanged()

        return settle

    @override
    def places(self, batch: Batch) -> Places:
        return Places.of(Place(each.checkpoint, each.key) for each in batch.held)

    def fail(self, state: ProcessorState, failed: tuple[Failure, ...]) -> outcomes.StepOutcome:
        """Write down what becomes of one that failed alone."""
        answer = holding.fail(self._target.connection(), self._context.key, lease_of(state), failed)
        if answer < 0:
            return outcomes.OwnershipLost(holding.NOT_OURS)
        return outcomes.HeldFailed() if answer else outcomes.HeldChanged()
