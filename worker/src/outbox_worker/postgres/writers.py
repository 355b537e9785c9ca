"""Open transactions that have written: who holds the reading bound back, and who will when that one ends.

Every role sees transaction ids, programs and databases of all sessions. Since when a session's transaction is open is
shown to members of its role and, with `GRANT pg_read_all_stats`, to everybody who has that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.queries import load

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True, slots=True)
class Writer:
    """One open transaction: a session's (`pid`), or a prepared one (`prepared`, its name).

    Attributes:
        transaction_id: its low 32 bits, as the server's views show it.
        holds: it is the one that the reading bound waits for.
        age_seconds: since it began or was prepared; None where this role may not see it.

    """

    transaction_id: str
    holds: bool
    pid: int | None
    application: str | None
    database: str | None
    role: str | None
    state: str | None
    prepared: str | None
    age_seconds: float | None


@dataclass(frozen=True, slots=True)
class Writers:
    """The reading bound and the open writers, the oldest first."""

    bound: str
    writers: tuple[Writer, ...]

    @property
    def holder(self) -> Writer | None:
        """Who holds the bound back; None when nobody does, or it ended while we looked."""
        return next((writer for writer in self.writers if writer.holds), None)


def list_writers(connection: psycopg.Connection[Any]) -> Writers:
    """Look once."""
    with translated(), connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(load("list_transactions")).fetchall()
    found = tuple(
        Writer(
            transaction_id=row["xid"],
            holds=row["holds"],
            pid=row["pid"],
            application=row["application_name"] or None,
            database=row["datname"],
            role=row["usename"],
            state=row["state"],
            prepared=row["gid"],
            age_seconds=None if row["age"] is None else max(0.0, row["age"]),
        )
        for row in rows
        if row["xid"] is not None
    )
    return Writers(bound=rows[0]["bound"] if rows else "0", writers=found)
