"""Brings the schema to the version this worker needs or checks it; checks the outbox table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.report import Reason
from outbox_core.spec import Cursor, SchemaManagement
from outbox_sql import runner
from outbox_sql.adopt import KINDS, list_indexes
from outbox_sql.guide import build_index, quote
from outbox_sql.recognise import missing_indexes
from outbox_worker.postgres.call import fetch_row, fetch_rows, load
from outbox_worker.postgres.errors import translate, translated
from outbox_worker.postgres.reading.table import OutboxTable

if TYPE_CHECKING:
    from outbox_core.spec import Source
    from outbox_worker.postgres.connection import Connection

_TEXTS = ("text", "character varying")
_PAYLOADS = ("jsonb", "json", *_TEXTS)
_TYPES = {
    "position": ("bigint",), "transactionId": ("xid8",), "publicationId": _TEXTS, "data": _PAYLOADS,
    "metadata": _PAYLOADS, "scheduled": ("timestamp with time zone",),
}  # fmt: skip
"""Of columns, by their fields in source.table.columns; any other may have every type."""


@dataclass(frozen=True, slots=True)
class Column:
    """What the catalog says of a column."""

    name: str
    type: str
    not_null: bool
    default: str | None
    sequence: str | None
    cache: int | None
    cycles: bool | None
    increment: int | None


def ensure_schema(connection: Connection, source: Source) -> None:
    """Apply what is missing (Manage) or say that it is missing (Verify), then check the outbox table.

    The connection must be outside a transaction. A schema that is complete is only read.

    Raises:
        ConfigurationError: `SchemaMissing`, `SchemaMismatch` or `PermissionDenied`, each with the remedy.
        TransientError: a lock was not to be had, or the database went away.

    """
    bring_up(connection, source)
    check_table(connection, source)


def bring_up(connection: Connection, source: Source) -> None:
    """Apply what is missing (Manage) or say that it is missing (Verify); the outbox table is not looked at.

    Raises:
        ConfigurationError: `SchemaMissing`, `SchemaMismatch` or `PermissionDenied`, each with the remedy.
        TransientError: a lock was not to be had, or the database went away.

    """
    schema = source.schema_name
    try:
        if source.schema_ is SchemaManagement.MANAGE:
            runner.migrate(connection, schema)
        else:
            _verify(connection, schema)
    except psycopg.errors.InsufficientPrivilege as err:
        raise ConfigurationError(
            f"{err.diag.message_primary}: this role cannot bring schema {schema} up to date or read it; run "
            "`outbox migrate` as its owner, grant what sql/README.md lists, and set source.schema to Verify",
            reason=Reason.PERMISSION_DENIED,
        ) from err
    except runner.MigrationBusyError as err:
        raise TransientError(str(err), reason=Reason.DATABASE_UNAVAILABLE) from err
    except runner.MigrationError as err:
        raise ConfigurationError(str(err), reason=Reason.SCHEMA_MISMATCH) from err
    except psycopg.Error as err:
        raise translate(err) from err


def _verify(connection: Connection, schema: str) -> None:
    with connection.transaction():
        applied = runner.fetch_applied(connection, schema)
    missing = runner.pending(applied, (runner.Phase.PRE,), runner.load_migrations())
    if missing:
        names = ", ".join(migration.name for migration in missing)
        raise ConfigurationError(
            f"schema {schema} lacks {names}: run `outbox migrate --schema {schema}` as its owner",
            reason=Reason.SCHEMA_MISMATCH if applied else Reason.SCHEMA_MISSING,
        )


def check_table(connection: Connection, source: Source) -> None:
    """Check the outbox's columns, defaults, sequence and index, and that no row is hidden from this role.

    Raises:
        ConfigurationError: `SchemaMissing` (no such table) or `SchemaMismatch`; names every fault and its remedy.

    """
    table = OutboxTable.of(source)
    columns = fetch_columns(connection, table)
    if not columns:
        raise ConfigurationError(
            f"there is no table {table.schema}.{table.name}, or this role may not see it",
            reason=Reason.SCHEMA_MISSING,
        )
    _, kind, hidden_from = fetch_table(connection, table)
    if kind not in ("r", "p"):
        _refuse(table, [f"it is {KINDS[kind]}: name the table behind it, and the database that has it"])
    faults = find_faults(table, columns)
    if not faults:
        faults = _hidden_rows(table, hidden_from)
        pair = [table.columns.transaction_id, table.columns.position]
        if source.publications and table.columns.publication_id is not None:
            pair.insert(0, table.columns.publication_id)
        needed = [pair, [table.columns.position]] if source.cursor is Cursor.SNAPSHOT else [pair]
        faults += _missing_indexes(connection, table, needed)
    _refuse(table, faults)


def check_position_index(connection: Connection, source: Source) -> None:
    """Check what the cursor Snapshot needs, for a resource that names no cursor and is about to get this one.

    Raises:
        ConfigurationError: `SchemaMismatch`, with both remedies.

    """
    table = OutboxTable.of(source)
    faults = _missing_indexes(connection, table, [[table.columns.position]])
    if source.cursor is None:
        faults = [
            f"{fault}. Cursor TransactionOrder needs none, but a processor's cursor can never be changed"
            for fault in faults
        ]
    _refuse(table, faults)


def _refuse(table: OutboxTable, faults: list[str]) -> None:
    if faults:
        raise ConfigurationError(
            f"{table.schema}.{table.name} cannot be read as an outbox: " + "; ".join(faults),
            reason=Reason.SCHEMA_MISMATCH,
        )


def fetch_columns(connection: Connection, table: OutboxTable) -> dict[str, Column]:
    """Read the table's columns from the catalog; empty where there is no such table."""
    rows = fetch_rows(connection, load("fetch_columns"), {"schema": table.schema, "table": table.name})
    return {row[0]: Column(*row) for row in rows}


