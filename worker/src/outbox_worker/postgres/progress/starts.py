"""Starting where another processor stands: its checkpoint, copied once, when the new one is first owned.

Where the cursors differ it is turned into one of the other kind. A pair is a snapshot range, exactly. Of a range only
its lower end is a pair: messages above it come that were examined already, those whose transactions began after
another one's that the range leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_core.errors import ConfigurationError
from outbox_core.progress.checkpoint import MAX_POSITION, Checkpoint
from outbox_core.progress.coverage import as_snapshot_range, find_common
from outbox_core.report import Reason
from outbox_core.spec import DEFAULT_CURSOR, Cursor
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.call import call, fetch_one, fetch_rows
from outbox_worker.postgres.progress.checkpoints import build_checkpoint, partition_parameters
from outbox_worker.postgres.queries import in_schema, load
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.schema import check_position_index

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from outbox_core.spec import Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


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


def spread(
    connection: Connection,
    key: ProcessorKey,
    pairs: Mapping[int, Checkpoint],
    *,
    epoch: int,
    token: UUID,
) -> bool:
    """Give each partition the start that is its own, in the transaction that partitioned the processor."""
    of = partition_parameters(pairs)
    if any(pair.snapshot_range is not None for pair in pairs.values()):
        spread = call(
            connection, key.schema, "spread_ranges", **key.names, partitions=of["partitions"], lowers=of["lowers"],
            uppers=of["uppers"], positions=of["positions"], epoch=epoch, owner_token=token,
        )  # fmt: skip
    else:
        spread = call(
            connection, key.schema, "spread_start", **key.names, partitions=of["partitions"],
            transaction_ids=of["transaction_ids"], positions=of["counters"], epoch=epoch, owner_token=token,
        )  # fmt: skip
    return spread is True
