"""The server ends a handler's idle transaction whatever the handler did last: a pipeline too, which stops its timer."""

from __future__ import annotations

import contextlib
import uuid

import psycopg
import pytest
from psycopg import sql

from outbox_core.processor.outcomes import HeldLease
from outbox_worker.ownership.heartbeat import Ownership
from outbox_worker.postgres.transactions.guard import GuardedConnection
from tests.support.servers.postgres import VERSIONS, wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, Outbox, build_config

INSERT = "INSERT INTO public.effects VALUES (%s)"
IDLE_LIMIT = 0.5


def execute_once(connection):
    connection.execute(INSERT, [1])


def execute_many(connection):
    connection.cursor().executemany(INSERT, [(1,), (2,)])


def execute_in_a_pipeline(connection):
    with connection.pipeline():
        connection.execute(INSERT, [1])
        connection.execute(INSERT, [2])


def fail_behind_a_savepoint(connection):
    with contextlib.suppress(psycopg.errors.UniqueViolation), connection.transaction():
        connection.cursor().executemany(INSERT, [(1,), (1,)])


def copy_in(connection):
    with connection.cursor().copy("COPY public.effects FROM STDIN") as copy:
        copy.write_row((1,))


def stream(connection):
    assert list(connection.cursor().stream("SELECT 1")) == [(1,)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "last_act",
    [
        execute_once,
        execute_many,
        execute_in_a_pipeline,
        fail_behind_a_savepoint,
        copy_in,
        stream,
    ],
)
def test_a_transaction_left_idle_is_ended_after(servers, version, last_act):
    with servers.database(version) as database:
        watcher = database.direct()
        watcher.execute("CREATE TABLE public.effects (n int UNIQUE)")
        owned = database.direct()
        owned.execute(f"BEGIN; SET LOCAL idle_in_transaction_session_timeout = '{IDLE_LIMIT}s'")
        handed = GuardedConnection(owned, "mark")
        last_act(handed)
        wait_until(
            lambda: (
                watcher.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [owned.info.backend_pid]
                ).fetchone()
                == (0,)
            ),
            "the server ended the session",
            seconds=IDLE_LIMIT + 2.0,
        )
        assert watcher.execute("SELECT count(*) FROM public.effects").fetchone() == (0,)


@pytest.mark.parametrize("kept", [True, False], ids=["the lease is ours", "the lease is lost"])
def test_the_heartbeat_keeps_a_computing_handlers_transaction_while(servers, kept):
    with servers.database() as database:
        owned, watcher = database.direct(), database.direct()
        lease, ownership = HeldLease(0, 1, uuid.uuid4()), Ownership(3600.0)
        ownership.note_lease(lease)
        owned.execute(f"BEGIN; SET LOCAL idle_in_transaction_session_timeout = '{IDLE_LIMIT}s'")
        ownership.enter(owned)
        if not kept:
            ownership.lose_lease(lease, "another has it")
        age = "SELECT extract(epoch FROM clock_timestamp() - xact_start) FROM pg_stat_activity WHERE pid = %s"

        def over():
            ownership.touch_transaction()
            found = watcher.execute(age, [owned.info.backend_pid]).fetchone()
            return found is None or found[0] > 2 * IDLE_LIMIT

        wait_until(over, "twice the limit passed, or the server ended it")
        assert (watcher.execute(age, [owned.info.backend_pid]).fetchone() is not None) is kept


@pytest.mark.parametrize("mode", [{}, {"mode": "Competing", "competing": {}}], ids=["Ordered", "Competing"])
def test_a_batch_may_take_longer_than_a_transaction_timeout_of_the_database(servers, workers, mode):
    """PostgreSQL has it from 17 on; how long a batch may take is for delivery.timeout to say."""
    with servers.database("18") as database:
        outbox = Outbox(database)
        name = sql.Identifier(database.name)
        outbox.connection.execute(sql.SQL("ALTER DATABASE {} SET transaction_timeout = '300ms'").format(name))
        outbox.produce(3)
        handler = f"{PYTHON_HANDLER}    import time; time.sleep(1)\n"
        workers.start(build_config(database, PYTHON_TARGET, delivery=mode), database.uri(), handler=handler)
        wait_until(lambda: outbox.count() == 3, "the batch is handled", 20)
        workers.stop()
