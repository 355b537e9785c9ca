"""`rewind` and `skip-to` where the cursor is Snapshot: a place is a position, and what it means a window.

Back: every message from that position on is handled again, and none that was not handled is passed over. Forward: what
is committed now and lies below the position is passed over; what commits later is handled, at every position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox_cli.errors import RefusedError, UsageError
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import LOWEST_POSITION, Plan, SnapshotRange
from outbox_core.spec import StartFrom, StartType
from outbox_worker.postgres.admin.preview import Count, count_window
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.reading.range_reader import find_start
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.reading.snapshots import take_snapshot

if TYPE_CHECKING:
    import psycopg

    from outbox_cli.command import Context
    from outbox_worker.postgres.admin.overview import ProcessorView


def plan_move(
    connection: psycopg.Connection[Any],
    context: Context,
    view: ProcessorView,
    *,
    back: bool,
    remote_target: bool = False,
) -> tuple[Checkpoint, Count, int | None]:
    """Return the checkpoint to move to, the messages that it concerns, and the position (None: the beginning or end).

    Raises:
        UsageError: a pair is named: it means nothing here.
        RefusedError: nothing was stored since the time named.

    """
    stored = view.pair
    if stored is None or stored.window is None:
        raise RefusedError(f"the checkpoint of {view.processor_id} is no snapshot range")
    window, source = stored.window, context.subject.source
    scan = RangeScan.whole(source)
    now = take_snapshot(connection, scan if remote_target else None, window.end)
    position = _find_position(connection, context)
    reader = MessageReader(source)
    if back:
        target = SnapshotRange() if position is None else window.rewound(position)
        first = (
            SnapshotRange()
            if window.end is None
            else SnapshotRange(None, window.end, target.position or LOWEST_POSITION)
        )
        last = SnapshotRange(window.end, plan=Plan.BY_POSITION)
    else:
        target = SnapshotRange(now) if position is None else window.skipped(position, now)
        reached = LOWEST_POSITION if window.position is None else window.position
        first, last = SnapshotRange(window.lower, now, reached), target
    with context.console.progress("messages counted") as progress:
        count = count_window(connection, reader, first, last, cap=context.options.count_at_most, watch=progress.reach)
    return Checkpoint(0, stored.position + 1, target), count, position


def _find_position(connection: psycopg.Connection[Any], context: Context) -> int | None:
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
    start = find_start(
        connection, context.subject.source, StartFrom(type=StartType.TIMESTAMP, timestamp=options.to_time)
    )
    if start.position is None:
        raise RefusedError(f"nothing was stored since {options.to_time}")
    return start.position + 1
