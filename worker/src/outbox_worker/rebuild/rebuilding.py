"""Steps of a processor that replaces another one: it catches up beside it, and swaps.

Both run until then. The swap is one transaction of the new one's owner, and its order is what keeps it short and free
of deadlocks:

1. The old processor stands still: its worker's transactions hold an advisory lock, shared, from their first statement
   on. Ours takes it exclusively: it waits for the batch in hand to be committed, and the next one waits for us before
   it has locked anything. Where this processor is partitioned, its other partitions are made to stand still likewise.
2. What the old one has examined and we have not, `maxLag` messages at most, is handled here, for all our partitions,
   and our checkpoint stored: now the new tables hold all that the old ones do.
3. The user's statement.
4. Our other partitions' checkpoints are moved, and their leases end, so that their owners read them anew. The old
   processor is superseded: its leases end, its claim becomes ours for good. Should anything have been stored for it, or
   by another partition of ours, since 1 (by a program that takes no lock), all is rolled back.

A swap that cannot be made now is rolled back, told, and tried again; this processor goes on meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.ports import Feed, InTransaction
from outbox_core.processor import outcomes
from outbox_core.processor.state import lease_of
from outbox_core.report import Reason, RebuildState, RebuildView
from outbox_worker.logs import get_logger
from outbox_worker.postgres.errors import DatabaseError, translate
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import rebuilds
from outbox_worker.postgres.progress.rebuilds import SupersedeAnswer
from outbox_worker.postgres.transactions.guard import GuardedConnection
from outbox_worker.postgres.transactions.statement import find_transaction_end
from outbox_worker.postgres.transactions.transaction import Reached, StoreRequest
from outbox_worker.rebuild.catch_up import CatchUp, NotNowError, plan_catch_up
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outbox_core.processor.state import ProcessorState
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import Rebuild
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.progress.rebuilds import Coverage, Noted
    from outbox_worker.postgres.transactions.transaction import Transaction, TransactionRunner

LOOK_SECONDS: Final = 0.5
LONGEST_WAIT: Final = 30.0
"""Between two tries of a swap that fails."""
LOCK_TIMEOUT: Final = "2s"
"""For the old processor's batch, and for the tables of the swap: readers queue behind a lock that is waited for."""
_log = get_logger("outbox.rebuild")
_ANSWERS: Final = {
    SupersedeAnswer.MOVED: "the other processor's checkpoint was moved during the swap",
    SupersedeAnswer.NO_MATCH: "the other processor has no checkpoint here, hands out batches, or reads another source",
    SupersedeAnswer.BY_ANOTHER: "the other processor was replaced already, or this one replaced another",
    SupersedeAnswer.ALREADY: "the swap was made before",
}


