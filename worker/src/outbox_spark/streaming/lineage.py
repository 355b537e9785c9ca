"""What the database remembers of a processor's query: under what it was begun, and what a person decided since."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from outbox_core.progress.checkpoint import Checkpoint
from outbox_spark.streaming.resume import Lineage
from outbox_worker.postgres.call import fetch_row
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.identity import check_identity

if TYPE_CHECKING:
    from outbox_core.spec import Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

_FETCH_DECISION = sql.SQL(
    """SELECT id, (extract(epoch FROM decided_at) * 1000000)::bigint, action = 'Rewind',
              to_transaction_id::text, to_position
       FROM {schema}.audit_log
       WHERE processor_id = %(processor_id)s AND partition = %(partition)s AND action IN ('Accept', 'Rewind', 'Rebase')
       ORDER BY id DESC LIMIT 1"""
)
_FETCH_QUERY = sql.SQL(
    """SELECT decisions, transaction_id::text, position FROM {schema}.spark_queries
       WHERE processor_id = %(processor_id)s AND partition = %(partition)s"""
)
_STORE_QUERY = sql.SQL(
    """INSERT INTO {schema}.spark_queries (processor_id, partition, decisions, transaction_id, position)
       VALUES (%(processor_id)s, %(partition)s, %(decisions)s, %(transaction_id)s::text::xid8, %(position)s)
       ON CONFLICT (processor_id, partition) DO UPDATE
       SET decisions = excluded.decisions, transaction_id = excluded.transaction_id, position = excluded.position,
           begun_at = clock_timestamp()"""
)


def fetch_history(
    connection: Connection, source: Source, key: ProcessorKey, stored: Checkpoint
) -> tuple[Lineage, bool]:
    """Read identity, decisions and where the current directory was begun.

    Returns:
        The lineage that a directory begun now would have, and whether no batch can have built state that the stored
        pair stands for.

    """
    database, schema = check_identity(connection, source, key).uuid, sql.Identifier(key.schema)
    decision = fetch_row(connection, _FETCH_DECISION.format(schema=schema), key.names)
    begun = fetch_row(connection, _FETCH_QUERY.format(schema=schema), key.names)
    number, decided_at, is_rewind, *chosen = decision or (0, 0, False)
    untouched = begun is None or _pair(*begun[1:]) == stored
    if is_rewind and (begun is None or number > begun[0]):
        # A person said from where: what state there was is not the state of that pair, and a new one is built from it.
        untouched = untouched or _pair(*chosen) == stored
    return Lineage(database, number, decided_at), untouched


def store_begin(connection: Connection, key: ProcessorKey, lineage: Lineage, start: Checkpoint) -> None:
    """Remember that a new directory was begun; before it is, so that a lost one is known to be lost."""
    begun = {"decisions": lineage.decisions, "transaction_id": str(start.transaction_id), "position": start.position}
    with translated():
        connection.execute(_STORE_QUERY.format(schema=sql.Identifier(key.schema)), key.names | begun)


def _pair(transaction_id: str, position: int) -> Checkpoint:
    return Checkpoint(int(transaction_id), position)
