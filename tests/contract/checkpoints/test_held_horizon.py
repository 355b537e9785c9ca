"""Somebody else's open snapshot keeps dead versions of our rows: what is stored often must not slow down behind it."""

from __future__ import annotations

from statistics import median
from uuid import uuid4

import psycopg
import pytest

from tests.support.database.contract import own, put, store
from tests.support.servers.postgres import EVERYWHERE

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


@EVERYWHERE
def test_an_older_snapshot_sees_every_checkpoint_whatever_was_stored_since(each_database):
    """So a dump has them all."""
    connection = each_database.direct()
    put(connection, (7, 0))
    put(connection, (9, 4), "payments")
    everything = "SELECT c::text FROM outbox.processor_checkpoints c ORDER BY 1"
    before = connection.execute(everything).fetchall()
    stranger = each_database.connect(autocommit=False)
    stranger.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    stranger.execute("SELECT 1")
    for n in range(3000):
        assert store(connection, (7, n + 1), (7, n)) == 1
    assert stranger.execute(everything).fetchall() == before
    with pytest.raises(psycopg.errors.SerializationFailure):
        store(stranger, (7, 1))


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
