"""Reads snapshot ranges in the order of positions, for the cursor Snapshot.

The upper snapshot is taken once, before the range's first page, and is part of the checkpoint from then on. What
it sees is committed or rolled back, so no message can appear behind a page: paging by position skips and repeats
nothing, in this process or in any other. What it does not see is in its list of transactions in progress or begins
after it, and so belongs to a later range. No reader waits for a transaction.

The transaction ids of a range are a few and an interval (`read_range.Lookup`): a small range costs its own keys, on the
index (transaction_id, position), sorted by position; where that finds more than a page, the later pages are read by the
positions that it found. A range too large for that, a backlog, is read along the index of positions from its first
message on, where its messages lie close together, and else by sorting all of its keys, for many pages at once.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_core.message import Batch, Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import LOWEST_POSITION, Plan, SnapshotRange
from outbox_worker.postgres.call import fetch_one, fetch_rows, load, place
from outbox_worker.postgres.reading.payloads import compose_messages, shipped_columns
from outbox_worker.postgres.reading.range_scan import NOTHING_FOUND, SIZE, Limits, RangeScan
from outbox_worker.postgres.reading.read_range import Lookup, Templates, Walk, array_text
from outbox_worker.postgres.reading.shared_look import FRESH, Found, SharedLook, read_numbers
from outbox_worker.postgres.reading.snapshots import fetch_news, fetch_present, is_later, take_snapshot
from outbox_worker.postgres.reading.table import build_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.shared_look import PartitionLook

    FetchRows = Callable[[Connection, sql.Composed, int | None], list[tuple[Any, ...]]]

_NULL: Final = sql.SQL("NULL::bigint").format()
_OFTEN: Final = 3
SPARSE: Final = 10
"""A page by position that holds less than one in so many of what was asked for is sought by sorting."""


@dataclass(frozen=True, slots=True)
class _Page:
    """What was found: so many rows are examined, up to `position`; more may be behind them where it `is_full`.

    Of a page by position that is not full, `reached`: all up to there was looked at, and there may be more behind it.
    """

    examined: int
    position: int
    matched: int
    delayed: int
    is_full: bool
    reached: int | None
    looked_at: int = 0
    messages: tuple[Message, ...] = ()
    positions: str | None = None


@dataclass(frozen=True, slots=True)
class _RangeList:
    """Where messages of one range are, which the look for a page of it found; `is_cut`: there may be more behind."""

    connection: Connection
    ends: tuple[str | None, str | None]
    until: float
    positions: array[int]
    is_cut: bool

    def page(self, connection: Connection | None, span: SnapshotRange, size: int) -> Found | None:
        """Return a page of a range, read on this connection or on any (None); None: it is not of this list."""
        is_same = (connection is None or connection is self.connection) and (span.lower, span.upper) == self.ends
        if not is_same or time.monotonic() >= self.until:
            return None
        begin = bisect_right(self.positions, span.after)
        found = list(self.positions[begin : begin + size])
        return None if self.is_cut and len(found) < size else Found(found, None, None)


class SnapshotReader:
    """Reads snapshot ranges of one source, or of one partition of it."""

    def __init__(  # noqa: PLR0913 - built once, by the reader of messages
        self,
        scan: RangeScan,
        partition: int = 0,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        *,
        end: str | None = None,
        remote_target: bool = False,
        fetch_rows: FetchRows | None = None,
        small: int | None = None,
        look: PartitionLook | None = None,
    ) -> None:
        """Keep the statements.

        `end`, a barrier: no range is opened beyond that snapshot. `remote_target`: what is read is remembered
        elsewhere. `fetch_rows` executes a statement for a page; None: on the connection alone. `small`: bytes of a
        payload up to which it is read with its message; None: every payload is. `look`: finds pages along the positions
        for all partitions of a process; None: each does.
        """
        self._end = end
        self._fetch_rows = fetch_rows or _fetch_rows
        self._remote_target, self._small = remote_target, small
        self._limits = limits
        # All partitions of a process have about as many keys, and look at so many together.
        self._most_keys = (limits.ahead if scan.types is None else limits.small) // (1 if look is None else look.count)
        self._scan = scan
        self._partition = partition
        self._templates = Templates()
        self._in_vain = 0
        """Looks in a row that found nothing."""
        self._saw_all = False
        """The snapshot taken last is of a moment when no transaction was in progress."""
        self._opened: tuple[Connection, Checkpoint, str | None, str | None] | None = None
        self._shared = look
        self._looks = SharedLook() if look is None else look.shared
        self._range_list: _RangeList | None = None

    def fetch(self, connection: Connection, after: Checkpoint, limit: int) -> Batch:
        """Return at most `limit` messages after `after`, with payloads as text, and how far was examined."""
        if self._scan.types is None:
            return self._read(connection, after, limit, with_messages=True)
        reach = self.fetch_extent(connection, after, limit)
        if not reach.matched_count:
            return reach
        messages = self.fetch_matching(connection, reach.after, reach.examined, reach.positions)
        return replace(reach, messages=messages, matched_count=len(messages))

    def fetch_matching(
        self, connection: Connection, after: Checkpoint, examined: Checkpoint, positions: str | None = None
    ) -> tuple[Message, ...]:
        """Return all messages between two checkpoints between which lies at most one range, payloads as text."""
        rows = self.relation("outline", lambda: self._scan.table.outline(self._small), after, examined, positions)
        return build_messages(fetch_rows(connection, compose_messages(rows, self._small, "o.position")))

    def fetch_extent(self, connection: Connection, after: Checkpoint, limit: int) -> Batch:
        """Return how far such a batch reaches and how many messages it has, without the messages."""
        return self._read(connection, after, limit, with_messages=False)

    def batch_relation(self, after: Checkpoint, examined: Checkpoint, positions: str | None = None) -> sql.Composed:
        """Return the SELECT of the matching messages between two checkpoints: the same rows on every run.

        `examined` must come from a read after `after`, so that at most one range lies between them; so do `positions`.
        """
        return self.relation("batch", lambda: self._scan.table.selection(payload="jsonb"), after, examined, positions)

    def relation(
        self,
        name: str,
        columns: Callable[[], sql.Composable],
        after: Checkpoint,
        examined: Checkpoint,
        positions: str | None = None,
    ) -> sql.Composed:
        """Return the SELECT of other columns of the same messages, which have a name; `o` is the outbox."""
        old, new = after.snapshot_range or SnapshotRange(), examined.snapshot_range or SnapshotRange()
        upper = new.end
        if upper is None:
            return self._scan.nothing(columns())
        span = old if old.upper == upper else SnapshotRange(old.end, upper)
        if new.plan is not Plan.BY_POSITION and positions is None:
            lookup = Lookup(span.lower, span.upper, span.position, new.position)
            return self._templates.fill(
                f"{name} {new.plan.value}", lookup, lambda: self._scan.matching(columns(), lookup, new.plan)
            )
        walk = Walk(span.lower, span.upper, span.position, new.position, among=positions)
        return self._templates.fill(name, walk, lambda: self._scan.walk(columns(), walk, only_matching=True))

    def _read(self, connection: Connection, after: Checkpoint, limit: int, *, with_messages: bool) -> Batch:
        """Read the next page: of the open range, or where that is read, of a new one up to now."""
        snapshot_range, self._saw_all = after.snapshot_range or SnapshotRange(), False
        # Opened some time ago, or by another partition: what was committed since lies behind it, unread.
        shared = self._find_range(connection, after, snapshot_range.end)
        for span in filter(None, (snapshot_range if snapshot_range.is_open else None, shared)):
            batch = self._page(connection, after, span, limit, with_messages=with_messages, is_newest=False)
            if batch.examined_count:
                if span is shared:
                    self._opened = (connection, after, snapshot_range.end, span.upper)
                return batch
        if with_messages and (news := self._look_for_news(connection, after, snapshot_range.end, limit)) is not None:
            return news
        upper = self._open(connection, after, snapshot_range.end)
        if upper == snapshot_range.end:
            return self._empty(after, upper)
        span = SnapshotRange(snapshot_range.end, upper)
        batch = self._page(connection, after, span, limit, with_messages=with_messages, is_newest=True)
        # A batch that fails is read again: the same range, so that looking for the message that fails gets nearer.
        self._opened = (connection, after, snapshot_range.end, upper) if batch.examined_count else None
        return batch

    def _look_for_news(self, connection: Connection, after: Checkpoint, end: str | None, limit: int) -> Batch | None:
        """Read a whole new range at once; None: it is large, or its upper snapshot is not to be the present one.

        Nor where looks often found nothing: most likely the snapshot is still the same, and to see that costs less.
        """
        again = self._opened is not None and self._opened[1:3] == (after, end)
        if end is None or again or self._remote_target or self._end is not None or self._in_vain >= _OFTEN:
            return None
        found = fetch_news(
            lambda news: self._fetch_rows(connection, news, None), self._scan, self._templates, end, limit, self._small
        )
        if found is None:
            return None
        upper, self._saw_all, messages = found
        self._opened = (connection, after, end, upper) if messages else None
        if not messages:
            return self._empty(after, upper)
        self._in_vain = 0
        examined = Checkpoint(0, after.position + len(messages), SnapshotRange(upper))
        return Batch.of(after, examined, messages, full=False, partition=self._partition)

    def forget(self) -> None:
        """Open the next range anew: the server may hand out again ids that the former one takes for over."""
        self._opened = self._range_list = None
        self._looks.forget()

    def _recall_upper(self, connection: Connection, after: Checkpoint, end: str | None) -> str | None:
        """Return the upper snapshot of the range that was opened behind this place; None: of none."""
        return self._opened[3] if self._opened is not None and self._opened[:3] == (connection, after, end) else None

    def _open(self, connection: Connection, after: Checkpoint, end: str | None) -> str | None:
        if (upper := self._recall_upper(connection, after, end)) is not None:
            return upper
        if self._end is not None:
            # A user may have put the checkpoint beyond the barrier: nothing is read then, and nothing is read again.
            return self._end if is_later(self._end, end) else end
        if self._remote_target:
            return take_snapshot(connection, self._scan, end)
        upper, self._saw_all = fetch_present(connection, end)
        return upper

    def _find_range(self, connection: Connection, after: Checkpoint, end: str | None) -> SnapshotRange | None:
        """Return the large range that another partition opened behind a snapshot; None: none, or one is open here."""
        if self._shared is None or self._end is not None or end is None or self._recall_upper(connection, after, end):
            return None
        return self._looks.find_range(connection, end)

    def _empty(self, after: Checkpoint, upper: str | None) -> Batch:
        """Nothing up to `upper`: go on from there, and say so if a range was closed by it."""
        self._in_vain += 1
        was_open = after.snapshot_range is not None and after.snapshot_range.is_open
        closed = Checkpoint(0, after.position + was_open, SnapshotRange(upper))
        return Batch(after, closed, (), 0, full=False, partition=self._partition, saw_all=self._saw_all)

    def _page(
        self,
        connection: Connection,
        after: Checkpoint,
        span: SnapshotRange,
        limit: int,
        *,
        with_messages: bool,
        is_newest: bool,
    ) -> Batch:
        size = limit if self._scan.types is None else max(limit, self._limits.typed)

        def look(by: Plan) -> _Page:
            if by is Plan.BY_POSITION and self._shared is not None:
                along = self._shared.find(connection, self._scan, span, limit, self._limits.ahead)
                return self._listed(connection, span, along, limit, with_messages=with_messages)
            if with_messages:
                return self._fetch(connection, span, by, size)
            return self._examine(connection, span, by, size, limit)

        if (found := self._recall(connection, span, size)) is not None:
            page, by = self._listed(connection, span, found, size, with_messages=with_messages), span.plan
        else:
            page, by = self._find(connection, span, size, look)
        if not page.examined and page.reached is None:
            return self._empty(after, span.end)
        self._in_vain = 0
        whole = page.reached is None and not page.is_full
        if whole:
            snapshot_range, self._range_list = SnapshotRange(span.upper, plan=by), None
        else:
            reached = page.position if page.reached is None else page.reached
            snapshot_range = SnapshotRange(span.lower, span.upper, reached, by)
        examined = Checkpoint(0, after.position + max(1, page.examined), snapshot_range)
        return Batch(
            after,
            examined,
            page.messages,
            max(1, page.examined),
            full=not (whole and is_newest),
            matched_count=page.matched,
            partition=self._partition,
            delayed_count=page.delayed,
            positions=page.positions,
        )

    def _listed(
        self, connection: Connection, span: SnapshotRange, found: Found, size: int, *, with_messages: bool
    ) -> _Page:
        """Make the page of at most `size` messages of which it is known where they are; some may be gone."""
        positions, count = array_text(found.positions), len(found.positions)
        last = found.positions[-1] if count else span.after
        messages: tuple[Message, ...] = ()
        matched, delayed = count, found.delayed
        if with_messages and count:
            messages = build_messages(self._fetch_rows(connection, self._listed_page(span, positions), count))
            matched, delayed = len(messages), _count_delayed(messages)
        elif count and delayed is None:
            delayed = self._examine(connection, span, Plan.BY_TRANSACTION, count, count, among=positions).delayed
        return _Page(
            count, last, matched, delayed or 0, is_full=count >= size, reached=found.reached, messages=messages,
            positions=positions,
        )  # fmt: skip

    def _recall(self, connection: Connection | None, span: SnapshotRange, size: int) -> Found | None:
        return None if self._range_list is None else self._range_list.page(connection, span, size)

    def _list(self, connection: Connection, span: SnapshotRange, positions: str | None) -> None:
        """Keep where the messages of the range are, of which the page just read is not the last."""
        if positions is not None:
            found = array("q", sorted(read_numbers(positions)))
            ends, until, is_cut = (span.lower, span.upper), time.monotonic() + FRESH, len(found) > self._limits.ahead
            self._range_list = _RangeList(connection, ends, until, found, is_cut)

    def _listed_page(self, span: SnapshotRange, positions: str) -> sql.Composed:
        walk = Walk(span.lower, span.upper, span.position, among=positions)

        def compose() -> sql.Composed:
            rows = self._scan.walk(self._scan.table.outline(self._small), walk, only_matching=True)
            return compose_messages(rows, self._small, "o.position")

        return self._templates.fill("listed page", walk, compose)

    def next_page(self, snapshot_range: SnapshotRange, limit: int) -> sql.Composed | None:
        """Return the statement by which `fetch` reads the next messages of an open range, where none is filtered out.

        None: it looks along the positions before it.
        """
        plan = _first_plan(snapshot_range)
        found = self._recall(None, snapshot_range, limit)
        if found is None:
            if self._shared is None or plan is not Plan.BY_POSITION:
                return self._page_statement("fetch_page", snapshot_range, plan, limit)
            found = self._shared.recall(snapshot_range, limit)
        if found is None or len(found.positions) < limit:
            return None
        return self._listed_page(snapshot_range, array_text(found.positions))

    def _find(
        self, connection: Connection, span: SnapshotRange, size: int, look: Callable[[Plan], _Page]
    ) -> tuple[_Page, Plan]:
        """Choose how to find the page."""
        if _first_plan(span) is Plan.BY_TRANSACTION:
            page = look(Plan.BY_TRANSACTION)
            if page.looked_at <= self._most_keys:
                return page, Plan.BY_TRANSACTION if page.looked_at <= self._limits.small else Plan.BY_SORTING
        if span.lower is not None and span.after == LOWEST_POSITION:
            before = self._looks.find_beginning(connection, self._scan, span, span.lower)
            return _Page(0, span.after, 0, 0, is_full=False, reached=before), Plan.BY_POSITION  # its pages follow
        page = look(Plan.BY_POSITION)
        # How many rows a filter left out is not known of a shared look.
        is_filtered = self._shared is not None and self._scan.types is not None
        if page.reached is None or page.examined * SPARSE >= size or is_filtered:
            return page, Plan.BY_POSITION
        return look(Plan.BY_SORTING), Plan.BY_SORTING

    def _fetch(self, connection: Connection, span: SnapshotRange, plan: Plan, size: int) -> _Page:
        result = self._fetch_rows(connection, self._page_statement("fetch_page", span, plan, size), size)
        messages = build_messages([row[3:] for row in result if row[3] is not None])
        position = messages[-1].position if messages else span.after
        count = len(messages)
        looked_at, reached, listed = result[0][:3]
        self._list(connection, span, listed)
        delayed = _count_delayed(messages)
        return _Page(count, position, count, delayed, count >= size, reached, looked_at, messages)

    def _examine(
        self, connection: Connection, span: SnapshotRange, plan: Plan, size: int, limit: int, among: str | None = None
    ) -> _Page:
        name = "examine_page" if self._scan.types is None else "examine_filtered_page"
        row = fetch_one(connection, self._page_statement(name, span, plan, size, among, limit))
        looked_at, position, examined, matched, delayed, count, reached, found, listed = row
        self._list(connection, span, listed)
        if listed is not None and (all_of_it := self._recall(connection, span, size)) is not None:
            found = array_text(all_of_it.positions)
        last = span.after if position is None else position
        is_full = count >= size
        return _Page(examined or 0, last, matched or 0, delayed or 0, is_full, reached, looked_at, positions=found)

    def _page_statement(
        self, name: str, span: SnapshotRange, plan: Plan, size: int, among: str | None = None, most: int = 0
    ) -> sql.Composed:
        limits, scan = self._limits, self._scan
        is_walk = plan is Plan.BY_POSITION or among is not None
        walk = Walk(span.lower, span.upper, span.position, size=size, among=among)
        lookup = Lookup(span.lower, span.upper, span.position, size=size)

        def compose() -> sql.Composed:
            columns = scan.table.outline(self._small) if name == "fetch_page" else scan.keys
            ahead = listed = _NULL
            if not is_walk:
                most = self._most_keys if plan is Plan.BY_TRANSACTION else limits.ahead
                found, rows = scan.page(columns, lookup, plan, most)
                listed = _list_all(self._most_keys if plan is Plan.BY_TRANSACTION else None)
            elif among is None:
                found, rows = NOTHING_FOUND, scan.walk(columns, walk, ahead=limits.ahead)
                ahead = scan.ahead(limits.ahead)
            else:
                found, rows = NOTHING_FOUND, scan.walk(columns, walk)
            return load(name).format(
                found=found, rows=rows, size=SIZE, ahead=ahead, positions=scan.positions(plan), listed=listed,
                payload=shipped_columns("p", self._small), most=place("most"),
            )  # fmt: skip

        return self._templates.fill(f"{name} {plan.value}", walk if is_walk else lookup, compose, most=most)


def _first_plan(span: SnapshotRange) -> Plan:
    return span.plan if span.plan is Plan.BY_TRANSACTION and span.lower is not None else Plan.BY_POSITION


def _list_all(most: int | None) -> sql.Composed:
    """Return the SELECT of the positions found, an array as text; null: a page has them, or they are too many."""
    bound = sql.SQL("") if most is None else sql.SQL("AND count(*) <= {}").format(sql.Literal(most))
    return sql.SQL("SELECT CASE WHEN count(*) > {} {} THEN array_agg(f.position)::text END FROM found AS f").format(
        SIZE, bound
    )


def _count_delayed(messages: tuple[Message, ...]) -> int:
    return sum(message.deliver_after is not None for message in messages)


def _fetch_rows(connection: Connection, statement: sql.Composed, _size: int | None) -> list[tuple[Any, ...]]:
    return fetch_rows(connection, statement)
