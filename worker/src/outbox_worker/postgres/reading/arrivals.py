"""Says of all partitions of a process at once that no message came, so that none of them needs to look.

Whenever the server wrote something each partition looks for messages, seven times until it rests, and mostly it was
this process's own heartbeat. To look for one partition merges the index ranges of its hash slots. To find the newest
message costs one row of an index.

A read that finds nothing leaves nothing of the transactions that were over when it began. What comes later is of one
that was not: its id is not below the oldest one that was open then (`pg_snapshot_xmin`). So a partition notes that
bound, as it was before a read in vain, or of the snapshot up to which that read. Until the table has a message at or
above it, another read would be in vain too. Now and then it reads all the same: a user may have changed the rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_core.progress.snapshot import parse_snapshot
from outbox_worker.postgres.call import fetch_rows
from outbox_worker.postgres.queries import load
from outbox_worker.postgres.reading.range_scan import RangeScan

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from outbox_core.message import Batch
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.progress.snapshot_range import SnapshotRange
    from outbox_core.spec import Source

FRESH: Final = 0.005
"""Seconds for which a look is used: the partitions of a process are due at the same time."""
BELIEVED: Final = 30.0
"""Seconds after which a partition reads again."""

_END: Final = sql.SQL("pg_snapshot_xmax(pg_current_snapshot())")
"""Rows with ids that the server has not reached count for nothing, and none does that has no id."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One look.

    Attributes:
        at: when.
        bound: every transaction with a lower id was over.
        newest: the id of the newest message's transaction; None: there is no message.
        run: of the server.
        changes: the number of partitions is to change, and each partition has to read up to the barrier.

    """

    at: float
    bound: int
    newest: int | None
    run: str
    changes: bool

    def has_none_since(self, before: Seen) -> bool:
        """Say whether it is certain that no message came since an earlier look, and none has to be passed by."""
        if self.run != before.run or self.changes or before.changes or self.at - before.at > BELIEVED:
            return False
        return self.newest is None or self.newest < before.bound


class Arrivals:
    """Looks for the newest message of a source; shared by the partitions of a process, which one thread uses."""

    def __init__(self, source: Source, processor_id: str) -> None:
        """Compose the statement; nothing is looked at yet."""
        composed = load("look_for_arrivals").format(
            newest=RangeScan.whole(source).newest(below=_END), schema=sql.Identifier(source.schema_name),
            processor_id=sql.Literal(processor_id),
        )  # fmt: skip
        self._statement = sql.SQL(composed.as_string(None))
        self._seen: Seen | None = None

    def look(self, connection: psycopg.Connection[Any]) -> Seen:
        """Return what is there now, or was `FRESH` seconds ago.

        Raises:
            OutboxError: as `translate` says.

        """
        now = time.monotonic()
        if self._seen is None or now - self._seen.at > FRESH:
            bound, newest, run, changes = fetch_rows(connection, self._statement)[0]
            self._seen = Seen(now, int(bound), None if newest is None else int(newest), run, changes)
        return self._seen

    def forget(self) -> None:
        """Look again when asked: the server wrote something, or it may be another server."""
        self._seen = None


class PartitionArrivals:
    """What one partition knows: where it read in vain, and what had been seen before."""

    def __init__(self, shared: Arrivals) -> None:
        """Know nothing."""
        self._shared = shared
        self._place: tuple[Checkpoint, SnapshotRange | None] | None = None
        self._before: Seen | None = None
        self._vain: Seen | None = None

    def find_end(self, connect: Callable[[], psycopg.Connection[Any]], after: Checkpoint) -> Seen | None:
        """Return the look that says that a read after this place would find nothing; None: read.

        To be asked before each read.
        """
        self._before = None
        if self._place != (after, after.window):
            return None  # messages come: to look for the newest one would be for nothing
        self._before = seen = self._shared.look(connect())
        return seen if self._vain is not None and seen.has_none_since(self._vain) else None

    def note(self, batch: Batch) -> None:
        """Take what was read."""
        self._place = self._vain = None
        if batch.matched_count or batch.full:
            return
        window = batch.examined.window
        self._place = (batch.examined, window)
        if self._before is not None and window is not None and window.end is not None:
            bound = min(self._before.bound, parse_snapshot(window.end).xmin)
            self._vain = replace(self._before, bound=bound)
        else:
            self._vain = self._before
