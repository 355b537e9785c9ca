"""Says of all partitions of a process at once that no message came, so that none of them needs to look.

Whenever the server wrote something each partition looks for messages, seven times until it rests, and mostly it was
this process's own heartbeat. To look for one partition merges the index ranges of its hash slots. To find the newest
message costs one row of an index.

A read that finds nothing leaves nothing of the transactions that were over when it began. What comes later is of one
that was not: its id is not below the oldest one that was open then (`pg_snapshot_xmin`). So a partition notes that
bound, as it was before a read in vain, or of the snapshot up to which that read. Until the table has a message at or
above it, another read would be in vain too. Now and then it reads all the same: a user may have changed the rows.

Where a few messages came since the look before, a look also says of which slots they are. A partition that had read
everything at some look still has, until a later look names one of its slots.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.progress.snapshot import parse_snapshot
from outbox_worker.postgres.call import Template, fetch_rows, load, place
from outbox_worker.postgres.reading.range_scan import RangeScan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outbox_core.message import Batch
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.progress.snapshot_range import SnapshotRange
    from outbox_core.spec import PartitionKey, Source
    from outbox_worker.postgres.connection import Connection

FRESH: Final = 0.005
"""Seconds for which a look is used: the partitions of a process are due at the same time."""
BELIEVED: Final = 30.0
"""Seconds after which a partition reads again."""
PASSED: Final = 5.0
"""The same where messages of others came: only a read moves on the lower snapshot that `outbox prune` waits for."""
FEW: Final = 100
"""Messages whose slots one look finds."""

_LATEST: Final = 2**63 - 1
"""An id that no transaction reaches: the first look has none to go on from."""
_END: Final = sql.SQL("pg_snapshot_xmax(pg_current_snapshot())")
"""Rows with ids that the server has not reached count for nothing, and none does that has no id."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One look.

    Attributes:
        at: when.
        bound: every transaction with a lower id was over.
        saw_all: none was in progress.
        newest: the id of the newest message's transaction; None: there is no message.
        run: of the server.
        changes: the number of partitions is to change, and each partition has to read up to the barrier.
        number: of the look.

    """

    at: float
    bound: int
    saw_all: bool
    newest: int | None
    run: str
    changes: bool
    number: int = 0

    @property
    def passed(self) -> int | None:
        """The id of the newest message's transaction, if no message can come below it any more."""
        return self.newest if self.newest is not None and self.newest < self.bound else None

    def has_none_since(self, before: Seen) -> bool:
        """Say whether it is certain that no message came since an earlier look, and none has to be passed by."""
        return self.continues(before) and (self.newest is None or self.newest < before.bound)

    def continues(self, before: Seen) -> bool:
        """Say whether what was seen before still counts."""
        changed = self.run != before.run or self.changes or before.changes
        return not changed and self.at - before.at <= BELIEVED


class Arrivals:
    """Looks for the newest message of a source; shared by the partitions of a process, which one thread uses."""

    def __init__(self, source: Source, processor_id: str, key: PartitionKey | None = None) -> None:
        """Compose the statement; nothing is looked at yet. Without a `key` no slots are found."""
        scan, slots = RangeScan.whole(source), sql.Composed([sql.SQL("NULL")])
        if key is not None:
            since = sql.SQL("{}::xid8").format(place("since"))
            rows = scan.slots_since(scan.table.computed_slot(key), since, _END, FEW + 1)
            slots = load("name_slots").format(rows=rows, few=sql.Literal(FEW))
        self._statement = Template(
            load("look_for_arrivals").format(
                newest=scan.newest(below=_END), schema=sql.Identifier(source.schema_name),
                processor_id=sql.Literal(processor_id), slots=slots,
            )
        )  # fmt: skip
        self.latest: Seen | None = None
        """The look made last, however long ago: the next one goes on from its bound."""
        self._fresh_until = 0.0
        self._unbroken = 0
        """The look since which each one said of all messages of which slots they are."""
        self._named: dict[int | None, int] = {}
        """Of each slot the latest look that found a message of it."""

    def look(self, connection: Connection) -> Seen:
        """Return what is there now, or was `FRESH` seconds ago.

        Raises:
            OutboxError: as `translate` says.

        """
        now, last = time.monotonic(), self.latest
        if last is not None and now <= self._fresh_until:
            return last
        statement = self._statement.fill({"since": _LATEST if last is None else last.bound})
        bound, saw_all, newest, run, changes, slots = fetch_rows(connection, statement)[0]
        number = 1 if last is None else last.number + 1
        seen = Seen(now, int(bound), saw_all, None if newest is None else int(newest), run, changes, number)
        if slots is None or last is None or last.run != run:
            self._unbroken = number
        else:
            self._named |= dict.fromkeys(slots, number)
        self.latest, self._fresh_until = seen, now + FRESH
        return seen

    def has_none_of(self, slots: Iterable[int | None], before: Seen) -> bool:
        """Say whether it is certain that no message of these slots came between an earlier look and the latest one."""
        if self.latest is None or not self.latest.continues(before) or before.number < self._unbroken:
            return False
        return all(self._named.get(slot, 0) <= before.number for slot in slots)

    def forget(self) -> None:
        """Look again when asked: the server wrote something, or it may be another server."""
        self._fresh_until = 0.0


class PartitionArrivals:
    """What one partition knows: where it read in vain, and what had been seen before."""

    def __init__(self, shared: Arrivals, slots: Iterable[int | None]) -> None:
        """Know nothing; `slots` are the partition's."""
        self._shared = shared
        self._slots = frozenset(slots)
        self._place: tuple[Checkpoint, SnapshotRange | None] | None = None
        self._before: Seen | None = None
        self._vain: Seen | None = None
        """Before the read in vain."""
        self._known: Seen | None = None
        """The latest look that showed no message of this partition since."""

    def find_end(self, connect: Callable[[], Connection], after: Checkpoint) -> Seen | None:
        """Return the look that says that a read after this place would find nothing; None: read.

        To be asked before each read.
        """
        # Where messages come, to look for the newest one would be for nothing.
        self._before = self._shared.latest
        if self._place != (after, after.snapshot_range):
            return None
        self._before = seen = self._shared.look(connect())
        if self._vain is None:
            return None
        if not seen.has_none_since(self._vain):
            is_recent = seen.at - self._vain.at <= PASSED
            if not is_recent or self._known is None or not self._shared.has_none_of(self._slots, self._known):
                return None
        self._known = seen
        return seen

    def note(self, batch: Batch) -> None:
        """Take what was read."""
        self._place = self._vain = self._known = None
        if batch.matched_count or batch.full:
            return
        snapshot_range, before = batch.examined.snapshot_range, self._before
        self._place, self._vain = (batch.examined, snapshot_range), before
        if before is not None and snapshot_range is not None and snapshot_range.end is not None:
            self._vain = replace(before, bound=min(before.bound, parse_snapshot(snapshot_range.end).xmin))
        # What a range that was opened before that look did not see may have come before it too.
        self._known = before if self._vain == before else None
