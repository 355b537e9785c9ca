"""What the database remembers of a processor's query: under what it was begun, and what a person decided since."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from outbox_core.progress.checkpoint import Checkpoint
from outbox_spark.streaming.resume import Lineage
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.identity import check_identity

if TYPE_CHECKING:
    from outbox_core.spec import Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

_FETCH_DECISION = sql.SQL(
    """SELECT id, act, to_transaction_id::text AS t, to_position, (extract(epoch FROM acted_at) * 1000000)::bigint
       FROM {acts}
       WHERE processor_id = %s AND partition = %s AND act IN ('Accept', 'Rewind', 'Rebase') ORDER BY id DESC LIMIT 1"""
)
_FETCH_QUERY = sql.SQL(
    "SELECT decisions, transaction_id::text AS t, position FROM {queries} WHERE processor_id = %s AND partition = %s"
)
_STORE_QUERY = sql.SQL(
    """INSERT INTO {queries} (processor_id, partition, decisions, transaction_id, position)
       VALUES (%s, %s, %s, %s::text::xid8, %s)
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
    database = check_identity(connection, source, key).uuid
    who = (key.processor_id, key.partition)
    with translated():
        decision = connection.execute(_FETCH_DECISION.format(acts=_table(key, "recorded_acts")), who).fetchone()
        begun = connection.execute(_FETCH_QUERY.format(queries=_table(key, "spark_queries")), who).fetchone()
    number, decided_at = (0, 0) if decision is None else (int(decision[0]), int(decision[4]))
    untouched = begun is None or _pair(begun[1], begun[2]) == stored
    if decision is not None and decision[1] == "Rewind" and (begun is None or number > int(begun[0])):
        # A person said from where: what state there was is not the state of that pair, and a new one is built from it.
        untouched = untouched or _pair(decision[2], decision[3]) == stored
    return Lineage(database, number, decided_at), untouched


def store_begin(connection: Connection, key: ProcessorKey, lineage: Lineage, start: Checkpoint) -> None:
    """Remember that a new directory was begun; before it is, so that a lost one is known to be lost."""
    with translated():
        connection.execute(
            _STORE_QUERY.format(queries=_table(key, "spark_queries")),
            (key.processor_id, key.partition, lineage.decisions, str(start.transaction_id), start.position),
        )


def _pair(transaction_id: str, position: int) -> Checkpoint:
    return Checkpoint(int(transaction_id), position)


def _table(key: ProcessorKey, name: str) -> sql.Identifier:
    return sql.Identifier(key.schema, name)
