"""The connection that a user's handler gets: the batch's own transaction, which only the worker may end.

It is a real `psycopg.Connection` over the same session, with row factory and adapters of its own. What would end the
transaction is refused before it is sent, as far as it can be seen; what gets past that (inside a procedure) is
noticed afterwards, because a setting that lives as long as the transaction is gone. Either way the handler is named.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psycopg
from psycopg import pq, sql
from typing_extensions import override

from outbox_core.errors import HandlerError, TransientError
from outbox_core.report import Reason
from outbox_worker.postgres.transactions.statement import find_transaction_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MARK: Final = "outbox.batch"
"""A setting made with SET LOCAL when the transaction begins: it does not outlive it."""

_SUSPECT: Final = re.compile(r"\b(?:commit|rollback|abort|end|prepare)\b", re.IGNORECASE)


class HandlerEndedTransactionError(HandlerError):
    """The handler ended, or tried to end, the transaction that holds its effects and the checkpoint."""

    reason = Reason.HANDLER_ENDED_TRANSACTION
    frames: list[traceback.FrameSummary] | None = None
    """Where it was tried, outermost first; None when it was only noticed afterwards."""


class GuardedConnection(psycopg.Connection[Any]):
    """A connection without the right to end its transaction. Savepoints (`connection.transaction()`) are free."""

    def __init__(self, connection: psycopg.Connection[Any], mark: str | None) -> None:
        """Share the session of `connection`, whose transaction is open and carries `mark`; None: the caller looks."""
        super().__init__(connection.pgconn)
        self.lock = connection.lock
        self.prepare_threshold = None
        self.cursor_factory = GuardedCursor
        self._mark = mark
        self._violation: HandlerEndedTransactionError | None = None

    def refuse(self, what: str) -> NoReturn:
        """Remember what the handler did and stop it here, in its own frame.

        Raises:
            HandlerEndedTransactionError: always.

        """
        violation = HandlerEndedTransactionError(
            f"the handler called {what}, but the transaction is the worker's: it commits effects and checkpoint "
            "together. Remove it; return to commit, raise to roll back"
        )
        # The handler may catch it: then its traceback would end where it was caught.
        violation.frames = list(traceback.extract_stack())
        self._violation = violation
        raise violation

    def check_after(self) -> None:
        """Look, after the handler returned, whether its transaction is as it must be.

        Raises:
            HandlerEndedTransactionError: it is not the one that was open before.
            HandlerError: it cannot be committed.
            TransientError: the session broke.

        """
        self.check_violation()
        if self.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            raise HandlerError("the handler returned in the middle of a pipeline; leave the `with` block first")
        match self.pgconn.transaction_status:
            case pq.TransactionStatus.INTRANS:
                if self._mark is not None:
                    self._check_mark()
            case pq.TransactionStatus.IDLE:
                raise ended()
            case pq.TransactionStatus.INERROR:
                raise HandlerError(
                    "the handler swallowed a database error, so its transaction cannot be committed; use "
                    "`with connection.transaction():` around what may fail"
                )
            case pq.TransactionStatus.ACTIVE:
                raise HandlerError("the handler returned while a COPY or a stream was unfinished")
            case _:
                raise TransientError(
                    "the connection broke while the handler ran, without an exception",
                    reason=Reason.DATABASE_UNAVAILABLE,
                )

    @override
    @contextlib.contextmanager
    def pipeline(self) -> Iterator[psycopg.Pipeline]:
        try:
            with super().pipeline() as pipeline:
                yield pipeline
        finally:
            self.restart_idle_timeout()

    def restart_idle_timeout(self) -> None:
        """Make the server watch for an idle transaction again, which it does not after a pipeline.

        It starts that timer when it answers Sync and stops it at the next message; psycopg ends a pipeline with Sync
        and then Flush, which gets no answer. The empty query gets one. A failed transaction holds no lock any more.
        """
        with self.lock:
            outside = self.pgconn.pipeline_status == pq.PipelineStatus.OFF
            if outside and self.pgconn.transaction_status == pq.TransactionStatus.INTRANS:
                self.pgconn.exec_(b"")

    def check_violation(self) -> None:
        """Raise again what `refuse` raised, should the handler have swallowed it."""
        if self._violation is not None:
            raise self._violation

    def _check_mark(self) -> None:
        with psycopg.Cursor(self) as cursor:
            row = cursor.execute(sql.SQL("SELECT current_setting({}, true)").format(sql.Literal(MARK))).fetchone()
        if row is None or row[0] != self._mark:
            raise ended()

    @override
    def commit(self) -> None:
        self.refuse("connection.commit()")

    @override
    def rollback(self) -> None:
        self.refuse("connection.rollback()")

    @override
    def close(self) -> None:
        self.refuse("connection.close()")

    @override
    def __enter__(self) -> NoReturn:
        self.refuse("`with connection:`, which commits and closes it at its end")

    @override
    def set_autocommit(self, value: bool) -> None:
        self.refuse("connection.set_autocommit()")

    @override
    def __setattr__(self, name: str, value: object) -> None:
        if name == "autocommit":
            self.refuse("connection.autocommit = …")
        super().__setattr__(name, value)

    @override
    def tpc_begin(self, xid: psycopg.Xid | str) -> None:
        self.refuse("connection.tpc_begin()")

    @override
    def __del__(self, warn: Any = None, /) -> None:
        """The session is the worker's: nothing is left open here."""

    def examine(self, query: Any) -> None:
        """Refuse a statement that would end the transaction, also as one of several in a string."""
        if isinstance(query, bytes):
            text = query.decode(errors="replace")
        elif isinstance(query, sql.Composable):
            text = query.as_string(self)
        else:
            text = str(query)
        if _SUSPECT.search(text) and (command := find_transaction_end(text)):
            self.refuse(f"SQL {command}")


class GuardedCursor(psycopg.Cursor[Any]):
    """A cursor that looks at statements before it sends them."""

    connection: GuardedConnection

    @override
    def execute(self, query: Any, params: Any = None, **options: Any) -> GuardedCursor:
        self.connection.examine(query)
        super().execute(query, params, **options)
        if self.connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
            self.connection.refuse("SQL that ended it")
        return self

    @override
    def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> None:
        self.connection.examine(query)
        try:
            super().executemany(query, params_seq, **options)
        finally:
            self.connection.restart_idle_timeout()

    @override
    def stream(self, query: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        self.connection.examine(query)
        return super().stream(query, params, **options)


def ended() -> HandlerEndedTransactionError:
    """Return what is said where the transaction turned out to be over."""
    return HandlerEndedTransactionError(
        "the handler ended the transaction that was to hold its effects and the checkpoint; what it committed "
        "stays.  Remove COMMIT, ROLLBACK and the like from its SQL"
    )
