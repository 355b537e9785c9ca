"""The relation `batch` of a user's statement: the SELECT of the messages that a batch has, wherever they are kept."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.errors import OutboxError
from outbox_core.report import Reason
from outbox_worker.competing.settings import settings_of
from outbox_worker.feeds.partition_reader import reader_of
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader
from outbox_worker.postgres.reading.read_range import ReadRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.postgres.reading.messages import MessageReader

_IDS: Final = sql.SQL("$1")
_POSITIONS: Final = sql.SQL("$2")


_OTHERS: Final = 4
"""Where positions reach over so many times the messages, walking along them costs more than looking up each."""


def build_batch_relation(
    config: ProcessorConfig,
) -> Callable[[Batch, Sequence[Checkpoint] | None], sql.Composed | None]:
    """Give the SELECT of a batch's messages as the user's statement sees them, each with its `ordinal`.

    With the pairs of all its messages, in order: the SELECT of those that the parameters $1 (transaction ids) and $2
    (positions) name, some in a row; None where a batch has no such SELECT.
    """
    if config.delivery.competing is not None:
        taken = _of_consumer(config)

        def of_piece(batch: Batch, pairs: Sequence[Checkpoint] | None) -> sql.Composed | None:
            rows = taken(batch, None if pairs is None else _are_near(pairs))
            return None if rows is None else _numbered(rows, batch)

        return of_piece
    readers: dict[int, MessageReader] = {}

    def relation(batch: Batch, pairs: Sequence[Checkpoint] | None) -> sql.Composed:
        if batch.held:
            key = ProcessorKey(config.source.schema_name, config.processor_id, batch.partition)
            held = [each.checkpoint for each in batch.held]
            return holding.held_relation(key, *(holding.literals(held) if pairs is None else (_IDS, _POSITIONS)))
        if batch.partition not in readers:
            readers[batch.partition] = reader_of(config, batch.partition)
        reader = readers[batch.partition]
        if pairs is not None:
            # Only with the cursor Snapshot there is an index on position.
            near = batch.examined.window is not None and _are_near(pairs)
            return _numbered(reader.picked_relation(_IDS, _POSITIONS, near=near), batch)
        if batch.only:
            return _numbered(reader.picked_relation(*holding.literals(batch.only)), batch)
        rows = reader.batch_relation(batch.after, batch.examined)
        return _numbered(holding.without_excluded(rows, batch.excluded) if batch.excluded else rows, batch)

    return relation


def _are_near(pairs: Sequence[Checkpoint]) -> bool:
    """Say whether positions ascend, with few others between them."""
    ascending = all(one.position < other.position for one, other in pairwise(pairs))
    return ascending and pairs[-1].position - pairs[0].position < _OTHERS * len(pairs)


def _numbered(rows: sql.Composed, batch: Batch) -> sql.Composed:
    """Add the column `ordinal`, which sorts the messages as the processor's cursor does; held ones have it already.

    A statement whose effects depend on the order would have to know the cursor otherwise. The server leaves the
    numbering out where a statement does not name it (a subquery's unused columns are not computed).
    """
    order = "position" if batch.examined.window is not None else "transaction_id, position"
    numbered = "SELECT b.*, row_number() OVER (ORDER BY {}) AS ordinal FROM ({}) AS b"
    return sql.SQL(numbered).format(sql.SQL(order), rows)


def _of_consumer(
    config: ProcessorConfig,
) -> Callable[[Batch, bool | None], sql.Composed | None]:
    """Give the SELECT of a chunk's messages for the target sql; or of those that $1 and $2 name, near or not."""
    reader = DispatchReader(config.source, settings_of(config), config.processor_id)

    def relation(batch: Batch, near: bool | None) -> sql.Composed | None:
        claimed = getattr(batch, "claimed", None)
        if claimed is None:
            raise OutboxError("a batch that no consumer claimed", reason=Reason.INTERNAL_ERROR)
        if near is not None:
            return reader.picked_relation(claimed, _IDS, _POSITIONS, near=near)
        return reader.relation(ReadRange.of(claimed, upto=batch.examined))

    return relation
