"""Numbers of messages beside the checkpoint, for a target whose receiver drops what it has (progress.numbering)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from psycopg import sql

from outbox_core.errors import ConfigurationError
from outbox_core.progress.checkpoint import StoreAnswer
from outbox_core.progress.numbering import Numbering
from outbox_core.report import Reason
from outbox_worker.postgres.call import call_rows, compose_call

if TYPE_CHECKING:
    from outbox_core.processor.outcomes import HeldLease
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


def open_numbers(
    connection: Connection, key: ProcessorKey, lease: HeldLease, stored: Checkpoint, mapping: str
) -> Checkpoint | None:
    """Return the stored checkpoint with its number, in the transaction that loaded it under the lease; None: it went.

    Raises:
        ConfigurationError: `CursorDiffers`: the checkpoint is a snapshot range.

    """
    if stored.snapshot_range is not None:
        raise ConfigurationError(
            f"the checkpoint of processor {key.processor_id!r} is of cursor Snapshot, and its target numbers messages "
            "in the order of cursor TransactionOrder: use another processorId with source.cursor: TransactionOrder and "
            "startFrom",
            reason=Reason.CURSOR_DIFFERS,
        )
    rows = call_rows(connection, key.schema, "open_publisher_numbers", **key.leased(lease), mapping=mapping)
    return replace(stored, numbering=Numbering(str(rows[0][0]), rows[0][1])) if rows else None


def compose_numbered_store(
    key: ProcessorKey, store: sql.Composable, stored: Checkpoint, numbering: Numbering
) -> sql.Composed:
    """Return the statement that stores a checkpoint, which returns the answer, with the number beside it."""
    number = compose_call(
        key.schema, "store_publisher_number", **key.names, space=numbering.space,
        transaction_id=str(stored.transaction_id), position=stored.position, number=numbering.last,
    )  # fmt: skip
    return sql.SQL(
        "WITH s (answer) AS MATERIALIZED ({}) SELECT s.answer, CASE WHEN s.answer = {} THEN ({}) END FROM s"
    ).format(store, sql.Literal(StoreAnswer.STORED.value), number)
