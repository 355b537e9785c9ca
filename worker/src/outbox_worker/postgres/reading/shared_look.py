"""Looks along the positions once for all partitions of a process.

With the cursor Snapshot a backlog is read along the index of positions, where the messages of all partitions lie side
by side. A look for one partition passes those of the others, and to compute whose a message is takes longer than to
pass it. So a look notes where the messages of every partition are, and the other partitions need not look.

Only places are noted; the messages are read when they are asked for. A look serves a range whose upper snapshot its own
snapshot covers: all that the upper one sees was there then, so that nothing of the range is missing. What the range
does not hold is left out by its transaction id.
"""

from __future__ import annotations

import json
import time
from array import array
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.progress.snapshot_range import Plan, SnapshotRange
from outbox_worker.postgres.call import Template, fetch_rows, load
from outbox_worker.postgres.reading.read_range import Lookup

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.range_scan import RangeScan

PAGES: Final = 4
"""A look notes about so many pages of each partition."""
KEPT: Final = 8
"""Looks that are kept: partitions begin at different places, and with fewer each would drop what another needs."""
FRESH: Final = 30.0
"""Seconds for which a look is used: a user may have changed the rows since."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a page's messages are, how many of them may be delayed, and up to where all was looked at.

    `delayed` is None where that is not known; `reached` where the page is full or nothing is behind it.
    """

    positions: list[int]
    delayed: int | None
    reached: int | None


@dataclass(frozen=True, slots=True)
class _Places:
    """Of one partition: positions in order, the transaction id of each, and which positions may be delayed.

    `lowest` and `highest` are bounds of the ids: mostly the range has all of them, and none need be compared.
    """

    positions: array[int]
    ids: array[int]
    delayed: frozenset[int]
    lowest: int
    highest: int

    @classmethod
    def of(cls, positions: str | None, ids: str | None, delayed: str | None) -> _Places:
        """Read what the server noted of a partition."""
        pairs = sorted(zip(read_numbers(positions), read_numbers(ids), strict=True))
        ids_found = array("q", [pair[1] for pair in pairs])
        lowest, highest = min(ids_found, default=0), max(ids_found, default=0)
        places = array("q", [pair[0] for pair in pairs])
        return cls(places, ids_found, frozenset(read_numbers(delayed)), lowest, highest)

    def page(self, span: SnapshotRange, size: int, reached: int | None) -> Found:
        """Return at most `size` of those behind the span's place that belong to it."""
        lower, upper = span.snapshots
        begin = bisect_right(self.positions, span.after)
        if lower.xmax <= self.lowest and self.highest < upper.xmin:
            positions = list(self.positions[begin : begin + size])
        else:
            places = zip(self.positions[begin:], self.ids[begin:], strict=True)
            belonging = (place for place, each in places if upper.sees(each) and not lower.sees(each))
            positions = list(islice(belonging, size))
        delayed = len(self.delayed.intersection(positions)) if self.delayed else 0
        return Found(positions, delayed, reached if len(positions) < size else None)


@dataclass(slots=True)
class _Look:
    """What one look noted of `count` partitions behind `after`, up to `reached`; None: up to the end."""

    connection: Connection
    count: int
    until: float
    snapshot: str
    after: int
    reached: int | None
    noted: dict[int, tuple[str | None, str | None, str | None]]
    places: dict[int, _Places] = field(default_factory=dict)

    def serves(self, span: SnapshotRange) -> bool:
        """Say whether a page of this span can be made of it."""
        return (
            time.monotonic() < self.until
            and self.after <= span.after
            and (self.reached is None or span.after < self.reached)
            and parse_snapshot(self.snapshot).covers(span.snapshots[1])
        )

    def page(self, partition: int, span: SnapshotRange, size: int) -> Found:
        """Return a page of one partition."""
        if partition not in self.places:
            self.places[partition] = _Places.of(*self.noted.pop(partition, (None, None, None)))
        return self.places[partition].page(span, size, self.reached)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """All that `snapshot` sees and `lower` does not lies behind the position `before`; None: there is nothing."""

    connection: Connection
    until: float
    lower: str
    snapshot: str
    before: int | None

    def serves(self, connection: Connection, span: SnapshotRange) -> bool:
        """Say whether all of the span is among those messages."""
        if self.connection is not connection or time.monotonic() >= self.until:
            return False
        lower, upper = span.snapshots
        return lower.covers(parse_snapshot(self.lower)) and parse_snapshot(self.snapshot).covers(upper)


