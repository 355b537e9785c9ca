"""One transaction of the worker: effects and checkpoint commit together, or neither.

It takes no transaction id before the first write, so that a slow reader delays no processor. Its idle timeout, below
the lease, ends it on the server should this process be frozen: no lock of ours keeps a successor waiting, and a process
that wakes up finds nothing left to commit. Where the server waits for this process and is not idle (in a COPY, in a
pipeline, with a result to hand over) that timeout does not run, and any other would hit slow handlers too: an advisory
lock shows the transaction to the next owner, who ends it.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg
from psycopg import pq, sql

from outbox_core.errors import OutboxError, TransientError, drop_traceback
from outbox_core.processor import outcomes
from outbox_core.progress.checkpoint import BEGINNING, StoreAnswer
from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.report import Reason
from outbox_worker.postgres import identity
from outbox_worker.postgres.call import Template, load, place
from outbox_worker.postgres.errors import as_refused_commit, translate, translated
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.transactions.guard import MARK

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.reading.wal_watch import WalWatch

_IDLE_SHARE: Final = 0.8
"""Of the lease: the server ends an idle transaction this early, before another process may take over."""


_COMMIT_AND_PLACE: Final = "COMMIT; SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text"
_AS_OPENED: Final = "; RESET ALL; RESET ROLE; DISCARD TEMP"
"""What a user's statement may have left in the session, others of the process must not find there."""
RUN_LOOK_SECONDS: Final = 1.0
"""Between two looks of an idle partition whether the server recovered from a crash."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """An open transaction, as targets see it: the connection, and the mark that tells this transaction from another.

    Without a mark the caller looks afterwards whether it is the same, by a savepoint of its own.
    """

    connection: Connection
    mark: str | None


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """The checkpoint to store, under which lease; `first` stores it before the effects."""

    lease: outcomes.HeldLease
    expected: Checkpoint | None
    new: Checkpoint
    first: bool = False


@dataclass(frozen=True, slots=True)
class Reached:
    """What effects answer that find out themselves how far they go: what to store, with so many messages handled."""

    request: StoreRequest | None
    count: int


class TransactionRunner:
    """Runs transactions of one processor on connections in autocommit."""

    def __init__(
        self, key: ProcessorKey, *, lease: float, timeout: float, wal: WalWatch | None = None, can_rest: bool = False,
        is_shared: bool = False,
    ) -> None:  # fmt: skip
        """Keep the settings; seconds. `wal` waits for the same server's log, and is told of what we write there.

        `can_rest`: where nothing can have come, no look is due after a commit: no other unit of this process waits for
        that log, and a look does nothing but read. `is_shared`: other processors use the session too.
        """
        self._key = key
        self._opening = _compose_opening(key, max(1, int(lease * _IDLE_SHARE * 1000)), max(1, int(timeout * 1000)))
        self.server_run: str | None = None
        """Of the server, in which everything was learned that a transaction may store; None: not asked yet."""
        self._next_look = 0.0
        self._wal = wal
        self._can_rest = can_rest
        self._left_behind: LiteralString = _AS_OPENED if is_shared else ""

    def run(
        self,
        connection: Connection,
        epoch: int,
        request: StoreRequest | None,
        effects: Callable[[Transaction], int | Reached] | None = None,
        finish: Callable[[Connection], outcomes.StepOutcome | None] | None = None,
    ) -> outcomes.StepOutcome:
        """Begin, handle, store, commit; and say what came of it. After anything but Stored nothing is committed by us.

        `epoch` is the lease's, or the number of a batch in mode Competing: it shows the transaction to the next owner.

        Without a request only the effects are committed; the Stored that is returned then names no pair of ours.
        `finish` is the last in the transaction; what it says happened, instead of nothing, is the answer after a
        roll-back.
        """
        if request is not None and effects is None and finish is None:
            return self._store_alone(connection, request)
        committing = False
        try:
            transaction = self._begin(connection, epoch)
            answer = self._store(connection, request) if request and request.first else StoreAnswer.STORED
            count = effects(transaction) if effects and answer is StoreAnswer.STORED else 0
            if isinstance(count, Reached):
                request, count = count.request, count.count
            if request and not request.first:
                answer = self._store(connection, request)
            if request and answer is not StoreAnswer.STORED:
                return self._roll_back_refused(connection, request, answer)
            if finish is not None and (told := finish(connection)) is not None:
                roll_back(connection)
                return told
            committing = True
            self._check_committed(connection.execute(self._closing + (self._left_behind if effects else "")))
        except psycopg.Error as err:
            return self._after_error(connection, request, translate(err), committing=committing)
        except OutboxError as err:
            return self._after_error(connection, request, err, committing=committing)
        except BaseException:
            roll_back(connection)
            raise
        return outcomes.Stored(request.new if request else BEGINNING, count)

    def ask(self, connection: Connection, request: StoreRequest) -> StoreAnswer:
        """Return what the contract answers now, without any effect."""
        try:
            self._begin(connection, request.lease.epoch)
            return self._store(connection, request)
        finally:
            roll_back(connection)

    @cached_property
    def _flushing(self) -> sql.Composed:
        begin, end = (load(name) for name in ("begin_durable_read", "end_durable_read"))
        return sql.SQL("{}; SELECT {}.server_run()::text; {}").format(begin, sql.Identifier(self._key.schema), end)

    def flush_log(self, connection: Connection) -> None:
        """Return when no crash of the server can take back what was committed before, in one round trip.

        For what is remembered outside of this database: the batch that was read, and the checkpoint before it.

        Raises:
            TransientError: the server recovered from a crash since that was read or stored.

        """
        try:
            with translated():
                row = connection.execute(self._flushing).set_result(-3).fetchone()  # before what flushes, and COMMIT
        except BaseException:
            roll_back(connection)
            raise
        if self.server_run is not None and (row is None or row[0] != self.server_run):
            raise identity.crashed()

    def look_at_run(self, connection: Connection) -> None:
        """See now and then, where nothing is stored that would see it, whether what is remembered still holds.

        Raises:
            TransientError: the server recovered from a crash that a pooler hid.

        """
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + RUN_LOOK_SECONDS
            self.check_run(connection)

    def check_run(self, connection: Connection) -> None:
        """The same, at once.

        Raises:
            TransientError: the server recovered from a crash.

        """
        if self.server_run != identity.fetch_run(connection, self._key.schema):
            raise identity.crashed()

    def _begin(self, connection: Connection, epoch: int) -> Transaction:
        """Begin, with settings that end with the transaction (PgBouncer hands sessions on), in one round trip.

        The server is the one that it was when this process last looked, and stays so to the end of the transaction: a
        crash ends it.

        Raises:
            TransientError: it recovered from a crash since.

        """
        mark = uuid.uuid4().hex
        row = connection.execute(self._opening.fill({"epoch": epoch, "mark": mark})).set_result(-1).fetchone()
        if self.server_run is not None and (row is None or row[-1] != self.server_run):
            raise identity.crashed()
        return Transaction(connection, mark)

    def _store_alone(self, connection: Connection, request: StoreRequest) -> outcomes.StepOutcome:
        """Store a checkpoint that has no effects beside it, in one round trip.

        What was refused wrote nothing, so that COMMIT is as good as ROLLBACK. Nothing is stored in another run of the
        server than that in which the checkpoint was learned.
        """
        lease, new, expected = request.lease, request.new, request.expected
        opening = self._opening.fill({"epoch": lease.epoch, "mark": ""})
        stored = checkpoints.compose_store(self._key, lease, new=new, expected=expected, run=self.server_run)
        text = [opening, stored, sql.SQL(self._closing)]
        if (next_id := self._find_next_id(request)) is not None:
            text.append(load("fetch_snapshot"))  # behind the log's place: what commits later moves the log
        try:
            cursor = connection.execute(sql.SQL("; ").join(text)).set_result(2)  # behind those of the opening
            row = cursor.fetchone()
            if row is None or row[0] is None:
                raise identity.crashed()
            cursor.nextset()
            saw_all = self._check_committed(cursor, next_id)
        except psycopg.Error as err:
            error = translate(err)
            committing = connection.closed or isinstance(error, TransientError)
            return self._after_error(connection, request, error, committing=committing)
        except OutboxError as err:
            return self._after_error(connection, request, err, committing=False)
        answer = StoreAnswer(row[0])
        if answer is StoreAnswer.STORED:
            return outcomes.Stored(request.new, saw_all=saw_all)
        return self._roll_back_refused(connection, request, answer)

    def _store(self, connection: Connection, request: StoreRequest) -> StoreAnswer:
        stored = checkpoints.compose_store(self._key, request.lease, new=request.new, expected=request.expected)
        return StoreAnswer(connection.execute(stored).fetchall()[0][0])

    def _roll_back_refused(
        self, connection: Connection, request: StoreRequest, answer: StoreAnswer
    ) -> outcomes.Rejected:
        roll_back(connection)
        stored = checkpoints.load(connection, self._key)
        return outcomes.Rejected(answer, request.expected, request.new, stored.pair if stored else None)

    @property
    def _closing(self) -> LiteralString:
        return _COMMIT_AND_PLACE if self._wal is not None and self._wal.is_working else "COMMIT"

    def _find_next_id(self, request: StoreRequest) -> int | None:
        """Return the id of the next transaction, if none but this one gets an id since the batch was read.

        None: it is not asked. Transactions were in progress then, messages of the snapshot range are left, or a look is
        due anyhow.
        """
        snapshot_range = request.new.snapshot_range
        asks = self._can_rest and self._wal is not None and self._wal.is_working
        if not asks or snapshot_range is None or snapshot_range.is_open or snapshot_range.snapshots[0].in_progress:
            return None
        return snapshot_range.snapshots[0].xmax + 1

    def _check_committed(self, cursor: psycopg.Cursor[Any], next_id: int | None = None) -> bool:
        """Tell who waits for the log that this commit is ours; say whether a look for messages would be in vain."""
        if cursor.statusmessage != "COMMIT":
            told = f"the server answered COMMIT with {cursor.statusmessage}"
            raise TransientError(told, reason=Reason.DATABASE_UNAVAILABLE)
        if self._wal is None or not cursor.nextset() or cursor.description is None:
            return False
        place = cursor.fetchone()
        if place is None:
            return False
        found = cursor.fetchone() if next_id is not None and cursor.nextset() else None
        saw_all = found is not None and found[2] and parse_snapshot(found[0]).xmax == next_id
        self._wal.note_own(*place, saw_all=saw_all)
        return saw_all

    def _after_error(
        self,
        connection: Connection,
        request: StoreRequest | None,
        error: OutboxError,
        *,
        committing: bool,
    ) -> outcomes.CommitUnknown | outcomes.Failed:
        roll_back(connection)
        # What ended the statement behind COMMIT, as a cancellation that came during it, says nothing of the commit.
        is_unknown = connection.closed or (committing and isinstance(error, TransientError))
        if is_unknown and request is not None:
            return outcomes.CommitUnknown(request.expected, request.new, committing, error)
        return outcomes.Failed(drop_traceback(as_refused_commit(error) if committing else error))


def roll_back(connection: Connection) -> None:
    """Leave no transaction open; a session in which that cannot be done is closed, which does the same."""
    if connection.closed or connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
        return
    try:
        connection.execute("ROLLBACK")
    except psycopg.Error:
        connection.close()


def _compose_opening(key: ProcessorKey, idle_limit: int, statement_limit: int) -> Template:
    """Compose what begins a transaction, with settings that end with it; limits in milliseconds.

    A `transaction_timeout` (PostgreSQL 17 and later) does not count in it: delivery.timeout says how long a batch may
    take.
    """
    text = sql.SQL(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
        "SELECT set_config('idle_in_transaction_session_timeout', {idle}, true), "
        "set_config('statement_timeout', {statement}, true), set_config({name}, {mark}, true), "
        "CASE WHEN current_setting('transaction_timeout', true) <> '0' "
        "THEN set_config('transaction_timeout', '0', true) END, "
        "pg_advisory_xact_lock_shared(hashtext({lock}), ({epoch}::bigint & 2147483647)::int), "
        "{schema}.server_run()::text"
    )
    composed = text.format(
        schema=sql.Identifier(key.schema), idle=sql.Literal(str(idle_limit)),
        statement=sql.Literal(str(statement_limit)), name=sql.Literal(MARK), mark=place("mark"),
        lock=sql.Literal(key.lock_name), epoch=place("epoch"),
    )  # fmt: skip
    return Template(composed)
