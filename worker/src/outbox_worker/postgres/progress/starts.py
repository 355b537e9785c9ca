"""Where a new processor starts: at a place in the outbox, or where another processor stands.

A start is computed once, when the processor is first owned, and stored before anything is read. Every start but the
beginning is cut at the high-water mark: what is in flight has a transaction id at or above it, so a start pair just
below the high-water mark loses nothing; the highest committed row would (a known fault of other implementations).

Another processor's checkpoint is copied. Where the cursors differ it is turned into one of the other kind. A pair is a
snapshot range, exactly. Of a range only its lower end is a pair: messages above it come that were examined already,
those whose transactions began after another one's that the range leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from outbox_core.errors import ConfigurationError
from outbox_core.progress.checkpoint import BEGINNING, MAX_POSITION, Checkpoint
from outbox_core.progress.coverage import as_snapshot_range, find_common
from outbox_core.progress.snapshot_range import LOWEST_POSITION, SnapshotRange
from outbox_core.report import Reason
from outbox_core.spec import DEFAULT_CURSOR, Cursor, StartType
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.call import call, fetch_one, fetch_row, fetch_rows, in_schema, let_lists_have_nulls, load
from outbox_worker.postgres.progress.checkpoints import (
    build_checkpoint,
    fetch_high_water_mark,
    leased,
    partition_parameters,
)
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.reading.snapshots import take_snapshot
from outbox_worker.postgres.reading.table import OutboxTable
from outbox_worker.postgres.schema import check_position_index

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from outbox_core.processor.outcomes import HeldLease
    from outbox_core.spec import Source, StartFrom
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


def start_pair(connection: Connection, source: Source, start_from: StartFrom) -> Checkpoint:
    """Compute the pair to start from.

    A position means the first row, in reading order, whose position is at least it; a timestamp the first row stored
    at or after it. Earlier rows may come, none is missed. Scans the outbox once where no index helps.

    Raises:
        ConfigurationError: a timestamp without a column that says when messages were stored.

    """
    column, least = _find_place(source, start_from)
    if start_from.type is StartType.BEGINNING:
        return BEGINNING
    # First: read after the row, the high-water mark could have moved past a transaction that the row's query did not
    # see.
    high_water_mark = fetch_high_water_mark(connection)
    if column is None:
        return high_water_mark
    statement = load("fetch_first").format(**OutboxTable.of(source).names, column=sql.Identifier(column))
    row = fetch_row(connection, statement, {"least": least})
    return high_water_mark if row is None else min(high_water_mark, Checkpoint(int(row[0]), row[1] - 1))


def start_range(
    connection: Connection, source: Source, start_from: StartFrom, *, remote_target: bool = False
) -> SnapshotRange:
    """Compute the snapshot range to start from. What is in progress now is handled in any case: nothing is lost.

    A position means what has at least that position, a timestamp what has at least the lowest position of what was
    stored at or after it: earlier messages may come, none is missed.

    Raises:
        ConfigurationError: a timestamp without a column that says when messages were stored; a hot standby.

    """
    _, least = _find_place(source, start_from)
    # First: what commits while the lowest position is looked for is not in it.
    now = take_snapshot(connection, RangeScan.whole(source) if remote_target else None)
    if start_from.type is StartType.BEGINNING:
        return SnapshotRange()
    position = start_from.position
    if start_from.type is StartType.TIMESTAMP:
        lowest = load("fetch_lowest_scheduled").format(**OutboxTable.of(source).names)
        (position,) = fetch_one(connection, lowest, {"least": least})
    return SnapshotRange(now) if position is None else SnapshotRange(None, now, max(position - 1, LOWEST_POSITION))


def _find_place(source: Source, start_from: StartFrom) -> tuple[str | None, int | datetime | None]:
    """Return the column by which a start is looked for, and what it is at least; None: it is an end of the outbox."""
    columns = OutboxTable.of(source).columns
    match start_from.type:
        case StartType.BEGINNING | StartType.END:
            return None, None
        case StartType.POSITION:
            return columns.position, start_from.position
        case StartType.TIMESTAMP:
            if columns.scheduled is None:
                raise ConfigurationError(
                    "startFrom.timestamp needs source.table.columns.scheduled: the column that says when a message "
                    "was stored; name it, or start from a position"
                )
            return columns.scheduled, start_from.timestamp
        case StartType.PROCESSOR:
            # Another processor's checkpoint need not be where the messages are: see `find_other`.
            raise ConfigurationError("startFrom.processorId is no place in the outbox")


def compute_start(
    connection: Connection, source: Source, start_from: StartFrom, *, remote_target: bool = False
) -> Checkpoint:
    """Compute the first checkpoint of a new processor, of the kind that the source asks for.

    `remote_target`: it will be stored in another database than the messages'.

    Raises:
        ConfigurationError: a timestamp without a column that says when messages were stored; no index on the
            position, or a hot standby, where the cursor would be Snapshot.

    """
    if (source.cursor or DEFAULT_CURSOR) is Cursor.SNAPSHOT:
        check_position_index(connection, source)
        return Checkpoint(0, 1, start_range(connection, source, start_from, remote_target=remote_target))
    return start_pair(connection, source, start_from)


@dataclass(frozen=True, slots=True)
class OtherStart:
    """Where another processor stands.

    Attributes:
        pairs: by partition; one that is not partitioned has number 0 only.
        count: how many partitions it has; None: it is not partitioned.
        by: by which key, in `describe_key`'s words.

    """

    pairs: Mapping[int, Checkpoint]
    count: int | None
    by: str | None

    @property
    def start(self) -> Checkpoint:
        """Where one that starts here begins: before it lies nothing that is not examined by all."""
        pairs = list(self.pairs.values())
        return min(pairs) if pairs[0].snapshot_range is None else Checkpoint(0, 1, find_common(pairs))

    def partitioned_like(self, count: int, by: str) -> bool:
        """The same keys are in the same partitions."""
        return (self.count, self.by) == (count, by) and len(self.pairs) == count


def find_other(
    target: Connection,
    source_connection: Connection,
    source: Source,
    key: ProcessorKey,
    other_id: str,
) -> OtherStart:
    """Find another processor's checkpoint, as one of our cursor: beside our own, or in the source's database.

    Raises:
        ConfigurationError: `StartNotFound`: it has none, or in both, or it is of another source.

    """
    if source_connection is target:
        found = _read(target, key, other_id, None)
    else:
        beside = _read(target, key, other_id, remote_target.identify(source_connection, source).identity)
        exists, readable = fetch_one(source_connection, load("find_checkpoints"), {"schema": key.schema})
        # One that may not be read is no reason to refuse what was found; without it, the refusal names the right.
        there = _read(source_connection, key, other_id, None) if readable or (exists and beside is None) else None
        if beside is not None and there is not None:
            raise ConfigurationError(
                f"startFrom: processor {other_id!r} has a checkpoint in the source's database and one in the target's: "
                "which is meant? Start from a position or a time instead",
                reason=Reason.START_NOT_FOUND,
            )
        found = beside or there
    if found is None:
        raise ConfigurationError(
            f"startFrom: processor {other_id!r} has no checkpoint in schema {key.schema}: correct "
            "startFrom.processorId, or let that processor start first",
            reason=Reason.START_NOT_FOUND,
        )
    if (source.cursor or DEFAULT_CURSOR) is Cursor.SNAPSHOT:
        check_position_index(source_connection, source)
        pairs = {partition: Checkpoint(0, 1, as_snapshot_range(each)) for partition, each in found.pairs.items()}
    else:
        pairs = {partition: _as_pair(source_connection, source, each) for partition, each in found.pairs.items()}
    return OtherStart(pairs, found.count, found.by)


def _as_pair(source_connection: Connection, source: Source, checkpoint: Checkpoint) -> Checkpoint:
    """Return the pair up to which all is examined: below the first message that is not, and all that is in flight."""
    if checkpoint.snapshot_range is None:
        return checkpoint
    scan = RangeScan.whole(source)
    statement = load("fetch_lowest_unexamined").format(rows=scan.first_unexamined(checkpoint.snapshot_range))
    high_water_mark, transaction_id, position = fetch_one(source_connection, statement)
    settled = Checkpoint(int(high_water_mark) - 1, MAX_POSITION)
    return settled if transaction_id is None else min(settled, Checkpoint(int(transaction_id), position - 1))


def _read(connection: Connection, key: ProcessorKey, other_id: str, identity: str | None) -> OtherStart | None:
    rows = fetch_rows(connection, in_schema("find_processor", key.schema), {"processor_id": other_id})
    if not rows:
        return None
    count, by, source, competing = rows[0][3], rows[0][4], rows[0][5], rows[0][10]
    if source != identity:
        raise ConfigurationError(
            f"startFrom: processor {other_id!r} reads another database than {key.processor_id!r}: its checkpoint means "
            "nothing here",
            reason=Reason.START_NOT_FOUND,
        )
    if competing:
        raise ConfigurationError(
            f"startFrom: processor {other_id!r} hands out batches (mode Competing): behind its checkpoint are messages "
            "that are handled already. Start from a position or a time",
            reason=Reason.START_NOT_FOUND,
        )
    return OtherStart({row[0]: build_checkpoint(*row[1:3], *row[6:10]) for row in rows}, count, by)


def spread(connection: Connection, key: ProcessorKey, lease: HeldLease, pairs: Mapping[int, Checkpoint]) -> bool:
    """Give each partition the start that is its own, in the transaction that partitioned the processor."""
    of = partition_parameters(pairs)
    if any(pair.snapshot_range is not None for pair in pairs.values()):
        let_lists_have_nulls(connection)
        spread = call(
            connection, key.schema, "spread_ranges", **leased(key, lease), partitions=of["partitions"],
            lowers=of["lowers"], uppers=of["uppers"], positions=of["positions"],
        )  # fmt: skip
    else:
        spread = call(
            connection, key.schema, "spread_start", **leased(key, lease), partitions=of["partitions"],
            transaction_ids=of["transaction_ids"], positions=of["counters"],
        )  # fmt: skip
    return spread is True
