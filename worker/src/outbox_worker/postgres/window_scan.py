"""The statements that find a window's messages: which index is walked, and how far. `windows.py` says when which.

A planner without statistics, or with old ones, must not be tempted into scanning the table. So what is to be walked
in an index's order is asked for in that order with a limit, and what must not be walked along another index is hidden
from it in an expression (`position + 0`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from psycopg import sql

from outbox_core.snapshot import parse_snapshot
from outbox_core.window import LOWEST_POSITION, Plan, Window, find_transactions
from outbox_worker.postgres.table import OutboxTable, as_text, is_slot

if TYPE_CHECKING:
    from outbox_core.spec import Source


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is looked at.

    Attributes:
        small: keys of a window up to which all of them are looked at for each page.
        ahead: messages that are looked at along the positions for one page.
        typed: messages on a page when a filter on types lets only some through.

    """

    small: int = 10_000
    ahead: int = 50_000
    typed: int = 20_000


@dataclass(frozen=True, slots=True)
class Span:
    """Of the window between two snapshots, what lies behind one position and not behind another."""

    lower: str | None
    upper: str
    after: int
    up_to: int | None = None


@dataclass(frozen=True)
class WindowScan:
    """One source, or one partition of it: the table and what of it is wanted.

    Attributes:
        slots: of one partition; None among them is the slot of rows that have neither key nor id.

    """

    table: OutboxTable
    types: sql.Composable | None = None
    publications: tuple[str, ...] = ()
    slot: sql.Composable | None = None
    slots: tuple[int | None, ...] = ()

    @classmethod
    def whole(cls, source: Source) -> WindowScan:
        """Take a source as a whole, all partitions and types of it."""
        return cls(OutboxTable.of(source), publications=tuple(dict.fromkeys(source.publications)))

    @property
    def keys(self) -> sql.Composed:
        """Position of `o`, whether its type is wanted, and whether it may be delayed."""
        return sql.SQL("{} AS position, {} AS matches, {} IS NOT NULL AS delayed").format(
            self._position, self.table.matches(self.types), self.table.deliver_after
        )

    def page(
        self, columns: sql.Composable, span: Span, plan: Plan, *, size: int, limits: Limits
    ) -> tuple[sql.Composed, sql.Composed]:
        """Return the CTE `found` and the SELECT of a page's rows in order; `found` is only full for BY_TRANSACTION."""
        if plan is Plan.BY_POSITION:
            nothing = sql.SQL("found AS (SELECT 1 WHERE false)").format()
            return nothing, sql.SQL("{} LIMIT {}").format(
                self._along(columns, span, ahead=limits.ahead), sql.Literal(size)
            )
        keys = sql.SQL("o.{t} AS transaction_id, {p} AS position").format(
            t=self._name("transaction_id"), p=self._position
        )
        if plan is Plan.BY_TRANSACTION:
            arms = self._arms(keys, span, limit=limits.small + 1, bounded=False)
            found = sql.SQL("found AS MATERIALIZED (SELECT f.* FROM ({}) AS f LIMIT {})").format(
                arms, sql.Literal(limits.small + 1)
            )
            source: sql.Composable = sql.SQL("found")
        else:
            found = sql.SQL("found AS (SELECT 1 WHERE false)").format()
            source = sql.SQL("({})").format(self._arms(keys, span, limit=None, bounded=True))
        rows = sql.SQL(
            "SELECT {columns} FROM (SELECT f.transaction_id, f.position FROM {source} AS f WHERE f.position > {after} "
            "ORDER BY f.position + 0 LIMIT {size}) AS k CROSS JOIN LATERAL (SELECT o.* FROM {table} AS o "
            "WHERE o.{t} = k.transaction_id AND {p} = k.position OFFSET 0) AS o ORDER BY {p}"
        ).format(
            columns=columns, source=source, after=sql.Literal(span.after), size=sql.Literal(size),
            table=self.table.identifier, t=self._name("transaction_id"), p=self._position,
        )  # fmt: skip
        return found, rows

    def matching(self, columns: sql.Composable, span: Span, plan: Plan) -> sql.Composed:
        """Return the SELECT of the span's messages that pass the filter on types, in order."""
        if plan is Plan.BY_POSITION:
            return self._along(columns, span, ahead=None, only_matching=True)
        inside = self._arms(sql.SQL("o.*"), span, limit=None, bounded=True)
        return sql.SQL("SELECT {} FROM ({}) AS o WHERE {} ORDER BY {}").format(
            columns, inside, self.table.matches(self.types), self._position
        )

    def newest(self, *, below: sql.Composable | None = None) -> sql.Composed:
        """Return the SELECT of the highest transaction id of a committed message, below a bound; of all partitions."""
        transaction_id = sql.SQL("o.{}").format(self._name("transaction_id"))
        bound = sql.SQL("true") if below is None else sql.SQL("{} < {}").format(transaction_id, below)
        conditions: list[sql.Composable] = [bound]
        if self.publications:
            column = sql.SQL("o.{}").format(self._name("publication_id"))
            conditions = [
                sql.SQL("{} = {} AND {}").format(column, sql.Literal(each), bound) for each in self.publications
            ]
        # Backwards along the index, whichever of the two there is.
        arms = [
            sql.SQL("(SELECT {t} AS id FROM {table} AS o WHERE {where} ORDER BY {t} DESC, o.{p} DESC LIMIT 1)").format(
                t=transaction_id, table=self.table.identifier, where=each, p=self._name("position")
            )
            for each in conditions
        ]
        return sql.SQL("SELECT n.id::text FROM ({}) AS n ORDER BY n.id DESC LIMIT 1").format(
            sql.SQL(" UNION ALL ").join(arms)
        )

    def first_unexamined(self, window: Window) -> sql.Composed:
        """Return the SELECT of the lowest pair of a committed message that is not examined; of all partitions."""
        conditions: list[sql.Composable] = [sql.SQL("true")]
        transaction_id = sql.SQL("o.{}").format(self._name("transaction_id"))
        low = 0
        if window.lower is not None:
            lower = parse_snapshot(window.lower)
            low = min(lower.in_progress, default=lower.xmax)
            conditions = [sql.SQL("NOT {}").format(_sees(window.lower, transaction_id))]
        if window.upper is not None:
            conditions.append(
                sql.SQL("NOT ({} AND {} <= {})").format(
                    _sees(window.upper, transaction_id), self._position, sql.Literal(window.position)
                )
            )
        if self.publications:
            conditions.append(self._published())
        return sql.SQL(
            "SELECT {t} AS transaction_id, {p} AS position FROM {table} AS o WHERE {t} >= {low}::xid8 AND {rest} "
            "ORDER BY {t}, {p} LIMIT 1"
        ).format(
            t=transaction_id, p=self._position, table=self.table.identifier, low=sql.Literal(str(low)),
            rest=sql.SQL(" AND ").join(conditions),
        )  # fmt: skip

    def nothing(self, columns: sql.Composable) -> sql.Composed:
        """Return a SELECT of no row."""
        return sql.SQL("SELECT {} FROM {} AS o WHERE false").format(columns, self.table.identifier)

    def ahead(self, after: int, count: int) -> sql.Composed:
        """Return the SELECT of the position of the row so many behind another; none where there are not so many."""
        return sql.SQL("SELECT {p} FROM {table} AS o WHERE {p} > {after} ORDER BY {p} OFFSET {skip} LIMIT 1").format(
            p=self._position, table=self.table.identifier, after=sql.Literal(after), skip=sql.Literal(count - 1)
        )

    def unexamined(self, window: Window, limit: int) -> sql.Composed:
        """Return the SELECT of what is committed and not examined yet, with `matches` and `scheduled`; bounded."""
        scheduled = sql.SQL("NULL::timestamptz") if self.table.columns.scheduled is None else self.table.moment
        columns = sql.SQL("{} AS matches, {} AS scheduled").format(self.table.matches(self.types), scheduled)
        if window.upper is None or window.position is None:
            later = self._arms(columns, Span(window.lower, "", 0), limit=limit, bounded=False)
            return sql.SQL("SELECT l.* FROM ({}) AS l LIMIT {}").format(later, sql.Literal(limit))
        # Behind the position all that the lower snapshot did not see; before it what the upper one does not.
        inside = self._along(columns, Span(window.lower, "", window.position), ahead=limit)
        later = self._arms(columns, Span(window.upper, "", 0, window.position), limit=limit, bounded=True)
        return sql.SQL("SELECT l.* FROM (({}) UNION ALL ({})) AS l LIMIT {}").format(inside, later, sql.Literal(limit))

    def _along(
        self, columns: sql.Composable, span: Span, *, ahead: int | None, only_matching: bool = False
    ) -> sql.Composed:
        """Walk the index of positions; only functions, which no index knows, say what belongs to the window."""
        places = [sql.SQL("{} > {}").format(self._position, sql.Literal(span.after))]
        if span.up_to is not None:
            places.append(sql.SQL("{} <= {}").format(self._position, sql.Literal(span.up_to)))
        walked = sql.SQL("SELECT o.* FROM {table} AS o WHERE {places} ORDER BY {p} {limit}").format(
            table=self.table.identifier, places=sql.SQL(" AND ").join(places), p=self._position, limit=_limit(ahead)
        )
        transaction_id = sql.SQL("o.{}").format(self._name("transaction_id"))
        conditions: list[sql.Composable] = [sql.SQL("{} IS NOT NULL").format(transaction_id)]
        if span.upper:
            conditions.append(_sees(span.upper, transaction_id))
        if span.lower is not None:
            conditions.append(sql.SQL("NOT {}").format(_sees(span.lower, transaction_id)))
        if self.slot is not None:
            # -1 is the slot that is null: ANY does not find a null in a list.
            listed_slots = sql.Literal([-1 if number is None else number for number in self.slots])
            conditions.append(sql.SQL("coalesce({}, -1) = ANY ({}::int[])").format(self.slot, listed_slots))
        if self.publications:
            listed = sql.Literal(list(self.publications))
            conditions.append(
                sql.SQL("o.{}::text || '' = ANY ({}::text[])").format(self._name("publication_id"), listed)
            )
        if only_matching:
            conditions.append(self.table.matches(self.types))
        return sql.SQL("SELECT {} FROM ({}) AS o WHERE {} ORDER BY {}").format(
            columns, walked, sql.SQL(" AND ").join(conditions), self._position
        )

    def _arms(self, columns: sql.Composable, span: Span, *, limit: int | None, bounded: bool) -> sql.Composed:
        """Unite the intervals of transaction ids that the window can hold, each an index range in the index's order."""
        places: list[sql.Composable] = []
        if bounded and span.after > LOWEST_POSITION:
            places.append(sql.SQL("{} + 0 > {}").format(self._position, sql.Literal(span.after)))
        if bounded and span.up_to is not None:
            places.append(sql.SQL("{} + 0 <= {}").format(self._position, sql.Literal(span.up_to)))
        late, fresh = find_transactions(span.lower, span.upper or None)
        arms = self._late(columns, late, places, limit) if late else []
        if fresh is not None:
            if span.upper and parse_snapshot(span.upper).in_progress:
                places.append(_sees(span.upper, sql.SQL("o.{}").format(self._name("transaction_id"))))
            arms += self._range(columns, *fresh, places, limit)
        if not arms:
            return self.nothing(columns)
        return sql.SQL(" UNION ALL ").join(sql.SQL("({})").format(arm) for arm in arms)

    def _late(
        self, columns: sql.Composable, late: list[int], places: list[sql.Composable], limit: int | None
    ) -> list[sql.Composed]:
        """Look up single transactions: those that were in progress."""
        transaction_id = self._name("transaction_id")
        ids = sql.SQL("unnest({}::text[]::xid8[]) AS late (id)").format(sql.Literal([str(each) for each in late]))
        conditions = [*places, sql.SQL("o.{} = late.id").format(transaction_id)]
        if self.publications:
            conditions.append(self._published())
        arm = sql.SQL(
            "SELECT {columns} FROM {lists} CROSS JOIN LATERAL (SELECT o.* FROM {table} AS o WHERE {conditions} "
            "ORDER BY {p} {limit}) AS o"
        )
        wanted: list[tuple[sql.Composable, list[sql.Composable]]] = [(ids, [])]
        if self.slot is not None:
            numbers = [number for number in self.slots if number is not None]
            slots = sql.SQL("{} CROSS JOIN unnest({}::int[]) AS wanted (slot)").format(ids, sql.Literal(numbers))
            wanted = [(slots, [sql.SQL("{} = wanted.slot").format(self.slot)])]
            if None in self.slots:
                wanted.append((ids, [is_slot(self.slot, None)]))
        return [
            arm.format(
                columns=columns, lists=lists, table=self.table.identifier,
                conditions=sql.SQL(" AND ").join([*conditions, *of_slot]), p=self._position,
                limit=_limit(limit) if limit else sql.SQL("OFFSET 0"),
            )
            for lists, of_slot in wanted
        ]  # fmt: skip

    def _range(
        self, columns: sql.Composable, low: int, high: int | None, places: list[sql.Composable], limit: int | None
    ) -> list[sql.Composed]:
        """Walk the ids from `low` to before `high`: once, or once for each publication or slot."""
        arm = sql.SQL("SELECT {} FROM {} AS o WHERE {} {}")
        transaction_id = sql.SQL("o.{}").format(self._name("transaction_id"))
        if self.slot is None:
            heads: list[list[sql.Composable]] = [[]]
            if self.publications:
                column = sql.SQL("o.{}").format(self._name("publication_id"))
                heads = [[sql.SQL("{} = {}").format(column, sql.Literal(each))] for each in self.publications]
            ends = [sql.SQL("{} >= {}::xid8").format(transaction_id, sql.Literal(str(low)))]
            if high is not None:
                ends.append(sql.SQL("{} < {}::xid8").format(transaction_id, sql.Literal(str(high))))
            order: sql.Composable = self.table.pair
            wanted = [(order, [*head, *ends, *places]) for head in heads]
        else:
            wanted = [
                (self.table.slot_order(self.slot, number), self._slot_range(number, transaction_id, low, high, places))
                for number in self.slots
            ]
        return [
            arm.format(
                columns, self.table.identifier, sql.SQL(" AND ").join(conditions),
                sql.SQL("ORDER BY {} {}").format(order, _limit(limit)) if limit else sql.SQL(""),
            )
            for order, conditions in wanted
        ]  # fmt: skip

    def _slot_range(
        self,
        number: int | None,
        transaction_id: sql.Composable,
        low: int,
        high: int | None,
        places: list[sql.Composable],
    ) -> list[sql.Composable]:
        """The slot is part of the row that is compared, so that no other index can look cheaper."""
        slot = sql.SQL("{}").format(self.slot)

        def compared(sign: str, transaction: int) -> sql.Composable:
            end = sql.Literal(str(transaction))
            if number is None:  # nothing compares with null
                return sql.SQL("{} {} {}::xid8").format(transaction_id, sql.SQL(sign), end)
            row = sql.SQL("({}, {}) {} ({}, {}::xid8)")
            return row.format(slot, transaction_id, sql.SQL(sign), sql.Literal(number), end)

        ends: list[sql.Composable] = [is_slot(slot, number), compared(">=", low)]
        if high is not None:
            ends.append(compared("<", high))
        if self.publications:
            ends.append(self._published())
        return [*ends, *places]

    def _published(self) -> sql.Composed:
        column = sql.SQL("o.{}").format(self._name("publication_id"))
        return sql.SQL("{} = ANY ({}::text[])").format(column, sql.Literal(list(self.publications)))

    @cached_property
    def _position(self) -> sql.SQL:
        return as_text(sql.SQL("o.{}").format(self._name("position")))

    def _name(self, role: str) -> sql.Identifier:
        return sql.Identifier(getattr(self.table.columns, role))


def _sees(snapshot: str, transaction_id: sql.Composable) -> sql.Composed:
    return sql.SQL("pg_visible_in_snapshot({}, {}::pg_snapshot)").format(transaction_id, sql.Literal(snapshot))


def _limit(count: int | None) -> sql.Composable:
    return sql.SQL("") if count is None else sql.SQL("LIMIT {}").format(sql.Literal(count))
