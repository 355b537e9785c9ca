"""Restores as people make them: pg_dump of one server into another, whose transaction ids are elsewhere."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING, Any

from tests.support.servers.postgres import Database, binaries

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from tests.support.servers.postgres import PostgresServer, Servers


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
            f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
        )


def dump(source: Database) -> bytes:
    """Dump a database, of any version up to that of pg_dump, which is 15."""
    command = [str(binaries("15") / "pg_dump"), "--format=custom", "--no-owner", source.server.uri(source.name)]
    return subprocess.run(command, check=True, capture_output=True).stdout


@contextlib.contextmanager
def restored(dumped: bytes, server: PostgresServer) -> Iterator[Database]:
    """Restore a dump on a server, perhaps of a later version."""
    database = Database(server, server.create("empty_template"), server.port)
    command = [str(binaries("15") / "pg_restore"), "--no-owner", "--exit-on-error", "--dbname"]
    try:
        subprocess.run([*command, server.uri(database.name)], input=dumped, check=True, capture_output=True)
        yield database
    finally:
        database.close()
        server.drop(database.name)


def age(servers: Servers, source: Database, version: str, ahead: int) -> None:
    """Bring the source's counter ahead of the server of another version."""
    with servers.get(version).connect("postgres") as there, source.server.connect("postgres") as here:
        use_up(here, next_id(there) + ahead)
