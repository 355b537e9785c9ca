"""Target `sql` with a connection of its own: the statement runs in another database than the one that has the messages.

The batch travels there as one parameter, JSON, and one statement turns it into the relation `batch` and does what the
user wrote: nothing is sent for each message, nothing is created (a temporary table a batch would bloat the catalogs),
and no session state is needed, so that PgBouncer in transaction mode will do. Payloads are strings in that JSON, so
what a message holds can never be more than one row's data.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import psycopg
from typing_extensions import override

from outbox_worker.sinks.sql import SqlSink, no_relation
from outbox_worker.statement import parse_batch_statement

if TYPE_CHECKING:
    from outbox_core.message import Batch, Message
    from outbox_core.spec import SqlTarget
    from outbox_worker.transaction import Transaction

_ROWS: Final = (
    "SELECT r.t::xid8 AS transaction_id, r.p AS position, r.i AS message_id, r.y AS message_type, "
    "r.u AS publication_id, r.k AS partition_key, r.d::jsonb AS data, r.m::jsonb AS metadata, r.s AS scheduled, "
    "r.n AS ordinal "
    "FROM json_to_recordset($1::json) AS r "
    "(t text, p bigint, i text, y text, u text, k text, d text, m text, s timestamptz, n bigint)"
)


class CarriedSqlSink(SqlSink):
    """Runs one statement over a batch that was read elsewhere."""

    needs_payload = True

    def __init__(self, target: SqlTarget) -> None:
        """Keep the statement."""
        super().__init__(target, no_relation)

    @override
    def handle(self, transaction: Transaction, batch: Batch) -> int:
        parts = parse_batch_statement(self._statement)
        front = parts.head + _ROWS + parts.joint
        # The server's own placeholder: a `%` of the user's is a `%`.
        cursor: psycopg.RawCursor[Any] = psycopg.RawCursor(transaction.connection)
        try:
            cursor.execute((front + parts.body).encode(), (format_rows(batch),))
        except psycopg.Error as err:
            raise self._explain(err, len(front) - parts.offset) from err
        finally:
            cursor.close()
        return batch.matched_count


def format_rows(batch: Batch) -> str:
    """Write the messages as the JSON that the statement reads."""
    return json.dumps([_row(ordinal, message) for ordinal, message in enumerate(batch.messages, 1)], ensure_ascii=False)


def _row(ordinal: int, message: Message) -> dict[str, object]:
    return {
        "t": str(message.checkpoint.transaction_id),
        "p": message.checkpoint.position,
        "i": message.message_id,
        "y": message.message_type,
        "u": message.publication_id,
        "k": message.partition_key,
        "d": message.data,
        "m": message.metadata,
        "s": message.scheduled.isoformat(),
        "n": ordinal,
    }
