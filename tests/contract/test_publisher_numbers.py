"""When numbers of published messages go on, and when they begin anew: never one number for two messages."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.errors import ConfigurationError
from outbox_core.message import Batch
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.progress.numbering import number_batch
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import ResourceRef
from outbox_worker.postgres.call import fetch_one
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints

KEY = ProcessorKey("outbox", "orders")
RESOURCE = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
FIRST, SECOND, THIRD = Checkpoint(10, 1), Checkpoint(20, 5), Checkpoint(30, 2)


@pytest.fixture
def connection(database):
    connection = database.connect()
    assert ownership.claim(connection, KEY, RESOURCE).granted
    return connection


def acquire(connection):
    token = uuid4()
    answer = ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="pod", token=token, lease=timedelta(hours=1))
    assert answer.epoch is not None
    return HeldLease(0, answer.epoch, token)


def store(connection, lease, expected, new, *, with_number=True):
    with connection.transaction():
        stored = new if with_number else replace(new, numbering=None)
        assert checkpoints.store(connection, KEY, lease, new=stored, expected=expected) is StoreAnswer.STORED


def begin(connection, lease, *, at=FIRST, mapping="m"):
    return checkpoints.open_numbers(connection, KEY, lease, at, mapping)


def passed(before, examined, count):
    """The checkpoint after a batch of so many messages."""
    return number_batch(Batch(before, examined, (), count, full=False, matched_count=count), before).examined


@pytest.fixture
def owner(connection):
    """A lease, and the numbers of 7 messages up to a checkpoint that is stored."""
    lease = acquire(connection)
    store(connection, lease, None, FIRST, with_number=False)
    first = begin(connection, lease)
    assert first.numbering.last == 0
    second = passed(first, SECOND, 7)
    store(connection, lease, first, second)
    return lease, second


def release(connection, lease):
    assert ownership.release_lease(connection, KEY, lease)


def test_a_successor_goes_on_with_the_numbers_of_the_checkpoint(connection, owner):
    lease, second = owner
    release(connection, lease)
    found = begin(connection, acquire(connection), at=SECOND)
    assert found.numbering == second.numbering
    assert found.numbering.last == 7


def test_no_numbers_for_one_who_is_not_the_owner(connection, owner):
    lease, _ = owner
    release(connection, lease)
    assert begin(connection, lease, at=SECOND) is None


@pytest.mark.parametrize(
    "change",
    [
        "SELECT outbox.rewind_processor_checkpoint('orders', 0, '10', 3, 'test', 'a person')",
        "UPDATE outbox.database_identity SET timeline_id = timeline_id + 1, database_uuid = gen_random_uuid()",
        "UPDATE outbox.database_identity SET rebased = rebased + 1",
        "UPDATE outbox.publisher_numbers SET place = replace(place, '/1/', '/2/')",
        "DELETE FROM outbox.publisher_numbers",
    ],
    ids=["rewind", "copy", "rebased", "failover", "lost"],
)
def test_they_begin_anew_under_a_name_never_used(connection, owner, change):
    lease, second = owner
    release(connection, lease)
    connection.execute(change)
    found = begin(connection, acquire(connection), at=SECOND)
    assert found.numbering.last == 0
    assert found.numbering.space != second.numbering.space


def test_another_mapping_has_other_numbers_and_the_former_does_not_come_back(connection, owner):
    lease, second = owner
    other = begin(connection, lease, at=SECOND, mapping="other")
    again = begin(connection, lease, at=SECOND)
    assert [each.numbering.last for each in (other, again)] == [0, 0]
    assert len({each.numbering.space for each in (second, other, again)}) == 3


def test_a_checkpoint_that_was_moved_and_put_back_has_its_numbers(connection, owner):
    """Nothing was published meanwhile: that would have begun others."""
    lease, second = owner
    release(connection, lease)
    for at in (FIRST, SECOND):
        connection.execute(
            "SELECT outbox.rewind_processor_checkpoint('orders', 0, %s, %s, 'test', 'a person')",
            (str(at.transaction_id), at.position),
        )
    assert begin(connection, acquire(connection), at=SECOND).numbering == second.numbering


def test_a_checkpoint_that_is_stored_without_its_number_begins_others(connection, owner):
    """As a worker of a version that knows no numbers does."""
    lease, second = owner
    store(connection, lease, SECOND, THIRD, with_number=False)
    assert begin(connection, lease, at=THIRD).numbering.space != second.numbering.space


def test_numbers_that_begun_anew_are_not_changed_by_who_has_the_former(connection, owner):
    lease, second = owner
    other = begin(connection, lease, at=SECOND, mapping="other")
    store(connection, lease, SECOND, passed(second, THIRD, 4))
    row = connection.execute("SELECT space::text, last_number, transaction_id::text FROM outbox.publisher_numbers")
    assert row.fetchone() == (other.numbering.space, 0, "20")


def test_the_number_is_as_durable_as_the_checkpoint(connection, owner):
    lease, second = owner
    third = passed(second, THIRD, 4)
    with connection.transaction(force_rollback=True):
        assert checkpoints.store(connection, KEY, lease, new=third, expected=second) is StoreAnswer.STORED
    assert begin(connection, lease, at=SECOND).numbering == second.numbering


@pytest.mark.parametrize("refused", [False, True], ids=["stored", "refused"])
def test_one_statement_stores_checkpoint_and_number_or_neither(connection, owner, refused):
    lease, second = owner
    third = passed(second, THIRD, 4)
    store = checkpoints.compose_store(KEY, lease, new=third, expected=FIRST if refused else second)
    found = fetch_one(connection, store)
    assert (found[0] == StoreAnswer.STORED) is not refused
    expected = second if refused else third
    assert begin(connection, lease, at=expected).numbering == expected.numbering


def test_a_snapshot_range_has_no_numbers(connection):
    with pytest.raises(ConfigurationError, match=r"use another processorId with source\.cursor: TransactionOrder"):
        begin(connection, acquire(connection), at=Checkpoint(0, 1, SnapshotRange()))


def test_partitions_have_numbers_of_their_own(connection, owner):
    lease, second = owner
    key = replace(KEY, partition=1)
    token = uuid4()
    answer = ownership.acquire_lease(connection, key, claim_uid="u1", pod="pod", token=token, lease=timedelta(hours=1))
    assert answer.epoch is not None
    lease = HeldLease(0, answer.epoch, token)
    assert checkpoints.store(connection, key, lease, new=SECOND, expected=None) is StoreAnswer.STORED
    found = checkpoints.open_numbers(connection, key, lease, SECOND, "m")
    assert found is not None
    assert found.numbering is not None
    assert found.numbering.space != second.numbering.space
