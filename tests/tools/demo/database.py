"""The demo's database, as its administrator sees it: connections, the outbox's state, and a gate in its tables."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg
from psycopg import sql

from tests.tools.demo.waiting import DemoError, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TABLE_LOCK: Final = 7301
SESSION_LOCK: Final = 7302
CATCH_SECONDS: Final = 30.0

CHECKPOINT: Final[LiteralString] = """
SELECT last_processed_transaction_id::text::bigint, last_processed_position
  FROM outbox.processor_checkpoints WHERE processor_id = %s AND partition = 0
"""
OWNER: Final[LiteralString] = """
SELECT pod, epoch, expires_at > clock_timestamp() FROM outbox.processor_leases WHERE processor_id = %s AND partition = 0
"""
CLAIM: Final[LiteralString] = (
    "SELECT cluster, namespace, name, uid FROM outbox.processor_claims WHERE processor_id = %s"
)
WAITER: Final[LiteralString] = """
SELECT pid FROM pg_locks
 WHERE locktype = 'advisory' AND NOT granted AND classid = %s AND objid::int = to_regclass(%s)::oid::int
"""
BEHIND: Final[LiteralString] = """
SELECT count(*) FROM outbox.messages m, outbox.processor_checkpoints c
 WHERE c.processor_id = %s AND (m.transaction_id, m.position)
       > (c.last_processed_transaction_id, c.last_processed_position)
"""
UNHANDLED: Final[LiteralString] = """
SELECT count(*) FROM outbox.messages m
 WHERE NOT EXISTS (SELECT FROM {table} h WHERE h.message_id = m.message_id)
"""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lease:
    """Who works on a processor."""

    pod: str
    epoch: int
    live: bool


class Database:
    """One database server, by a role that may do everything."""

    def __init__(self, host: str, port: int, password: str, *, user: str = "outbox", name: str = "shop") -> None:
        """Remember how to connect."""
        self.host, self.port, self.user, self.name, self._password = host, port, user, name, password
        self._kept = threading.local()

    def connect(self, application_name: str = "demo") -> psycopg.Connection[Any]:
        """Open a connection in autocommit."""
        return psycopg.connect(
            host=self.host,
            port=self.port,
            user=self.user,
            dbname=self.name,
            password=self._password,
            application_name=application_name,
            autocommit=True,
            connect_timeout=10,
        )

    def elsewhere(self, name: str) -> Database:
        """Another database of the same server, by the same role."""
        return Database(self.host, self.port, self._password, user=self.user, name=name)

    def libpq_environment(self) -> dict[str, str]:
        """Return libpq's variables, for a program that must not get the password on its command line."""
        return {
            "PGHOST": self.host,
            "PGPORT": str(self.port),
            "PGUSER": self.user,
            "PGDATABASE": self.name,
            "PGPASSWORD": self._password,
        }

    def write_secret_files(self, directory: Path) -> None:
        """Write the connection as a directory of files, as a mounted Secret is one."""
        directory.mkdir(parents=True, exist_ok=True)
        own = {"host": self.host, "port": str(self.port), "database": self.name}
        for key, value in {**own, "user": self.user, "password": self._password}.items():
            file = directory / key
            file.touch(mode=0o600)
            file.write_text(value)

    def rows(self, query: LiteralString, *values: object) -> list[tuple[Any, ...]]:
        """Run one query on this thread's own connection, which is kept: scenes look several times a second."""
        connection: psycopg.Connection[Any] | None = getattr(self._kept, "connection", None)
        if connection is None or connection.closed:
            connection = self._kept.connection = self.connect("demo-look")
        return connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Close this thread's own connection."""
        connection: psycopg.Connection[Any] | None = getattr(self._kept, "connection", None)
        if connection is not None:
            connection.close()

    def one(self, query: LiteralString, *values: object) -> tuple[Any, ...] | None:
        """Return the first row."""
        return next(iter(self.rows(query, *values)), None)

    def checkpoint(self, processor: str) -> Pair | None:
        """Return the stored pair."""
        row = self.one(CHECKPOINT, processor)
        return (row[0], row[1]) if row else None

    def lease(self, processor: str) -> Lease | None:
        """Return the lease, live or lapsed."""
        row = self.one(OWNER, processor)
        return Lease(row[0] or "", row[1], row[2]) if row else None

    def claim(self, processor: str) -> tuple[str, str, str, str] | None:
        """Return cluster, namespace, name and uid of the claim's holder."""
        row = self.one(CLAIM, processor)
        return (row[0], row[1], row[2], row[3]) if row else None

    def behind(self, processor: str) -> int:
        """Count the committed messages beyond the checkpoint."""
        row = self.one(BEHIND, processor)
        return int(row[0]) if row else -1

    def unhandled(self, schema: str) -> int:
        """Count the committed messages that the schema's table of handled orders does not have."""
        query = sql.SQL(UNHANDLED).format(table=sql.Identifier(schema, "handled_orders"))
        with self.connect("demo-look") as connection:
            row = connection.execute(query).fetchone()
        return int(row[0]) if row else -1

    @contextmanager
    def hold_next_batch(self, table: str, begin: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Catch the next session that inserts into `table`, in the middle of its batch, and hold it there.

        Yields the caught session's backend pid. All other sessions go on as soon as it is caught; it goes on when the
        block ends. `begin` is called when the gate is closed.

        Raises:
            DemoError: no session came.

        """
        with self.connect("demo-gate") as gate:
            gate.execute("SELECT pg_advisory_lock(%s, to_regclass(%s)::oid::int)", [TABLE_LOCK, table])
            begin()
            pid, _ = wait_for(f"a batch that writes {table}", lambda: self._waiter(table), within=CATCH_SECONDS)
            gate.execute("SELECT pg_advisory_lock(%s, %s)", [SESSION_LOCK, pid])
            gate.execute("SELECT pg_advisory_unlock(%s, to_regclass(%s)::oid::int)", [TABLE_LOCK, table])
            yield pid
            # The connection's end gives all locks back.

    def _waiter(self, table: str) -> int | None:
        row = self.one(WAITER, TABLE_LOCK, table)
        return int(row[0]) if row else None

    def application_of(self, backend: int) -> str:
        """Return the application name of a session.

        Raises:
            DemoError: the session is gone.

        """
        row = self.one("SELECT application_name FROM pg_stat_activity WHERE pid = %s", backend)
        if row is None:
            raise DemoError(f"session {backend} is gone")
        return str(row[0])
