"""Target `sql`: the user's statement, run once for each batch in the checkpoint's transaction.

The batch stays in the database: the statement sees it as the relation `batch`, a SELECT of the range that was examined.
No payload travels to the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.handler import class_names
from outbox_worker.postgres.errors import translate
from outbox_worker.statement import StatementError, parse_batch_statement

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.message import Batch
    from outbox_core.spec import SqlTarget
    from outbox_worker.transaction import Transaction

_EXCERPT = 40


def no_relation(batch: Batch) -> sql.Composed:
    """Say that the batch is not in the statement's database.

    Raises:
        OutboxError: always.

    """
    raise OutboxError(f"the batch up to {batch.examined} is in another database", reason=Reason.INTERNAL_ERROR)


class SqlSink:
    """Runs one statement."""

    needs_payload = False

    def __init__(self, target: SqlTarget, relation: Callable[[Batch], sql.Composed]) -> None:
        """Keep the statement.

        Args:
            target: the resource's words.
            relation: gives the SELECT of a batch's messages.

        """
        self._statement = target.statement
        self._relation = relation

    def check(self) -> None:
        """Look whether it is one statement that can have a WITH list; the server reads the rest of it."""
        try:
            parse_batch_statement(self._statement)
        except StatementError as err:
            raise ConfigurationError(f"target.sql.statement cannot be used: {err}") from err

    def changed(self) -> bool:
        """The statement is part of the resource."""
        return False

    def keep_alive(self) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""

    def handle(self, transaction: Transaction, batch: Batch) -> int:
        """Run the statement over the batch."""
        query, shift = self.compose(transaction.connection, batch)
        try:
            # Without parameters: a `%` of the user's is a `%`.
            transaction.connection.execute(query)
        except psycopg.Error as err:
            raise self._explain(err, shift) from err
        return batch.matched_count

    def compose(self, connection: psycopg.Connection[Any], batch: Batch) -> tuple[bytes, int]:
        """Return the whole query, and how many characters the user's statement is displaced in it."""
        parts = parse_batch_statement(self._statement)
        front = parts.head + self._relation(batch).as_string(connection) + parts.joint
        text = front + parts.body  # the resource's author is trusted with SQL: it is the target
        return sql.SQL(text).as_bytes(connection), len(front) - parts.offset

    def _explain(self, err: psycopg.Error, shift: int) -> OutboxError:
        """Say what the server says about the statement; never a row: DETAIL is left out."""
        error = translate(err)
        if isinstance(error, TransientError) and err.sqlstate != "57014":
            return error
        if err.sqlstate == "57014":
            return HandlerError(
                "target.sql.statement ran longer than delivery.timeout and was cancelled; make it faster, or "
                "raise delivery.timeout, or lower delivery.batchSize",
                reason=Reason.HANDLER_TIMEOUT,
            )
        place = ""
        if err.diag.statement_position is not None:
            at = int(err.diag.statement_position) - shift
            if 0 < at <= len(self._statement):
                excerpt = " ".join(self._statement[at - 1 : at - 1 + _EXCERPT].split())
                place = f" at character {at}, near {excerpt!r}"
        hint = f" ({err.diag.message_hint})" if err.diag.message_hint else ""
        return HandlerError(
            f"target.sql.statement failed{place}: {err.diag.message_primary} [{err.sqlstate}]{hint}",
            reason=Reason.STATEMENT_FAILED,
            classes=class_names(err),
        )
