"""What two sessions do that lock the same rows: one waits for the other, and then knows what it did."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints, conflicts, rebuilds
from outbox_worker.postgres.progress.conflicts import Refusal
from outbox_worker.postgres.progress.rebuilds import SupersedeAnswer
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.servers.postgres import EVERYWHERE

HOUR = timedelta(hours=1)
KEY, NEXT = ProcessorKey("outbox", "orders"), ProcessorKey("outbox", "orders", 1)
PLACE = Checkpoint(20, 5)


def resource(name):
    return ResourceRef(cluster="c", namespace="n", name=name, uid=f"uid-{name}")


def acquire(connection, key, token, lease=HOUR):
    uid = f"uid-{key.processor_id}"
    return ownership.acquire_lease(connection, key, claim_uid=uid, pod="pod", token=token, lease=lease)


def own(connection, key, lease=HOUR):
    """Claim and lease of the resource of that name."""
    assert ownership.claim(connection, key, resource(key.processor_id)).granted
    token = uuid4()
    answer = acquire(connection, key, token, lease)
    assert answer.acquired
    assert answer.epoch is not None
    return HeldLease(0, answer.epoch, token)


@EVERYWHERE
def test_no_lease_is_given_for_a_conflict_that_opens_while_it_is_waited_for(each_database):
    reporter, standby = each_database.connect(autocommit=False), each_database.connect()
    owner = own(standby, KEY, lease=timedelta(0))
    conflicts.record_refusal(
        reporter,
        KEY,
        Refusal(StoreAnswer.OLDER, PLACE, None, Checkpoint(30, 1), owner.epoch, "pod", "uid-orders", True),
    )

    with background(lambda: acquire(standby, KEY, uuid4())) as answer:
        wait_until_blocked(each_database, answer)
        reporter.commit()

    assert conflicts.find_open(standby, KEY) is not None
    assert not answer.result().acquired
    assert answer.result().epoch == owner.epoch


@EVERYWHERE
def test_a_partition_that_is_owned_for_the_first_time_during_a_swap_has_no_owner_after_it(each_database):
    swapping, late = each_database.connect(), each_database.connect(autocommit=False)
    former = own(swapping, KEY)
    assert partitions.begin(swapping, KEY, former, count=2, by="partition key", start=PLACE).begun
    new = ProcessorKey("outbox", "new")
    owner = own(swapping, new)
    checkpoints.store(swapping, new, owner, new=PLACE, expected=None)
    seen = rebuilds.find_coverage(swapping, KEY)
    assert seen is not None
    token = uuid4()
    answer = acquire(late, NEXT, token)
    assert answer.acquired

    with background(lambda: rebuilds.supersede(swapping, new, owner, "orders", seen, decided_by="test")) as swapped:
        wait_until_blocked(each_database, swapped)
        late.commit()

    assert swapped.result() is SupersedeAnswer.DONE
    stored = checkpoints.store(late, NEXT, HeldLease(0, answer.epoch, token), new=Checkpoint(30, 1), expected=PLACE)
    assert stored is StoreAnswer.NOT_OWNER


@EVERYWHERE
def test_a_lease_that_is_taken_while_a_copy_is_renewed_ends_with_its_claim(each_database):
    person, late = each_database.connect(), each_database.connect(autocommit=False)
    assert ownership.claim(person, KEY, resource("orders")).granted
    assert acquire(late, KEY, uuid4()).acquired

    with background(lambda: person.execute("SELECT outbox.confirm_identity('renew')").fetchone()) as renewed:
        wait_until_blocked(each_database, renewed)
        late.commit()

    assert renewed.exception() is None
    assert ownership.fetch_claim(person, KEY).holder is None
    live = "SELECT count(*) FROM outbox.processor_leases WHERE expires_at > clock_timestamp()"
    assert person.execute(live).fetchone() == (0,)


@EVERYWHERE
@pytest.mark.parametrize("leaves", [False, True], ids=["heartbeat", "leaving"])
def test_a_process_and_who_ends_its_leases_lock_them_in_the_same_order(each_database, leaves):
    """The rows lie the other way round in the table, and a store of one of them makes the end of all leases wait."""
    connection, storing = each_database.connect(), each_database.connect(autocommit=False)
    assert ownership.claim(connection, KEY, resource("orders")).granted
    token = uuid4()
    second, first = acquire(connection, NEXT, token), acquire(connection, KEY, token)
    assert (
        checkpoints.store(storing, NEXT, HeldLease(0, second.epoch, token), new=PLACE, expected=None)
        is StoreAnswer.STORED
    )
    ending = each_database.connect()

    def beat():
        if leaves:
            return partitions.end_membership(connection, KEY, token)
        return partitions.renew_membership(connection, KEY, claim_uid="uid-orders", pod="pod", token=token, lease=HOUR)

    with background(lambda: ownership.release_claim(ending, KEY, "uid-orders")) as ended:
        wait_until_blocked(each_database, ended)
        with background(beat) as beaten:
            wait_until_blocked(each_database, beaten, sessions=2)
            storing.commit()

    assert ended.result() is True
    assert beaten.exception() is None
    assert first.epoch == 1


@EVERYWHERE
def test_a_partition_that_is_owned_for_the_first_time_while_its_checkpoint_is_advanced_reads_anew(each_database):
    """Told 2 in place of 4, its owner would open a conflict."""
    connection, swapping, late = (each_database.connect(autocommit=each) for each in (True, False, False))
    owner = own(connection, KEY)
    assert partitions.begin(connection, KEY, owner, count=2, by="partition key", start=PLACE).begun
    others = rebuilds.find_coverage(connection, KEY, but_partition=0)
    token, goal = uuid4(), Checkpoint(30, 1)
    answer = acquire(late, NEXT, token)

    with background(lambda: rebuilds.advance_partitions(swapping, KEY, owner, others, {1: goal})) as advanced:
        wait_until_blocked(each_database, advanced)
        late.commit()

    assert advanced.result()
    swapping.commit()
    stored = checkpoints.store(late, NEXT, HeldLease(0, answer.epoch, token), new=Checkpoint(40, 1), expected=PLACE)
    assert stored is StoreAnswer.NOT_OWNER


@pytest.fixture
def counted(each_database):
    """A process that was counted as crashed, and its successor with an open transaction that has stored."""
    connection, successor = each_database.connect(), each_database.connect(autocommit=False)
    survivor = own(connection, KEY, lease=timedelta(0)).token
    token = uuid4()
    epoch = acquire(connection, KEY, token).epoch
    assert connection.execute(ACCUSED).fetchone() == ([survivor],)
    checkpoints.store(successor, KEY, HeldLease(0, epoch, token), new=PLACE, expected=None)
    return survivor, successor, (epoch, token)


ACCUSED = "SELECT counted_tokens FROM outbox.processor_crashes"


@EVERYWHERE
def test_a_process_that_was_counted_as_crashed_does_not_wait_for_the_owners_commit(each_database, counted):
    survivor, successor, owner = counted
    connection = each_database.connect()
    successor.execute("SELECT outbox.end_in_flight('orders', 0, %s, %s)", owner)

    assert not acquire(connection, KEY, survivor).acquired
    successor.commit()
    assert not acquire(connection, KEY, survivor).acquired

    assert connection.execute(ACCUSED).fetchone() == ([],)


@EVERYWHERE
def test_it_and_another_one_that_ask_at_once_are_both_answered(each_database, counted):
    survivor, successor, _ = counted
    other, again = each_database.connect(), each_database.connect()
    each_database.direct().execute("UPDATE outbox.processor_leases SET expires_at = 'epoch'")

    with background(lambda: acquire(other, KEY, uuid4())) as first:
        wait_until_blocked(each_database, first)
        with background(lambda: acquire(again, KEY, survivor)) as second:
            wait_until_blocked(each_database, second, sessions=2)
            successor.rollback()

    assert first.result().acquired
    assert not second.result().acquired
    (counted_tokens,) = each_database.direct().execute(ACCUSED).fetchone()
    assert survivor not in counted_tokens
