"""What is next to be handed out in mode Competing: behind which dispatch position, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql

from outbox_core.processor.competing import choose_priority
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.progress.snapshot_range import NOTHING, SnapshotRange
from outbox_worker.postgres.call import load
from outbox_worker.postgres.reading.dispatch_reader import Examined
from outbox_worker.postgres.reading.messages import WINDOW
from outbox_worker.postgres.reading.range_scan import LIVE
from outbox_worker.postgres.reading.read_range import ReadRange, start_of

if TYPE_CHECKING:
    from datetime import timedelta

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.dispatch_reader import DispatchReader


@dataclass(frozen=True, slots=True)
class DispatchPosition:
    """How far a priority was handed out: what `lower` sees, and of what `upper` sees besides, all up to `after`."""

    priority: int
    id: int
    snapshot_range: SnapshotRange
    after: Checkpoint


@dataclass(frozen=True, slots=True)
class Found:
    """What is next behind a dispatch position: where no row was examined, only the dispatch position is to move.

    `whole`: nothing is left of its range.
    """

    dispatch_position: DispatchPosition
    wanted: ReadRange
    examined: Examined
    whole: bool


def dispatch_positions_of(rows: list[tuple[Any, ...]]) -> tuple[list[DispatchPosition], str]:
    """Read dispatch positions; where no range is open the next one reaches to the snapshot of now."""
    if not rows:
        return [], NOTHING
    now = rows[0][6]
    return [
        DispatchPosition(priority, number, SnapshotRange(lower, upper or now), Checkpoint(int(t), p))
        for priority, number, lower, upper, t, p, _ in rows
    ], now  # fmt: skip


class NextMessages:
    """Finds what is next for one consumer, which remembers how far it saw each priority."""

    def __init__(self, reader: DispatchReader, ageing: timedelta) -> None:
        """Keep what reads; `ageing` is what a level of priority is worth of waiting."""
        self._reader = reader
        self._ageing = ageing
        self._reached: dict[int, int] = {}
        """Of each priority, the transaction id before which its last message is."""

    def find(
        self, connection: Connection, dispatch_positions: list[DispatchPosition], now: str, limit: int
    ) -> Found | None:
        """Find at most `limit` messages behind one of the dispatch positions, up to the snapshot `now`; None: none."""
        dispatch_position = self._choose(connection, dispatch_positions, now)
        if dispatch_position is None:
            return None
        window = max(limit, WINDOW) if self._reader.filters else limit
        wanted = ReadRange(
            dispatch_position.after,
            limit=window,
            snapshot_range=dispatch_position.snapshot_range,
            priority=dispatch_position.priority,
        )
        examined = self._reader.examine(connection, wanted, limit)
        if (
            examined is None
            and dispatch_position.snapshot_range.upper == now
            and not self._is_to_settle(dispatch_position, now)
        ):
            return None
        if examined is None:
            examined = Examined(dispatch_position.after, 0, 0, None, (), is_last=True)
        return Found(dispatch_position, wanted, examined, whole=examined.is_last and examined.rows < window)

    def note_handed_out(self, found: Found) -> None:
        """Remember that the found messages are handed out now."""
        if found.examined.rows:
            self._reached[found.dispatch_position.priority] = found.dispatch_position.snapshot_range.snapshots[1].xmax

    def _choose(
        self, connection: Connection, dispatch_positions: list[DispatchPosition], now: str
    ) -> DispatchPosition | None:
        if not self._reader.is_queue:
            return dispatch_positions[0]
        heads = _fetch_heads(connection, self._reader, dispatch_positions)
        # A range of which nothing is left must be closed before what came later is seen.
        over = [each for each in dispatch_positions if each.priority not in heads and each.snapshot_range.upper != now]
        if over:
            return over[0]
        if not heads:
            return next((each for each in dispatch_positions if self._is_to_settle(each, now)), None)
        priority = choose_priority(heads, self._ageing)
        return next(each for each in dispatch_positions if each.priority == priority)

    def _is_to_settle(self, dispatch_position: DispatchPosition, now: str) -> bool:
        """Say whether all in progress beside the last message is over, and the dispatch position does not show it.

        It is moved once then, without a batch: else the checkpoint would stay before that message, caught up or not.
        """
        lower, _ = dispatch_position.snapshot_range.snapshots
        reached = self._reached.setdefault(dispatch_position.priority, lower.xmax)
        return lower.xmin < reached <= parse_snapshot(now).xmin


def _fetch_heads(
    connection: Connection, reader: DispatchReader, dispatch_positions: list[DispatchPosition]
) -> dict[int, Any]:
    """Return when the first message that was not handed out was stored, of each priority that has one."""
    snapshots = [each.snapshot_range.snapshots for each in dispatch_positions]
    starts = [start_of(lower, each.after) for each, (lower, _) in zip(dispatch_positions, snapshots, strict=True)]
    late = [
        "" if each.after.transaction_id >= lower.xmax else ",".join(map(str, lower.ended_since(upper)))
        for each, (lower, upper) in zip(dispatch_positions, snapshots, strict=True)
    ]
    statement = load("fetch_heads").format(
        table=reader.table.identifier,
        live=LIVE,
        priorities=sql.Literal([each.priority for each in dispatch_positions]),
        starts=sql.Literal([str(each.transaction_id) for each in starts]),
        positions=sql.Literal([each.position for each in starts]),
        ends=sql.Literal([str(upper.xmax) for _, upper in snapshots]),
        uppers=sql.Literal([each.snapshot_range.upper for each in dispatch_positions]),
        late=sql.Literal(late),
    )
    return dict(connection.execute(statement).fetchall())
