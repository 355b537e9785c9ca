"""The relation `batch` of a user's statement: the SELECT of the messages that a batch has, wherever they are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from psycopg import sql

from outbox_core.errors import OutboxError
from outbox_core.processor.claimed_batch import Chunk
from outbox_core.report import Reason
from outbox_worker.feeds.partition_reader import reader_of
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader
from outbox_worker.postgres.reading.read_range import ReadRange, pair_literals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_core.processor.claimed_batch import ClaimedBatch
    from outbox_core.spec import Competing
    from outbox_worker.postgres.reading.messages import MessageReader

Whole: TypeAlias = "Callable[[Batch], sql.Composed]"
"""Gives the SELECT of a batch's messages."""
Some: TypeAlias = "Callable[[Batch, Sequence[int]], tuple[str, sql.Composed] | None]"
"""Gives, with the positions of all messages of a batch, in order, the SELECT of those that the parameters $1
(transaction ids) and $2 (positions) name, some in a row, and the name under which `search_batch` is to prepare it; or
None."""

_IDS: Final = sql.SQL("$1")
_POSITIONS: Final = sql.SQL("$2")
_OTHERS: Final = 2
"""Where positions reach over so many times the messages, walking along them costs more than looking up each."""
_NEAR: Final = "outbox_near"
_PART: Final = "outbox_part"
_HELD: Final = "outbox_held"


def build_batch_relation(config: ProcessorConfig) -> tuple[Whole, Some]:
    """Give the SELECT of a batch's messages as the user's statement sees them, each with its `ordinal`; and of some."""
    if config.delivery.competing is not None:
        return _of_consumer(config, config.delivery.competing)
    readers: dict[int, MessageReader] = {}

    def find_reader(batch: Batch) -> MessageReader:
        if batch.partition not in readers:
            readers[batch.partition] = reader_of(config, batch.partition)
        return readers[batch.partition]

    def held_relation(batch: Batch, ids: sql.Composable, positions: sql.Composable) -> sql.Composed:
        key = ProcessorKey(config.source.schema_name, config.processor_id, batch.partition)
        return holding.held_relation(key, ids, positions)

    def whole(batch: Batch) -> sql.Composed:
        if batch.held:
            return held_relation(batch, *pair_literals(each.checkpoint for each in batch.held))
        reader, by_position = find_reader(batch), batch.examined.snapshot_range is not None
        if batch.only:
            return _numbered(reader.picked_relation(*pair_literals(batch.only)), by_position=by_position)
        rows = reader.batch_relation(batch.after, batch.examined, batch.positions, count=batch.examined_count)
        rows = holding.without_excluded(rows, batch.excluded) if batch.excluded else rows
        return _numbered(rows, by_position=by_position)

    def some(batch: Batch, positions: Sequence[int]) -> tuple[str, sql.Composed]:
        if batch.held:
            return _HELD, held_relation(batch, _IDS, _POSITIONS)
        # Only with the cursor Snapshot there is an index on position.
        by_position = batch.examined.snapshot_range is not None
        near = by_position and _are_near(positions)
        # Only of our table is it known that each position is one message's.
        name = _NEAR if near and config.source.table is None else _PART
        rows = find_reader(batch).picked_relation(_IDS, _POSITIONS, near=near)
        return name, _numbered(rows, by_position=by_position)

    return whole, some


def _are_near(positions: Sequence[int]) -> bool:
    """Say whether positions ascend, with few others between them."""
    ascending = sorted(set(positions)) == [*positions]
    return ascending and positions[-1] - positions[0] < _OTHERS * len(positions)


def _numbered(rows: sql.Composed, *, by_position: bool) -> sql.Composed:
    """Add the column `ordinal`, which sorts the messages as the processor's cursor does; held ones have it already.

    A statement whose effects depend on the order would have to know the cursor otherwise. The server leaves the
    numbering out where a statement does not name it (a subquery's unused columns are not computed).
    """
    order = "position" if by_position else "transaction_id, position"
    numbered = "SELECT b.*, row_number() OVER (ORDER BY {}) AS ordinal FROM ({}) AS b"
    return sql.SQL(numbered).format(sql.SQL(order), rows)


def _of_consumer(config: ProcessorConfig, settings: Competing) -> tuple[Whole, Some]:
    """Give the SELECT of a chunk's messages, and of some."""
    reader = DispatchReader(config.source, settings, config.processor_id)

    def find_claimed(batch: Batch) -> ClaimedBatch:
        if not isinstance(batch, Chunk):
            raise OutboxError("a batch that no consumer claimed", reason=Reason.INTERNAL_ERROR)
        return batch.claimed

    def whole(batch: Batch) -> sql.Composed:
        return _numbered(reader.relation(ReadRange.of(find_claimed(batch), upto=batch.examined)), by_position=False)

    def some(batch: Batch, positions: Sequence[int]) -> tuple[str, sql.Composed] | None:
        near = reader.can_walk and _are_near(positions)
        rows = reader.picked_relation(find_claimed(batch), _IDS, _POSITIONS, near=near)
        # Where positions ascend with the pairs, they sort the messages as the pairs do, and nothing is sorted.
        return None if rows is None else (_NEAR if near else _PART, _numbered(rows, by_position=near))

    return whole, some