def fetch_table(connection: Connection, table: OutboxTable) -> tuple[int, str, str | None]:
    """Return the table's oid, its kind, and this role if row-level security may hide rows from it.

    Kinds are the catalog's (`relkind`): `r` is a table, `p` a partitioned one.
    """
    row = fetch_row(connection, load("fetch_table"), {"schema": table.schema, "table": table.name})
    return (0, "r", None) if row is None else (row[0], row[1], row[2])


def find_faults(table: OutboxTable, columns: dict[str, Column]) -> list[str]:
    """Say what keeps the table from being read, each with its remedy. Pure."""
    faults = []
    for field, name in table.columns.model_dump(by_alias=True).items():
        if name is None:
            continue
        column = columns.get(name)
        if column is None:
            faults.append(
                f"it has no column {name} (source.table.columns.{field}): name the right one, or run `outbox adopt`"
            )
            continue
        if field in _TYPES and column.type not in _TYPES[field]:
            faults.append(
                f"column {name} (source.table.columns.{field}) is {column.type}, not {' or '.join(_TYPES[field])}"
            )
    position = columns.get(table.columns.position)
    transaction_id = columns.get(table.columns.transaction_id)
    return faults or [*_transaction_id_faults(table, transaction_id), *_sequence_faults(position)]


def _transaction_id_faults(table: OutboxTable, column: Column | None) -> list[str]:
    if column is None or "pg_current_xact_id()" in (column.default or ""):
        return []
    if column.default is None and column.not_null:
        return []  # the producers name it themselves, or their insert fails
    fault = f"column {column.name} must default to pg_current_xact_id(), or new messages are never read"
    name = f"{quote(table.schema)}.{quote(table.name)}"
    return [f"{fault}: ALTER TABLE {name} ALTER {quote(column.name)} SET DEFAULT pg_current_xact_id()"]


def _sequence_faults(column: Column | None) -> list[str]:
    if column is None:
        return []
    if column.sequence is None:
        if column.default is None and column.not_null:
            return []
        return [f"column {column.name} does not get its number from a sequence: run `outbox adopt`"]
    faults = []
    if column.cache != 1:
        faults.append(
            f"sequence {column.sequence} has CACHE {column.cache}, which hands out numbers out of order for one key: "
            f"ALTER SEQUENCE {column.sequence} CACHE 1"
        )
    if column.cycles or (column.increment or 1) < 1:
        faults.append(f"sequence {column.sequence} must ascend and never cycle")
    return faults


def _hidden_rows(table: OutboxTable, role: str | None) -> list[str]:
    if role is None:
        return []
    name = table.identifier.as_string(None)
    fault = "row-level security may hide messages from role {role}, and they would never be read"
    remedies = "CREATE POLICY outbox ON {name} FOR SELECT TO {role} USING (true), or ALTER ROLE {role} BYPASSRLS"
    return [f"{fault}: {remedies}".format(role=role, name=name)]


def _missing_indexes(connection: Connection, table: OutboxTable, needed: list[list[str]]) -> list[str]:
    oid, kind, _ = fetch_table(connection, table)
    with translated():
        missing = missing_indexes(needed, list_indexes(connection, oid))
    note, partitioned = "", kind == "p"
    if partitioned:
        note = ", and producers wait for its build unless each partition has one (build those CONCURRENTLY before)"
    return [
        f"it has no index (btree, of all rows) on ({', '.join(columns)}), so that each read would scan the table"
        f"{note}: {build_index(table.schema, table.name, columns, partitioned=partitioned)}"
        for columns in missing
    ]
