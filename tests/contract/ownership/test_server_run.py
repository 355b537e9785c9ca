"""`server_run()` answers something else after each crash, in each database, and after nothing else."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import psycopg
import pytest

from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_worker.postgres import identity
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.reading.snapshots import fetch_snapshot
from tests.support.servers.clone import Primary
from tests.support.servers.crash import CrashingServer
from tests.support.servers.postgres import VERSIONS, binaries, build_source

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=VERSIONS)
def server(request) -> Iterator[CrashingServer]:
    server = CrashingServer(request.param)
    yield server
    server.stop()


@pytest.fixture
def of_pg_dump() -> Iterator[CrashingServer]:
    """A server of the version of the one pg_dump that there is."""
    server = CrashingServer("15")
    yield server
    server.stop()


def run_of(server, name):
    with server.connect(name) as connection:
        return identity.fetch_run(connection, "outbox")


def test_it_changes_with_the_crash_of_a_backend_and_not_with_a_clean_restart(server):
    name = server.create("outbox_template")
    first = run_of(server, name)
    assert run_of(server, name) == first
    with server.crashed():
        pass
    second = run_of(server, name)
    assert second != first

    server.restart()
    assert run_of(server, name) == second


def test_a_copy_of_the_database_has_another(server):
    name = server.create("outbox_template")
    first = run_of(server, name)
    copy = server.create(name)
    with server.connect(copy) as connection:
        assert connection.execute("SELECT id::text FROM outbox.server_runs").fetchone() == (first,), "it came along"
    assert run_of(server, copy) != first
    assert run_of(server, copy) == run_of(server, copy)
    assert run_of(server, name) == first


def test_a_restored_dump_does_not_bring_it_back(of_pg_dump):
    """Into the same database, as `pg_restore --clean` does."""
    server = of_pg_dump
    name = server.create("outbox_template")
    first = run_of(server, name)
    programs = binaries(server.version)
    dump = subprocess.run(
        [programs / "pg_dump", "--clean", server.uri(name)], check=True, capture_output=True, text=True
    ).stdout
    assert first in dump, "a dump has the rows of unlogged tables"
    with server.crashed():
        pass
    subprocess.run([programs / "psql", "-q", server.uri(name)], check=True, capture_output=True, text=True, input=dump)
    assert run_of(server, name) != first


def test_two_sessions_that_ask_first_get_the_same(server):
    name = server.create("outbox_template")
    with server.connect(name, autocommit=False) as one, server.connect(name) as other:
        one.execute("SELECT outbox.server_run()")
        other.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("SELECT outbox.server_run()")
        one.rollback()
        first = identity.fetch_run(other, "outbox")
        assert identity.fetch_run(one, "outbox") == first


def test_a_promoted_standby_has_another():
    primary = Primary()
    try:
        name = primary.create("outbox_template")
        first = run_of(primary, name)
        with primary.copied(standby=True) as standby:
            primary.wait_received(standby)
            standby.promote()
            assert run_of(standby, name) not in (first, "")
    finally:
        primary.stop()


def test_what_a_range_was_opened_with_is_forgotten_after_a_crash(database):
    """A batch that is read again keeps its snapshot range. Under another run that range may name ids that return."""
    connection, reader = database.connect(), MessageReader(build_source(cursor="Snapshot"))
    store = "INSERT INTO outbox.messages (message_type, data) VALUES ('t', '{}')"
    start = Checkpoint(0, 1, SnapshotRange(fetch_snapshot(connection)))
    connection.execute(store)
    opened = reader.fetch(connection, start, 10).examined
    connection.execute(store)
    assert reader.fetch(connection, start, 10).examined == opened
    reader.forget()
    found = reader.fetch(connection, start, 10)
    assert (len(found), found.examined == opened) == (2, False)
