"""Steps of a processor that replaces another one: it catches up beside it, and swaps.

Both run until then. The swap is one transaction of the new one's owner, and its order is what keeps it short and free
of deadlocks:

1. The old processor stands still: its worker's transactions hold an advisory lock, shared, from their first statement
   on. Ours takes it exclusively: it waits for the batch in hand to be committed, and the next one waits for us before
   it has locked anything.
2. What lies between our checkpoint and the old one's, `maxLag` messages at most, is handled here, and our checkpoint
   stored: now the new tables hold whatever the old ones do.
3. The user's statement.
4. The old processor is superseded: its leases end, its claim becomes ours for good. Should anything have been stored
   for it since 1 (by somebody who takes no lock), all is rolled back.

A swap that cannot be made now is rolled back, told, and tried again; this processor goes on meanwhile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
from typing_extensions import override

from outbox_core import happening as h
from outbox_core.checkpoint import BEGINNING
from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.message import Batch
from outbox_core.report import Reason, RebuildState, RebuildView
from outbox_worker.guard import GuardedConnection
from outbox_worker.logs import get_logger
from outbox_worker.postgres import holding, rebuilds
from outbox_worker.postgres.errors import translate
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.preview import count_between
from outbox_worker.postgres.rebuilds import SupersedeAnswer
from outbox_worker.shutdown import Interrupted
from outbox_worker.statement import find_transaction_end
from outbox_worker.steps import Steps, lease_of
from outbox_worker.transaction import StoreRequest, Transaction, TransactionRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.ports import TransactionTarget
    from outbox_core.spec import Rebuild
    from outbox_core.state import ProcessorState
    from outbox_worker.steps import Parts

LOOK_SECONDS: Final = 0.5
LONGEST_WAIT: Final = 30.0
"""Between two tries of a swap that fails."""
LOCK_TIMEOUT: Final = "2s"
"""For the old processor's batch, and for the tables of the swap: readers queue behind a lock that is waited for."""
_log = get_logger("outbox.rebuild")
_ANSWERS: Final = {
    SupersedeAnswer.MOVED: "the other processor's checkpoint was moved during the swap",
    SupersedeAnswer.NO_MATCH: "the other processor has no checkpoint here, or reads another source",
    SupersedeAnswer.BY_ANOTHER: "the other processor was replaced already",
    SupersedeAnswer.ALREADY: "the swap was made before",
}


class NotNowError(OutboxError):
    """The swap is rolled back and tried again later."""

    reason = Reason.STATEMENT_FAILED


