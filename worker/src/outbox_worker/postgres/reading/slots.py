"""The index without which reading one partition would scan the others' rows too.

It stands on the hash slot of the key, so it serves every number of partitions, and processors with the same key share
it. Where the table is the product's own and the schema is managed, a worker builds it, CONCURRENTLY: producers go on.
PostgreSQL refuses that for a partitioned table, of which a person builds it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from outbox_core.spec import SchemaManagement
from outbox_worker.postgres.call import fetch_one, load
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.reading.table import OutboxTable
from outbox_worker.postgres.schema import fetch_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox_core.spec import PartitionKey, Source
    from outbox_worker.postgres.connection import Connection

_LOST: Final = (psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected)
"""What is told to the one of two builders that came second. A deadlock: each waits for the other's lock or snapshot."""


def ensure_slot_index(connection: Connection, source: Source, key: PartitionKey) -> str | None:
    """Look for the index, and build it if that is ours to do; return what a person should run where it is missing.

    The connection must be outside a transaction. What a cut connection left half built is dropped and built anew.
    Of two that build it at the same moment one fails, by its name or in a deadlock: it is told that the index is being
    built. What is missing is to be looked for again.

    Raises:
        ConfigurationError: the key needs a column that the table does not have.
        TransientError: the database went away, or a lock was not free in time.

    """
    table = OutboxTable.of(source)
    if can_read_by_slot(connection, source, key):
        return None
    slot = table.slot(key, source.schema_name, row=None)
    # One name for each key, short enough for an identifier with every path.
    name = f"{table.name[:40]}_slots_{hashlib.sha256(slot.as_bytes(connection)).hexdigest()[:8]}"
    partitioned = fetch_table(connection, table)[1] == "p"
    statement = sql.SQL("CREATE INDEX {}{} ON {} (({}), {}, {})").format(
        sql.SQL("" if partitioned else "CONCURRENTLY "),  # PostgreSQL refuses it for a partitioned table
        sql.Identifier(name),
        table.identifier,
        slot,
        sql.Identifier(table.columns.transaction_id),
        sql.Identifier(table.columns.position),
    )
    advice = (
        f"reading a partition scans the whole outbox until this statement is run: {statement.as_string(connection)}"
    )
    if source.table is not None or partitioned or source.schema_ is not SchemaManagement.MANAGE:
        return advice
    with translated():
        try:
            if _is_clear(connection, table, name):
                connection.execute(statement)
                return None
        except psycopg.errors.InsufficientPrivilege:
            return advice
        except _LOST:
            if can_read_by_slot(connection, source, key):
                return None
    return f"the index {table.schema}.{name} is being built; until then reading a partition scans the outbox"


def can_read_by_slot(connection: Connection, source: Source, key: PartitionKey) -> bool:
    """Ask the planner whether an index finds the rows of one slot in order: the truth, under every index name."""
    table = OutboxTable.of(source)
    slot = table.slot(key, source.schema_name)
    statement = load("explain_slot").format(table=table.identifier, slot=slot, pair=table.pair)
    with translated(), connection.transaction():
        connection.execute("SELECT set_config('enable_seqscan', 'off', true), set_config('enable_sort', 'off', true)")
        (plan,) = fetch_one(connection, statement)
    return any("hash_slot" in node.get("Index Cond", "") for node in _nodes(plan[0]["Plan"]))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from _nodes(each)


def _is_clear(connection: Connection, table: OutboxTable, name: str) -> bool:
    """Take away what a builder left that is gone; False while one is at work."""
    row = connection.execute(load("fetch_unfinished_index"), {"schema": table.schema, "name": name}).fetchone()
    if row is None:
        return True
    if row[0]:
        return False
    connection.execute(sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}").format(sql.Identifier(table.schema, name)))
    return True
