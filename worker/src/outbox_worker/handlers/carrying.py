"""Messages carried to a user's statement as one parameter, where they are at hand or the statement runs elsewhere.

They travel as JSON, and the statement sees the same relation `batch` as where they stay in the database: nothing is
sent for each message, nothing is created (a temporary table a batch would bloat the catalogs), and no session state is
needed, so that PgBouncer in transaction mode will do. Payloads are strings in that JSON, so what a message holds can
never be more than one row's data.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from outbox_core.message import Batch, Message

CARRIED_ROWS: Final = (
    "SELECT r.t::xid8 AS transaction_id, r.p AS position, r.i AS message_id, r.y AS message_type, "
    "r.u AS publication_id, r.k AS partition_key, r.d::jsonb AS data, r.m::jsonb AS metadata, r.s AS scheduled, "
    "r.n AS ordinal "
    "FROM json_to_recordset($1::json) AS r "
    "(t text, p bigint, i text, y text, u text, k text, d text, m text, s timestamptz, n bigint)"
)
"""The relation `batch`, of the parameter $1."""


def format_rows(batch: Batch) -> str:
    """Write the messages as the JSON that the statement reads."""
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