class SwapRunner(TransactionRunner):
    """Runs the one transaction whose checkpoint is known only when the other processor stands still."""

    def swap(
        self,
        connection: psycopg.Connection[Any],
        lease: h.HeldLease,
        catch_up: Callable[[Transaction], tuple[StoreRequest | None, int]],
        finish: Callable[[Transaction], None],
    ) -> h.Stored | h.Refused | h.Unsure | h.Failed | None:
        """Begin, catch up, store, finish, commit. None: committed, without a checkpoint to store."""
        committing, request = False, None
        try:
            transaction = self._begin(connection, lease)
            connection.execute("SELECT set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
            request, count = catch_up(transaction)
            if request is not None and (refused := self._store(connection, request)) is not None:
                return self._roll_back_refused(connection, refused)
            finish(transaction)
            committing = True
            self._commit(connection)
        except psycopg.Error as err:
            return self._after_error(connection, request, translate(err), committing=committing)
        except OutboxError as err:
            return self._after_error(connection, request, err, committing=committing)
        except BaseException:
            self._roll_back(connection)
            raise
        return None if request is None else h.Stored(request.new, count)


class RebuildSteps(Steps):
    """The steps of a processor that is not divided, with a look at the one that it replaces before each fetch."""

    def __init__(self, parts: Parts, *, take_over: bool) -> None:
        """Keep the parts.

        Raises:
            ConfigurationError: the resource has no `rebuildOf`, or a swap that cannot be.

        """
        super().__init__(parts, take_over=take_over)
        if parts.config.rebuild_of is None or not parts.transactional_target:
            raise ConfigurationError("rebuildOf needs target.sql or target.python: a projection in the database")
        self._rebuild: Rebuild = parts.config.rebuild_of
        self._old = ProcessorKey(parts.key.schema, self._rebuild.processor_id)
        self._swapper = SwapRunner(parts.key, lease=self._lease.total_seconds(), timeout=self._timeout)
        self._next_look = 0.0
        self._failures = 0
        self._swapped = False
        self._at: Checkpoint = BEGINNING

    @override
    def _prepare(self, _state: ProcessorState) -> h.Happening:
        if (command := find_transaction_end(self._rebuild.swap_statement)) is not None:
            raise ConfigurationError(
                f"rebuildOf.swapStatement holds {command}: the transaction is the worker's, take it out"
            )
        return super()._prepare(_state)

    @override
    def _fetch(self, state: ProcessorState) -> h.Happening:
        # While a message fails, this projection is not what readers should get.
        troubled = state.attempt > 0 or state.suspect is not None or state.suspicion is not None
        if not self._swapped and not troubled and time.monotonic() >= self._next_look:
            began = time.monotonic()
            happened = self._look(state)
            # Counting costs a scan of what lies between: a tenth of the time at most.
            self._next_look = max(self._next_look, time.monotonic() + max(LOOK_SECONDS, 9 * (time.monotonic() - began)))
            if happened is not None:
                return happened
        return super()._fetch(state)

    def _look(self, state: ProcessorState) -> h.Happening | None:
        """See how far the other processor is ahead, and swap where that is near enough."""
        lease, cursor = lease_of(state), state.cursor
        home = self._connection()
        noted = rebuilds.note(home, self._parts.key, self._old.processor_id, epoch=lease.epoch, token=lease.token)
        if noted.swapped_at is not None:
            self._swapped = True
            self._tell(RebuildState.SWAPPED, f"swapped at {noted.swapped_at:%Y-%m-%d %H:%M:%S%z}", behind=0)
            return None
        if noted.superseded_by is not None:
            self._tell(RebuildState.NOT_POSSIBLE, f"processor {noted.superseded_by!r} replaced it already")
            return None
        try:
            found = self._find_old(cursor)
        except ConfigurationError as err:
            self._tell(RebuildState.NOT_POSSIBLE, str(err))
            return None
        cursor, theirs = found
        behind, at_least = self._count(cursor, theirs)
        held = rebuilds.count_held(home, self._parts.key)
        if behind > self._rebuild.max_lag or held:
            waits = f"{held} messages are held and not handled yet" if held else ""
            self._tell(RebuildState.CATCHING_UP, waits, behind=behind, at_least=at_least)
            return None
        if self._rebuild.hold:
            self._tell(RebuildState.HELD, "set rebuildOf.hold to false to swap", behind=behind)
            return None
        return self._swap(state, lease, behind)

    def _find_old(self, cursor: Checkpoint | None) -> tuple[Checkpoint, Checkpoint]:
        """Return where this processor reads and where the other one stands: two pairs that can be compared."""
        found = rebuilds.furthest(self._connection(), self._old)
        if found is None or cursor is None:
            raise ConfigurationError(f"it has no checkpoint in schema {self._old.schema} of this database")
        if cursor.window is not None:
            raise ConfigurationError("this one's cursor is Snapshot: its checkpoint is no pair to compare")
        return cursor, found[0]

    def _count(self, after: Checkpoint, up_to: Checkpoint) -> tuple[int, bool]:
        if up_to <= after:
            return 0, False
        found = count_between(self._source_connection(), self._reader, after, up_to, cap=self._rebuild.max_lag)
        return found.total, found.at_least

    def _swap(self, state: ProcessorState, lease: h.HeldLease, behind: int) -> h.Happening | None:
        connection = self._connection()
        self._parts.ownership.enter(connection)
        try:
            happened = self._parts.shutdown.limited(
                self._timeout,
                lambda: self._swapper.swap(
                    connection,
                    lease,
                    lambda transaction: self._catch_up(state, lease, transaction),
                    lambda transaction: self._finish(lease, transaction),
                ),
            )
        except Interrupted as err:
            self._parts.databases.discard()  # in the middle of whatever it was
            happened = h.Failed(err.as_error("the swap"))
        finally:
            self._parts.ownership.leave()
        if isinstance(happened, h.Failed) and not connection.closed:
            self._failures += 1
            self._next_look = time.monotonic() + min(LONGEST_WAIT, 2.0 ** min(self._failures, 10) / 4)
            _log.warning("not swapped", extra={"of": self._old.processor_id, "error": str(happened.error)})
            passing = isinstance(happened.error, TransientError | NotNowError)
            self._tell(
                RebuildState.SWAPPING if passing else RebuildState.NOT_POSSIBLE,
                f"rolled back, and tried again: {happened.error}", behind=behind,
            )  # fmt: skip
            return None
        if happened is None or isinstance(happened, h.Stored):
            _log.info("swapped", extra={"of": self._old.processor_id})
            self._next_look = 0.0
        if isinstance(happened, h.Stored) and happened.count:
            self._parts.board.add_batch(happened.count)
        return happened

    def _catch_up(
        self, state: ProcessorState, lease: h.HeldLease, transaction: Transaction
    ) -> tuple[StoreRequest | None, int]:
        """Stop the other processor where it stands, and handle what it has handled."""
        rebuilds.stand_still(transaction.connection, self._old)
        found = rebuilds.furthest(transaction.connection, self._old)
        cursor = state.cursor
        if found is None or cursor is None:
            raise NotNowError("the other processor's checkpoint is gone")
        self._at, end = found[0], max(found[0], cursor)
        behind, _ = self._count(cursor, end)
        if behind > self._rebuild.max_lag:
            raise NotNowError(f"the other processor is more than {self._rebuild.max_lag} messages ahead again")
        count = self._handle_range(transaction, cursor, end, behind) if behind else 0
        stored = state.stored
        if stored is not None and end <= stored:
            return None, count
        return StoreRequest(lease, stored, end), count

    def _handle_range(self, transaction: Transaction, after: Checkpoint, end: Checkpoint, count: int) -> int:
        target = cast("TransactionTarget", self._parts.target)
        batch = Batch(after, end, (), count, full=True, matched_count=count)
        delayed = holding.find_delayed(transaction.connection, self._relation(batch))
        if delayed is not None:
            raise NotNowError(f"message {delayed[0].message_id} is delayed, and lies between the two")
        if target.needs_payload:
            batch = self._reader.fetch_range(self._source_connection(), after, end)
        return target.handle(transaction, batch)

    def _finish(self, lease: h.HeldLease, transaction: Transaction) -> None:
        """Run the user's statement; let the other processor never store again."""
        connection = transaction.connection
        try:
            connection.execute(self._rebuild.swap_statement.encode())
        except psycopg.Error as err:
            raise _explain(err) from err
        GuardedConnection(connection, transaction.mark).check_after()
        answer = rebuilds.supersede(
            connection, self._parts.key, self._old.processor_id, self._at,
            epoch=lease.epoch, token=lease.token, decided_by=str(self._parts.config.resource),
        )  # fmt: skip
        if answer is not SupersedeAnswer.DONE:
            raise NotNowError(_ANSWERS.get(answer, "this processor is not the live owner any more"))

    def _tell(self, state: RebuildState, message: str, *, behind: int | None = None, at_least: bool = False) -> None:
        view = RebuildView(
            of=self._old.processor_id, state=state, behind=behind, at_least=at_least, message=message[:500]
        )
        self._parts.board.set_rebuild(view)


def _explain(err: psycopg.Error) -> OutboxError:
    """Say what the server says about the statement; never a row: DETAIL is left out."""
    error = translate(err)
    if isinstance(error, TransientError):
        return error
    said = f"{err.diag.message_primary} [{err.sqlstate}]"
    return HandlerError(f"rebuildOf.swapStatement failed: {said}", reason=Reason.STATEMENT_FAILED)
