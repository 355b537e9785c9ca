"""Restores as people make them: pg_dump of one server into another, whose transaction ids are elsewhere."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING, Any

from tests.support.postgres import Database, binaries

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from tests.support.postgres import PostgresServer, Servers


def next_id(connection: psycopg.Connection[Any]) -> int:
    """The id that the server hands out next."""
    row = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
    assert row is not None
    return int(row[0])


def use_up(connection: psycopg.Connection[Any], until: int) -> None:
    """Let the server's counter reach `until`."""
    count = until - next_id(connection)
    if count > 0:
        connection.execute(
            f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"  # type: ignore[call-overload]  # a test's own number
        )


@contextlib.contextmanager
def restored(source: Database, server: PostgresServer) -> Iterator[Database]:
    """Dump a database and restore it on a server of the same or a later version (pg_dump is of version 15)."""
    program = binaries("15")
    dump = subprocess.run(
        [str(program / "pg_dump"), "--format=custom", "--no-owner", source.server.uri(source.name)],
        check=True, capture_output=True,
    ).stdout  # fmt: skip
    database = Database(server, server.create("empty_template"), server.port)
    try:
        subprocess.run(
            [str(program / "pg_restore"), "--no-owner", "--exit-on-error", "--dbname", server.uri(database.name)],
            input=dump, check=True, capture_output=True,
        )  # fmt: skip
        yield database
    finally:
        database.close()
        server.drop(database.name)


@contextlib.contextmanager
def restored_into_a_younger_server(servers: Servers, source: Database, version: str, ahead: int) -> Iterator[Database]:
    """The same, where the server is some ids behind what the dump names. Call `age` before writing to the source."""
    server = servers.get(version)
    with server.connect("postgres") as there, source.server.connect("postgres") as here:
        assert next_id(here) > next_id(there) + ahead // 2, "make the source older first"
    with restored(source, server) as database:
        yield database


def age(servers: Servers, source: Database, version: str, ahead: int) -> None:
    """Bring the source's counter ahead of the server of another version."""
    with servers.get(version).connect("postgres") as there, source.server.connect("postgres") as here:
        use_up(here, next_id(there) + ahead)
