"""A divided processor in the database: the hash, the common start, membership and leases that lapse together."""

from __future__ import annotations

import random
from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.partition import slot_of
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints
from tests.support.database.stored import stored_pair
from tests.support.servers.postgres import EVERYWHERE, wait_until

KEY = ProcessorKey("outbox", "orders")
OTHER = ProcessorKey("outbox", "orders", 1)
HOUR = timedelta(hours=1)
START = Checkpoint(50, 7)


@pytest.fixture
def connection(each_database):
    connection = each_database.connect()
    resource = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
    assert ownership.claim(connection, KEY, resource).granted
    return connection


def acquire(connection, key=KEY, token=None, lease=HOUR):
    token = token or uuid4()
    answer = ownership.acquire_lease(connection, key, claim_uid="u1", pod=f"pod-{token}", token=token, lease=lease)
    assert answer.acquired
    return answer.epoch, token


def renew(connection, token, lease=HOUR, uid="u1"):
    return partitions.renew_membership(connection, KEY, claim_uid=uid, pod="pod-1", token=token, lease=lease)


def begin(connection, key, owner, start=START, count=4, by="column partition_key"):
    return partitions.begin(connection, key, HeldLease(0, owner[0], owner[1]), count=count, by=by, start=start)


def test_sql_hashes_as_python_does(connection):
    chance = random.Random(7)
    alphabet = [chr(code) for code in (*range(1, 0x250), *range(0x4E00, 0x4E40), 0x1F4E6, 0x10FFFF)]
    keys = ["", *("".join(chance.choices(alphabet, k=chance.randrange(1, 30))) for _ in range(2000))]

    rows = connection.execute(
        "SELECT outbox.hash_slot(k) FROM unnest(%s::text[]) WITH ORDINALITY AS u (k, n) ORDER BY n", [keys]
    ).fetchall()

    assert [slot for (slot,) in rows] == [slot_of(key) for key in keys]
    assert set(range(64)) == {slot for (slot,) in rows}


class TestBegin:
    def test_the_first_owner_starts_all_partitions_at_one_pair(self, connection):
        answer = begin(connection, OTHER, acquire(connection, OTHER))

        assert (answer.owned, answer.count, answer.by, answer.begun) == (True, 4, "column partition_key", True)
        pairs = checkpoints.load_all(connection, KEY)
        assert {p: stored.pair for p, stored in pairs.items()} == dict.fromkeys(range(4), START)

    def test_a_later_one_starts_there_too_whatever_it_asks(self, connection):
        begin(connection, OTHER, acquire(connection, OTHER))

        answer = begin(connection, KEY, acquire(connection), start=Checkpoint(99, 1), count=8, by="data {id}")

        assert (answer.count, answer.by, answer.begun) == (4, "column partition_key", False)
        assert stored_pair(connection, KEY) == START

    @EVERYWHERE
    def test_without_the_lease_nothing_is_begun(self, connection):
        epoch, token = acquire(connection)

        answer = begin(connection, KEY, (epoch + 1, token))

        assert (answer.owned, answer.count, answer.begun) == (False, None, False)
        assert checkpoints.load_all(connection, KEY) == {}

    def test_a_processor_that_was_never_divided_stays_so(self, connection):
        connection.execute("INSERT INTO outbox.processor_checkpoints VALUES ('orders', 0, '10', 1)")

        answer = begin(connection, KEY, acquire(connection))

        assert (answer.owned, answer.count, answer.begun) == (True, None, False)

    @EVERYWHERE
    def test_of_two_at_once_one_begins_and_both_know_the_same(self, each_database, connection):
        first, second = (each_database.connect(autocommit=False) for _ in range(2))
        one, other = acquire(connection, KEY), acquire(connection, OTHER)
        assert begin(first, KEY, one).begun
        second.execute("SET LOCAL lock_timeout = '10s'")
        first.commit()

        answer = begin(second, OTHER, other, start=Checkpoint(99, 1), count=2)

        assert (answer.count, answer.begun) == (4, False)


class TestMembership:
    def test_one_call_renews_everything_that_a_process_owns(self, connection):
        token = uuid4()
        short = timedelta(seconds=30)
        epochs = {p: acquire(connection, ProcessorKey("outbox", "orders", p), token, short)[0] for p in (0, 2, 3)}
        acquire(connection, OTHER)

        assert renew(connection, token) == epochs
        assert partitions.fetch_owners(connection, KEY, claim_uid="u1", count=4).members == (token,)
        left = connection.execute(
            "SELECT partition FROM outbox.processor_leases WHERE expires_at < clock_timestamp() + '1 minute'"
        ).fetchall()
        assert left == []

    @EVERYWHERE
    def test_what_lapsed_is_not_renewed(self, connection):
        _, token = acquire(connection, lease=timedelta(0))

        assert renew(connection, token) == {}

    def test_membership_and_leases_lapse_together(self, connection):
        token, brief = uuid4(), timedelta(milliseconds=300)
        acquire(connection, token=token, lease=brief)
        renew(connection, token, brief)
        seen = partitions.fetch_owners(connection, KEY, claim_uid="u1", count=4)
        assert (seen.members, seen.owners) == ((token,), {0: token})

        wait_until(lambda: partitions.fetch_owners(connection, KEY, claim_uid="u1", count=4).owners == {}, "it lapses")
        assert partitions.fetch_owners(connection, KEY, claim_uid="u1", count=4).members == ()

    def test_the_oldest_comes_first(self, connection):
        tokens = [uuid4() for _ in range(3)]
        for token in tokens:
            renew(connection, token)
        renew(connection, tokens[0])

        assert partitions.fetch_owners(connection, KEY, claim_uid="u1", count=4).members == tuple(tokens)

    def test_the_dead_are_forgotten(self, connection):
        brief = timedelta(milliseconds=1)
        renew(connection, uuid4(), brief)
        wait_until(
            lambda: (
                renew(connection, uuid4(), brief) == {}
                and connection.execute("SELECT count(*) FROM outbox.processor_members").fetchone()[0] < 10
            ),
            "few rows",
        )
        for _ in range(20):
            renew(connection, uuid4(), brief)
        assert connection.execute("SELECT count(*) FROM outbox.processor_members").fetchone()[0] < 20

    @EVERYWHERE
    def test_without_the_claim_nobody_is_a_member(self, connection):
        renew(connection, uuid4(), uid="another resource")

        assert connection.execute("SELECT count(*) FROM outbox.processor_members").fetchone() == (0,)

    def test_who_leaves_gives_everything_back_at_once(self, connection):
        _, token = acquire(connection)
        renew(connection, token)

        partitions.end_membership(connection, KEY, token)

        seen = partitions.fetch_owners(connection, KEY, claim_uid="u1", count=4)
        assert (seen.members, seen.owners) == ((), {})
        acquire(connection)
