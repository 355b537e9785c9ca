"""Reads the messages of a window: those that one snapshot sees and an earlier one did not, in order of their pairs.

A window needs no high-water mark, so no open transaction holds it up: what commits late is in a later window. What it
holds is fixed by the two snapshots, however late and by whichever process it is read. Two index ranges are merged: the
transactions that were in progress for the earlier snapshot and are done for the later one, and those that the earlier
one did not know yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.checkpoint import BEGINNING, MAX_POSITION, Checkpoint
from outbox_core.errors import ConfigurationError
from outbox_core.spec import Columns
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.queries import load
from outbox_worker.postgres.table import OWN_COLUMNS, OWN_TABLE, OutboxTable, build_message

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    import psycopg

    from outbox_core.claimed_batch import ClaimedBatch, Window
    from outbox_core.message import Message
    from outbox_core.spec import Competing, Source

    Selecting: TypeAlias = Callable[[OutboxTable], sql.Composable]
    """The columns of whichever table the rows are in."""

LIVE: Final = sql.SQL("(CASE WHEN o.deliver_after IS NULL THEN (o.position >> 40) & 3 ELSE -1 END) = ANY ('{0,1,2,3}')")
"""In the words of the queue table's partitions, so that those of delayed messages are not looked into."""
_QUEUE_COLUMNS: Final = Columns(
    publication_id="publication_id", partition_key="partition_key", metadata="metadata", scheduled="scheduled"
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Which messages of a priority: of a window or listed, after a pair, up to one, at most so many."""

    priority: int
    window: Window | None
    after: Checkpoint = BEGINNING
    upto: Checkpoint | None = None
    limit: int | None = None
    listed: tuple[Checkpoint, ...] = ()
    excluded: tuple[int, ...] = ()
    """Positions of a window that the batch leaves out."""

    @classmethod
    def of(cls, claimed: ClaimedBatch, upto: Checkpoint | None = None, limit: int | None = None) -> Stretch:
        """What is left of a batch, or the beginning of that."""
        listed = tuple(pair for pair, _ in claimed.listed)
        return cls(
            claimed.priority, claimed.window, claimed.after, upto or claimed.upto, limit, listed, claimed.excluded
        )


@dataclass(frozen=True, slots=True)
class Examined:
    """The last pair looked at, how many rows, how many of them are to be handled now, and the unique keys among them.

    `delayed`: positions of those whose time has not come.
    """

    upto: Checkpoint
    rows: int
    matched: int
    keys: list[str] | None
    delayed: tuple[int, ...] = ()


def table_of(source: Source, competing: Competing) -> OutboxTable:
    """Return the queue's table, or the outbox."""
    if competing.queue is None:
        return OutboxTable.of(source)
    return OutboxTable(source.schema_name, f"queue_{competing.queue}", _QUEUE_COLUMNS)


def start_of(window: Window, after: Checkpoint) -> Checkpoint:
    """Return the pair after which the messages lie that the lower snapshot did not know."""
    return max(after, Checkpoint(window.lower.xmax - 1, MAX_POSITION))


class WindowReader:
    """Statements over one outbox or queue; holds no connection and no state."""

    def __init__(self, source: Source, competing: Competing, processor_id: str) -> None:
        """Prepare.

        Raises:
            ConfigurationError: publications are asked of a table that has no column for them.

        """
        self.table = table_of(source, competing)
        self.is_queue = competing.queue is not None
        # Of a queue everything that waits is in its own table.
        self._copies = None if self.is_queue else OutboxTable(source.schema_name, "competing_copies", OWN_COLUMNS)
        self._processor_id = sql.Literal(processor_id)
        self._schema = source.schema_name
        # Of a queue the delayed messages are in a child of their own.
        self._can_delay = not self.is_queue and self.table.columns.deliver_after is not None
        self._publications = list(dict.fromkeys(source.publications))
        self._types = sql.Literal(list(dict.fromkeys(source.message_types))) if source.message_types else None
        if self._publications and self.table.columns.publication_id is None:
            raise ConfigurationError(
                "source.publications needs source.table.columns.publicationId: name the column, or leave them out"
            )

    @property
    def filters(self) -> bool:
        """Some rows are examined and passed over."""
        return self._types is not None or bool(self._publications)

    def examine(self, connection: psycopg.Connection[Any], stretch: Stretch, limit: int) -> Examined | None:
        """Say how far a batch of at most `limit` matching messages reaches; None: no row is there."""
        rows = self._rows(self._examined_columns, stretch)
        with translated():
            row = connection.execute(load("examine_cut").format(rows=rows, limit=sql.Literal(limit))).fetchone()
        if row is None:
            return None
        return Examined(Checkpoint(int(row[0]), row[1]), row[2], row[3], row[4], tuple(row[5] or ()))

    def copies(self, stretch: Stretch, upto: Checkpoint, positions: tuple[int, ...]) -> sql.Composable:
        """Return the array of the stretch's messages at these positions, for `cut_batch` to keep."""
        copied = sql.SQL("{}[]").format(sql.Identifier(self._schema, "competing_copies"))
        if not positions:
            return sql.SQL("'{{}}'::{}").format(copied)
        rows = self._rows(lambda table: table.selection(payload="text"), replace(stretch, upto=upto))
        return load("copied_rows").format(
            rows=rows, schema=sql.Identifier(self._schema), processor_id=self._processor_id,
            positions=sql.Literal(list(positions)),
        )  # fmt: skip

    def fetch(self, connection: psycopg.Connection[Any], stretch: Stretch) -> tuple[Message, ...]:
        """Return the matching messages, payloads as text."""
        rows = self._rows(lambda table: table.selection(payload="text"), stretch, only_matching=True)
        with translated():
            found = connection.execute(load("fetch_messages").format(rows=rows)).fetchall()
        return tuple(map(build_message, found))

    def fetch_attempts(self, connection: psycopg.Connection[Any], stretch: Stretch) -> dict[Checkpoint, int]:
        """Return how often messages of a queue's stretch have failed before, of those that have."""
        rows = self._rows(lambda _: sql.SQL("o.transaction_id, o.position, o.attempts"), stretch, only_matching=True)
        with translated():
            found = connection.execute(load("fetch_attempts").format(rows=rows)).fetchall()
        return {Checkpoint(int(t), p): attempts for t, p, attempts in found}

    def relation(self, stretch: Stretch) -> sql.Composed:
        """Return the SELECT that is the relation `batch` of a user's statement."""
        return self._rows(lambda table: table.selection(payload="jsonb"), stretch, only_matching=True)

    def picked_relation(
        self, claimed: ClaimedBatch, ids: sql.Composable, positions: sql.Composable, *, near: bool
    ) -> sql.Composed | None:
        """Return the same SELECT of a window's messages with these pairs; None: they are listed, and may be copies."""
        if claimed.window is None:
            return None
        if near and self.table == OutboxTable(self._schema, OWN_TABLE, OWN_COLUMNS):
            return self.table.near(self.table.selection(payload="jsonb"), ids, positions)
        conditions = [LIVE, sql.SQL("o.priority = {}").format(sql.Literal(claimed.priority))] if self.is_queue else []
        return self.table.picked(
            self.table.selection(payload="jsonb"), ids, positions, self._publications, conditions
        )  # fmt: skip

    def count(self, connection: psycopg.Connection[Any], stretch: Stretch) -> tuple[int, int, float]:
        """Count what is in a stretch: matching, all, and the age of the oldest matching one in seconds."""
        with translated():
            row = connection.execute(
                load("count_lag").format(rows=self._rows(self._counted_columns, stretch))
            ).fetchone()
        return row if row is not None else (0, 0, 0.0)

    def _examined_columns(self, table: OutboxTable) -> sql.Composed:
        due = sql.SQL("coalesce({} <= clock_timestamp(), true)").format(table.deliver_after)
        now = self._can_delay and table is self.table
        return sql.SQL("o.{} AS transaction_id, o.{} AS position, {} AS matches, {} AS due, {} AS unique_key").format(
            sql.Identifier(table.columns.transaction_id),
            sql.Identifier(table.columns.position),
            self._matches(table),
            due if now else sql.SQL("true"),
            sql.SQL("o.unique_key" if self.is_queue else "NULL::text"),
        )

    def _counted_columns(self, table: OutboxTable) -> sql.Composed:
        return sql.SQL("o.{} AS transaction_id, o.{} AS position, {} AS matches, {} AS scheduled").format(
            sql.Identifier(table.columns.transaction_id),
            sql.Identifier(table.columns.position),
            self._matches(table),
            sql.SQL("NULL::timestamptz") if table.columns.scheduled is None else table.moment,
        )

    def _matches(self, table: OutboxTable) -> sql.Composable:
        matches = table.matches(self._types)
        if not self._publications:
            return matches
        column = sql.Identifier("o", table.columns.publication_id or "")
        return sql.SQL("({} AND {} = ANY ({}::text[]))").format(matches, column, sql.Literal(self._publications))

    def _rows(self, columns: Selecting, stretch: Stretch, *, only_matching: bool = False) -> sql.Composed:
        arms = [
            self._arm(
                columns, table, [*conditions, *self._common(table, stretch, only_matching=only_matching)], stretch
            )
            for table, conditions in self._ranges(stretch)
        ]
        if len(arms) == 1:
            return arms[0]
        limit = sql.SQL("") if stretch.limit is None else sql.SQL("LIMIT {}").format(sql.Literal(stretch.limit))
        joined = sql.SQL(" UNION ALL ").join(sql.SQL("({})").format(arm) for arm in arms)
        return sql.SQL("SELECT u.* FROM ({}) AS u ORDER BY u.transaction_id, u.position {}").format(joined, limit)

    def _common(self, table: OutboxTable, stretch: Stretch, *, only_matching: bool) -> list[sql.Composable]:
        common: list[sql.Composable] = []
        if self.is_queue:
            common += [LIVE, sql.SQL("o.priority = {}").format(sql.Literal(stretch.priority))]
        if stretch.upto is not None:
            common.append(sql.SQL("({}) <= ({})").format(table.pair, _literal(stretch.upto)))
        if stretch.excluded:
            column = sql.Identifier("o", table.columns.position)
            common.append(sql.SQL("{} <> ALL ({}::bigint[])").format(column, sql.Literal(list(stretch.excluded))))
        if only_matching and self.filters:
            common.append(self._matches(table))
        return common

    def _arm(
        self, columns: Selecting, table: OutboxTable, conditions: list[sql.Composable], stretch: Stretch
    ) -> sql.Composed:
        limit = sql.SQL("") if stretch.limit is None else sql.SQL("LIMIT {}").format(sql.Literal(stretch.limit))
        return sql.SQL("SELECT {} FROM {} AS o WHERE {} ORDER BY {} {}").format(
            columns(table), table.identifier, sql.SQL(" AND ").join(conditions), table.pair, limit
        )

    def _ranges(self, stretch: Stretch) -> list[tuple[OutboxTable, list[sql.Composable]]]:
        table, window = self.table, stretch.window
        if window is None:
            return self._listed(stretch)
        transaction_id = sql.Identifier("o", table.columns.transaction_id)
        new: list[sql.Composable] = [
            sql.SQL("({}) > ({})").format(table.pair, _literal(start_of(window, stretch.after))),
            sql.SQL("{} < {}::xid8").format(transaction_id, sql.Literal(str(window.upper.xmax))),
        ]
        if window.upper.in_progress:
            new.append(
                sql.SQL("pg_visible_in_snapshot({}, {}::pg_snapshot)").format(
                    transaction_id, sql.Literal(str(window.upper))
                )
            )
        late = window.lower.ended_since(window.upper)
        if not late or stretch.after.transaction_id >= window.lower.xmax:
            return [(table, new)]
        among = sql.SQL("{} = ANY ({}::xid8[])").format(transaction_id, sql.Literal([str(each) for each in late]))
        return [(table, [among, sql.SQL("({}) > ({})").format(table.pair, _literal(stretch.after))]), (table, new)]

    def _listed(self, stretch: Stretch) -> list[tuple[OutboxTable, list[sql.Composable]]]:
        """Messages that wait by themselves: where there is a copy it counts, for the row may be gone."""
        ids = sql.Literal([str(pair.transaction_id) for pair in stretch.listed])
        positions = sql.Literal([pair.position for pair in stretch.listed])
        among = sql.SQL("({}) IN (SELECT t::xid8, p FROM unnest({}::text[], {}::bigint[]) AS w (t, p))")

        def conditions(table: OutboxTable) -> list[sql.Composable]:
            after = sql.SQL("({}) > ({})").format(table.pair, _literal(stretch.after))
            return [after, among.format(table.pair, ids, positions)]

        if self._copies is None:
            return [(self.table, conditions(self.table))]
        mine = sql.SQL("o.processor_id = {}").format(self._processor_id)
        copied = sql.SQL(
            "NOT EXISTS (SELECT 1 FROM {} AS c WHERE c.processor_id = {} AND (c.transaction_id, c.position) = ({}))"
        ).format(self._copies.identifier, self._processor_id, self.table.pair)
        return [
            (self.table, [*conditions(self.table), copied]),
            (self._copies, [mine, *conditions(self._copies)]),
        ]


def _literal(pair: Checkpoint) -> sql.Composed:
    return sql.SQL("{}::xid8, {}::bigint").format(sql.Literal(str(pair.transaction_id)), sql.Literal(pair.position))
