"""`outbox try --on postgresql://…`: says which outbox a database has, and what it takes to read it. Writes nothing.

All is read in one READ ONLY transaction with short time limits: it takes no transaction id, waits for no lock for long,
and changes nothing, also where the role may.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import conninfo, sql

from outbox_cli.errors import INSTALL, CommandError
from outbox_core.span import format_age
from outbox_sql import guide
from outbox_sql.adopt import LOCK_TIMEOUT, list_indexes
from outbox_sql.recognise import Recognised, missing_indexes, needed_indexes, recognise
from outbox_worker.postgres.connection import ENCODE, Connection, is_misread

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIMIT: Final = "5s"
"""For the age of the oldest row, which may have no index."""
_TABLES: Final = """
SELECT c.oid::bigint, n.nspname, c.relname,
       (SELECT json_object_agg(a.attname, replace(format_type(a.atttypid, NULL), '"', ''))
        FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       CASE WHEN c.reltuples < 0 THEN pg_relation_size(c.oid) / 200 ELSE c.reltuples END::bigint, pg_table_size(c.oid),
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'), current_user::text,
       EXISTS (SELECT FROM pg_class o WHERE o.relnamespace = n.oid AND o.relname = 'processor_checkpoints'),
       c.relkind = 'p'
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_%'
ORDER BY n.nspname, c.relname
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is an outbox.

    Attributes:
        rows: as the statistics reckon them.
        size: in bytes.
        readable: this role may read it.
        ready: our functions are in its schema.
        partitioned: it cannot be adopted.

    """

    oid: int
    schema: str
    name: str
    columns: dict[str, str]
    rows: int
    size: int
    readable: bool
    role: str
    ready: bool
    partitioned: bool
    kind: Recognised

    @property
    def identifier(self) -> sql.Identifier:
        """Its name in a statement."""
        return sql.Identifier(self.schema, self.name)

    @property
    def full_name(self) -> str:
        """Its name for people."""
        return f"{guide.quote(self.schema)}.{guide.quote(self.name)}"


def look_at(uri: str) -> list[str]:
    """Say what is in the database; no error has the password."""
    if is_misread(uri):
        raise CommandError(f"in the URI of --on {ENCODE}")
    try:
        connection = psycopg.connect(uri, connect_timeout=10, application_name="outbox-try", prepare_threshold=None)
    except psycopg.ProgrammingError:
        raise CommandError("--on takes a connection URI: postgresql://user@host:port/database") from None
    except psycopg.OperationalError as err:
        raise CommandError(f"{_where(uri)} cannot be reached: {_first_line(err)}") from None
    with connection:
        connection.read_only = True
        try:
            connection.execute(f"SET LOCAL statement_timeout = '{_LIMIT}'")
            connection.execute("SET LOCAL lock_timeout = '1s'")
            return list(_describe(connection))
        except psycopg.errors.InsufficientPrivilege as err:
            raise CommandError(f"{_where(uri)}: {_first_line(err)}: use a role that may read the catalog") from None
        except psycopg.errors.LockNotAvailable:
            raise CommandError(
                f"{_where(uri)}: another session has locked a table that is to be looked at; run this again once that "
                "is over (pg_locks names the session)"
            ) from None
        except psycopg.Error as err:
            raise CommandError(f"{_where(uri)} cannot be looked at: {_first_line(err)}") from None


def find_outboxes(connection: Connection) -> tuple[list[Table], int]:
    """Return the tables that are outboxes, and of how many."""
    rows = connection.execute(_TABLES).fetchall()
    found = []
    for oid, schema, name, columns, count, size, readable, role, ours, partitioned in rows:
        kind = recognise(columns or {})
        # Beside our own outbox are copies of messages (held ones, dead letters, queues): they have its columns.
        if kind is not None and (name == "messages" or not ours or kind.is_mapped):
            found.append(Table(oid, schema, name, columns, count, size, readable, role, ours, partitioned, kind))
    return found, len(rows)


def _describe(connection: Connection) -> Iterator[str]:
    tables, of = find_outboxes(connection)
    if not tables:
        yield f"no outbox that is known is among the {of} tables that this database has."
        yield "`outbox migrate` makes one (schema outbox); `outbox adopt --table SCHEMA.NAME --dry-run` says what it"
        yield "takes to read a table of yours that is an outbox under other names."
    for number, table in enumerate(tables):
        if number:
            yield ""
        yield from _describe_table(connection, table)
    yield ""
    yield f"the command `outbox` comes with {INSTALL}; PGSERVICE, PGHOST … or"
    yield "--connection DIR tells it the database"


def _describe_table(connection: Connection, table: Table) -> Iterator[str]:
    kind = table.kind
    yield f"{table.full_name} is {kind.kind.title}: about {table.rows} rows, {table.size / 1_000_000:.1f} MB"
    if not table.readable:
        yield f"  role {table.role} may not read it. As its owner:"
        yield f"    GRANT USAGE ON SCHEMA {guide.quote(table.schema)} TO {guide.quote(table.role)};"
        yield f"    GRANT SELECT ON {table.full_name} TO {guide.quote(table.role)};"
    else:
        yield f"  {_describe_oldest(connection, table)}"
    if kind.faults:
        yield from (f"  it cannot be read: {fault}" for fault in kind.faults)
        return
    existing = list_indexes(connection, table.oid)
    indexes = missing_indexes(needed_indexes(kind.columns), existing)
    if kind.missing:
        yield f"  missing columns: {', '.join(f'{name} {type_}' for name, type_ in kind.missing.items())}"
    listed = ", ".join(f"({', '.join(index)})" for index in indexes)
    yield f"  missing indexes: {listed or 'none'}"
    if table.partitioned and (kind.missing or indexes):
        yield "  it is partitioned, and only an ordinary table can be adopted: have its producers insert into one, or"
        yield "  into `outbox.messages`, in the same transaction"
        return
    if kind.missing or indexes:
        yield from _describe_adoption(table, indexes, existing)
    if kind.is_mapped:
        yield "  the change-over:"
        steps = guide.describe_change_over(
            table.schema, table.name, transaction_id=kind.columns["transactionId"], poller=kind.kind.poller,
            handled=kind.is_handled, backfilled=bool(kind.missing and kind.ordered_by), note=kind.kind.note,
        )  # fmt: skip
        yield from (f"    {number}. {step}" for number, step in enumerate(steps, 1))
    elif table.ready:
        yield "  it is ready; `outbox status` says what reads it"
    yield "  its processor:"
    columns = kind.columns if kind.is_mapped else None
    manifest = guide.build_manifest(schema=table.schema, table=table.name, columns=columns)
    yield from (f"    {line}" for line in manifest.splitlines())


def _describe_adoption(table: Table, indexes: list[list[str]], existing: list[list[str | None]]) -> Iterator[str]:
    kind = table.kind
    command = ["outbox", "adopt", "--table", f"{table.schema}.{table.name}"]
    if kind.ordered_by:
        command += ["--ordered-by", kind.ordered_by]
        if missing_indexes([[kind.ordered_by]], existing):
            yield f"  first an index, by which its rows are numbered in the order of {kind.ordered_by}; in psql:"
            yield f"    {guide.build_index(table.schema, table.name, [kind.ordered_by])};"
    command += ["--only-where-null", kind.handled_at] if kind.handled_at else []
    yield f"  `{shlex.join(command)}` would:"
    steps = guide.build_steps(
        columns=kind.missing, indexes=indexes, rows=table.rows, size=table.size, backfills=bool(kind.ordered_by),
        lock_timeout=LOCK_TIMEOUT,
    )  # fmt: skip
    yield from (f"    {step}" for step in steps)


def _describe_oldest(connection: Connection, table: Table) -> str:
    """Say how old the oldest row is; the oldest that waits, where the table says which do."""
    kind = table.kind
    candidates = [kind.columns.get("scheduled"), kind.ordered_by, *table.columns]
    column = next((name for name in candidates if name and table.columns.get(name, "").startswith("timestamp")), None)
    if column is None:
        return "it has no column that says how old a row is"
    condition: sql.Composable = sql.SQL("true")
    if kind.handled_at is not None:
        condition = sql.SQL("{} IS NULL").format(sql.Identifier(kind.handled_at))
    elif kind.handled is not None:
        condition = sql.SQL("NOT {}").format(sql.Identifier(kind.handled))
    query = sql.SQL("SELECT min({}) FROM {} WHERE {}").format(sql.Identifier(column), table.identifier, condition)
    try:
        with connection.transaction():
            row = connection.execute(query).fetchone()
    except (psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable):
        return f"the age of its oldest row was not found within {_LIMIT}: no index begins with {column}"
    waits = " that is not handled" if kind.handled_at or kind.handled else ""
    if row is None or row[0] is None:
        return f"it has no row{waits}"
    oldest: datetime = row[0] if row[0].tzinfo else row[0].replace(tzinfo=UTC)
    age = max(0.0, (datetime.now(UTC) - oldest).total_seconds())
    return f"its oldest row{waits} is of {oldest:%Y-%m-%d %H:%M:%S}Z, {format_age(age)} old ({column})"


def _where(uri: str) -> str:
    """Name the database without a password."""
    try:
        parts = conninfo.conninfo_to_dict(uri)
    except psycopg.Error:
        return "the database"
    return (
        f"database {parts.get('dbname') or parts.get('user') or 'of that URI'} on {parts.get('host') or 'this machine'}"
    )


def _first_line(err: psycopg.Error) -> str:
    return str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
