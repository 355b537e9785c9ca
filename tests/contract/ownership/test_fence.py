"""The fence: what a checkpoint that is being committed, a heartbeat and a takeover do to one another."""

from __future__ import annotations

import contextlib
import time
from uuid import UUID, uuid4

import psycopg
import pytest

from outbox_core.processor.outcomes import CommitUnknown, Failed, HeldLease
from outbox_core.progress.checkpoint import Checkpoint
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership.leases import Stuck, end_stuck_transactions
from outbox_worker.postgres.transactions.transaction import StoreRequest, TransactionRunner
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.contract import NOT_OWNER, NOTHING, STORED, own, put, store, stored
from tests.support.database.copying import COPY, wait_for_copy
from tests.support.servers.postgres import EVERYWHERE, wait_until

KEY = ProcessorKey("outbox", "orders")
OLD, NEW = str(uuid4()), str(uuid4())
RENEW = "SELECT outbox.renew_lease('orders', 0, %s, %s::uuid, '1 hour')"
ACQUIRE = "SELECT acquired, epoch FROM outbox.acquire_lease('orders', 0, 'u1', 'pod-2', %s::uuid, '1 hour')"
FORCE = "SELECT granted FROM outbox.claim_processor('orders', 'x', 'y', 'z', 'u9', true)"
LAPSE = "UPDATE outbox.processor_leases SET expires_at = clock_timestamp() - interval '1 second'"


@pytest.fixture
def owner(each_database):
    """A live owner with a row, and a transaction of it that has stored and not committed."""
    epoch = own(each_database, OLD)
    put(each_database.direct(), (10, 1))
    batch = each_database.connect(autocommit=False)
    assert store(batch, (20, 5), (10, 1), owner=(epoch, OLD)) == STORED
    return batch


@EVERYWHERE
def test_the_heartbeat_does_not_wait_for_the_batch(each_database, owner):
    assert each_database.connect().execute(RENEW, (1, OLD)).fetchone() == (True,)
    owner.commit()
    assert stored(each_database.direct()) == (20, 5)


@EVERYWHERE
def test_no_takeover_between_store_and_commit(each_database, owner):
    each_database.connect().execute(RENEW, (1, OLD))
    each_database.direct().execute(LAPSE)
    outsider = each_database.connect()

    with background(lambda: outsider.execute(FORCE).fetchone()) as forced:
        assert each_database.connect().execute(ACQUIRE, (NEW,)).fetchone() == (False, 1)
    assert forced.result() == (False,)

    owner.commit()
    assert each_database.connect().execute(ACQUIRE, (NEW,)).fetchone() == (True, 2)
    assert stored(each_database.direct()) == (20, 5)


@EVERYWHERE
def test_a_takeover_waits_briefly_for_a_commit(each_database, owner):
    each_database.direct().execute(LAPSE)
    standby = each_database.connect()

    with background(lambda: standby.execute(ACQUIRE, (NEW,)).fetchone()) as answer:
        wait_until_blocked(each_database, answer)
        owner.rollback()

    assert answer.result() == (True, 2)
    assert stored(each_database.direct()) == (10, 1)


@EVERYWHERE
def test_a_store_waits_for_a_takeover_and_is_told_4(each_database):
    epoch = own(each_database, OLD)
    put(each_database.direct(), (10, 1))
    takeover = each_database.direct(autocommit=False)
    # as claim_processor does it: the lock that fences, then the new holder
    takeover.execute("SELECT 1 FROM outbox.processor_leases FOR UPDATE")
    batch = each_database.connect(autocommit=False)

    with background(lambda: store(batch, (20, 5), (10, 1), owner=(epoch, OLD))) as answer:
        wait_until_blocked(each_database, answer)
        takeover.execute("UPDATE outbox.processor_leases SET epoch = 2, token = %s", (NEW,))
        takeover.commit()

    assert answer.result() == NOT_OWNER


@EVERYWHERE
def test_force_ends_the_lease_of_whoever_had_the_claim(each_database):
    epoch = own(each_database, OLD)
    batch = each_database.connect(autocommit=False)
    batch.execute("SELECT 1")

    assert each_database.connect().execute(FORCE).fetchone() == (True,)

    assert store(batch, (20, 5), NOTHING, owner=(epoch, OLD)) == NOT_OWNER
    acts = each_database.direct().execute("SELECT action, decided_by, reason FROM outbox.audit_log").fetchall()
    assert acts == [("TakeOver", "x/y/z", "claim of c/n/a taken by force")]


@EVERYWHERE
def test_a_refused_caller_leaves_no_lock_behind(each_database):
    epoch = own(each_database, OLD, lease="0 seconds")
    lapsed, script = each_database.connect(autocommit=False), each_database.connect(autocommit=False)
    assert store(lapsed, (20, 5), NOTHING, owner=(epoch, OLD)) == NOT_OWNER
    assert store(script, (20, 5)) == NOT_OWNER

    started = time.monotonic()
    assert each_database.connect().execute(ACQUIRE, (NEW,)).fetchone() == (True, 2)
    assert each_database.connect().execute(FORCE).fetchone() == (True,)
    assert time.monotonic() - started < 1.5


@EVERYWHERE
def test_a_lease_that_lapses_after_the_store_does_not_undo_it(each_database, owner):
    each_database.direct().execute(LAPSE)
    owner.commit()

    assert stored(each_database.direct()) == (20, 5)
    assert store(each_database.connect(), (30, 1), (20, 5), owner=(1, OLD)) == NOT_OWNER


