"""A dump that is taken while everything runs, and somebody's snapshot is old, has all that a restore needs."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support.database.consuming import (
    claim,
    drain,
    find,
    join,
    look,
    maintain,
    positions,
    produce,
    taker,
)
from tests.support.database.contract import store
from tests.support.servers.postgres import SCHEMA, binaries, wait_until

SECONDS = float(os.environ.get("OUTBOX_DUMPS_SECONDS", "12"))
pytestmark = pytest.mark.timeout(SECONDS + 240)
PROCESSORS = [f"processor-{n}" for n in range(4)]
_CHECKPOINTS = re.compile(r"^COPY outbox\.processor_checkpoints .*?^\\\.$", re.MULTILINE | re.DOTALL)


def dump(database, *options):
    """The whole database, as pg_dump writes it."""
    done = subprocess.run(
        [str(binaries("15") / "pg_dump"), *options, database.uri()], capture_output=True, text=True, check=True
    )
    return done.stdout


@contextmanager
def old_snapshot(database):
    """Somebody's report, that takes all day."""
    stranger = database.direct(autocommit=False)
    stranger.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    stranger.execute("SELECT 1")
    yield
    stranger.close()


@contextmanager
def running(*loops):
    """Each in a thread of its own, again and again, until the block ends; what one of them raises is raised here."""
    done = threading.Event()

    def repeat(loop):
        while not done.is_set():
            loop()

    with ThreadPoolExecutor(len(loops)) as pool:
        results = [pool.submit(repeat, loop) for loop in loops]
        try:
            yield
        finally:
            done.set()
    for each in results:
        each.result()


def storing(database, processor):
    """One store after the other."""
    connection = database.direct()
    connection.execute("SET synchronous_commit = off")
    assert store(connection, (7, 0), processor_id=processor) == 1
    position = 0

    def loop():
        nonlocal position
        for _ in range(100):
            assert store(connection, (7, position + 1), (7, position), processor_id=processor) == 1
            position += 1

    return loop


def test_every_dump_beside_stores_has_every_checkpoint(servers):
    with servers.database("15") as database, old_snapshot(database):
        taken, until = 0, time.monotonic() + SECONDS
        with running(*[storing(database, processor) for processor in PROCESSORS]):
            while time.monotonic() < until:
                (rows,) = _CHECKPOINTS.findall(dump(database, f"--schema={SCHEMA}"))
                assert [processor for processor in PROCESSORS if f"\n{processor}\t" not in rows] == []
                taken += 1
        stored = database.direct().execute("SELECT sum(last_processed_position) FROM outbox.processor_checkpoints")
        print(f"{taken} dumps beside {stored.fetchone()[0]} stores")
        assert taken > SECONDS / 5


def consuming(database, emptied):
    """A producer and a consumer whose effects are in the transaction that completes the batch; tables turn quickly."""
    connection, by = database.direct(), taker(limit=3)
    connection.execute("SET synchronous_commit = off; CREATE TABLE handled (position bigint)")
    claim(connection)
    join(connection)

    def loop():
        produce(connection, 10)
        while (claimed := look(connection, by) or find(connection, by)) is not None:
            with connection.transaction():
                connection.execute("INSERT INTO handled SELECT unnest(%s)", (positions(connection, by, claimed),))
                assert by.complete(connection, claimed, claimed.upto, claimed.count)
        connection.execute(
            "SELECT setval('outbox.competing_batch_ids', 250 + (SELECT last_value FROM outbox.competing_batch_ids)), "
            "setval('outbox.competing_dispatch_position_ids', "
            "125 + (SELECT last_value FROM outbox.competing_dispatch_position_ids))"
        )
        emptied.extend(maintain(connection))

    return loop


def restored(servers, text):
    """What is handled in the end by who goes on from a dump: once each, and nothing else."""
    with servers.database("15", template="empty_template") as copy:
        command = [str(binaries("15") / "psql"), "-q", "-v", "ON_ERROR_STOP=1", copy.uri()]
        subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.DEVNULL)
        connection, by = copy.direct(), taker("two", limit=1000)
        connection.execute("UPDATE outbox.competing_batches SET expires_at = '-infinity'")
        done = [row[0] for row in connection.execute("SELECT position FROM handled").fetchall()]
        there = connection.execute("SELECT position FROM outbox.messages").fetchall()
        return sorted(done + drain(connection, by)), sorted(row[0] for row in there)


def slow_dump(database):
    """As of a large database: a while passes between its snapshot and its locks, of which this table's is the first."""
    gate = database.direct(autocommit=False)
    gate.execute("LOCK TABLE outbox.applied_migrations IN ACCESS EXCLUSIVE MODE")
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(dump, database)
        time.sleep(0.5)
        gate.close()
        return text.result()


def test_from_every_dump_beside_consumers_all_is_handled_that_was_owed(servers):
    emptied: list[str] = []
    with servers.database("15") as database, running(consuming(database, emptied)):
        texts = [slow_dump(database) for _ in range(5)]
        wait_until(lambda: len({name[:-1] for name in emptied}) == 2, "tables are emptied between dumps")
    for text in texts:
        handled, there = restored(servers, text)
        assert handled == there
    print(f"{len(texts)} dumps, the last of {len(there)} messages; {len(emptied)} times a table was emptied")
    assert {name.rstrip("0123") for name in emptied} == {"competing_batches_", "competing_dispatch_positions_"}
