"""The relation `batch` of a user's statement: the SELECT of the messages that a batch has, wherever they are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from outbox_worker.competing import build_relation
from outbox_worker.postgres import holding
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.reading import reader_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_worker.postgres.messages import MessageReader


def build_batch_relation(config: ProcessorConfig) -> Callable[[Batch, sql.SQL | None], sql.Composed]:
    """Give the SELECT of a batch's messages as the user's statement sees them, each with its `ordinal`.

    Of those only that a condition names, on the columns of `r`, where there is one.
    """
    if config.delivery.competing is not None:
        taken = build_relation(config)
        return lambda batch, only: _numbered(_only(taken(batch), only), batch)
    readers: dict[int, MessageReader] = {}

    def relation(batch: Batch, only: sql.SQL | None) -> sql.Composed:
        if batch.held:
            key = ProcessorKey(config.source.schema_name, config.processor_id, batch.partition)
            return holding.held_relation(key, batch.held)
        if batch.partition not in readers:
            readers[batch.partition] = reader_of(config, batch.partition)
        if batch.only and (picked := readers[batch.partition].picked_relation(batch.only)) is not None:
            return _numbered(picked, batch)
        rows = readers[batch.partition].batch_relation(batch.after, batch.examined)
        return _numbered(_only(holding.without_aside(rows, batch.aside) if batch.aside else rows, only), batch)

    return relation


def _only(rows: sql.Composed, condition: sql.SQL | None) -> sql.Composed:
    return rows if condition is None else sql.SQL("SELECT r.* FROM ({}) AS r WHERE {}").format(rows, condition)


def _numbered(rows: sql.Composed, batch: Batch) -> sql.Composed:
    """Add the column `ordinal`, which sorts the messages as the processor's cursor does; held ones have it already.

    A statement whose effects depend on the order would have to know the cursor otherwise. The server leaves the
    numbering out where a statement does not name it (a subquery's unused columns are not computed).
    """
    order = "position" if batch.examined.window is not None else "transaction_id, position"
    numbered = "SELECT b.*, row_number() OVER (ORDER BY {}) AS ordinal FROM ({}) AS b"
    return sql.SQL(numbered).format(sql.SQL(order), rows)