class Rebuilder:
    """Looks how far the processor to be replaced is ahead, and swaps where that is near enough."""

    def __init__(self, context: StepContext, runner: TransactionRunner, *, on_swapped: Callable[[], None]) -> None:
        """Keep the context, and what runs its transactions.

        `on_swapped` is called when partitions of ours that others own were moved, right before that is committed.

        Raises:
            ConfigurationError: the resource has no `rebuildOf`, or a target that cannot be swapped.

        """
        target = context.target
        if context.config.rebuild_of is None or not isinstance(target, InTransaction):
            raise ConfigurationError("rebuildOf needs target.sql or target.python: a projection in the database")
        self._context = context
        self._on_swapped = on_swapped
        self._rebuild: Rebuild = context.config.rebuild_of
        self._old = ProcessorKey(context.key.schema, self._rebuild.processor_id)
        delivery = context.config.delivery
        self._timeout = delivery.timeout.total_seconds()
        self._runner = runner
        self._catching_up = CatchUp(context, target)
        self._partitions = delivery.partitions
        self._next_look = 0.0
        self._failures = 0
        self._swapped = False

    def check(self) -> None:
        """Refuse a statement that would end the swap's transaction.

        Raises:
            ConfigurationError: it would.

        """
        if (command := find_transaction_end(self._rebuild.swap_statement)) is not None:
            raise ConfigurationError(
                f"rebuildOf.swapStatement holds {command}: the transaction is the worker's, take it out"
            )

    def look(self, state: ProcessorState) -> outcomes.StepOutcome | None:
        """See, every so often, how far the other processor is ahead; None: go on."""
        # While a message fails, this projection is not what readers should get.
        troubled = state.attempt > 0 or state.search_end is not None or state.poison_search is not None
        if self._swapped or troubled or time.monotonic() < self._next_look:
            return None
        began = self._next_look = time.monotonic()
        outcome = self._look(state)
        if self._next_look:  # else it was swapped, which the next look tells
            # Counting costs a scan of what lies between: a tenth of the time at most.
            pause = max(LOOK_SECONDS, 9 * (time.monotonic() - began))
            self._next_look = max(self._next_look, time.monotonic() + pause)
        return outcome

    def _look(self, state: ProcessorState) -> outcomes.StepOutcome | None:
        lease, target, key = lease_of(state), self._target, self._context.key
        noted = rebuilds.note(target, key, lease, self._old.processor_id)
        if self._is_decided(noted):
            return None
        try:
            coverage = self._find_old(target)
        except ConfigurationError as err:
            self._tell(RebuildState.NOT_POSSIBLE, str(err))
            return None
        places, _ = self._places(state, target)
        plans = plan_catch_up(places, coverage.places)
        plans, behind, at_least = self._catching_up.count(plans, cap=self._rebuild.max_lag)
        unhandled = rebuilds.count_unhandled(target, key)
        waits = str(unhandled)
        if not unhandled and not self._catching_up.is_settled(plans):
            waits = "transactions are open below what the other one has handled: cursor TransactionOrder waits for them"
        if behind > self._rebuild.max_lag or waits:
            self._tell(RebuildState.CATCHING_UP, waits, behind=behind, at_least=at_least)
            return None
        if self._rebuild.hold:
            self._tell(RebuildState.HELD, "set rebuildOf.hold to false to swap", behind=behind)
            return None
        return self._swap(state, lease, behind)

    def _is_decided(self, noted: Noted) -> bool:
        """Tell what leaves nothing to swap: it was made, or can never be."""
        if noted.swapped_at is not None:
            self._swapped = True
            self._tell(RebuildState.SWAPPED, f"swapped at {noted.swapped_at:%Y-%m-%d %H:%M:%S%z}", behind=0)
            return True
        if noted.superseded_by is not None:
            self._tell(RebuildState.NOT_POSSIBLE, f"processor {noted.superseded_by!r} replaced it already")
        elif noted.replaced is not None:
            self._tell(
                RebuildState.NOT_POSSIBLE,
                f"this processor replaced {noted.replaced!r} before, and can replace no other: use another processorId",
            )
        return noted.superseded_by is not None or noted.replaced is not None

    @property
    def _target(self) -> Connection:
        return self._context.databases.target.connection()

    def _find_old(self, connection: Connection) -> Coverage:
        coverage = rebuilds.find_coverage(connection, self._old)
        if coverage is None:
            raise ConfigurationError(f"it has no checkpoint in schema {self._old.schema} of this database")
        return coverage

    def _places(
        self, state: ProcessorState, connection: Connection
    ) -> tuple[dict[int, tuple[Checkpoint, Checkpoint]], Coverage | None]:
        """Return where each partition of ours is, and where the other ones stand as the database has it."""
        if state.cursor is None or state.stored is None:
            raise TransientError("no checkpoint is loaded", reason=Reason.INTERNAL_ERROR)
        key = self._context.key
        places = {key.partition: (state.cursor, state.stored)}
        if self._partitions is None:
            return places, None
        others = rebuilds.find_coverage(connection, key, but_partition=key.partition)
        return places | {number: (pair, pair) for number, pair in (others.pairs if others else {}).items()}, others

    def _swap(self, state: ProcessorState, lease: outcomes.HeldLease, behind: int) -> outcomes.StepOutcome | None:
        connection, swap = self._target, _Swap()
        limited, until = self._context.shutdown.limited, time.monotonic() + self._timeout
        self._context.ownership.enter(connection)
        try:
            # Not around the COMMIT: interrupted there it may be stored, and this process would go on from before it.
            outcome = self._runner.run(
                connection,
                lease.epoch,
                None,
                lambda transaction: limited(
                    until - time.monotonic(), lambda: self._catch_up(state, lease, transaction, swap)
                ),
                lambda _: limited(until - time.monotonic(), lambda: self._finish(lease, swap)),
            )
        except Interrupted as err:
            self._context.databases.discard()  # it may be in the middle of a statement
            outcome = self._after_interruption(err, behind)
        finally:
            self._context.ownership.leave()
        if isinstance(outcome, outcomes.Failed) and not connection.closed:
            self._note_failure(outcome, behind)
            return None
        if isinstance(outcome, outcomes.Stored):
            _log.info("swapped", extra={"of": self._old.processor_id})
            self._next_look = 0.0
            if swap.stores and outcome.count:
                self._context.status.add_batch(outcome.count)
            return outcome if swap.stores else None
        return outcome

    def _after_interruption(self, interrupted: Interrupted, behind: int) -> outcomes.Failed:
        """Tell that it took too long. No message's fault: it must not count as an attempt at handling one."""
        failed = outcomes.Failed(interrupted.as_error("the swap"))
        if interrupted.draining:
            return failed
        self._note_failure(failed, behind)
        return outcomes.Failed(TransientError(str(failed.error), reason=failed.error.reason))

    def _note_failure(self, failed: outcomes.Failed, behind: int) -> None:
        self._failures += 1
        self._next_look = time.monotonic() + min(LONGEST_WAIT, 2.0 ** min(self._failures, 10) / 4)
        _log.warning("not swapped", extra={"of": self._old.processor_id, "error": str(failed.error)})
        passing = isinstance(failed.error, TransientError | NotNowError)
        self._tell(
            RebuildState.SWAPPING if passing else RebuildState.NOT_POSSIBLE,
            f"rolled back, and tried again: {failed.error}", behind=behind,
        )  # fmt: skip

    def _catch_up(
        self, state: ProcessorState, lease: outcomes.HeldLease, transaction: Transaction, swap: _Swap
    ) -> Reached:
        """Stop the other processor where it stands, and handle what it has handled."""
        connection, key = transaction.connection, self._context.key
        swap.transaction = transaction
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
        rebuilds.stand_still(connection, self._old)
        if self._partitions is not None:
            rebuilds.stand_still(connection, key)
            self._check_partitioning(connection, self._partitions.count)
        try:
            swap.coverage = self._find_old(connection)
        except ConfigurationError as err:
            raise NotNowError(str(err)) from err
        if unhandled := rebuilds.count_unhandled(connection, key):
            raise NotNowError(str(unhandled))
        places, swap.others = self._places(state, connection)
        plans = plan_catch_up(places, swap.coverage.places)
        self._catching_up.wait_settled(plans)
        plans, behind, _ = self._catching_up.count(plans, cap=self._rebuild.max_lag)
        if behind > self._rebuild.max_lag:
            raise NotNowError(f"the other processor is more than {self._rebuild.max_lag} messages ahead again")
        count = sum(self._catching_up.handle(transaction, plan) for plan in plans)
        goals = {plan.partition: goal for plan in plans if (goal := plan.decide_checkpoint()) is not None}
        mine = goals.pop(key.partition, None)
        swap.goals = goals
        swap.stores = mine is not None
        return Reached(None if mine is None else StoreRequest(lease, state.stored, mine), count)

    def _check_partitioning(self, connection: Connection, count: int) -> None:
        now = partitions.fetch(connection, self._context.key)
        if now is None or now.count != count or now.next_count is not None:
            raise NotNowError("the number of partitions is being changed")

    def _finish(self, lease: outcomes.HeldLease, swap: _Swap) -> None:
        """Run the user's statement; move our other partitions; let the other processor never store again."""
        if swap.transaction is None or swap.coverage is None:
            raise NotNowError("the other processor's checkpoint is gone")
        transaction = swap.transaction
        connection, key = transaction.connection, self._context.key
        try:
            connection.execute(self._rebuild.swap_statement.encode())
        except DatabaseError as err:
            raise _explain(err) from err
        GuardedConnection(connection, transaction.mark).check_after()
        if swap.goals and not rebuilds.advance_partitions(connection, key, lease, swap.others, swap.goals):
            raise NotNowError("a partition of this processor stored something during the swap")
        answer = rebuilds.supersede(
            connection, key, lease, self._old.processor_id, swap.coverage,
            decided_by=str(self._context.config.resource),
        )  # fmt: skip
        if answer is not SupersedeAnswer.DONE:
            raise NotNowError(_ANSWERS.get(answer, "this processor is not the live owner any more"))
        if swap.goals:
            self._on_swapped()  # before the COMMIT, whose outcome may stay unknown

    def _tell(self, state: RebuildState, message: str, *, behind: int | None = None, at_least: bool = False) -> None:
        view = RebuildView(
            of=self._old.processor_id, state=state, behind=behind, at_least=at_least, message=message[:500]
        )
        self._context.status.set_observed(rebuild=view)


