"""Rebases transaction ids that came with a restore from a server that was further on than this one.

Messages are read by (transaction id, position) below the server's own counter. What a restore brings names transactions
that this server has not reached: it stays invisible, and what is stored here since sorts before it. So every id that is
stored (of messages, checkpoints, conflicts, and of every other table of the schema that has a column of that kind) gets
a smaller one: the n-th id in order becomes the n-th id that a server can hand out. Restored ones come first, those
written here since after them, and what producers write from now on has a higher id than all of these. The order is
strict and positions stay, so each pair keeps its place among all others: nothing is lost, skipped or repeated.

Told apart are the two by the row's own writer (`xmin`): a row that names a transaction above its writer's came with the
restore, and so did everything that was written no later than the last such row. (A row that was updated since has
another writer; the outbox's rows are never updated by this product.)

Pages are rewritten in short transactions, for producers go on. From the plan to the end nothing of ours runs
(`database_identity.repair_begun_at`). A row tells by itself whether it was done, so a repair that was killed is begun
again where it was; the checkpoints change last, all at once, with the record of it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql
from typing_extensions import override

from outbox_core.errors import OutboxError
from outbox_core.plain import plain_count
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Reason
from outbox_worker.postgres.call import call, fetch_one, fetch_row, fetch_rows, in_schema, load
from outbox_worker.postgres.reading.stall import describe, list_writers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_worker.postgres.connection import Connection


PAGES: Final = 1000
"""Pages of the outbox, or of each of its partitions, that one transaction rewrites: 8 MB."""
MOST_USED_UP: Final = 200_000_000
"""Ids that are used up to make room; a server freezes its tables after as many."""
_USED_AT_ONCE: Final = 5_000
_ONE_SNAPSHOT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"


class RepairError(OutboxError):
    """The repair was refused or could not go on; nothing was changed but what is said."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """A table of messages and its column of transaction ids."""

    schema: str
    name: str
    transaction_id: str = "transaction_id"

    @override
    def __str__(self) -> str:
        """`schema.name`, quoted where it must be."""
        return sql.Identifier(self.schema, self.name).as_string(None)

    @property
    def rows(self) -> sql.Composed:
        """Every message's id and writer."""
        return sql.SQL("SELECT o.{0}, o.xmin FROM {1} AS o WHERE o.{0} IS NOT NULL").format(
            sql.Identifier(self.transaction_id), sql.Identifier(self.schema, self.name)
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Messages of one origin, and the ids they name."""

    count: int
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A checkpoint as it is and as it will be."""

    processor_id: str
    partition: int
    before: Checkpoint
    after: Checkpoint


@dataclass(frozen=True, slots=True)
class Plan:
    """What a repair changes.

    Attributes:
        needed: something stored here is ahead of the server, or was when it was written.
        restored: messages that came with the restore.
        written_here: messages stored here since.
        ids: how many different ids are mapped.
        use_up: ids that the server must hand out first, so that there are enough below those of open transactions.
        columns: per table of the schema, columns that are mapped.
        others: tables elsewhere that look like an outbox and are not part of it.

    """

    needed: bool
    restored: Rows | None = None
    written_here: Rows | None = None
    ids: int = 0
    use_up: int = 0
    checkpoints: tuple[Moved, ...] = ()
    columns: tuple[tuple[str, str], ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Repair:
    """A repair that was begun."""

    id: int
    until: int
    below: int
    planned_by: int
    tables: tuple[Outbox, ...]


@dataclass(frozen=True, slots=True)
class _Column:
    """`type`: xid8, xid8[] or pg_snapshot."""

    table: str
    name: str
    type: str
    of_processors: bool


def find_outboxes(connection: Connection, schema: str) -> tuple[Outbox, ...]:
    """Return the schema's tables that producers write."""
    name = sql.Identifier(schema).as_string(None)
    rows = fetch_rows(connection, load("repair_list_outboxes"), {"schema": name})
    return tuple(Outbox(schema, table, column) for table, column in rows)


def is_unfinished(connection: Connection, schema: str) -> bool:
    """Say whether a repair was begun and not finished: some ids are new by then, and others are not."""
    return fetch_row(connection, in_schema("repair_fetch_open", schema)) is not None


class Repairer:
    """Repairs one schema and the outboxes that belong to it, on an autocommit connection, as their owner."""

    def __init__(self, connection: Connection, schema: str, tables: Sequence[Outbox]) -> None:
        """Look at nothing yet."""
        self._connection = connection
        self._schema = schema
        self._tables = tuple(tables)

    def find_open(self) -> Repair | None:
        """Return the repair that was begun and not finished."""
        row = fetch_row(self._connection, in_schema("repair_fetch_open", self._schema))
        if row is None:
            return None
        tables = tuple(Outbox(*text) for text in row[4])
        return Repair(row[0], int(row[1]), int(row[2]), int(row[3]), tables)

    def live_owners(self) -> list[str]:
        """Name the live owners."""
        with self._connection.transaction(force_rollback=True):
            return self._lock_leases()

    def preview(self) -> Plan:
        """Say what would be done. Everything is worked out and rolled back."""
        with self._connection.transaction(force_rollback=True):
            self._connection.execute(_ONE_SNAPSHOT)
            return self._plan("preview", "preview")[0]

    def use_up(self, count: int, watch: Callable[[int], None]) -> None:
        """Let the server hand out so many transaction ids."""
        for done in range(0, count, _USED_AT_ONCE):
            size = min(_USED_AT_ONCE, count - done)
            self._connection.execute(load("repair_use_up").format(count=sql.Literal(size)))
            watch(done + size)

    def begin(self, reason: str, decided_by: str) -> Repair:
        """Write the plan down; from now on nothing runs until the repair is finished.

        Raises:
            RepairError: an owner is live, or an open transaction leaves no room below itself.

        """
        with self._connection.transaction():
            self._connection.execute(_ONE_SNAPSHOT)
            # Before the snapshot: it shows who is an owner by now, and who asks later finds the repair begun.
            self._lock("repair_lock_owners")
            self._refuse_live()
            self._connection.execute(in_schema("repair_hand_back", self._schema))
            plan, repair = self._plan(reason, decided_by)
            if repair is None:
                raise RepairError("there is nothing to repair any more", reason=Reason.DATABASE_BEHIND)
            if plan.use_up:
                holder = list_writers(self._connection).holder
                who = "an open transaction" if holder is None else describe(holder)
                raise RepairError(
                    f"{plan.use_up} more transaction ids are needed below {who}: end it, then try again",
                    reason=Reason.DATABASE_BEHIND,
                )
        return repair

    def rewrite(self, repair: Repair, pages: int, watch: Callable[[int, int], None]) -> int:
        """Rewrite the messages, from wherever it was; return how many this call rewrote."""
        pages_of = load("repair_count_pages")
        sizes = [int(fetch_one(self._connection, pages_of, {"table": str(each)})[0]) for each in repair.tables]
        done = changed = 0
        for table, size in zip(repair.tables, sizes, strict=True):
            for first in range(0, size, pages):
                changed += self._rewrite_pages(repair, table, first, min(first + pages, size))
                done += min(pages, size - first)
                watch(done, sum(sizes))
        return changed

    def finish(self, repair: Repair) -> tuple[Moved, ...]:
        """Move the checkpoints and all else of the schema that names ids, record it, and let everything run again.

        Raises:
            RepairError: an owner is live, or messages were restored meanwhile.

        """
        with self._connection.transaction():
            now = self._assign()
            self._refuse_live()
            parameters = {"repair_id": repair.id, "until": repair.until, "now": now, "below": str(repair.below)}
            for table in repair.tables:
                if fetch_one(self._connection, load("repair_find_left").format(**_names(table)), parameters)[0]:
                    raise RepairError(
                        f"{table} has messages that were restored while the repair ran: run it again when the "
                        "restore is over",
                        reason=Reason.DATABASE_BEHIND,
                    )
            parameters["highest"] = self._count_ids(repair.id)[2]
            moved = self._moved(parameters)
            record = load("repair_record_acts").format(
                schema=sql.Identifier(self._schema), checkpoints=self._list_checkpoints()
            )
            self._connection.execute(record, parameters)
            sealed = fetch_rows(self._connection, in_schema("repair_list_sealed", self._schema))
            for table_name, columns in groupby(self._columns(repair.tables), lambda each: each.table):
                self._map(table_name, list(columns), parameters)
            for processor_id, partition in sealed:
                # A pair's shadow is mapped as the pair is; a range's is made anew, unless it was tampered with.
                call(
                    self._connection, self._schema, "store_shadow_checkpoint", processor_id=processor_id,
                    partition=partition,
                )  # fmt: skip
            self._connection.execute(in_schema("repair_finish", self._schema), parameters)
            return moved

    def _plan(self, reason: str, decided_by: str) -> tuple[Plan, Repair | None]:
        """Work the mapping out in the open transaction, all of it in one snapshot."""
        now = self._assign()
        rows = sql.SQL(" UNION ALL ").join(table.rows for table in self._tables)
        schema = sql.Identifier(self._schema)
        (below,) = fetch_one(self._connection, "SELECT pg_snapshot_xmin(pg_current_snapshot())::text")
        columns = self._columns(self._tables)
        checkpoints = (_named(each, schema) for each in columns if each.table == "processor_checkpoints")
        everything = sql.SQL(" UNION ALL ").join([rows, *checkpoints])
        query = load("repair_find_restore").format(rows=everything, schema=schema)
        until, needed = fetch_one(self._connection, query, {"now": now})
        if not needed:
            return Plan(needed=False), None
        parameters: dict[str, Any] = {"now": now, "until": int(until), "below": below}
        counted = fetch_rows(self._connection, load("repair_count_rows").format(rows=rows), parameters)
        groups = {bool(row[0]): Rows(row[1], int(row[2]), int(row[3])) for row in counted}
        parameters["highest"] = groups[False].highest if False in groups else 0
        begun = {"reason": reason, "decided_by": decided_by, "tables": [list(astuple(table)) for table in self._tables]}
        (number,) = fetch_one(self._connection, in_schema("repair_begin", self._schema), parameters | begun)
        parameters["repair_id"] = number
        self._connection.execute(
            load("repair_plan").format(schema=schema, found=_found(rows, columns, schema)), parameters
        )
        ids, highest, _ = self._count_ids(number)
        plan = Plan(
            needed=True,
            restored=groups.get(False),
            written_here=groups.get(True),
            ids=ids,
            use_up=max(0, highest + 1 - int(below)),
            checkpoints=self._moved(parameters),
            columns=tuple((each.table, each.name) for each in columns),
            others=self._others(),
        )
        return plan, Repair(number, int(until), int(below), now, self._tables)

    def _rewrite_pages(self, repair: Repair, table: Outbox, first: int, end: int) -> int:
        with self._connection.transaction():
            # A page has few rows and the mapping may have many: never a join that reads all of it.
            self._connection.execute("SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off")
            parameters = {
                "now": self._assign(),
                "first": f"({first},0)",
                "end": f"({end},0)",
                "planned_by": repair.planned_by,
                "below": str(repair.below),
                "until": repair.until,
                "repair_id": repair.id,
            }
            statement = load("repair_pages").format(schema=sql.Identifier(self._schema), **_names(table))
            return self._connection.execute(statement, parameters).rowcount

    def _map(self, table: str, columns: Sequence[_Column], parameters: dict[str, Any]) -> None:
        schema = sql.Identifier(self._schema)
        changes = [sql.SQL("{} = {}").format(sql.Identifier(each.name), _mapped(each, schema)) for each in columns]
        self._connection.execute(
            sql.SQL("UPDATE {} AS o SET {} WHERE {}").format(
                sql.Identifier(self._schema, table), sql.SQL(", ").join(changes), _is_ours(columns[0], schema)
            ),
            parameters,
        )

    def _count_ids(self, number: int) -> tuple[int, int, int]:
        found = fetch_one(self._connection, in_schema("repair_count_ids", self._schema), {"repair_id": number})
        return int(found[0]), int(found[1]), int(found[2])

    def _list_checkpoints(self) -> sql.Composed:
        return load("repair_list_checkpoints").format(
            schema=sql.Identifier(self._schema), written_here=_item("c", "last_processed_transaction_id")
        )

    def _moved(self, parameters: dict[str, Any]) -> tuple[Moved, ...]:
        found = fetch_rows(self._connection, self._list_checkpoints(), parameters)
        return tuple(
            Moved(row[0], row[1], Checkpoint(int(row[2]), row[3]), Checkpoint(int(row[4]), row[3])) for row in found
        )

    def _columns(self, tables: Sequence[Outbox]) -> list[_Column]:
        return [_Column(*row) for row in self._beside("repair_list_columns", tables)]

    def _others(self) -> tuple[str, ...]:
        return tuple(row[0] for row in self._beside("repair_list_others", self._tables))

    def _beside(self, query: str, tables: Sequence[Outbox]) -> list[tuple[Any, ...]]:
        """Ask about the tables beside those of messages."""
        parameters = {
            "schema": sql.Identifier(self._schema).as_string(None), "messages": [str(table) for table in tables],
        }  # fmt: skip
        return fetch_rows(self._connection, load(query), parameters)

    def _lock_leases(self) -> list[str]:
        rows = self._lock("repair_lock_leases").fetchall()
        owners = [f"pod {pod} of {processor_id} partition {number}" for processor_id, number, pod, live in rows if live]
        self._lock("repair_lock_consumers")
        rows = fetch_rows(self._connection, in_schema("repair_list_consumers", self._schema))
        return owners + [f"consumer {pod} of {processor_id}" for processor_id, pod in rows]

    def _lock(self, name: str) -> psycopg.Cursor[tuple[Any, ...]]:
        self._connection.execute("SET LOCAL lock_timeout = '10s'")
        try:
            return self._connection.execute(in_schema(name, self._schema))
        except psycopg.errors.LockNotAvailable as err:
            raise RepairError(
                "another session has kept a lease or a batch locked for 10 s: look in pg_stat_activity for an idle "
                "transaction (of a frozen worker, or a person's), end it, then run this again",
                reason=Reason.DATABASE_BEHIND,
            ) from err

    def _refuse_live(self) -> None:
        if live := self._lock_leases():
            raise RepairError(
                f"{plain_count(len(live), 'live owner')} here, among them {live[0]}: suspend them first",
                reason=Reason.DATABASE_BEHIND,
            )

    def _assign(self) -> int:
        """Take the transaction's id, before anything asks for the age of another: ages count from it."""
        return int(fetch_one(self._connection, "SELECT pg_current_xact_id()::text")[0])


def _item(row: str, name: str, *, snapshot: bool = False) -> sql.Composed:
    """Whether a value of the schema's own tables is of ids that this server handed out."""
    value: sql.Composable = sql.Identifier(row, name)
    if snapshot:
        value = sql.SQL("pg_snapshot_xmin({})").format(value)
    return sql.SQL(
        "(%(now)s - age({writer}) > %(until)s AND {value}::text::numeric <= %(now)s - age({writer}) "
        "AND {value}::text::numeric > %(highest)s)"
    ).format(writer=sql.SQL(f"{row}.xmin"), value=value)


def _mapped(column: _Column, schema: sql.Identifier) -> sql.Composed:
    """What becomes of a column's value."""
    name, value = column.name, sql.Identifier("o", column.name)
    if column.type == "pg_snapshot":
        return sql.SQL("CASE WHEN {value} IS NULL OR {written_here} THEN {value} ELSE {snapshot} END").format(
            value=value, written_here=_item("o", name, snapshot=True),
            snapshot=load("repair_mapped_snapshot").format(schema=schema, value=value),
        )  # fmt: skip
    if column.type == "xid8":
        found = load("repair_mapped_id").format(schema=schema, value=value, written_here=_item("o", name))
    else:
        found = load("repair_mapped_array").format(schema=schema, value=value)
    return sql.SQL("coalesce({}, {})").format(found, value)


def _is_ours(column: _Column, schema: sql.Identifier) -> sql.Composable:
    """Whether a row names ids of this server: a processor that reads another database names that one's."""
    if not column.of_processors:
        return sql.SQL("true")
    return load("repair_is_ours").format(schema=schema, row=sql.Identifier("o"))


def _named(column: _Column, schema: sql.Identifier) -> sql.Composed:
    """Build a SELECT of the highest id that each row's column knows of, and its writer."""
    value: sql.Composable = sql.Identifier("o", column.name)
    if column.type == "pg_snapshot":
        # A snapshot's beginning is at most the transaction that takes it; its end may be beyond.
        value = sql.SQL("pg_snapshot_xmin({})").format(value)
    return sql.SQL("SELECT {0}, o.xmin FROM {1}.{2} AS o WHERE {0} IS NOT NULL AND {3}").format(
        value, schema, sql.Identifier(column.table), _is_ours(column, schema)
    )


def _found(rows: sql.Composable, columns: Sequence[_Column], schema: sql.Identifier) -> sql.Composed:
    """Build the SELECT of every id that has to change."""
    parts: list[sql.Composable] = [
        sql.SQL(
            "SELECT o.t::text::numeric > %(until)s AND o.t::text::numeric <= %(now)s - age(o.xmin), o.t "
            "FROM ({}) AS o (t, xmin)"
        ).format(rows)
    ]
    ids = "SELECT {item}, o.{name} FROM {schema}.{table} AS o WHERE o.{name} IS NOT NULL AND {ours}"
    arrays = "SELECT false, e.id FROM {schema}.{table} AS o CROSS JOIN LATERAL unnest(o.{name}) AS e (id) WHERE {ours}"
    parts += [
        sql.SQL(ids if each.type == "xid8" else arrays).format(
            item=_item("o", each.name), name=sql.Identifier(each.name), schema=schema,
            table=sql.Identifier(each.table), ours=_is_ours(each, schema),
        )
        for each in columns
        if each.type != "pg_snapshot"
    ]  # fmt: skip
    return sql.SQL(
        "SELECT DISTINCT f.written_here, f.t FROM ({}) AS f (written_here, t) "
        "WHERE NOT f.written_here OR f.t < %(below)s::text::xid8"
    ).format(sql.SQL(" UNION ").join(parts))


def _names(table: Outbox) -> dict[str, sql.Identifier]:
    return {
        "table": sql.Identifier(table.schema, table.name),
        "transaction_id": sql.Identifier(table.transaction_id),
    }
