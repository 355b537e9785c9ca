"""Read what the targets hold, with plain clients: SQL rows, sums, and Parquet files. The queue is read by `amqp`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, LiteralString

import pyarrow.parquet
from psycopg import sql

from tests.tools.ledger.account import Handled

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

ROWS: Final[LiteralString] = "SELECT message_id::text, order_key, order_sequence, cents FROM {} ORDER BY handled_id"
SUMS: Final[LiteralString] = "SELECT {}, messages, cents FROM {}"


def read_rows(connection: psycopg.Connection[Any], schema: str, table: str) -> list[Handled]:
    """Read an append-only table in the order of its own serial number."""
    query = sql.SQL(ROWS).format(sql.Identifier(schema, table))
    return [Handled(*row) for row in connection.execute(query)]


def read_sums(connection: psycopg.Connection[Any], schema: str, table: str, group: str) -> dict[Any, tuple[int, int]]:
    """Read a table of aggregates: group → (messages, cents). A timestamp becomes seconds since 1970."""
    column: sql.Composable = sql.Identifier(group)
    if group == "minute":
        column = sql.SQL("extract(epoch FROM {})::bigint").format(column)
    query = sql.SQL(SUMS).format(column, sql.Identifier(schema, table))
    return {key: (int(messages), int(cents)) for key, messages, cents in connection.execute(query)}


def read_parquet(directory: Path) -> list[Handled]:
    """Read every row of every file that a reader of the directory sees.

    Files and folders whose names begin with `.` or `_` are invisible, as they are to Spark: what lies there is neither
    handled twice nor, should it never have been moved out, handled at all.
    """
    columns = ["message_id", "order_key", "order_sequence", "cents"]
    handled: list[Handled] = []
    for path in sorted(directory.rglob("*.parquet")):
        if any(part.startswith((".", "_")) for part in path.relative_to(directory).parts):
            continue
        rows = pyarrow.parquet.read_table(path, columns=columns, partitioning=None).to_pydict()
        handled += [Handled(*row) for row in zip(*(rows[name] for name in columns), strict=True)]
    return handled