@dataclass(slots=True)
class _Swap:
    """What one attempt at a swap found while both processors waited; `stores`: a checkpoint of this partition."""

    transaction: Transaction | None = None
    stores: bool = False
    coverage: Coverage | None = None
    others: Coverage | None = None
    goals: Mapping[int, Checkpoint] = field(default_factory=dict)


class RebuildFeed(Feed):
    """Looks, before each fetch, at the processor that is replaced; else it is the feed of any processor."""

    def __init__(self, rebuilder: Rebuilder, feed: Feed) -> None:
        self._rebuilder = rebuilder
        self._feed = feed

    @override
    def check(self) -> None:
        self._rebuilder.check()

    @override
    def fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        return self._rebuilder.look(state) or self._feed.fetch(state)


def let_go(contexts: Sequence[StepContext]) -> None:
    """The swap ends the leases of our other partitions: no step may try to store under them."""
    for each in contexts[1:]:
        if (lease := each.ownership.lease) is not None:
            each.ownership.lose_lease(lease, "the swap moved its checkpoint")


def _explain(err: DatabaseError) -> OutboxError:
    """Say what the server says about the statement; never a row: DETAIL is left out."""
    error = translate(err)
    if isinstance(error, TransientError):
        return error
    said = f"{err.diag.message_primary} [{err.sqlstate}]"
    return HandlerError(f"rebuildOf.swapStatement failed: {said}", reason=Reason.STATEMENT_FAILED)
