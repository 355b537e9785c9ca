"""A server that loses what it did not flush: one of its backends is killed, and it goes on without a restart."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any, Final

import psycopg
from typing_extensions import override

from tests.support.servers.postgres import Database, PgBouncer, PostgresServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


_WRITER: Final = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"


class CrashingServer(PostgresServer):
    """A server of its own, with a pool before it, whose WAL is flushed when a test says so.

    Nothing waits for a flush (`synchronous_commit` is off), and the process that flushes by itself is stopped in
    `crashed`. So a test decides what a crash takes back.
    """

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.pool = PgBouncer(self)

    @override
    def stop(self) -> None:
        self.pool.stop()
        super().stop()

    def database(self, *, pooled: bool = True) -> Database:
        """A migrated database with an identity of its own."""
        database = Database(self, self.create("outbox_template"), self.pool.port if pooled else self.port)
        with self.connect(database.name) as connection:
            connection.execute(
                "UPDATE outbox.database_identity SET database_oid = (SELECT oid FROM pg_database "
                "WHERE datname = current_database()), database_uuid = gen_random_uuid()"
            )
        return database

    def flush(self) -> None:
        """Let everything that is written until now survive a crash."""
        with self.connect("postgres") as connection:
            connection.execute("SET synchronous_commit = on")
            connection.execute("SELECT pg_logical_emit_message(true, 'test', 'flush')")

    def restart(self) -> None:
        """Stop it as an administrator does, and start it again."""
        self._daemon._process.send_signal(signal.SIGINT)
        self._daemon._process.wait(30)
        self._daemon.start()
        self._daemon.wait_ready(lambda: self.connect("postgres").close())

    @contextlib.contextmanager
    def crashed(self) -> Iterator[None]:
        """No WAL is flushed by itself in the body; after it a backend is killed, and the server has recovered."""
        with self.connect("postgres") as victim:
            (writer,) = _only(victim, _WRITER)
            (pid, started) = _only(victim, "SELECT pg_backend_pid(), pg_postmaster_start_time()")
            os.kill(writer, signal.SIGSTOP)
            try:
                yield
            finally:
                os.kill(pid, signal.SIGKILL)
                os.kill(writer, signal.SIGKILL)  # woken, it would flush before it is told to end
        wait_until(lambda: self._has_recovered(writer), "the server has recovered")
        with self.connect("postgres") as again:
            assert _only(again, "SELECT pg_postmaster_start_time()") == (started,), "the server was not restarted"

    def _has_recovered(self, writer: int) -> bool:
        with contextlib.suppress(psycopg.Error), self.connect("postgres") as connection:
            found = connection.execute(_WRITER).fetchone()
            return found is not None and found[0] != writer
        return False


class Place:
    """An outbox and a table `handled`, where every backend may end: a connection for each look."""

    def __init__(self, database: Database) -> None:
        self.database = database
        with self.connect() as connection:
            connection.execute(
                "CREATE TABLE handled (n serial PRIMARY KEY, message_id text, total int, pod text DEFAULT '')"
            )

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """Past the pool."""
        return self.database.server.connect(self.database.name, autocommit=autocommit)

    def handled(self) -> list[str]:
        with self.connect() as connection:
            rows = connection.execute("SELECT message_id FROM handled ORDER BY n").fetchall()
        return [row[0] for row in rows]

    def stored(self) -> list[str]:
        """The messages there are, in the order of their transactions' ids."""
        with self.connect() as connection:
            rows = connection.execute("SELECT message_id FROM outbox.messages ORDER BY transaction_id").fetchall()
        return [row[0] for row in rows]

    def wait_count(self, count: int, what: str, seconds: float = 30.0) -> None:
        wait_until(lambda: len(self.handled()) >= count, what, seconds)

    def produce(self, *names: str, message_type: str = "m") -> list[int]:
        """Messages of a transaction each; return the transactions' ids."""
        with self.connect() as connection:
            return [_insert(connection, name, message_type) for name in names]

    def insert(self, connection: psycopg.Connection[Any], *names: str) -> None:
        """Messages of the transaction that is open on this connection."""
        for name in names:
            _insert(connection, name, "m")

    def burn(self, count: int) -> list[int]:
        """Insert messages that are rolled back; return their transactions' ids."""
        ids = []
        with self.connect(autocommit=False) as connection:
            for _ in range(count):
                ids.append(_insert(connection, "rolled-back", "m"))
                connection.rollback()
        return ids

    def skip_to(self, ids: list[int]) -> None:
        """Use ids up until one of these is the next: a heartbeat may have had one before them, which is lost too."""
        with self.connect() as connection:
            while (found := _next_id(connection)) not in ids:
                assert found < max(ids), f"{found} is beyond them"
                connection.execute("SELECT pg_current_xact_id()")

    def skip_all(self, ids: list[int]) -> None:
        """Use ids up until all of these are behind."""
        with self.connect() as connection:
            while _next_id(connection) <= max(ids):
                connection.execute("SELECT pg_current_xact_id()")

    def asked_for_a_person(self) -> int:
        """How many conflicts wait for a decision, or waited."""
        with self.connect() as connection:
            (count,) = _only(connection, "SELECT count(*) FROM outbox.processor_conflicts WHERE needs_person")
        return int(count)


def _next_id(connection: psycopg.Connection[Any]) -> int:
    (found,) = _only(connection, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    return int(found)


def _insert(connection: psycopg.Connection[Any], name: str, message_type: str) -> int:
    (number,) = _only(
        connection,
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "VALUES (%s, %s, %s, '{\"total\": 1}') RETURNING transaction_id::text::int8",
        name, name, message_type,
    )  # fmt: skip
    return int(number)


def _only(connection: psycopg.Connection[Any], statement: str, *parameters: object) -> tuple[Any, ...]:
    row = connection.execute(statement.encode(), parameters or None).fetchone()
    assert row is not None
    return tuple(row)
