"""Makes an outbox that exists already readable: adds `transaction_id` and `position` without rewriting the table.

New rows get both from column defaults. Old rows get neither: their pair is NULL, and a row without a pair is never
read, unless they are backfilled. A backfill goes through an index on the ordering column in bounded batches, each a
short transaction, and gives every old row the transaction id 2 (PostgreSQL's "frozen", below every real one) and the
next number: so old rows come before all new ones, in the order of that column. The indexes that readers need, one for
each cursor, are built last and without blocking writers; until they are there no processor starts, so none can run past
rows that are still being backfilled.

Can be interrupted and run again: each step looks at what is there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from outbox_sql.guide import build_index, build_steps, quote
from outbox_sql.recognise import missing_indexes, needed_indexes

if TYPE_CHECKING:
    from collections.abc import Callable

FROZEN_TRANSACTION_ID: Final = 2
LOCK_TIMEOUT: Final = "300ms"
"""For so long producers wait at most behind this command while it waits for a lock."""
IDLE_TIMEOUT: Final = "5s"
"""Suspended with locks (Ctrl-Z), the command would stop all producers, or the old poller."""
ATTEMPTS: Final = 120
_TELLING_ATTEMPT: Final = 3
"""Of the attempts to lock the table: the one with which the person is told of the wait."""

# A table that was never analysed, after a restore for example, has no estimate of its rows but its size.
_INSPECT: Final = """
    SELECT c.oid::bigint, c.relkind::text, c.relispartition, pg_has_role(c.relowner, 'USAGE'),
           has_schema_privilege(n.oid, 'CREATE'),
           EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid),
           CASE WHEN c.reltuples < 0 THEN pg_relation_size(c.oid) / 200 ELSE c.reltuples END::bigint,
           pg_table_size(c.oid),
           (SELECT coalesce(json_object_agg(a.attname, replace(format_type(a.atttypid, NULL), '"', '')), '{}')
            FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s
"""
KINDS: Final = {"p": "a partitioned table", "v": "a view", "m": "a materialized view", "f": "a foreign table"}

# Columns of the key: those of INCLUDE are not sorted. NULL stands for an expression, and for a column in an order that
# reading cannot use: not that of the first column, or neither ASC NULLS LAST (indoption 0) nor the reverse of it (3).
_LIST_INDEXES: Final = """
    SELECT c.relname, x.indisvalid,
           (SELECT array_agg(CASE WHEN x.indoption[0] IN (0, 3) AND x.indoption[k.n::int - 1] = x.indoption[0]
                                  THEN a.attname::text END ORDER BY k.n)
            FROM unnest(x.indkey::int2[]) WITH ORDINALITY AS k (num, n)
            LEFT JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.num
            WHERE k.n <= x.indnkeyatts)
    FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid JOIN pg_am m ON m.oid = c.relam
    WHERE x.indrelid = %s AND x.indpred IS NULL AND m.amname = 'btree'
"""

# A prepared transaction holds locks without a session.
_LIST_HOLDERS: Final = """
    SELECT coalesce(string_agg(DISTINCT coalesce('pid ' || a.pid || coalesce(' ' || nullif(a.application_name, ''), ''),
                                                 'a prepared transaction'), ', '), 'another transaction')
    FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.relation = %s AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
      AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
"""

_LOCK_OLD_ROWS: Final = sql.SQL("""
SELECT o.ctid::text, o.{order}::text FROM {table} AS o
WHERE o.{transaction_id} IS NULL {only} {after} ORDER BY o.{order} LIMIT {batch} FOR UPDATE
""")
_NUMBER_OLD_ROWS: Final = sql.SQL("""
WITH numbered AS MATERIALIZED (
    SELECT p.place, nextval({sequence}) AS position FROM unnest({places}::text[]::tid[]) AS p (place)
)
UPDATE {table} AS o SET {transaction_id} = {frozen}::text::xid8, {position} = n.position
FROM numbered AS n WHERE o.ctid = n.place
RETURNING o.{transaction_id}::text
""")
"""A statement of its own: the one that waits for a lock does not see the row that it has locked then."""
_MARK_OLD_ROWS: Final = sql.SQL("""
UPDATE {table} AS o SET {transaction_id} = {frozen}::text::xid8
WHERE o.ctid = ANY ({places}::text[]::tid[])
RETURNING o.{transaction_id}::text
""")
"""Of rows that have a position of their own, in whose order they are to be read."""


class AdoptionError(Exception):
    """This table cannot be adopted; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """What to adopt.

    Attributes:
        schema: of the table.
        table: its name.
        transaction_id: column to add or to use.
        position: column to add or to use.
        ordered_by: column whose order old rows get; None leaves old rows unread.
        only_where_null: backfill only rows in which this column is NULL (for example `processed_on_utc`).
        publication_id: column of publications, for a second index; None for none.
        batch: rows in one backfill transaction.
        message_type: column to add, and the one value of it, for an outbox that has no type; None: it has one.

    """

    schema: str
    table: str
    transaction_id: str = "transaction_id"
    position: str = "position"
    ordered_by: str | None = None
    only_where_null: str | None = None
    publication_id: str | None = None
    batch: int = 5_000
    message_type: tuple[str, str] | None = None

    @property
    def identifier(self) -> sql.Identifier:
        """`"schema"."table"`."""
        return sql.Identifier(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class _Found:
    oid: int
    rows: int
    size: int
    columns: dict[str, str]


def adopt(
    connection: psycopg.Connection[Any],
    adoption: Adoption,
    *,
    dry_run: bool = False,
    announce: Callable[[str], None] = lambda _: None,
    watch: Callable[[int, int], None] = lambda _done, _estimate: None,
) -> None:
    """Add what is missing, backfill if asked, build the index. The connection must be in autocommit.

    `watch` is told how many old rows are numbered, and the catalog's estimate of how many rows there are.

    Raises:
        AdoptionError: the table cannot be adopted, or stayed locked.
        psycopg.Error: the server refused a statement.

    """
    found = inspect(connection, adoption)
    names = [adoption.transaction_id, adoption.position, *(adoption.message_type or ())[:1]]
    missing = [name for name in names if name not in found.columns]
    for line in _explain(connection, adoption, found, missing):
        announce(line)
    if dry_run:
        return
    try:
        _carry_out(connection, adoption, found, missing, announce, watch)
    except psycopg.errors.DeadlockDetected as err:
        raise AdoptionError(
            f"another program locks rows or indexes of {adoption.schema}.{adoption.table} in another order (a second "
            "`outbox adopt`, a build of an index, the old poller): run it again once that is over, and it goes on "
            "where it was"
        ) from err


def _carry_out(
    connection: psycopg.Connection[Any],
    adoption: Adoption,
    found: _Found,
    missing: list[str],
    announce: Callable[[str], None],
    watch: Callable[[int, int], None],
) -> None:
    if missing:

        def tell_of_wait() -> None:
            holders = connection.execute(_LIST_HOLDERS, (found.oid,)).fetchone()
            announce(
                f"{adoption.schema}.{adoption.table} is in use by {holders[0] if holders else 'another transaction'}: "
                "trying again to lock it, for about two minutes"
            )

        _with_retry(connection, lambda: _add_columns(connection, adoption, found.oid, missing), tell_of_wait)
        announce(f"added {' and '.join(missing)}: a change of the catalog, no row was rewritten")
    if adoption.ordered_by is not None:
        count = _backfill(connection, adoption, lambda done: watch(done, found.rows))
        announce(f"backfilled {count} old rows in the order of {adoption.ordered_by}")
    for columns in _indexes(adoption):
        if _ensure_index(connection, adoption, found.oid, columns, announce):
            announce(f"built an index on ({', '.join(columns)}) beside running writers")


def inspect(connection: psycopg.Connection[Any], adoption: Adoption) -> _Found:
    """Look at the table and refuse what cannot work.

    Raises:
        AdoptionError: with the reason and the remedy.

    """
    name = f"{adoption.schema}.{adoption.table}"
    row = connection.execute(_INSPECT, (adoption.schema, adoption.table)).fetchone()
    if row is None:
        raise AdoptionError(f"there is no table {name}")
    oid, kind, is_partition, owned, may_create, has_children, rows, size, columns = row
    if kind != "r" or is_partition:
        what = "a partition" if is_partition else KINDS.get(kind, "no table")
        where = "the table behind it, in its own database" if kind == "f" else "the table behind it"
        raise AdoptionError(f"{name} is {what}; only an ordinary table can be adopted: adopt {where}")
    if not owned:
        raise AdoptionError(f"this role does not own {name}: run it as the table's owner")
    if not may_create:
        raise AdoptionError(
            f"this role may not create a sequence and an index in {adoption.schema}: "
            f"GRANT CREATE ON SCHEMA {quote(adoption.schema)} to it, at least while this runs"
        )
    if has_children:
        raise AdoptionError(
            f"{name} is a table that others inherit from; only an ordinary table can be adopted: adopt each of its "
            f"tables by itself (ALTER TABLE … NO INHERIT {_quoted(adoption)})"
        )
    _check_columns(adoption, columns)
    if adoption.ordered_by is not None:
        _check_order(connection, adoption, adoption.ordered_by, oid, columns)
    return _Found(oid, rows, size, columns)


def _check_columns(adoption: Adoption, columns: dict[str, str]) -> None:
    name = f"{adoption.schema}.{adoption.table}"
    for column, wanted in ((adoption.transaction_id, "xid8"), (adoption.position, "bigint")):
        if columns.get(column, wanted) != wanted:
            raise AdoptionError(
                f"{name} has a column {column} of type {columns[column]}, not {wanted}: choose another name for ours "
                "(--transaction-id-column, --position-column) and map it in source.table.columns"
            )
    for named in (adoption.ordered_by, adoption.only_where_null, adoption.publication_id):
        if named is not None and named not in columns:
            raise AdoptionError(f"{name} has no column {named}")


def _quoted(adoption: Adoption) -> str:
    return f"{quote(adoption.schema)}.{quote(adoption.table)}"


def _check_order(
    connection: psycopg.Connection[Any], adoption: Adoption, order: str, oid: int, columns: dict[str, str]
) -> None:
    """Refuse a column in whose order old rows cannot be numbered.

    Raises:
        AdoptionError: it has no index, or no value in a row that waits for its number; or that has one of its own, or
            may be hidden.

    """
    name = f"{adoption.schema}.{adoption.table}"
    if connection.execute("SELECT row_security_active(%s::oid)", (oid,)).fetchone() == (True,):
        raise AdoptionError(
            f"row-level security may hide rows of {name} from this role, and they would get no number: ALTER TABLE "
            f"{_quoted(adoption)} NO FORCE ROW LEVEL SECURITY, at least while this runs, or leave old rows unread"
        )
    if missing_indexes([[order]], list_indexes(connection, oid)):
        wanted = build_index(adoption.schema, adoption.table, [order])
        raise AdoptionError(
            f"{name} has no index (btree, of all rows) that begins with {order}, so that each batch would sort the "
            f"whole table: {wanted}, or leave old rows unread"
        )
    waiting = [adoption.only_where_null] if adoption.only_where_null is not None else []
    waiting += [adoption.transaction_id] if adoption.transaction_id in columns else []

    def has_old_row(column: str, test: sql.SQL) -> bool:
        tests = [sql.SQL("{} IS NULL").format(sql.Identifier(each)) for each in waiting]
        tests.append(test.format(sql.Identifier(column)))
        statement = sql.SQL("SELECT FROM {} WHERE {} LIMIT 1").format(adoption.identifier, sql.SQL(" AND ").join(tests))
        return connection.execute(statement).fetchone() is not None

    may_stay = adoption.position not in columns or adoption.position == order
    if not may_stay and has_old_row(adoption.position, sql.SQL("{} IS NOT NULL")):
        raise AdoptionError(
            f"{name} has old rows with a {adoption.position} of their own, which stays: read them in its order with "
            f"--ordered-by {adoption.position}, or choose another name for ours with --position-column"
        )
    if has_old_row(order, sql.SQL("{} IS NULL")):
        raise AdoptionError(
            f"{name} has old rows in which {order} is NULL: they have no place in its order, and would never be read. "
            "UPDATE them to have a value there, delete them, or name another column"
        )


def _explain(connection: psycopg.Connection[Any], adoption: Adoption, found: _Found, missing: list[str]) -> list[str]:
    types = {adoption.transaction_id: "xid8", adoption.position: "bigint"}
    indexes = missing_indexes(_indexes(adoption), list_indexes(connection, found.oid))
    lines = [f"{adoption.schema}.{adoption.table}: about {found.rows} rows; to add: {', '.join(missing) or 'nothing'}"]
    lines += [
        str(step)
        for step in build_steps(
            columns={name: types.get(name, "text") for name in missing}, indexes=indexes, rows=found.rows,
            size=found.size, backfills=adoption.ordered_by is not None, lock_timeout=LOCK_TIMEOUT,
        )
    ]  # fmt: skip
    if adoption.ordered_by is None:
        lines.append(
            "old rows keep a NULL pair and are never read (name --ordered-by COLUMN to have them read before new rows)"
        )
    else:
        some = f" where {adoption.only_where_null} is NULL" if adoption.only_where_null else ""
        position = f"a position in the order of {adoption.ordered_by}"
        if adoption.ordered_by == adoption.position:
            position = f"keep their {adoption.position}"
        lines.append(
            f"old rows{some} get transaction_id {FROZEN_TRANSACTION_ID} and {position}, {adoption.batch} rows a "
            "transaction; who starts from the beginning reads them"
        )
    return lines


def list_indexes(connection: psycopg.Connection[Any], oid: int) -> list[list[str | None]]:
    """Return the key's columns of each index that is sorted, valid and of the whole table; None: reading has no use."""
    return [columns for _, valid, columns in connection.execute(_LIST_INDEXES, (oid,)).fetchall() if valid]


def _add_columns(connection: psycopg.Connection[Any], adoption: Adoption, oid: int, missing: list[str]) -> None:
    """One short transaction. ADD COLUMN with the default at once would rewrite the table: the default is volatile."""
    names = {
        "table": adoption.identifier,
        "transaction_id": sql.Identifier(adoption.transaction_id),
        "position": sql.Identifier(adoption.position),
        # Not after the table's name, which may be too long for it, or have been another table's.
        "sequence": sql.Identifier(adoption.schema, f"outbox_{oid}_position_seq"),
    }
    connection.execute(sql.SQL("LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE").format(**names))
    if adoption.transaction_id in missing:
        connection.execute(sql.SQL("ALTER TABLE {table} ADD COLUMN {transaction_id} xid8").format(**names))
        connection.execute(
            sql.SQL("ALTER TABLE {table} ALTER {transaction_id} SET DEFAULT pg_current_xact_id()").format(**names)
        )
    if adoption.position in missing:
        connection.execute(sql.SQL("ALTER TABLE {table} ADD COLUMN {position} bigint").format(**names))
        connection.execute(
            sql.SQL("CREATE SEQUENCE {sequence} AS bigint CACHE 1 OWNED BY {table}.{position}").format(**names)
        )
        connection.execute(
            sql.SQL("ALTER TABLE {table} ALTER {position} SET DEFAULT nextval({literal})").format(
                literal=sql.Literal(names["sequence"].as_string(connection)), **names
            )
        )
        # Producers insert with their own rights, and the default runs with theirs.
        connection.execute(sql.SQL("GRANT USAGE ON SEQUENCE {sequence} TO PUBLIC").format(**names))
    if adoption.message_type is not None and adoption.message_type[0] in missing:
        name, value = adoption.message_type
        # A constant default is kept in the catalog: no row is rewritten.
        connection.execute(
            sql.SQL("ALTER TABLE {table} ADD COLUMN {name} text NOT NULL DEFAULT {value}").format(
                name=sql.Identifier(name), value=sql.Literal(value), **names
            )
        )


def _backfill(connection: psycopg.Connection[Any], adoption: Adoption, watch: Callable[[int], None]) -> int:
    """Number old rows along the ordering column; each batch goes on where the last one ended, by the index."""
    names: dict[str, sql.Composable] = {
        "table": adoption.identifier,
        "transaction_id": sql.Identifier(adoption.transaction_id),
        "order": sql.Identifier(adoption.ordered_by or ""),
        "frozen": sql.Literal(str(FROZEN_TRANSACTION_ID)),
    }
    change = _MARK_OLD_ROWS
    if adoption.ordered_by != adoption.position:
        change = _NUMBER_OLD_ROWS
        names["position"] = sql.Identifier(adoption.position)
        names["sequence"] = sql.Literal(_position_sequence(connection, adoption))
    only: sql.Composable = sql.SQL("")
    if adoption.only_where_null is not None:
        only = sql.SQL("AND o.{} IS NULL").format(sql.Identifier(adoption.only_where_null))
    after: sql.Composable = sql.SQL("")
    total = 0
    while True:
        with connection.transaction():
            _limit_idleness(connection)
            rows = connection.execute(
                _LOCK_OLD_ROWS.format(only=only, after=after, batch=sql.Literal(adoption.batch), **names)
            ).fetchall()
            places = sql.Literal([place for place, _ in rows])
            _change(connection, adoption, change.format(places=places, **names), len(rows))
        total += len(rows)
        if len(rows) < adoption.batch:
            return total
        after = sql.SQL("AND o.{order} >= {last}").format(last=sql.Literal(rows[-1][1]), **names)
        watch(total)


def _change(connection: psycopg.Connection[Any], adoption: Adoption, statement: sql.Composed, count: int) -> None:
    """Give old rows their pair.

    Raises:
        AdoptionError: not all of them have it then.

    """
    fault: Exception | None = None
    changed: list[Any] = []
    try:
        changed = connection.execute(statement).fetchall()
    except psycopg.errors.FeatureNotSupported as err:  # of a rule, which may change the statement into another one
        fault = err
    if changed.count((str(FROZEN_TRANSACTION_ID),)) < count or fault is not None:
        raise AdoptionError(
            f"a trigger or a rule of {adoption.schema}.{adoption.table} keeps rows from being changed, so that old "
            f"ones get no number: ALTER TABLE {_quoted(adoption)} DISABLE TRIGGER … (or DISABLE RULE …), at least "
            "while this runs, or leave old rows unread"
        ) from fault


def _position_sequence(connection: psycopg.Connection[Any], adoption: Adoption) -> str:
    row = connection.execute(
        "SELECT pg_get_serial_sequence(%s, %s)", (adoption.identifier.as_string(connection), adoption.position)
    ).fetchone()
    if row is None or row[0] is None:
        raise AdoptionError(f"column {adoption.position} does not own a sequence, so old rows cannot be numbered")
    return str(row[0])


def _indexes(adoption: Adoption) -> list[list[str]]:
    mapped = {"transactionId": adoption.transaction_id, "position": adoption.position}
    if adoption.publication_id is not None:
        mapped["publicationId"] = adoption.publication_id
    return needed_indexes(mapped, publications=True)


def _ensure_index(
    connection: psycopg.Connection[Any],
    adoption: Adoption,
    oid: int,
    columns: list[str],
    announce: Callable[[str], None],
) -> bool:
    """Build the index unless a valid one is there; an invalid one is what an interrupted run left."""
    if not missing_indexes([columns], list_indexes(connection, oid)):
        return False
    for name, valid, there in connection.execute(_LIST_INDEXES, (oid,)).fetchall():
        if there == columns and not valid:
            connection.execute(sql.SQL("DROP INDEX CONCURRENTLY {}").format(sql.Identifier(adoption.schema, name)))
    announce(f"building an index on ({', '.join(columns)}): it waits for transactions that are open now")
    listed = sql.SQL(", ").join(map(sql.Identifier, columns))
    connection.execute(sql.SQL("CREATE INDEX CONCURRENTLY ON {} ({})").format(adoption.identifier, listed))
    return True


def _with_retry(
    connection: psycopg.Connection[Any], change: Callable[[], None], tell_of_wait: Callable[[], None]
) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with connection.transaction():
                connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_TIMEOUT)))
                _limit_idleness(connection)
                change()
        except psycopg.errors.LockNotAvailable as err:
            if attempt == ATTEMPTS:
                raise AdoptionError(
                    "the table stayed locked and there was no moment to add columns: look for long transactions in "
                    "pg_stat_activity, then run it again"
                ) from err
            if attempt == _TELLING_ATTEMPT:
                tell_of_wait()
            time.sleep(min(0.1 * attempt, 1.0))
        else:
            return


def _limit_idleness(connection: psycopg.Connection[Any]) -> None:
    limit = sql.Literal(IDLE_TIMEOUT)
    connection.execute(sql.SQL("SET LOCAL idle_in_transaction_session_timeout = {}").format(limit))
