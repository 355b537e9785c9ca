"""The statements that find the messages of a snapshot range: which index is walked, and how far.

The cursor Snapshot reads in the order of positions; `range_reader.py` says by which plan. Consumers read in the order
of pairs: what was in progress for the lower snapshot and is over for the upper one, merged with what began later.

A planner without statistics, or with old ones, must not be tempted into scanning the table. So what is to be walked
in an index's order is asked for in that order with a limit, and what must not be walked along another index is hidden
from it in an expression (`position + 0`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.errors import ConfigurationError
from outbox_core.progress.snapshot_range import Plan, SnapshotRange
from outbox_worker.postgres.call import Template, place
from outbox_worker.postgres.reading.read_range import AFTER, UP_TO, Lookup, Walk, pair_place
from outbox_worker.postgres.reading.table import OutboxTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    from outbox_core.spec import Source
    from outbox_worker.postgres.reading.read_range import ReadRange

    Parts: TypeAlias = list[sql.Composable]
    Sought: TypeAlias = tuple[Parts, Parts, sql.Composable]
    """Lists to join, conditions, and the order of the rows of each element."""
    Selecting: TypeAlias = Callable[[OutboxTable], sql.Composable]
    """The columns of the table that has the rows."""

LIVE: Final = sql.SQL("(CASE WHEN o.deliver_after IS NULL THEN (o.position >> 40) & 3 ELSE -1 END) = ANY ('{0,1,2,3}')")
"""In the words of the queue table's partitions, so that those of delayed messages are not looked into."""

NOTHING_FOUND: Final = sql.SQL("found AS (SELECT 1 WHERE false)").format()
"""The CTE of a page for which no keys are collected."""
SIZE: Final = sql.SQL("{}::bigint").format(place("size"))
"""Of a `Walk` or a `Lookup`."""
_BEHIND: Final = sql.SQL("{}::bigint").format(place("after"))
_SEEN_NOW: Final = sql.SQL(
    "{0} < pg_snapshot_xmax(pg_current_snapshot()) AND pg_visible_in_snapshot({0}, (SELECT pg_current_snapshot()))"
)
"""The first of them bounds what is walked of the index."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is looked at.

    Attributes:
        small: keys of a range up to which the planner may look for its rows by itself, and with a filter on types all
            are looked at for each page.
        ahead: messages that are looked at along the positions for one page, or as keys of a range for all of its pages.
        typed: messages on a page when a filter on types lets only some through.

    """

    small: int = 10_000
    ahead: int = 50_000
    typed: int = 20_000


