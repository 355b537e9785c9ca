"""What the planner knows of a table, chosen by a test: no server of the tests analyzes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg


def choose_statistics(connection: psycopg.Connection[Any], table: str, *, wanted: bool) -> None:
    """Let the table have statistics, or be as one that was never analyzed. Made once, they are kept while wanted."""
    known = connection.execute("SELECT FROM pg_statistic WHERE starelid = %s::regclass LIMIT 1", [table]).fetchone()
    if wanted and known is None:
        connection.execute(f"VACUUM ANALYZE {table}")
    elif not wanted:
        connection.execute("DELETE FROM pg_statistic WHERE starelid = %s::regclass", [table])
