"""An owner frozen with SIGSTOP at the four places, past its lease: a standby takes over, nothing of the first stays.

The client is a real process; its transaction carries the bounds that a worker's has. Effects are rows, so that a commit
that should not be would be seen.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints
from tests.support.database.client import LOST, Client
from tests.support.database.contract import stored
from tests.support.servers.postgres import POOLED, wait_until

KEY = ProcessorKey("outbox", "orders")
RESOURCE = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
LEASE, HOUR = timedelta(seconds=1), timedelta(hours=1)
FROZEN, STANDBY = uuid4(), uuid4()
BOUNDS = """SELECT set_config('idle_in_transaction_session_timeout', '800ms', true),
                   set_config('tcp_user_timeout', '800', true)"""
EFFECT = "INSERT INTO public.effects VALUES ('of the frozen one')"
STORE = f"SELECT outbox.store_processor_checkpoint('orders', 0, '20', 5, '10', 1, 1, '{FROZEN}')"


@pytest.fixture(params=["15", POOLED])
def place(servers, request):
    with servers.database(request.param) as database:
        database.direct().execute("CREATE TABLE public.effects (what text)")
        database.direct().execute("INSERT INTO outbox.processor_checkpoints VALUES ('orders', 0, '10', 1)")
        yield database


@pytest.fixture
def owner(place):
    connection = place.connect()
    assert ownership.claim(connection, KEY, RESOURCE).granted
    lease = ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="pod-1", token=FROZEN, lease=HOUR)
    assert lease.epoch == 1
    client = Client(place.uri())
    yield client
    client.close()


def freeze(database, owner):
    """Its last heartbeat, then silence."""
    assert ownership.renew_lease(database.connect(), KEY, HeldLease(0, 1, FROZEN), lease=LEASE)
    owner.freeze()


def take_over(database):
    """What a standby does: ask until it is the owner. Returns its epoch."""
    standby = database.connect()

    def acquired():
        return ownership.acquire_lease(standby, KEY, claim_uid="u1", pod="pod-2", token=STANDBY, lease=HOUR).acquired

    wait_until(acquired, "the standby takes over", 15)
    return ownership.acquire_lease(standby, KEY, claim_uid="u1", pod="pod-2", token=STANDBY, lease=HOUR).epoch


def effects(database):
    return [row[0] for row in database.direct().execute("SELECT what FROM public.effects").fetchall()]


def nothing_happened(database):
    assert effects(database) == []
    assert stored(database.direct()) == (10, 1)


def work_on(database, epoch):
    """The new owner handles the same batch."""
    batch = database.connect(autocommit=False)
    batch.execute("INSERT INTO public.effects VALUES ('of the standby')")
    answer = checkpoints.store(
        batch, KEY, HeldLease(0, epoch, STANDBY), new=Checkpoint(20, 5), expected=Checkpoint(10, 1)
    )
    assert answer is StoreAnswer.STORED
    batch.commit()
    assert effects(database) == ["of the standby"]
    assert stored(database.direct()) == (20, 5)


def test_between_batches(place, owner):
    assert owner.run("SELECT 1") == [[1]]
    owner.run("COMMIT")
    freeze(place, owner)
    epoch = take_over(place)
    owner.thaw()

    owner.run(EFFECT)
    assert owner.run(STORE) == [[4]]
    owner.run("ROLLBACK")

    nothing_happened(place)
    work_on(place, epoch)


def test_before_the_store(place, owner):
    owner.run(EFFECT)
    freeze(place, owner)
    epoch = take_over(place)
    owner.thaw()

    assert owner.run(STORE) == [[4]]
    owner.run("ROLLBACK")

    nothing_happened(place)
    work_on(place, epoch)


def test_before_the_store_with_bounds_the_server_ends_it(place, owner):
    owner.run(EFFECT)
    owner.run(BOUNDS)
    freeze(place, owner)
    epoch = take_over(place)
    open_transactions = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    wait_until(lambda: place.direct().execute(open_transactions).fetchone() is None, "the server ends the session")
    owner.thaw()

    assert owner.run(STORE) in (LOST, "25P03")

    nothing_happened(place)
    work_on(place, epoch)


def test_between_store_and_commit(place, owner):
    owner.run(EFFECT)
    assert owner.run(STORE) == [[1]]
    owner.run(BOUNDS)
    freeze(place, owner)
    epoch = take_over(place)
    owner.thaw()

    assert owner.run("COMMIT") in (LOST, "25P03")

    nothing_happened(place)
    work_on(place, epoch)


def test_between_store_and_commit_the_fence_holds_until_the_server_ends_it(place, owner):
    """Without the bound on idle transactions no standby could take over: this is why workers set it."""
    owner.run(EFFECT)
    assert owner.run(STORE) == [[1]]
    freeze(place, owner)
    standby = place.connect()
    wait_until(
        lambda: standby.execute("SELECT expires_at < clock_timestamp() FROM outbox.processor_leases").fetchone()[0],
        "the lease lapses",
    )

    refused = ownership.acquire_lease(standby, KEY, claim_uid="u1", pod="pod-2", token=STANDBY, lease=LEASE)
    owner.thaw()

    assert not refused.acquired
    assert owner.run("COMMIT") == []
    assert effects(place) == ["of the frozen one"]
    assert stored(place.direct()) == (20, 5)


@pytest.mark.parametrize("store_first", [False, True], ids=["store after handling", "store before handling"])
def test_inside_a_statement(place, owner, store_first):
    if store_first:
        assert owner.run(STORE) == [[1]]
    owner.run(EFFECT)
    owner.run(BOUNDS)
    owner.send("SELECT pg_sleep(1.5)")
    sleeping = "SELECT 1 FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(1.5)' AND state = 'active'"
    wait_until(lambda: place.direct().execute(sleeping).fetchone() is not None, "the statement runs")
    freeze(place, owner)
    epoch = take_over(place)
    owner.thaw()

    owner.receive()
    assert owner.run("COMMIT" if store_first else STORE) in (LOST, "25P03", [[4]])
    owner.run("ROLLBACK")

    nothing_happened(place)
    work_on(place, epoch)


def test_inside_a_statement_whose_result_nobody_takes(place, owner):
    """The server cannot hand the rows over and is not idle: the bound on unacknowledged data ends it."""
    assert owner.run(STORE) == [[1]]
    owner.run(BOUNDS)
    owner.send("SELECT repeat('x', 1000) FROM generate_series(1, 100000)")
    freeze(place, owner)
    epoch = take_over(place)
    owner.thaw()
    owner.receive()

    assert owner.run("COMMIT") in (LOST, "25P03")

    nothing_happened(place)
    work_on(place, epoch)
