"""Somebody else's open snapshot keeps dead versions of our rows: what is stored often must not slow down behind it."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from uuid import uuid4

import psycopg
import pytest

from outbox_core.checkpoint import Checkpoint
from outbox_worker.postgres import checkpoints
from outbox_worker.postgres.key import ProcessorKey
from tests.support.concurrency import background, wait_until_blocked
from tests.support.contract import own, put, store

STORES = 4000
STORE = """EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT outbox.store_processor_checkpoint(
    'orders', 0, '7'::xid8, %s, '7'::xid8, %s, %s::bigint, %s::uuid)"""


def buffers(connection, position, epoch, token):
    """Pages that one store touches, dead versions of the row included."""
    plan = connection.execute(STORE, (position + 1, position, epoch, token)).fetchone()[0][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


@pytest.fixture
def owner(database):
    token = str(uuid4())
    own(database, token)
    return token


@pytest.mark.parametrize("owned", [True, False], ids=["the owner", "another program"])
def test_a_checkpoint_stored_often_is_found_at_once(database, owned):
    connection = database.direct()
    token = str(uuid4())
    owner = (own(database, token), token) if owned else (None, None)
    assert store(connection, (7, 0), owner=owner) == 1
    # A table of one page would be scanned whole, and the plan kept while it grows.
    connection.execute("ANALYZE outbox.processor_checkpoints")
    fresh = [buffers(connection, n, *owner) for n in range(20)]
    stranger = database.connect(autocommit=False)
    stranger.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    stranger.execute("SELECT 1 FROM outbox.processor_checkpoints")

    for n in range(20, STORES):
        assert store(connection, (7, n + 1), (7, n), owner=owner) == 1
    held = [buffers(connection, n, *owner) for n in range(STORES, STORES + 200)]
    dead = connection.execute("SELECT pg_relation_size('outbox.processor_checkpoints') / 8192").fetchone()[0]

    assert dead > 30, "the snapshot keeps every version"
    # A hundred versions are two pages; once in a page's worth the primary key's check looks at all of them.
    assert median(held) <= median(fresh) + 25
    assert connection.execute("SELECT count(*) FROM outbox.processor_checkpoints").fetchone() == (1,)


def rewrite(connection, size):
    return connection.execute("SELECT outbox.rewrite_checkpoints(%s)", (size,)).fetchone()[0]


def sized(connection):
    return connection.execute("SELECT pg_total_relation_size('outbox.processor_checkpoints')").fetchone()[0]


def everything(connection):
    return connection.execute("SELECT c::text FROM outbox.processor_checkpoints c ORDER BY 1").fetchall()


def test_what_a_snapshot_keeps_of_checkpoints_is_bounded(each_database):
    connection = each_database.direct()
    put(connection, (7, 0))
    put(connection, (9, 4), "payments")
    stranger = each_database.connect(autocommit=False)
    stranger.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    stranger.execute("SELECT 1")
    for n in range(3000):
        assert store(connection, (7, n + 1), (7, n)) == 1
    before, large = everything(connection), sized(connection)
    assert large > 200_000

    assert rewrite(connection, large) is False, "it is no larger than that"
    assert rewrite(connection, 100_000) is True

    assert everything(connection) == before
    assert sized(connection) < 100_000
    assert store(connection, (7, 3001), (7, 3000)) == 1
    assert rewrite(connection, 100_000) is False, "it is small now"
    assert everything(stranger) == [], "the price: TRUNCATE is not MVCC-safe"
    # Whoever holds the snapshot would write with it: it is told to begin again, and moves nothing back.
    with pytest.raises(psycopg.errors.SerializationFailure):
        store(stranger, (7, 1))


def test_a_rewrite_waits_for_nobody(each_database):
    connection, busy = each_database.direct(), each_database.direct(autocommit=False)
    put(connection, (7, 0))
    assert store(busy, (7, 1), (7, 0)) == 1

    began = time.monotonic()
    assert rewrite(connection, 1) is False
    assert time.monotonic() - began < 5
    busy.commit()
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    assert rewrite(connection, 1) is False, "this snapshot may be older than a checkpoint"
    connection.execute("COMMIT")
    assert rewrite(connection, 1) is True


def test_a_table_with_a_trigger_of_somebody_is_not_rewritten(each_database):
    connection = each_database.direct()
    put(connection, (7, 1))
    with connection.transaction(force_rollback=True):
        connection.execute("CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
        connection.execute(
            "CREATE TRIGGER note BEFORE INSERT ON outbox.processor_checkpoints FOR EACH ROW EXECUTE FUNCTION note()"
        )
        assert rewrite(connection, 1) is False
    assert rewrite(connection, 1) is True


def test_whoever_comes_during_a_rewrite_sees_the_checkpoint(each_database):
    connection, rewriting = each_database.direct(), each_database.direct(autocommit=False)
    assert store(connection, (7, 1)) == 1
    looks = [
        lambda session: checkpoints.load_unedited(session, ProcessorKey("outbox", "orders")),
        lambda session: session.execute("SELECT * FROM outbox.find_edit('orders', 0)").fetchone(),
        lambda session: store(session, (7, 2), (7, 1)),
    ]
    answers = []
    for look in looks:
        assert rewrite(rewriting, 1) is True
        with background(partial(look, each_database.direct())) as answer:
            wait_until_blocked(each_database, answer)
            rewriting.commit()
        answers.append(answer.result())

    assert answers[0].pair == Checkpoint(7, 1)
    assert answers[1:] == [None, 1]


def test_a_lease_is_not_written_for_each_batch(database, owner):
    connection = database.direct()
    connection.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp() + interval '15 s'")
    keep = "SELECT outbox.keep_lease('orders', 0, 1, %s::uuid, interval '15 s')"
    where = "SELECT ctid::text, expires_at FROM outbox.processor_leases"
    before = connection.execute(where).fetchone()

    for _ in range(50):
        assert connection.execute(keep, (owner,)).fetchone() == (True,)
    assert connection.execute(where).fetchone() == before

    connection.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp() + interval '5 s'")
    assert connection.execute(keep, (owner,)).fetchone() == (True,)
    left = "SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM outbox.processor_leases"
    assert connection.execute(left).fetchone()[0] > 14

    connection.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")
    assert connection.execute(keep, (owner,)).fetchone() == (False,)
    assert connection.execute(keep, (str(uuid4()),)).fetchone() == (False,)
