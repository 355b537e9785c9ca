"""A table of mode Competing is emptied when nobody's snapshot is from when it was needed, and not before."""

from __future__ import annotations

import pytest

from outbox_worker.postgres.feeds import competing
from tests.support.database.consuming import JOBS, SETTINGS, claim, cut, drain, join, maintain, produce, put, taker
from tests.support.servers.postgres import wait_until

EVERYTHING = """
SELECT 'batch ' || b.id FROM outbox.competing_batches b
UNION ALL SELECT 'dispatch position ' || f.id FROM outbox.competing_dispatch_positions f
UNION ALL SELECT 'message ' || m.position FROM outbox.queue_jobs m ORDER BY 1"""
LOOKS = 8


@pytest.fixture
def connection(database):
    """A processor over a queue of 15 messages."""
    connection = database.connect()
    claim(connection)
    competing.ensure_queue(connection, "outbox", "jobs", create=True)
    join(connection, JOBS)
    put(connection, 15)
    return connection


@pytest.fixture
def by():
    return taker(settings=JOBS, limit=5)


def rotate(connection, looks=1):
    """Return what was emptied in so many looks."""
    emptied = []
    for _ in range(looks):
        row = connection.execute("SELECT outbox.rotate_competing() || outbox.rotate_queue('orders', '0', 0)").fetchone()
        emptied += row[0]
    return emptied


def move_on(connection):
    """Let the next batches and dispatch positions go into other tables."""
    connection.execute(
        "SELECT setval('outbox.competing_batch_ids', 1024 + (SELECT last_value FROM outbox.competing_batch_ids)), "
        "setval('outbox.competing_dispatch_position_ids', "
        "512 + (SELECT last_value FROM outbox.competing_dispatch_position_ids))"
    )


def snapshot(database):
    """As pg_dump begins: a snapshot, and no lock yet."""
    session = database.direct(autocommit=False)
    session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    session.execute("SELECT 1")
    return session


def test_a_snapshot_from_when_a_batch_was_in_hand_sees_it_and_all_that_was_owed(database, connection, by):
    claimed = cut(connection, by)
    dump = snapshot(database)
    owed = connection.execute(EVERYTHING).fetchall()
    assert by.complete(connection, claimed, claimed.upto, claimed.count)
    drain(connection, by)
    move_on(connection)
    assert rotate(connection, LOOKS) == []
    assert dump.execute(EVERYTHING).fetchall() == owed
    dump.close()
    kinds = {name.rstrip("0123") for name in rotate(connection, LOOKS)}
    assert kinds == {"competing_batches_", "competing_dispatch_positions_", "queue_jobs_"}


def test_whoever_imports_the_snapshot_of_a_session_that_ends_between_two_looks_sees_it_too(database, connection, by):
    claimed = cut(connection, by)
    leader = snapshot(database)
    (name,) = leader.execute("SELECT pg_export_snapshot()").fetchone()
    owed = connection.execute(EVERYTHING).fetchall()
    assert by.complete(connection, claimed, claimed.upto, claimed.count)
    drain(connection, by)
    move_on(connection)
    rotate(connection, 2)
    follower = database.direct(autocommit=False)
    follower.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    follower.execute(f"SET TRANSACTION SNAPSHOT '{name}'")
    leader.close()
    assert rotate(connection, LOOKS) == []
    assert follower.execute(EVERYTHING).fetchall() == owed
    follower.close()


@pytest.mark.parametrize("looks", range(5))
def test_a_snapshot_taken_between_any_two_looks_sees_every_lane(database, connection, by, looks):
    drain(connection, by)
    move_on(connection)
    rotate(connection, looks)
    dump = snapshot(database)
    rotate(connection, LOOKS)
    priorities = "SELECT count(DISTINCT priority) FROM outbox.competing_dispatch_positions"
    assert dump.execute(priorities).fetchone() == connection.execute(priorities).fetchone() == (10,)
    dump.close()
    assert drain(connection, by) == []


def test_a_batch_that_is_done_after_the_first_look_is_seen_by_who_came_before_that(database, connection, by):
    """Its number was drawn long before it was stored: the table looked empty meanwhile."""
    drain(connection, by)
    (number,) = connection.execute("SELECT nextval('outbox.competing_batch_ids')").fetchone()
    move_on(connection)
    rotate(connection, 2)
    put(connection, 1)
    cut(connection, by)
    connection.execute("UPDATE outbox.competing_batches SET id = %s", (number,))
    dump = snapshot(database)
    connection.execute("DELETE FROM outbox.competing_batches")
    assert not [name for name in rotate(connection, LOOKS) if "batches" in name]
    assert dump.execute("SELECT count(*) FROM outbox.competing_batches").fetchone() == (1,)
    dump.close()


def test_a_session_that_is_no_dump_counts_for_the_time_in_which_a_dump_takes_its_locks(database, connection):
    def holds(**settled):
        more = "".join(f", '{value}'" for value in settled.values())
        now = "clock_timestamp(), pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        (held,) = connection.execute(f"SELECT outbox.holds_older_snapshot({now}{more})").fetchone()
        return held

    report = snapshot(database)
    put(connection, 1)
    assert holds(), "it may be a dump that is about to take its locks"
    assert not holds(settled="0 s"), "it is no dump: it would have its locks"
    report.execute("SET application_name = 'pg_dump'")
    assert holds(settled="0 s"), "a dump of very many tables takes its locks for as long as it needs"
    report.close()
    wait_until(lambda: not holds(), "its server process ended")


def test_over_the_outbox_too(database):
    connection = database.connect()
    claim(connection)
    join(connection, SETTINGS)
    produce(connection, 30)
    drain(connection, taker())
    move_on(connection)
    emptied = [name for _ in range(LOOKS) for name in maintain(connection)]
    assert {name.rstrip("0123") for name in emptied} == {"competing_batches_", "competing_dispatch_positions_"}
