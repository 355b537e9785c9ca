"""Reads the outbox in the order of the pair (transaction_id, position), below the oldest open transaction.

The pair is compared as a row: positions are not monotonic along the order. The high-water mark is `pg_snapshot_xmin`:
everything below it is settled, so nothing can appear behind a checkpoint; a number that was rolled back is simply
absent, and no reader waits for it. Keyset paging on an index in the same order: a read costs its own rows, however
large the table is. One or more publications are read each from its own part of `(publication_id, transaction_id,
position)` and merged; so are the hash slots of a partition, each from its own part of `(hash slot, transaction_id,
position)`.

A filter on message types looks at a bounded number of rows on the server and ships only what matches, so that a
processor whose types match one row in ten million moves on by that number. Reading writes nothing: no transaction id is
ever taken.

A checkpoint of the cursor Snapshot has no place in this order: `range_reader.py` reads what comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_core.message import Batch, Message
from outbox_core.partition import slots_of
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Lag
from outbox_core.spec import Cursor
from outbox_worker.postgres.call import Template, fetch_one, fetch_row, fetch_rows, load, place
from outbox_worker.postgres.reading.payloads import compose_messages
from outbox_worker.postgres.reading.range_reader import SnapshotReader
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.reading.read_range import AFTER, UP_TO, ReadRange, Templates, pair_literals
from outbox_worker.postgres.reading.shared_look import PartitionLook
from outbox_worker.postgres.reading.table import build_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox_core.spec import PartitionKey, Partitions, Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.ownership.leases import LeaseLook
    from outbox_worker.postgres.reading.ahead import ReadAhead
    from outbox_worker.postgres.reading.payloads import PayloadBound
    from outbox_worker.postgres.reading.shared_look import SharedLook

WINDOW: Final = 20_000
"""Rows that one call looks at when a filter lets only some through."""
SHORT_PAGE: Final = 100
"""Messages of a partition that are read at most, where the page before was not full: of each slot so many are read."""
LAG_CAP: Final = 10_000
"""Lag is exact up to here."""

_HIGH_WATER_MARK: Final = sql.SQL("pg_snapshot_xmin(pg_current_snapshot())")


@dataclass(frozen=True, slots=True)
class Slice:
    """One partition of a partitioned processor; with a barrier, no further than that."""

    partition: int
    partitions: Partitions
    barrier: Checkpoint | None = None


class MessageReader:
    """Reads one source, or one partition of it. Holds no connection."""

    def __init__(
        self,
        source: Source,
        part: Slice | None = None,
        *,
        remote_target: bool = False,
        ahead: ReadAhead | None = None,
        lease_look: LeaseLook | None = None,
        payloads: PayloadBound | None = None,
        shared: SharedLook | None = None,
    ) -> None:
        """Prepare the statements.

        Args:
            source: the outbox.
            part: of it; None: all.
            remote_target: the checkpoint is in another database.
            ahead: reads the next batch of a backlog before it is asked for; None: nothing does.
            lease_look: asks about the lease beside each read of messages; None: that is not asked.
            payloads: bounds the bytes of a batch; None: all payloads of its messages are read at once.
            shared: looks along the positions for all partitions of a process; None: for this one alone.

        Raises:
            ConfigurationError: publications or keys are asked of a table that has no column for them.

        """
        scan, look = RangeScan.of(source), None
        if part is not None:
            key = part.partitions.key
            scan = replace(
                scan, slot=scan.table.slot(key, source.schema_name), computed_slot=scan.table.computed_slot(key),
                slots=_slots_read(part, source),
            )  # fmt: skip
            look = None if shared is None else PartitionLook(shared, part.partition, part.partitions.count)
        self._schema, self._ahead, self._payloads = source.schema_name, ahead, payloads
        self._lease_look = lease_look
        self._small = None if payloads is None else payloads.small
        self._partition = 0 if part is None else part.partition
        self._templates = Templates()
        self._is_short = False
        self._kept: tuple[Message, ...] = ()
        """A full page that was read ahead, and is fetched now."""
        self._scan, self._table = scan, scan.table
        self._types, self.slots = scan.types, scan.slots
        """Hash slots of the partition."""
        barrier = None if part is None else part.barrier
        snapshot_range = None if barrier is None else barrier.snapshot_range
        self._barrier = barrier if snapshot_range is None else None
        self._ranges = SnapshotReader(
            scan, self._partition, end=None if snapshot_range is None else snapshot_range.lower,
            remote_target=remote_target, fetch_rows=self._fetch_rows, small=self._small, look=look,
        )  # fmt: skip
        # Where none is named, the checkpoint that lag is measured behind says which one it is.
        self._has_no_high_water_mark = source.cursor is Cursor.SNAPSHOT

    def forget(self) -> None:
        """Keep nothing of what the server said before: it recovered from a crash."""
        self._ranges.forget()
        self.forget_ahead()

    def read_ahead(self, after: Checkpoint, limit: int, run: str, *, durably: bool = False) -> None:
        """Let the server look, in this run of it, for the full batch that `fetch` will be asked for next.

        `durably`: as `remote_target.read_durably`; ask `take_ahead` before that `fetch`.
        """
        if self._ahead is None or self._types is not None:
            return
        limit = self._bounded(limit)
        if after.snapshot_range is None:
            statement: sql.Composed | None = self._messages(ReadRange(after, limit=limit))
        else:
            statement = self._ranges.next_page(after.snapshot_range, limit)
        if statement is not None:
            self._ahead.send(self, self._schema, run, statement, durably=durably)

    def take_ahead(self, connection: Connection, after: Checkpoint, limit: int) -> bool:
        """Take what was read ahead for the next `fetch` from this place; say whether that reads nothing else.

        Of cursor TransactionOrder.
        """
        self._kept = ()
        if self._ahead is not None and self._types is None:
            limit = self._page(self._bounded(limit))
            wanted = ReadRange(after, limit=limit, is_short=self._is_short)
            self._kept = build_messages(self._ahead.take(self, connection, self._messages(wanted), limit) or ())
        return bool(self._kept)

    def forget_ahead(self) -> None:
        """Use nothing that was asked for ahead."""
        if self._ahead is not None:
            self._ahead.forget(self)

    def fetch(self, connection: Connection, after: Checkpoint, limit: int) -> Batch:
        """Return at most `limit` messages after `after`, with payloads as text, and how far was examined.

        Fewer where their payloads have too many bytes; such a batch is full.
        """
        if self._payloads is None:
            return self.fetch_outline(connection, after, limit)

        def find(pairs: Sequence[Checkpoint]) -> tuple[sql.Composable, sql.Composable]:
            rows = self._table.picked(self._table.stored_payload(), *pair_literals(pairs), self._scan.published)
            return rows, sql.SQL("position" if after.snapshot_range is not None else "transaction_id, position")

        return self._payloads.read(connection, limit, lambda most: self.fetch_outline(connection, after, most), find)

    def fetch_outline(self, connection: Connection, after: Checkpoint, limit: int) -> Batch:
        """Return the same messages without their large payloads: those are empty, where payloads are bounded."""
        if after.snapshot_range is not None:
            return self._ranges.fetch(connection, after, limit)
        if self._types is not None:
            reach = self.fetch_extent(connection, after, limit)
            if not reach.matched_count:
                return reach
            found = ReadRange(after, up_to=reach.examined, most=reach.examined_count)
            messages = self._fetch_messages(connection, found)
            return replace(reach, messages=messages, matched_count=len(messages))
        limit = self._page(limit)
        wanted = ReadRange(after, limit=limit, is_short=self._is_short)
        messages = self._kept[:limit] or self._fetch_messages(connection, wanted)
        examined = messages[-1].checkpoint if messages else after
        full = len(messages) >= limit
        self._is_short = not full
        return Batch.of(after, examined, messages, full=full, partition=self._partition)

    def fetch_range(self, connection: Connection, after: Checkpoint, up_to: Checkpoint, count: int) -> Batch:
        """Return all messages in (after, up_to], with payloads as text; `up_to` is settled, or ends a snapshot range.

        `count`: rows that the range has, or had, matching or not.
        """
        if up_to.snapshot_range is not None:
            messages = self._ranges.fetch_matching(connection, after, up_to)
        else:
            messages = self._fetch_messages(connection, ReadRange(after, up_to=up_to, most=count))
        return Batch.of(after, up_to, messages, full=True, partition=self._partition)

    def fetch_extent(self, connection: Connection, after: Checkpoint, limit: int) -> Batch:
        """Return how far such a batch reaches and how many messages it has, without the messages."""
        if after.snapshot_range is not None:
            return self._ranges.fetch_extent(connection, after, limit)
        return self._examine(connection, after, limit)[0]

    def fetch_sized_extent(self, connection: Connection, after: Checkpoint, limit: int) -> tuple[Batch, int | None]:
        """Return the same of pairs, and how many bytes the payloads take as they are stored: some may be compressed.

        None: no message is there, or a filter lets only some types through.
        """
        return self._examine(connection, after, limit, sized=True)

    def _examine(
        self, connection: Connection, after: Checkpoint, limit: int, *, sized: bool = False
    ) -> tuple[Batch, int | None]:
        window = self._page(limit) if self._types is None else max(limit, WINDOW)
        wanted = ReadRange(after, limit=window, is_short=self._is_short)

        def compose() -> sql.Composed:
            stored = self._table.stored_bytes if sized else sql.SQL("NULL::int")
            named = sql.SQL("{} AS transaction_id, {}, {} AS stored").format(
                self._table.transaction_id, self._scan.keys, stored
            )
            name = "examine_messages" if self._types is None else "examine_filtered"
            return load(name).format(rows=self._rows(named, wanted), most=place("most"))

        row = fetch_row(connection, self._templates.fill(f"examine {sized}", wanted, compose, most=limit))
        # What filters look through is long, and would be read for each slot.
        self._is_short = self._types is None and (row is None or row[2] < window)
        if row is None:
            return Batch(after, after, (), 0, full=False, matched_count=0, partition=self._partition), None
        transaction_id, position, examined_count, matched, delayed, size = row
        batch = Batch(
            after,
            Checkpoint(int(transaction_id), position),
            (),
            examined_count,
            full=examined_count >= window or matched >= limit,
            matched_count=matched,
            partition=self._partition,
            delayed_count=delayed,
        )
        return batch, size

    def keyed_relation(
        self, after: Checkpoint, examined: Checkpoint, key: PartitionKey | None, *, count: int | None = None
    ) -> sql.Composed:
        """Return the same SELECT as `batch_relation`, payloads as text, with each message's `key` and `deliver_after`.

        Raises:
            ConfigurationError: the key needs a column that the table does not have.

        """
        name = f"keyed {key}"
        if examined.snapshot_range is not None:
            return self._ranges.relation(name, lambda: self._keyed(key), after, examined)
        wanted = ReadRange(after, up_to=examined, most=count, is_short=self._is_short)
        return self._templates.fill(name, wanted, lambda: self._rows(self._keyed(key), wanted, only_matching=True))

    def batch_relation(
        self, after: Checkpoint, examined: Checkpoint, positions: str | None = None, *, count: int | None = None
    ) -> sql.Composed:
        """Return the SELECT of the matching messages in (after, examined], in order: the relation `batch`.

        `examined` must come from a read (below the high-water mark): then every run of it sees the same rows. What that
        read says of them, `positions` and `count` (`Batch.examined_count`), makes them found faster.
        """
        if examined.snapshot_range is not None:
            return self._ranges.batch_relation(after, examined, positions)
        wanted = ReadRange(after, up_to=examined, most=count, is_short=self._is_short)
        return self._templates.fill(
            "relation", wanted,
            lambda: self._rows(self._table.selection(payload="jsonb"), wanted, only_matching=True),
        )  # fmt: skip

    def picked_relation(self, ids: sql.Composable, positions: sql.Composable, *, near: bool = False) -> sql.Composed:
        """Return the same SELECT of the messages with these pairs, in any order; `near`: see `picked_batch`."""
        return self._table.picked_batch(ids, positions, self._scan.published, near=near)

    def picked_keyed_relation(
        self, pairs: Iterable[Checkpoint], key: PartitionKey | None, *, by_position: bool
    ) -> sql.Composed:
        """Return the same SELECT as `keyed_relation` of these messages, in the order of positions or of pairs."""
        rows = self._table.picked(self._keyed(key), *pair_literals(pairs), self._scan.published)
        order = self._table.position if by_position else self._table.pair
        return sql.SQL("{} ORDER BY {}").format(rows, order)

    def _keyed(self, key: PartitionKey | None) -> sql.Composed:
        return sql.SQL("{}, {} AS key").format(self._table.selection(payload="text"), self._table.key_text(key))

    def lag(self, connection: Connection, after: Checkpoint, cap: int = LAG_CAP) -> Lag:
        """Count what is committed behind `after`, also what the high-water mark still hides.

        At most `cap` rows are looked at, in an open snapshot range twice. Seconds are the age of the oldest such
        message by the column `scheduled`; 0 where the table has none.
        """
        self._has_no_high_water_mark = after.snapshot_range is not None
        if after.snapshot_range is not None:
            rows = self._scan.unexamined(after.snapshot_range, cap + 1)
        else:
            wanted = ReadRange(after, below_high_water_mark=False, limit=cap + 1)
            rows = Template(self._rows(self._scan.counted(self._table), wanted)).fill(wanted.numbers)
        matched, looked_at, seconds = fetch_one(connection, load("count_lag").format(rows=rows))
        return Lag(messages=min(matched, cap), at_least=looked_at > cap, seconds=max(0.0, seconds))

    def has_waiting(self, connection: Connection) -> bool:
        """Say whether a committed message waits at or above the high-water mark."""
        return self.waiting_seconds(connection) is not None

    def waiting_seconds(self, connection: Connection) -> float | None:
        """Return since when the first message at or above the high-water mark is stored; None where none waits there.

        0 where the table has no column that says when a message was stored. With the cursor Snapshot none waits.
        """
        if self._has_no_high_water_mark:
            return None
        table = self._table
        row = fetch_row(connection, load("fetch_waiting").format(**table.names, pair=table.pair, moment=table.moment))
        return None if row is None else max(0.0, row[0])

    def find_newest(self, connection: Connection) -> int | None:
        """Return the highest transaction id of a message below the high-water mark; of all partitions."""
        row = fetch_row(connection, self._scan.newest(below=_HIGH_WATER_MARK))
        return None if row is None else int(row[0])

    def _bounded(self, limit: int) -> int:
        return limit if self._payloads is None else self._payloads.limit(limit)

    def _page(self, limit: int) -> int:
        return min(limit, SHORT_PAGE) if self._is_short and self.slots else limit

    def _fetch_messages(self, connection: Connection, wanted: ReadRange) -> tuple[Message, ...]:
        return build_messages(self._fetch_rows(connection, self._messages(wanted), wanted.limit))

    def _fetch_rows(self, connection: Connection, statement: sql.Composed, size: int | None) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that returns at most `size`; None: that ends somewhere."""
        if self._ahead is not None and (found := self._ahead.take(self, connection, statement, size)) is not None:
            return found
        if self._lease_look is not None:
            return self._lease_look.read(connection, statement)
        return fetch_rows(connection, statement)

    def _messages(self, wanted: ReadRange) -> sql.Composed:
        """Return the SELECT of messages with payloads as text."""

        def compose() -> sql.Composed:
            rows = self._rows(self._table.outline(self._small), wanted, only_matching=True)
            return compose_messages(rows, self._small, "o.transaction_id, o.position")

        return self._templates.fill("fetch", wanted, compose)

    def _rows(self, columns: sql.Composable, wanted: ReadRange, *, only_matching: bool = False) -> sql.Composed:
        """Build the keyset scan over `o`, in order: one index range, or one for each publication or slot, merged."""
        conditions = self._conditions(wanted)
        if only_matching and self._types is not None:
            conditions.append(self._table.matches(self._types))
        # Where few rows are to be found, or all of a range are, each slot's have to be read to their end.
        repeated = wanted.is_short or wanted.limit is None
        return self._scan.merged(columns, conditions, wanted.limit_place, repeated=repeated)

    def _conditions(self, wanted: ReadRange) -> list[sql.Composable]:
        """Say which rows are in the range, so that an index of pairs is read from its beginning to its end.

        The index of slots too: it has the pairs of a slot behind it.
        """
        pair = self._table.pair
        if wanted.is_in_one_transaction:
            ends = place("after_position"), place("up_to_position")
            return [self._table.inside_transaction(place("up_to_id"), *ends)]
        conditions: list[sql.Composable] = [sql.SQL("({}) > ({})").format(pair, AFTER)]
        if wanted.up_to is not None:
            conditions.append(sql.SQL("({}) <= ({})").format(pair, UP_TO))
            is_counted = wanted.most is not None and self._types is None
            # By an index of publications or slots: of so small a part the planner would take the cursor's as well.
            if not (is_counted or self.slots or self._scan.published):
                conditions.append(self._table.between_ids(place("after_id"), place("up_to_id")))
        elif wanted.below_high_water_mark:
            conditions.append(sql.SQL("{} < {}").format(self._table.transaction_id, _HIGH_WATER_MARK))
            if self._barrier is not None:
                barrier = sql.Literal(str(self._barrier.transaction_id)), sql.Literal(self._barrier.position)
                conditions.append(sql.SQL("({}) <= ({}::xid8, {}::bigint)").format(pair, *barrier))
        return conditions


def _slots_read(part: Slice, source: Source) -> tuple[int | None, ...]:
    """Return the hash slots of a partition; None is the slot of rows that have neither key nor id: of partition 0.

    Only a mapped table can have such rows. The index says null for them, and cannot be another one where it exists.
    """
    slots = slots_of(part.partition, part.partitions.count)
    return (*slots, None) if part.partition == 0 and source.table is not None else slots