@dataclass(frozen=True)
class RangeScan:
    """One source, or one partition of it, or one queue: the table and what of it is wanted.

    Attributes:
        computed_slot: the same as `slot` in less time, for where its index is not read; None: there is no such way.
        slots: of one partition; None among them is the slot of rows that have neither key nor id.
        is_queue: only messages that are not delayed, of one priority.
        copies: where messages of this processor are copied; a copy counts, for the row may be gone.

    """

    table: OutboxTable
    types: sql.Composable | None = None
    publications: tuple[str, ...] = ()
    slot: sql.Composable | None = None
    computed_slot: sql.Composable | None = None
    slots: tuple[int | None, ...] = ()
    is_queue: bool = False
    copies: tuple[OutboxTable, sql.Composable] | None = None

    @classmethod
    def of(cls, source: Source, table: OutboxTable | None = None) -> RangeScan:
        """Take what a source asks for of its own table, or of another one.

        Raises:
            ConfigurationError: publications are asked of a table that has no column for them.

        """
        table = table or OutboxTable.of(source)
        if source.publications and table.columns.publication_id is None:
            raise ConfigurationError(
                "source.publications needs source.table.columns.publicationId: name the column, or leave them out"
            )
        types = sql.Literal(list(dict.fromkeys(source.message_types))) if source.message_types else None
        return cls(table, types, tuple(dict.fromkeys(source.publications)))

    @classmethod
    def whole(cls, source: Source) -> RangeScan:
        """Take a source as a whole, all partitions and types of it."""
        return replace(cls.of(source), types=None)

    @property
    def keys(self) -> sql.Composed:
        """Position of `o`, whether its type is wanted, and whether it may be delayed."""
        return sql.SQL("{} AS position, {} AS matches, {} IS NOT NULL AS delayed").format(
            self.table.position, self.table.matches(self.types), self.table.deliver_after
        )

    def positions(self, plan: Plan) -> sql.SQL:
        """Return the positions of a page's rows `e` as an array; NULL where the rows are found again without it.

        Along the positions those of other partitions are passed too, and the slot of each is computed.
        """
        return sql.SQL("array_agg(e.position)::text" if plan is Plan.BY_POSITION and self.slots else "NULL")

    def page(
        self, columns: sql.Composable, wanted: Lookup, plan: Plan, most_keys: int
    ) -> tuple[sql.Composed, sql.Composed]:
        """Return the CTE `found`, keys of the range, and the SELECT of a page's rows in order.

        By transaction at most one key more than `most_keys` is found; by sorting that many behind the place, in order,
        or a page. With places for the numbers of `wanted`. Not for BY_POSITION, see `walk`.
        """
        table, keys = self.table, self.table.named_pair
        few: sql.Composable = sql.Literal(most_keys + 1)
        in_order = sql.SQL("f.position > {} ORDER BY f.position + 0").format(_BEHIND)
        if plan is Plan.BY_TRANSACTION:
            arms = sql.SQL("({}) AS f").format(self._arms(keys, replace(wanted, after=None), limit=few))
        else:
            arms = sql.SQL("({}) AS f WHERE {}").format(self._arms(keys, wanted, limit=None), in_order)
            few = sql.SQL("greatest({}, {})").format(few, SIZE)
        found = sql.SQL("found AS MATERIALIZED (SELECT f.* FROM {} LIMIT {})").format(arms, few)
        sorted_keys = sql.SQL("SELECT f.transaction_id, f.position FROM found AS f WHERE {} LIMIT {}").format(
            in_order, SIZE
        )
        rows = sql.SQL("SELECT {} FROM {} ORDER BY {}").format(columns, table.rows_of(sorted_keys), table.position)
        return found, rows

    def news(self, columns: sql.Composable, wanted: Lookup) -> sql.Composed:
        """Return the SELECT, in no order, of what the statement's own snapshot sees and the lower one does not.

        With places for the numbers of `wanted`, which has no upper snapshot; of each interval as many rows as its size.
        """
        return self._arms(columns, wanted, limit=SIZE, now=True)

    def matching(self, columns: sql.Composable, wanted: Lookup, plan: Plan) -> sql.Composed:
        """Return the SELECT of the range's messages that pass the filter on types, in order.

        With places for the numbers of `wanted`, of a page found by `plan`. Along the positions it is `walk`. Of a large
        range only keys are looked through, which an index has: the planner would read the whole table for its rows.
        """
        if plan is Plan.BY_SORTING:
            inside = self.table.rows_of(
                sql.SQL("{} OFFSET 0").format(self._arms(self.table.named_pair, wanted, limit=None))
            )
        else:
            inside = sql.SQL("({}) AS o").format(self._arms(sql.SQL("o.*"), wanted, limit=None))
        return sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY {}").format(
            columns, inside, self.table.matches(self.types), self.table.position
        )

    def newest(self, *, below: sql.Composable | None = None) -> sql.Composed:
        """Return the SELECT of the highest transaction id of a committed message, below a bound; of all partitions."""
        table = self.table
        bound = sql.SQL("true") if below is None else sql.SQL("{} < {}").format(table.transaction_id, below)
        # Backwards along the index, whichever of the two there is.
        order = sql.SQL("{} DESC, {} DESC").format(table.transaction_id, table.position)
        lists, conditions, _ = self._by_publication()
        ids = self._sought(
            sql.SQL("{} AS id").format(table.transaction_id), (lists, [*conditions, bound], order), sql.Literal(1)
        )
        return sql.SQL("SELECT n.id::text FROM ({}) AS n ORDER BY n.id DESC LIMIT 1").format(ids)

    def slots_since(
        self, slot: sql.Composable, since: sql.Composable, below: sql.Composable, most: int
    ) -> sql.Composed:
        """Return the SELECT of the slots of messages from one transaction id to before another; of all partitions.

        Of at most `most` messages, or of so many of each publication.
        """
        lists, conditions, order = self._by_publication()
        bound = sql.SQL("{t} >= {since} AND {t} < {below}").format(
            t=self.table.transaction_id, since=since, below=below
        )
        return self._sought(sql.SQL("{} AS slot").format(slot), (lists, [*conditions, bound], order), sql.Literal(most))

    def merged(
        self, columns: sql.Composable, conditions: Parts, limit: sql.Composable | None, *, repeated: bool
    ) -> sql.Composed:
        """Return the SELECT of the rows that meet conditions, in the order of pairs.

        It reads one index range, or merges those of each publication or slot. `repeated`: one arm is repeated for each
        slot, which takes a third of the time to parse and to plan. Else each slot has an arm of its own (`Merge
        Append`): of each no more is read than is returned, and one row.
        """
        if self.slot is None:
            heads = [self._by_publication()]
        elif repeated:
            heads = self._of_slots()
        else:
            heads = [self._of_slot(each) for each in self.slots]
        arms = [self._sought(columns, (lists, [*own, *conditions], order), limit) for lists, own, order in heads]
        is_sorted = len(heads) == 1 and not heads[0][0]
        return arms[0] if is_sorted else _unite(arms, limit)

    def _by_publication(self) -> Sought:
        """Return what rows of all partitions are sought by: an index of publications begins with them."""
        names, column = list(self.publications), self.table.publication_id
        if not names:
            return [], [], self.table.pair
        if len(names) == 1:
            return [], [sql.SQL("{} = {}").format(column, sql.Literal(names[0]))], self.table.pair
        wanted = sql.SQL("unnest({}::text[]) AS wanted (id)").format(sql.Literal(names))
        return [wanted], [sql.SQL("{} = wanted.id").format(column)], self.table.pair

    def first_unexamined(self, snapshot_range: SnapshotRange) -> sql.Composed:
        """Return the SELECT of the lowest pair of a committed message that is not examined; of all partitions."""
        (lower, _), position = snapshot_range.snapshots, sql.Literal(snapshot_range.position)
        low = min(lower.in_progress, default=lower.xmax)
        transaction_id = self.table.transaction_id
        conditions: list[sql.Composable] = [sql.SQL("true")]
        if snapshot_range.lower is not None:
            conditions = [sql.SQL("NOT {}").format(_sees(sql.Literal(snapshot_range.lower), transaction_id))]
        if snapshot_range.upper is not None:
            sees = _sees(sql.Literal(snapshot_range.upper), transaction_id)
            conditions.append(sql.SQL("NOT ({} AND {} <= {})").format(sees, self.table.position, position))
        conditions += self.published
        return sql.SQL(
            "SELECT {t} AS transaction_id, {p} AS position FROM {table} AS o WHERE {t} >= {low}::xid8 AND {rest} "
            "ORDER BY {t}, {p} LIMIT 1"
        ).format(
            t=transaction_id, p=self.table.position, table=self.table.identifier, low=sql.Literal(str(low)),
            rest=sql.SQL(" AND ").join(conditions),
        )  # fmt: skip

    def in_pair_order(self, columns: Selecting, wanted: ReadRange, *, only_matching: bool = False) -> sql.Composed:
        """Return the SELECT of a snapshot range's, or of listed messages in the order of pairs.

        With places for the numbers of `wanted`.
        """
        limit, is_listed = wanted.limit_place, wanted.snapshot_range is None
        arms = [
            sql.SQL("SELECT {} FROM {} AS o WHERE {} ORDER BY {} {}").format(
                columns(table), table.identifier,
                sql.SQL(" AND ").join([*conditions, *self._common(table, wanted, only_matching=only_matching)]),
                table.pair, _limit(limit),
            )
            for table, conditions in (self._listed(wanted) if is_listed else self._between(wanted.numbers))
        ]  # fmt: skip
        return arms[0] if len(arms) == 1 else _unite(arms, limit)

    def matches(self, table: OutboxTable) -> sql.Composable:
        """Whether the row `o` of one of the tables passes the filters; what failed before, in a queue, did then."""
        published = [table.is_published(self.publications)] if self.publications else []
        matches = sql.SQL(" AND ").join([table.matches(self.types), *published])
        return sql.SQL("({} OR o.last_error IS NOT NULL)" if self.is_queue else "({})").format(matches)

    def counted(self, table: OutboxTable, matches: sql.Composable | None = None) -> sql.Composed:
        """List the columns of `o` that `count_lag` needs; `matches`: what counts, None: what passes the filters."""
        return sql.SQL("{} AS transaction_id, {} AS position, {} AS matches, {} AS scheduled").format(
            table.transaction_id, table.position, matches or self.matches(table), table.moment
        )

    def available(self, priority: sql.Composable) -> list[sql.Composable]:
        """Return the conditions that a queue's messages meet."""
        return [LIVE, sql.SQL("o.priority = {}").format(priority)]

    def _common(self, table: OutboxTable, wanted: ReadRange, *, only_matching: bool) -> list[sql.Composable]:
        common = self.available(sql.SQL("{}::int").format(place("priority"))) if self.is_queue else []
        if wanted.is_in_one_transaction:
            common.append(table.inside_transaction(place("up_to_id"), place("after_position"), place("up_to_position")))
        elif wanted.up_to is not None:
            common.append(sql.SQL("({}) <= ({})").format(table.pair, UP_TO))
        if wanted.excluded:
            common.append(sql.SQL("{} <> ALL ({}::bigint[])").format(table.position, place("excluded")))
        # What is listed passed the filters when it was handed out.
        is_listed = wanted.snapshot_range is None
        if only_matching and not is_listed and (self.types is not None or self.publications):
            common.append(self.matches(table))
        return common

    def _between(self, numbers: Mapping[str, object]) -> list[tuple[OutboxTable, list[sql.Composable]]]:
        transaction_id = self.table.transaction_id
        new: list[sql.Composable] = [
            sql.SQL("({}) > ({})").format(self.table.pair, pair_place("start")),
            sql.SQL("{} < {}::xid8").format(transaction_id, place("end_id")),
        ]
        if "up_to_id" in numbers and "limit" not in numbers:
            new.append(self.table.between_ids(place("start_id"), place("up_to_id")))
        if "upper" in numbers:
            new.append(_sees(place("upper"), transaction_id))
        if "late" not in numbers:
            return [(self.table, new)]
        among = sql.SQL("{} = ANY ({}::xid8[])").format(transaction_id, place("late"))
        behind = sql.SQL("({}) > ({})").format(self.table.pair, AFTER)
        return [(self.table, [among, behind]), (self.table, new)]

    def _listed(self, wanted: ReadRange) -> list[tuple[OutboxTable, list[sql.Composable]]]:
        """Messages that wait by themselves."""
        names = ("listed_ids", "listed_positions")
        ids, positions = (place(name) if wanted.listed else sql.SQL("'{}'") for name in names)
        among = "({0}) > ({1}) AND ({0}) IN (SELECT t::xid8, p FROM unnest({2}::text[], {3}::bigint[]) AS w (t, p))"

        def conditions(table: OutboxTable) -> list[sql.Composable]:
            return [sql.SQL(among).format(table.pair, AFTER, ids, positions)]

        if self.copies is None:
            return [(self.table, conditions(self.table))]
        copies, processor_id = self.copies
        ours = sql.SQL("o.processor_id = {}").format(processor_id)
        copied = sql.SQL(
            "NOT EXISTS (SELECT 1 FROM {} AS c WHERE c.processor_id = {} AND (c.transaction_id, c.position) = ({}))"
        ).format(copies.identifier, processor_id, self.table.pair)
        return [(self.table, [*conditions(self.table), copied]), (copies, [ours, *conditions(copies)])]

    def nothing(self, columns: sql.Composable) -> sql.Composed:
        """Return a SELECT of no row."""
        return sql.SQL("SELECT {} FROM {} AS o WHERE false").format(columns, self.table.identifier)

    def ahead(self, count: int) -> sql.Composed:
        """Return the SELECT of the position of the row so many behind a walk's; none where there are not so many."""
        return sql.SQL("SELECT {p} FROM {table} AS o WHERE {p} > {after} ORDER BY {p} OFFSET {skip} LIMIT 1").format(
            p=self.table.position, table=self.table.identifier, after=_BEHIND, skip=sql.Literal(count - 1)
        )

    def unexamined(self, snapshot_range: SnapshotRange, limit: int) -> sql.Composed:
        """Return the SELECT of what is committed and not examined yet, with `matches` and `scheduled`; bounded.

        Inside a range rows of all partitions and publications are passed, and those of others do not match.
        """
        most = sql.Literal(limit)
        if snapshot_range.upper is None or snapshot_range.position is None:
            later = self._late_or_fresh(self.counted(self.table), Lookup(snapshot_range.lower, None), limit=most)
            return sql.SQL("SELECT l.* FROM ({}) AS l LIMIT {}").format(later, most)
        # Behind the position all that the lower snapshot did not see; before it what the upper one does not.
        everyone = replace(self, slot=None, publications=())
        own = sql.SQL(" AND ").join([self.table.matches(self.types), *self._of_partition, *self.published])
        walk = Walk(snapshot_range.lower, None, snapshot_range.position)
        inside = Template(everyone.walk(self.counted(self.table, own), walk, ahead=limit)).fill(walk.numbers)
        # Cut off before those behind the position are left out: of them there are as many inside.
        later = everyone._late_or_fresh(self.counted(self.table, own), Lookup(snapshot_range.upper, None), limit=most)  # noqa: SLF001 - its own
        return sql.SQL(
            "SELECT l.* FROM (({}) UNION ALL (SELECT n.* FROM ({}) AS n WHERE n.position <= {})) AS l LIMIT {}"
        ).format(inside, later, sql.Literal(snapshot_range.position), most)

    def walk(
        self, columns: sql.Composable, wanted: Walk, *, ahead: int | None = None, only_matching: bool = False
    ) -> sql.Composed:
        """Return the SELECT along the index of positions, in order, with places for the numbers of `wanted`.

        Only functions, which no index knows, say what belongs to the range. At most `ahead` rows are looked at. Those
        at given positions are of the partition: who found them computed their slots.
        """
        places = [sql.SQL("{} > {}").format(self.table.position, _BEHIND)]
        if wanted.up_to is not None:
            places.append(sql.SQL("{} <= {}::bigint").format(self.table.position, place("up_to")))
        if wanted.among is not None:
            places.append(sql.SQL("{} = ANY ({}::bigint[])").format(self.table.position, place("among")))
        walked = sql.SQL("SELECT o.* FROM {table} AS o WHERE {places} ORDER BY {p} {limit}").format(
            table=self.table.identifier, places=sql.SQL(" AND ").join(places), p=self.table.position,
            limit=_limit(None if ahead is None else sql.Literal(ahead)),
        )  # fmt: skip
        transaction_id = self.table.transaction_id
        conditions: list[sql.Composable] = [sql.SQL("{} IS NOT NULL").format(transaction_id)]
        if wanted.upper is not None:
            conditions.append(_sees(place("upper"), transaction_id))
        if wanted.lower is not None:
            conditions.append(sql.SQL("NOT {}").format(_sees(place("lower"), transaction_id)))
        if wanted.among is None:
            conditions += self._of_partition
        if self.publications:
            listed = sql.Literal(list(self.publications))
            conditions.append(sql.SQL("{}::text || '' = ANY ({}::text[])").format(self.table.publication_id, listed))
        if only_matching:
            conditions.append(self.table.matches(self.types))
        size = _limit(None if wanted.size is None else SIZE)
        return sql.SQL("SELECT {} FROM ({}) AS o WHERE {} ORDER BY {} {}").format(
            columns, walked, sql.SQL(" AND ").join(conditions), self.table.position, size
        )

    def _late_or_fresh(self, columns: sql.Composable, wanted: Lookup, *, limit: sql.Composable) -> sql.Composed:
        return Template(self._arms(columns, wanted, limit=limit)).fill(wanted.numbers)

    def _arms(
        self, columns: sql.Composable, wanted: Lookup, *, limit: sql.Composable | None, now: bool = False
    ) -> sql.Composed:
        """Unite the intervals of transaction ids that the range can hold, each an index range in the index's order.

        `now`: a range without an upper end ends with the statement's own snapshot.
        """
        numbers = wanted.numbers
        places: Parts = [_SEEN_NOW.format(self.table.transaction_id)] if now else []
        if wanted.after is not None:
            places.append(sql.SQL("{} + 0 > {}").format(self.table.position, _BEHIND))
        if wanted.up_to is not None:
            places.append(sql.SQL("{} + 0 <= {}::bigint").format(self.table.position, place("up_to")))
        arms = self._late(columns, places, limit) if "late" in numbers else []
        if "low" in numbers:
            if "upper" in numbers:
                places.append(_sees(place("upper"), self.table.transaction_id))
            arms += self._range(columns, places, limit, ends="high" in numbers)
        if not arms:
            return self.nothing(columns)
        return sql.SQL(" UNION ALL ").join(sql.SQL("({})").format(arm) for arm in arms)

    def _late(self, columns: sql.Composable, places: Parts, limit: sql.Composable | None) -> list[sql.Composed]:
        """Look up single transactions: those that were in progress."""
        ids = sql.SQL("unnest({}::text[]::xid8[]) AS late (id)").format(place("late"))
        one = sql.SQL("{} = late.id").format(self.table.transaction_id)
        return [
            self._sought(columns, ([ids, *lists], [*places, one, *conditions], order), limit)
            for lists, conditions, order in self._of_slots()
        ]

    def _range(
        self, columns: sql.Composable, places: Parts, limit: sql.Composable | None, *, ends: bool
    ) -> list[sql.Composed]:
        """Walk the ids from `low` to before `high`, if it ends there: once, or once for each publication or slot."""
        transaction_id = self.table.transaction_id
        between: Parts = [sql.SQL("{} >= {}::xid8").format(transaction_id, place("low"))]
        if ends:
            between.append(sql.SQL("{} < {}::xid8").format(transaction_id, place("high")))
        heads = [self._by_publication()] if self.slot is None else self._of_slots()
        return [
            self._sought(columns, (lists, [*conditions, *between, *places], order), limit, in_order=limit is not None)
            for lists, conditions, order in heads
        ]

    def _of_slots(self) -> list[Sought]:
        """Return what rows of the source or partition are sought by.

        Slots are a list, and not a part of the statement each: to plan sixteen parts takes the server several times as
        long as to read a few messages by them (docs/performance/profile-partitioned.md).
        """
        published = self.published
        if self.slot is None:
            return [([], published, self.table.pair)]
        numbers = sql.Literal([number for number in self.slots if number is not None])
        wanted = sql.SQL("unnest({}::int[]) AS wanted (slot)").format(numbers)
        same = sql.SQL("{} = wanted.slot").format(self.slot)
        found: list[Sought] = [([wanted], [same, *published], self.table.pair)]
        return [*found, self._of_slot(None)] if None in self.slots else found

    def _of_slot(self, number: int | None) -> Sought:
        """Return what rows of one slot are sought by, in the order of their pairs."""
        if number is None:
            order = sql.SQL("{}, {}").format(self.slot, self.table.pair)  # of IS NULL the planner knows no order
            return [], [sql.SQL("{} IS NULL").format(self.slot), *self.published], order
        return [], [sql.SQL("{} = {}").format(self.slot, sql.Literal(number)), *self.published], self.table.pair

    def _sought(
        self, columns: sql.Composable, by: Sought, limit: sql.Composable | None, *, in_order: bool = True
    ) -> sql.Composed:
        """Return the SELECT of the rows that are sought, for each combination of what the lists have."""
        lists, conditions, order = by
        ordered = sql.SQL("ORDER BY {} {}").format(order, _limit(limit)) if lists or in_order else sql.SQL("")
        rows = sql.SQL("FROM {} AS o WHERE {} {}").format(
            self.table.identifier, sql.SQL(" AND ").join(conditions), ordered
        )
        if not lists:
            return sql.SQL("SELECT {} {}").format(columns, rows)
        joined = sql.SQL(" CROSS JOIN ").join(lists)
        return sql.SQL("SELECT {} FROM {} CROSS JOIN LATERAL (SELECT o.* {}) AS o").format(columns, joined, rows)

    @cached_property
    def published(self) -> Parts:
        """The condition that `o` is of a wanted publication, if not all are."""
        return [self.table.is_published(self.publications)] if self.publications else []

    @cached_property
    def _of_partition(self) -> Parts:
        if self.slot is None:
            return []
        # -1 is the slot that is null: ANY does not find a null in a list.
        listed = sql.Literal([-1 if number is None else number for number in self.slots])
        return [sql.SQL("coalesce({}, -1) = ANY ({}::int[])").format(self.computed_slot or self.slot, listed)]


def _sees(snapshot: sql.Composable, transaction_id: sql.Composable) -> sql.Composed:
    return sql.SQL("pg_visible_in_snapshot({}, {}::pg_snapshot)").format(transaction_id, snapshot)


def _unite(arms: Iterable[sql.Composable], limit: sql.Composable | None) -> sql.Composed:
    """Put what several SELECTs of messages have in the order of pairs."""
    joined = sql.SQL(" UNION ALL ").join(sql.SQL("({})").format(arm) for arm in arms)
    return sql.SQL("SELECT u.* FROM ({}) AS u ORDER BY u.transaction_id, u.position {}").format(joined, _limit(limit))


def _limit(count: sql.Composable | None) -> sql.Composable:
    return sql.SQL("") if count is None else sql.SQL("LIMIT {}").format(count)
