"""Target `sql`: the user's statement, run once for each batch in the checkpoint's transaction.

The batch stays in the database: the statement sees it as the relation `batch`, a SELECT of the range that was examined.
No payload travels to the worker, but where messages that fail are looked for.

Messages that are at hand, or whose statement runs in another database, are carried to it as one parameter, as JSON:
nothing is sent for each message, nothing is created (a temporary table a batch would bloat the catalogs), and no
session state is needed, so that PgBouncer in transaction mode will do. Payloads are strings in that JSON, so what a
message holds can never be more than one row's data.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql
from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.ports import SearchTarget
from outbox_core.processor.isolation import Found, Search
from outbox_core.report import Reason
from outbox_worker.handlers.handler import class_names
from outbox_worker.postgres.call import load
from outbox_worker.postgres.errors import as_refused_commit, build_error, translate
from outbox_worker.postgres.transactions.statement import StatementError, parse_batch_statement
from outbox_worker.targets.batch_relation import build_batch_relation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.part import Places
    from outbox_core.spec import SqlTarget
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.transactions.statement import BatchStatement
    from outbox_worker.postgres.transactions.transaction import Transaction
    from outbox_worker.settings import Settings
    from outbox_worker.targets.batch_relation import Some, Whole

_EXCERPT: Final = 40
_CARRIED_ROWS: Final = (
    "SELECT r.t::xid8 AS transaction_id, r.p AS position, r.i AS message_id, r.y AS message_type, "
    "r.u AS publication_id, r.k AS partition_key, r.d::jsonb AS data, r.m::jsonb AS metadata, r.s AS scheduled, "
    "r.n AS ordinal "
    "FROM json_to_recordset($1::json) AS r "
    "(t text, p bigint, i text, y text, u text, k text, d text, m text, s timestamptz, n bigint)"
)
"""The relation `batch`, of the parameter $1."""


class SqlSink(SearchTarget):
    """Runs one statement."""

    def __init__(
        self,
        target: SqlTarget,
        whole: Whole | None = None,
        some: Some | None = None,
        schema: str = "",
        *,
        name: str = "target.sql.statement",
    ) -> None:
        """Keep the statement.

        `whole` gives the SELECT of a batch's messages, `some` that of a part of it (`batch_relation.py`); None: the
        statement's database does not hold them. `schema` is that of our functions; empty: they are not there either.
        `name` is where people find the statement.
        """
        self._name = name
        self._schema = schema
        self._statement = target.statement
        self._whole, self._some = whole, some
        self.needs_payload = whole is None

    @override
    def check(self) -> None:
        """Look whether it is one statement that can have a WITH list; the server reads the rest of it."""
        try:
            parse_batch_statement(self._statement)
        except StatementError as err:
            raise ConfigurationError(f"{self._name} cannot be used: {err}") from err

    @override
    def handle(self, transaction: Transaction, batch: Batch) -> int:
        """Run the statement over the batch; where its messages are at hand they are sent along, which is less work."""
        if batch.messages:
            return self._carry(transaction.connection, batch)
        if self._whole is None:
            raise OutboxError(f"the batch up to {batch.examined} is in another database", reason=Reason.INTERNAL_ERROR)
        query, shift = self._compose(transaction.connection, self._whole(batch))
        try:
            # Without parameters: a `%` of the user's is a `%`.
            transaction.connection.execute(query)
        except psycopg.Error as err:
            raise self._explain(err, shift) from err
        return batch.matched_count

    def _carry(self, connection: Connection, batch: Batch) -> int:
        parts = self._parsed
        front = parts.head + _CARRIED_ROWS + parts.joint
        # The server's own placeholder: a `%` of the user's is a `%`.
        cursor: psycopg.RawCursor[Any] = psycopg.RawCursor(connection)
        try:
            cursor.execute((front + parts.body).encode(), (_format_rows(batch),))
        except psycopg.Error as err:
            raise self._explain(err, len(front) - parts.offset) from err
        finally:
            cursor.close()
        return batch.matched_count

    @override
    def open_search(
        self, transaction: Transaction, batch: Batch, places: Places, seconds: float, *, blocks: bool
    ) -> Callable[[Search, Collection[int], int], Found] | None:
        """Return what searches the batch on the server; the statement is prepared once for many batches."""
        if self._some is None or not places or (found := self._some(batch, places.positions)) is None:
            return None
        name, rows = found
        parsed, connection = self._parsed, transaction.connection
        prepare = f"PREPARE {name} (xid8[], bigint[]) AS {parsed.head}{rows.as_string(connection)}"
        # Where each message has a key of its own, none waits behind another.
        numbers = {key: number for number, key in enumerate(dict.fromkeys(places.keys if blocks else ()))}
        fixed = {
            "schema": sql.Identifier(self._schema),
            "name": sql.Literal(name),
            "prepare": sql.Literal(prepare + parsed.joint + parsed.body),
            "transaction_ids": _array(places.transaction_ids),
            "positions": _array(places.positions),
            "keys": sql.NULL if len(numbers) in {0, len(places)} else _array(numbers[key] for key in places.keys),
            "seconds": sql.Literal(seconds),
        }

        def find(search: Search, waiting: Collection[int], most: int) -> Found:
            statement = load("search_batch").format(
                **fixed,
                waiting=_array(number + 1 for number in waiting),
                at=sql.Literal(search.at),
                failing_before=sql.Literal(search.failing_before),
                block=sql.Literal(search.block),
                most=sql.Literal(most),
            )
            try:
                row = connection.execute(statement).fetchone()
            except psycopg.Error as err:
                raise self._explain(err, 0) from err
            if row is None:
                raise OutboxError("search_batch() answered nothing", reason=Reason.INTERNAL_ERROR)
            at, failing_before, block, kept, *failed = row
            refused = tuple(
                (number - 1, as_refused_commit(translate(error)) if committing else self._explain(error, 0, hint))
                for number, state, message, hint, committing in zip(*failed, strict=True)
                for error in (build_error(state, message),)
            )
            return Found(Search(search.count, block, at, failing_before), kept, refused)

        return find

    @cached_property
    def _parsed(self) -> BatchStatement:
        return parse_batch_statement(self._statement)

    def _compose(self, connection: Connection, relation: sql.Composed) -> tuple[bytes, int]:
        """Return the whole query, and how many characters the user's statement is displaced in it."""
        parts = self._parsed
        front = parts.head + relation.as_string(connection) + parts.joint
        text = front + parts.body  # the resource's author is trusted with SQL: it is the target
        return sql.SQL(text).as_bytes(connection), len(front) - parts.offset

    def _explain(self, err: psycopg.Error, shift: int, hint: str | None = None) -> OutboxError:
        """Say what the server says about the statement; never a row: DETAIL is left out."""
        error = translate(err)
        if isinstance(error, TransientError) and err.sqlstate != "57014":
            return error
        if err.sqlstate == "57014":
            return HandlerError(
                f"{self._name} ran longer than delivery.timeout and was cancelled; make it faster, or "
                "raise delivery.timeout, or lower delivery.batchSize",
                reason=Reason.HANDLER_TIMEOUT,
            )
        place = ""
        if err.diag.statement_position is not None:
            at = int(err.diag.statement_position) - shift
            if 0 < at <= len(self._statement):
                excerpt = " ".join(self._statement[at - 1 : at - 1 + _EXCERPT].split())
                place = f" at character {at}, near {excerpt!r}"
        hint = hint or err.diag.message_hint
        return HandlerError(
            f"{self._name} failed{place}: {err.diag.message_primary or err} [{err.sqlstate}]"
            + (f" ({hint})" if hint else ""),
            reason=Reason.STATEMENT_FAILED,
            classes=class_names(err),
        )


def _format_rows(batch: Batch) -> str:
    return json.dumps([_row(ordinal, message) for ordinal, message in enumerate(batch.messages, 1)], ensure_ascii=False)


def _row(ordinal: int, message: Message) -> dict[str, object]:
    return {
        "t": str(message.transaction_id),
        "p": message.position,
        "i": message.message_id,
        "y": message.message_type,
        "u": message.publication_id,
        "k": message.partition_key,
        "d": message.data,
        "m": message.metadata,
        "s": None if message.scheduled is None else message.scheduled.isoformat(),
        "n": ordinal,
    }


def _array(numbers: Iterable[int | str]) -> sql.SQL:
    """Write an array, faster than number by number."""
    return sql.SQL("'{" + ",".join(map(str, numbers)) + "}'")


def build(target: SqlTarget, config: ProcessorConfig, settings: Settings) -> SqlSink:
    """Build the target, in the source's database or in one of its own."""
    del settings
    if target.connection is not None:
        return SqlSink(target)
    return SqlSink(target, *build_batch_relation(config), config.source.schema_name)
