"""Target `sql`: the user's statement, run once for each batch in the checkpoint's transaction.

The batch stays in the database: the statement sees it as the relation `batch`, a SELECT of the range that was examined.
No payload travels to the worker, but where messages that fail are looked for.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.carrying import CARRIED_ROWS, format_rows
from outbox_worker.handler import class_names
from outbox_worker.postgres.errors import translate
from outbox_worker.postgres.queries import load
from outbox_worker.statement import StatementError, parse_batch_statement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.message import Batch
    from outbox_core.spec import SqlTarget
    from outbox_worker.statement import BatchStatement
    from outbox_worker.transaction import Transaction

_EXCERPT = 40


_BY_PAIR: Final = sql.SQL("(r.transaction_id, r.position) > ($1, $2) AND (r.transaction_id, r.position) <= ($3, $4)")
_BY_POSITION: Final = sql.SQL("r.position > $2 AND r.position <= $4")


def no_relation(batch: Batch, _only: sql.SQL | None) -> sql.Composed:
    """Say that the batch is not in the statement's database.

    Raises:
        OutboxError: always.

    """
    raise OutboxError(f"the batch up to {batch.examined} is in another database", reason=Reason.INTERNAL_ERROR)


class SqlSink:
    """Runs one statement."""

    needs_payload = False

    def __init__(
        self, target: SqlTarget, relation: Callable[[Batch, sql.SQL | None], sql.Composed], schema: str = ""
    ) -> None:
        """Keep the statement.

        Args:
            target: the resource's words.
            relation: gives the SELECT of a batch's messages, or of those that a condition names.
            schema: of our functions, where they are in the statement's database.

        """
        self._schema = schema
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
        """Run the statement over the batch; where its messages are at hand they are sent along, which is less work."""
        if batch.messages:
            return self._carry(transaction.connection, batch)
        query, shift = self.compose(transaction.connection, batch)
        try:
            # Without parameters: a `%` of the user's is a `%`.
            transaction.connection.execute(query)
        except psycopg.Error as err:
            raise self._explain(err, shift) from err
        return batch.matched_count

    def _carry(self, connection: psycopg.Connection[Any], batch: Batch) -> int:
        parts = self._parsed
        front = parts.head + CARRIED_ROWS + parts.joint
        # The server's own placeholder: a `%` of the user's is a `%`.
        cursor: psycopg.RawCursor[Any] = psycopg.RawCursor(connection)
        try:
            cursor.execute((front + parts.body).encode(), (format_rows(batch),))
        except psycopg.Error as err:
            raise self._explain(err, len(front) - parts.offset) from err
        finally:
            cursor.close()
        return batch.matched_count

    def open_parts(
        self, transaction: Transaction, batch: Batch
    ) -> Callable[[Sequence[tuple[Checkpoint, Checkpoint]]], int] | None:
        """Return what runs the statement over one part after another: prepared once, on the server."""
        if not self._schema or batch.held:
            return None
        parsed, connection = self._parsed, transaction.connection
        rows = self._relation(batch, _BY_POSITION if batch.examined.window is not None else _BY_PAIR)
        prepare = f"PREPARE outbox_part (xid8, bigint, xid8, bigint) AS {parsed.head}{rows.as_string(connection)}"
        prepare += parsed.joint + parsed.body
        # Quoted once, as text: it is long, and goes with each call.
        quoted = sql.SQL(sql.Literal(prepare).as_string(connection))

        def try_parts(parts: Sequence[tuple[Checkpoint, Checkpoint]]) -> int:
            arguments = sql.Literal([_arguments(*part) for part in parts])
            statement = load("try_parts").format(
                schema=sql.Identifier(self._schema), prepare=quoted, parts=arguments
            )  # fmt: skip
            try:
                row = connection.execute(statement).fetchone()
            except psycopg.Error as err:
                raise self._explain(err, 0) from err
            return 0 if row is None else int(row[0])

        return try_parts

    @cached_property
    def _parsed(self) -> BatchStatement:
        return parse_batch_statement(self._statement)

    def compose(self, connection: psycopg.Connection[Any], batch: Batch) -> tuple[bytes, int]:
        """Return the whole query, and how many characters the user's statement is displaced in it."""
        parts = self._parsed
        front = parts.head + self._relation(batch, None).as_string(connection) + parts.joint
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


def _arguments(before: Checkpoint, last: Checkpoint) -> str:
    return f"'{before.transaction_id}', {before.position}, '{last.transaction_id}', {last.position}"
