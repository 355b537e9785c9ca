"""`rewind` and `skip-to` where the cursor is Snapshot: a place is a position, and what it means a snapshot range.

Back: every message from that position on is handled again, and none that was not handled is passed over. Forward: what
is committed now and lies below the position is passed over; what commits later is handled, at every position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_cli.database.moves import Direction, Move, count
from outbox_cli.errors import RefusedError, UsageError
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import LOWEST_POSITION, Plan, SnapshotRange
from outbox_core.spec import StartFrom, StartType
from outbox_worker.postgres.progress.starts import start_range
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.reading.snapshots import take_snapshot

if TYPE_CHECKING:
    from argparse import Namespace

    from outbox_cli.context import Context
    from outbox_cli.database.sources import Sources
    from outbox_core.spec import Source
    from outbox_worker.postgres.admin.overview import ProcessorView
    from outbox_worker.postgres.connection import Connection


def plan_move(
    sources: Sources, context: Context, view: ProcessorView, known: Checkpoint | None, direction: Direction
) -> Move:
    """Find the checkpoint to move to, and count the messages that it concerns.

    Where the checkpoint's row is gone, `known` has the counter that was expected and no range: it is taken that all
    that is committed by now was examined, as the database does (sql/functions/conflicts.sql).

    """
    back = direction is Direction.BACK
    if not back and view.open_conflict is not None:
        raise RefusedError(f"conflict {view.open_conflict} is open: accept it or rewind first, then skip")
    if known is None or (known.snapshot_range is None and view.pair is not None):
        raise RefusedError(f"the checkpoint of {view.processor_id} is no snapshot range")
    connection, source = sources.need(view.processor_id), sources.source_of(view.processor_id)
    scan = RangeScan.whole(source) if sources.has_remote_target(view.processor_id) else None
    now = take_snapshot(connection, scan, None if known.snapshot_range is None else known.snapshot_range.end)
    snapshot_range = known.snapshot_range or SnapshotRange(now)
    position = _find_position(connection, context, source)
    if back:
        target = SnapshotRange() if position is None else snapshot_range.rewound(position)
        first = (
            SnapshotRange()
            if snapshot_range.end is None
            else SnapshotRange(None, snapshot_range.end, target.position or LOWEST_POSITION)
        )
        last = SnapshotRange(snapshot_range.end, plan=Plan.BY_POSITION)
    else:
        target = SnapshotRange(now) if position is None else snapshot_range.skipped(position, now)
        reached = LOWEST_POSITION if snapshot_range.position is None else snapshot_range.position
        first, last = SnapshotRange(snapshot_range.lower, now, reached), target
    concerned = count(sources, context, view, Checkpoint(0, 1, first), Checkpoint(0, 2, last))
    ends = "the beginning" if back else "the end"
    place = ends if position is None else f"position {position}"
    return Move(view, view.pair, Checkpoint(0, known.position + 1, target), direction, concerned, place)


def _find_position(connection: Connection, context: Context, source: Source) -> int | None:
    """Return the position that the options mean; None: the beginning or end."""
    options = context.options
    if options.to is not None:
        raise UsageError(
            "--to names a pair, and this processor's cursor is Snapshot: say --to-position, --to-time, or the "
            "beginning or end"
        )
    if options.to_position is not None:
        return int(options.to_position)
    if options.to_time is None:
        return None
    start = start_range(connection, source, find_start_from(options))
    if start.position is None:
        raise RefusedError(f"nothing was stored since {options.to_time}")
    return start.position + 1


def find_start_from(options: Namespace) -> StartFrom:
    """Say the place that is named other than by a pair as a resource would."""
    if options.to_position is not None:
        return StartFrom(type=StartType.POSITION, position=options.to_position)
    if options.to_time is not None:
        return StartFrom(type=StartType.TIMESTAMP, timestamp=options.to_time)
    return StartFrom(type=StartType.END if options.to_end else StartType.BEGINNING)