class SharedLook:
    """Shared by the readers of all partitions of a process, which one thread uses."""

    def __init__(self) -> None:
        """Begin without a look."""
        self._kept: deque[_Look] = deque(maxlen=KEPT)
        self._beginnings: deque[_Beginning] = deque(maxlen=KEPT)

    def forget(self) -> None:
        """Use nothing that was noted: the server may have recovered from a crash."""
        self._kept.clear()
        self._beginnings.clear()

    def find_range(self, connection: Connection, lower: str) -> SnapshotRange | None:
        """Return a large range behind this snapshot of which another partition's look found the beginning.

        What is looked for in a range serves all partitions that read the same one.
        """
        for known in self._beginnings:
            span = SnapshotRange(lower, known.snapshot, plan=Plan.BY_POSITION)
            old, new = span.snapshots
            if new.covers(old) and not old.covers(new) and known.serves(connection, span):
                return span
        return None

    def find_beginning(self, connection: Connection, scan: RangeScan, span: SnapshotRange, lower: str) -> int | None:
        """Return a position behind which all of a span lies that has this lower snapshot; None: it has no message.

        All keys of the range are looked through, once for all partitions.
        """
        for known in self._beginnings:
            if known.serves(connection, span):
                return known.before
        everyone = replace(scan, slot=None, slots=())
        wanted = Lookup(lower, None, size=1)
        keys, rows = everyone.page(everyone.table.position, wanted, Plan.BY_SORTING, 0)
        statement = Template(load("fetch_beginning").format(found=keys, rows=rows))
        snapshot, position = fetch_rows(connection, statement.fill(wanted.numbers))[0]
        before = None if position is None else position - 1
        self._beginnings.appendleft(_Beginning(connection, time.monotonic() + FRESH, lower, snapshot, before))
        return before

    def recall(
        self, connection: Connection | None, partition: int, count: int, span: SnapshotRange, size: int
    ) -> Found | None:
        """Return a page of what was noted on this connection, or on any (None); None: it is to be looked for."""
        for look in self._kept:
            if look.count == count and connection in {None, look.connection} and look.serves(span):
                return look.page(partition, span, size)
        return None

    def look(self, connection: Connection, scan: RangeScan, count: int, after: int, most: int) -> _Look:
        """Note where the messages of `count` partitions are behind a position, passing at most so many rows."""
        rows = fetch_rows(connection, load("look_along").format(rows=_rows_along(scan, count, after, most)))
        reached = max(row[3] for row in rows) if sum(row[2] for row in rows) >= most else None
        noted = {row[1]: row[4:] for row in rows}
        look = _Look(connection, count, time.monotonic() + FRESH, rows[0][0] if rows else "", after, reached, noted)
        if rows:
            self._kept.appendleft(look)
        return look


@dataclass(frozen=True, slots=True)
class PartitionLook:
    """What one of `count` partitions takes of the shared look."""

    shared: SharedLook
    partition: int
    count: int

    def find(self, connection: Connection, scan: RangeScan, span: SnapshotRange, size: int, most: int) -> Found:
        """Return a page of at most `size` messages, of what was noted and of a look that passes at most `most` rows."""

        def look(beyond: SnapshotRange, wanted: int) -> Found:
            rows = min(most, PAGES * size * self.count)
            noted = self.shared.look(connection, scan, self.count, beyond.after, rows)
            return noted.page(self.partition, beyond, wanted)

        return self._take(connection, span, size, look) or look(span, size)

    def recall(self, span: SnapshotRange, size: int) -> Found | None:
        """Return a page of what was noted; None: that has none of it."""
        return self._take(None, span, size, lambda _span, _size: None)

    def _take(
        self,
        connection: Connection | None,
        span: SnapshotRange,
        size: int,
        look: Callable[[SnapshotRange, int], Found | None],
    ) -> Found | None:
        """Take a page of what was noted; what it lacks is taken behind that, where every partition looks on."""
        found = self.shared.recall(connection, self.partition, self.count, span, size)
        if found is None or found.reached is None:
            return found
        beyond, lacking = replace(span, position=found.reached), size - len(found.positions)
        more = self.shared.recall(connection, self.partition, self.count, beyond, lacking) or look(beyond, lacking)
        if more is None:
            return found
        return Found(found.positions + more.positions, (found.delayed or 0) + (more.delayed or 0), more.reached)


def _rows_along(scan: RangeScan, count: int, after: int, most: int) -> sql.Composed:
    """Return the SELECT of the rows behind a position, of all partitions: of which each is, and if it is wanted."""
    table, slot = scan.table, scan.computed_slot or scan.slot
    wanted = [
        sql.SQL("{} IS NOT NULL").format(table.transaction_id),
        *scan.published,
        table.matches(scan.types),
    ]
    return sql.SQL(
        "SELECT coalesce({slot}, 0) % {count} AS partition, {p} AS position, {t} AS transaction_id, "
        "{delayed} IS NOT NULL AS delayed, {wanted} AS wanted "
        "FROM {table} AS o WHERE {p} > {after} ORDER BY {p} LIMIT {most}"
    ).format(
        slot=slot, count=sql.Literal(count), p=table.position, t=table.transaction_id, delayed=table.deliver_after,
        wanted=sql.SQL(" AND ").join(wanted), table=table.identifier, after=sql.Literal(after), most=sql.Literal(most),
    )  # fmt: skip


def read_numbers(text: str | None) -> list[int]:
    """Read an array of numbers as PostgreSQL writes it."""
    return [] if text is None else json.loads(f"[{text[1:-1]}]")
