"""Reads snapshot ranges, and listed messages, in the order of pairs: for consumers of mode Competing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import Columns
from outbox_core.spec.delivery import LARGEST_BATCH
from outbox_worker.postgres.call import fetch_one, fetch_row, fetch_rows, load
from outbox_worker.postgres.reading.payloads import Page, compose_messages
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.reading.read_range import Templates
from outbox_worker.postgres.reading.table import OWN_COLUMNS, OWN_TABLE, OutboxTable, build_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_core.message import Message
    from outbox_core.processor.claimed_batch import ClaimedBatch
    from outbox_core.spec import Competing, Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.ahead import ReadAhead
    from outbox_worker.postgres.reading.payloads import PayloadBound
    from outbox_worker.postgres.reading.range_scan import Selecting
    from outbox_worker.postgres.reading.read_range import ReadRange

_QUEUE_COLUMNS: Final = Columns(
    publication_id="publication_id", partition_key="partition_key", metadata="metadata", scheduled="scheduled"
)
_DELIVER_AFTER: Final = itemgetter(-1)
"""Of a row of `Message`."""
COPIED_BYTES: Final = 1 << 20
"""Of delayed messages' payloads as they are stored, which one claim copies at most, if it has more than one.

They are one array: that is text of up to 255 times as many bytes, which compression saves, and PostgreSQL has none of
1 GB.
"""


@dataclass(frozen=True, slots=True)
class Examined:
    """How far a batch reaches, how many rows, how many of them are to be handled now, and the unique keys among them.

    `delayed`: positions of those whose time has not come. `is_last`: of what was to be looked at no row is behind it.
    """

    upto: Checkpoint
    rows: int
    matched: int
    keys: list[str] | None
    delayed: tuple[int, ...]
    is_last: bool


class DispatchReader:
    """Reads for mode Competing: chunks of snapshot ranges, and listed messages, in the order of pairs."""

    def __init__(
        self, source: Source, competing: Competing, processor_id: str, payloads: PayloadBound | None = None
    ) -> None:
        """Prepare; `payloads` bounds the bytes that are read at once, None: nothing does.

        Raises:
            ConfigurationError: publications are asked of a table that has no column for them.

        """
        self.table, self.is_queue = OutboxTable.of(source), competing.queue is not None
        if self.is_queue:
            self.table = OutboxTable(source.schema_name, f"queue_{competing.queue}", _QUEUE_COLUMNS)
        self._processor_id, self._payloads = sql.Literal(processor_id), payloads
        self._schema = source.schema_name
        # Of a queue the delayed messages are in a child of their own.
        self._can_delay = not self.is_queue and self.table.columns.deliver_after is not None
        # Of a queue everything that waits is in its own table.
        copies = (OutboxTable(source.schema_name, "competing_copies", OWN_COLUMNS), self._processor_id)
        self._scan = replace(
            RangeScan.of(source, self.table), is_queue=self.is_queue, copies=None if self.is_queue else copies
        )
        self._templates = Templates()
        self.filters = self._scan.types is not None or bool(self._scan.publications)
        """Some rows are examined and passed over."""
        self.ahead: ReadAhead | None = None
        """Reads what is most likely handed out next, while the batch before it is handled; None: nothing does."""
        self._sent: ReadRange | None = None
        """What that was asked for."""
        self._page: tuple[ReadRange, list[tuple[Any, ...]]] | None = None
        """What came of it."""
        self._may_be_delayed = False
        """In this backlog a page had a message with a `deliver_after`, so reading ahead is in vain."""

    def read_ahead(self, wanted: ReadRange, run: str) -> None:
        """Let the server read, in this run of it, the full page that is examined and fetched next.

        A queue's next page may be of another priority. Where payloads are large, less than a page is read.
        """
        limit, bound = wanted.limit, self._payloads
        if self.ahead is None or self.is_queue or self.filters or limit is None or self._may_be_delayed:
            return
        if bound is not None and bound.limit(limit) < limit:
            return
        self.ahead.send(self, self._schema, run, self._compose_page(wanted))
        self._sent = wanted

    def take_ahead(self, connection: Connection) -> None:
        """Keep what was read ahead for `examine` and `fetch_page`, unless a message of it may be delayed."""
        wanted, self._sent, self._page = self._sent, None, None
        if self.ahead is None or wanted is None:
            return
        rows = self.ahead.take(self, connection, self._compose_page(wanted), wanted.limit)
        if rows is not None:
            self._may_be_delayed = any(map(_DELIVER_AFTER, rows))
            self._page = None if self._may_be_delayed else (wanted, rows)

    def forget_ahead(self) -> None:
        """Use nothing that was read ahead."""
        self._sent, self._page, self._may_be_delayed = None, None, False
        if self.ahead is not None:
            self.ahead.forget(self)

    def examine(self, connection: Connection, wanted: ReadRange, limit: int) -> Examined | None:
        """Say how far a batch of at most `limit` matching messages reaches; None: no row is there."""
        if self._page is not None and self._page[0] == wanted:
            found = self._page[1]
            last = Checkpoint(int(found[-1][0]), found[-1][1])
            self._page = wanted._replace(up_to=last, limit=None), found
            return Examined(last, len(found), len(found), None, (), is_last=True)
        columns = self._listed_columns if wanted.snapshot_range is None else self._examined_columns
        rows, row = self._rows("examined", columns, wanted), None
        is_plain = not self.filters and wanted.limit == limit
        if is_plain:
            row = fetch_row(connection, load("examine_unfiltered").format(rows=rows))
        if not is_plain or (row is not None and row[2] > 1 and row[7] > COPIED_BYTES):
            bounds = {"limit": sql.Literal(limit), "most_copied": sql.Literal(COPIED_BYTES)}
            row = fetch_row(connection, load("examine_claim").format(rows=rows, **bounds))
        if row is None:
            return None
        return Examined(Checkpoint(int(row[0]), row[1]), row[2], row[3], row[4], tuple(row[5] or ()), row[6])

    def copies(self, wanted: ReadRange, upto: Checkpoint, positions: tuple[int, ...]) -> sql.Composable:
        """Return the array of the range's messages at these positions, for `claim_next` to keep."""
        rows = self._rows("text", lambda table: table.selection(payload="text"), wanted._replace(up_to=upto))
        return load("copied_rows").format(
            rows=rows, schema=sql.Identifier(self._schema), processor_id=self._processor_id,
            positions=sql.Literal(list(positions)),
        )  # fmt: skip

    def fetch(self, connection: Connection, wanted: ReadRange) -> tuple[Message, ...]:
        """Return the messages of `fetch_page`."""
        return self.fetch_page(connection, wanted).messages

    def fetch_page(self, connection: Connection, wanted: ReadRange) -> Page:
        """Return the matching messages, payloads as text; fewer than wanted where they have too many bytes."""
        bound, page, self._page = self._payloads, self._page, None
        kept = [page[1]] if page is not None and page[0] == wanted._replace(limit=None) else []

        def fetch(limit: int | None) -> Page:
            # Once: what is read again, here or after the batch was handed back, is read from the table.
            if kept:
                return Page(build_messages(kept.pop()[:limit]), limit)
            statement = self._compose_page(wanted._replace(limit=limit))
            return Page(build_messages(fetch_rows(connection, statement)), limit)

        def find(pairs: Sequence[Checkpoint]) -> tuple[sql.Composable, sql.Composable]:
            listed = wanted._replace(snapshot_range=None, listed=tuple(pairs), limit=None)
            rows = self._rows("stored", lambda table: table.stored_payload(copied=table is not self.table), listed)
            return rows, sql.SQL("transaction_id, position")

        if bound is None:
            return fetch(wanted.limit)
        return bound.read(connection, wanted.limit or LARGEST_BATCH, fetch, find)

    def _compose_page(self, wanted: ReadRange) -> sql.Composed:
        small = None if self._payloads is None else self._payloads.small
        rows = self._rows(f"outline {small}", lambda table: table.outline(small), wanted, only_matching=True)
        return compose_messages(rows, small, "o.transaction_id, o.position")

    def fetch_attempts(self, connection: Connection, wanted: ReadRange) -> dict[Checkpoint, int]:
        """Return how often messages of a queue's range have failed before, of those that have."""
        attempts = sql.SQL("o.transaction_id, o.position, o.attempts")
        rows = self._rows("attempts", lambda _: attempts, wanted, only_matching=True)
        found = fetch_rows(connection, load("fetch_attempts").format(rows=rows))
        return {Checkpoint(int(t), p): failures for t, p, failures in found}

    def relation(self, wanted: ReadRange) -> sql.Composed:
        """Return the SELECT that is the relation `batch` of a user's statement."""
        return self._rows("jsonb", lambda table: table.selection(payload="jsonb"), wanted, only_matching=True)

    @property
    def can_walk(self) -> bool:
        """Positions are indexed, and each is one message's: so it is in our table."""
        return self.table == OutboxTable(self._schema, OWN_TABLE, OWN_COLUMNS)

    def picked_relation(
        self, claimed: ClaimedBatch, ids: sql.Composable, positions: sql.Composable, *, near: bool
    ) -> sql.Composed | None:
        """Return the same SELECT of a range's messages with these pairs; None: they are listed, and may be copies."""
        if claimed.snapshot_range is None:
            return None
        available = self._scan.available(sql.Literal(claimed.priority)) if self.is_queue else self._scan.published
        return self.table.picked_batch(ids, positions, available, near=near)

    def count(self, connection: Connection, wanted: ReadRange) -> tuple[int, int, float]:
        """Count what is in a range: matching, all, and the age of the oldest matching one in seconds."""
        return _count(connection, self._rows("counted", self._scan.counted, wanted))

    def count_waiting(self, connection: Connection, limit: int) -> tuple[int, int, float]:
        """Count in the same way what of a queue is in no range: what failed, and what is due and not promoted yet.

        At most `limit` of each are looked at. Each is as old as it is overdue.
        """
        rows = load("waiting_rows").format(
            table=self.table.identifier, matches=self._scan.matches(self.table), limit=sql.Literal(limit)
        )
        return _count(connection, rows)

    def _rows(self, name: str, columns: Selecting, wanted: ReadRange, *, only_matching: bool = False) -> sql.Composed:
        """Return the SELECT of these columns, which have a name, of the messages of a range."""

        def compose() -> sql.Composed:
            return self._scan.in_pair_order(columns, wanted, only_matching=only_matching)

        return self._templates.fill(name, wanted, compose)

    def _listed_columns(self, table: OutboxTable) -> sql.Composed:
        """What is listed passed the filters when it was handed out."""
        return self._examined_columns(table, sql.SQL("true"))

    def _examined_columns(self, table: OutboxTable, matches: sql.Composable | None = None) -> sql.Composed:
        due = sql.SQL("coalesce({} <= clock_timestamp(), true)").format(table.deliver_after)
        now = self._can_delay and table is self.table
        return sql.SQL(
            "{} AS transaction_id, {} AS position, {} AS matches, {} AS due, {} AS stored, {} AS unique_key"
        ).format(
            table.transaction_id,
            table.position,
            matches or self._scan.matches(table),
            due if now else sql.SQL("true"),
            table.stored_bytes if now else sql.SQL("NULL::int"),
            sql.SQL("o.unique_key" if self.is_queue else "NULL::text"),
        )


def _count(connection: Connection, rows: sql.Composed) -> tuple[int, int, float]:
    matched, looked_at, seconds = fetch_one(connection, load("count_lag").format(rows=rows))
    return matched, looked_at, seconds