@EVERYWHERE
def test_no_claim_is_made_while_a_caller_without_one_is_committing(each_database):
    script = each_database.connect(autocommit=False)
    assert store(script, (5, 5)) == STORED
    claim = "SELECT granted FROM outbox.claim_processor('orders', 'c', 'n', 'a', 'u1')"

    assert each_database.connect().execute(claim).fetchone() == (False,)
    script.commit()

    assert each_database.connect().execute(claim).fetchone() == (True,)
    assert stored(each_database.direct()) == (5, 5)


@EVERYWHERE
def test_expiry_is_judged_by_the_clock_and_not_by_the_transactions_start(each_database):
    old_transaction = each_database.connect(autocommit=False)
    old_transaction.execute("SELECT now()")
    own(each_database, OLD, lease="100 milliseconds")
    lapsed = "SELECT expires_at < clock_timestamp() FROM outbox.processor_leases"
    wait_until(lambda: old_transaction.execute(lapsed).fetchone() == (True,), "the lease lapses")

    assert store(old_transaction, (20, 5), NOTHING, owner=(1, OLD)) == NOT_OWNER
    assert old_transaction.execute(RENEW, (1, OLD)).fetchone() == (False,)
    assert old_transaction.execute(ACQUIRE, (NEW,)).fetchone() == (True, 2)


@EVERYWHERE
def test_a_transaction_that_its_process_leaves_idle_is_ended_by_the_server_within_the_lease(each_database):
    """A frozen process can end nothing itself, and keeps the fence locked until then."""
    epoch, watch = own(each_database, OLD), each_database.direct()
    put(watch, (10, 1))
    request = StoreRequest(HeldLease(0, epoch, UUID(OLD)), Checkpoint(10, 1), Checkpoint(20, 5), first=True)

    def freeze(transaction):
        inside = transaction.connection
        assert inside.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("1600ms",)
        (backend,) = inside.execute("SELECT pg_backend_pid()").fetchone()
        is_over = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s AND state LIKE 'idle in transaction%%'"
        wait_until(lambda: watch.execute(is_over, [backend]).fetchone() == (True,), "the server ended it")
        return 1

    answer = TransactionRunner(KEY, lease=2, timeout=60).run(
        each_database.connect(), request.lease.epoch, request, freeze
    )

    assert isinstance(answer, CommitUnknown | Failed)
    assert stored(watch) == (10, 1)


@EVERYWHERE
def test_what_waits_in_a_copy_is_ended_once_its_lease_lapsed_and_not_before(each_database):
    epoch = own(each_database, OLD)
    put(each_database.direct(), (10, 1))
    batch, standby = each_database.connect(), each_database.connect()
    lease = HeldLease(0, epoch, UUID(OLD))
    request = StoreRequest(lease, Checkpoint(10, 1), Checkpoint(20, 5), first=True)
    asked, ended = {1: None, 0: None, 2: 7}, []

    def copy_and_wait(transaction):
        copying = transaction.connection.cursor().copy(COPY)
        # Behind PgBouncer psycopg stumbles over two errors at once.
        with contextlib.suppress(psycopg.OperationalError, ValueError), copying as copy:
            wait_for_copy(each_database)
            ended.append(end_stuck_transactions(standby, KEY, asked).ended)
            each_database.direct().execute(LAPSE)
            assert standby.execute(ACQUIRE, (NEW,)).fetchone() == (False, epoch)
            ended.append(end_stuck_transactions(standby, KEY, asked).ended)
            wait_until(lambda: standby.execute(ACQUIRE, (NEW,)).fetchone()[0], "the standby is owner")
            copy.write("m\t{}\n")
        return 1  # nothing to commit is left

    happened = TransactionRunner(KEY, lease=3600, timeout=3600).run(batch, lease.epoch, request, copy_and_wait)

    assert ended == [0, 1]
    assert isinstance(happened, CommitUnknown | Failed)
    assert stored(each_database.direct()) == (10, 1)


GRANTS = ["pg_read_all_stats", "pg_signal_backend"]


@pytest.mark.parametrize("granted", [[], GRANTS[:1], GRANTS], ids=["none", "to see", "to see and to end"])
def test_what_another_role_left_stuck_is_named_with_the_grants_that_are_missing(database, granted):
    epoch = own(database, OLD)
    put(database.direct(), (10, 1))
    admin = database.direct()
    admin.execute("GRANT USAGE ON SCHEMA outbox TO owner, processor")
    admin.execute("GRANT ALL ON ALL TABLES IN SCHEMA outbox TO owner, processor")
    admin.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox TO owner, processor")
    batch, standby = database.connect("owner"), database.connect("processor")
    request = StoreRequest(HeldLease(0, epoch, UUID(OLD)), Checkpoint(10, 1), Checkpoint(20, 5), first=True)
    found = []

    def copy_and_wait(transaction):
        copying = transaction.connection.cursor().copy(COPY)
        with contextlib.suppress(psycopg.OperationalError), copying as copy:
            wait_for_copy(database)
            found.append(end_stuck_transactions(standby, KEY, {0: None}))
            admin.execute(LAPSE)
            found.append(end_stuck_transactions(standby, KEY, {0: None}))
            transaction.connection.cancel()
            copy.write("m\t{}\n")
        return 1

    for name in granted:
        admin.execute(f"GRANT {name} TO processor")
    try:
        TransactionRunner(KEY, lease=3600, timeout=3600).run(batch, request.lease.epoch, request, copy_and_wait)
    finally:
        for name in granted:
            admin.execute(f"REVOKE {name} FROM processor")

    assert found[0] == Stuck()
    assert found[1].ended == (1 if granted == GRANTS else 0)
    missing = ", ".join(name for name in GRANTS if name not in granted)
    wanted = f"session {batch.info.backend_pid} of role owner" if missing else ""
    assert found[1].left.startswith(wanted)
    assert (f"GRANT {missing} TO processor" in found[1].left) == bool(missing)
