"""An edit by hand shows by the copy that only our functions write, whoever loads the row next."""

from __future__ import annotations

import re
from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.config import Resolution
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints, conflicts, starts
from outbox_worker.postgres.progress.checkpoints import TamperCheck, TamperedError
from tests.support.database.contract import put, store_by_position
from tests.support.database.sql_functions import read_functions

KEY = ProcessorKey("outbox", "orders")
RESOURCE = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
HOUR = timedelta(hours=1)
FIRST, SECOND = Checkpoint(10, 1), Checkpoint(20, 5)
WINDOWS = [
    Checkpoint(0, 1, SnapshotRange()),
    Checkpoint(0, 3, SnapshotRange("10:20:12,15", "18:30:18", 7)),
    Checkpoint(0, 4, SnapshotRange("18:30:18")),
]


@pytest.fixture
def connection(each_database):
    connection = each_database.connect()
    assert ownership.claim(connection, KEY, RESOURCE).granted
    return connection


def acquire(connection, key=KEY, token=None, lease=HOUR):
    token = token or uuid4()
    answer = ownership.acquire_lease(connection, key, claim_uid="u1", pod="pod-1", token=token, lease=lease)
    assert answer.acquired
    assert answer.epoch is not None
    return HeldLease(0, answer.epoch, token)


def release(connection, lease, key=KEY):
    assert ownership.release_lease(connection, key, lease)


def store(connection, lease, *pairs, key=KEY):
    for expected, new in zip((None, *pairs), pairs, strict=False):
        answer = checkpoints.store(connection, key, lease, new=new, expected=expected)
        assert answer is StoreAnswer.STORED


def found(connection, key=KEY):
    """What somebody who loads the row is told: the pair, or what is wrong with it."""
    try:
        stored = checkpoints.load_untampered(connection, key)
    except TamperedError as err:
        return err.edit
    return None if stored is None else stored.pair


def edit(connection, change, *values):
    connection.execute(f"UPDATE outbox.processor_checkpoints SET {change}", values)


@pytest.mark.parametrize("pairs", [[FIRST], [FIRST, SECOND], WINDOWS[:1], WINDOWS[:2], WINDOWS], ids=len)
def test_what_the_contract_stores_is_no_edit(connection, pairs):
    assert found(connection) is None
    store(connection, acquire(connection), *pairs)

    assert found(connection) == pairs[-1]


@pytest.mark.parametrize(
    ("change", "stored", "answer"),
    [
        ("last_processed_position = 6", Checkpoint(20, 6), StoreAnswer.AHEAD),
        ("last_processed_position = 4", Checkpoint(20, 4), StoreAnswer.OLDER),
        ("last_processed_transaction_id = '21'", Checkpoint(21, 5), StoreAnswer.AHEAD),
        ("last_processed_transaction_id = '9', last_processed_position = 99", Checkpoint(9, 99), StoreAnswer.OLDER),
    ],
)
def test_an_edited_pair(connection, change, stored, answer):
    store(connection, acquire(connection), FIRST, SECOND)
    edit(connection, change)

    assert found(connection) == TamperCheck(SECOND, stored)
    assert found(connection).answer is answer


@pytest.mark.parametrize(
    "change",
    [
        "range_position = 8",
        "lower_snapshot = '10:20:12'",
        "lower_snapshot = NULL",
        "upper_snapshot = '18:31:18'",
        "upper_snapshot = NULL, range_position = NULL",
        "last_processed_position = 4",
    ],
)
def test_an_edited_range(connection, change):
    store(connection, acquire(connection), *WINDOWS[:2])
    edit(connection, change)

    found_edit = found(connection)

    assert isinstance(found_edit, TamperCheck)
    assert (found_edit.kept, found_edit.answer) == (WINDOWS[1], StoreAnswer.AHEAD)


def test_a_deleted_row(connection):
    store(connection, acquire(connection), FIRST)
    connection.execute("DELETE FROM outbox.processor_checkpoints")

    assert found(connection) == TamperCheck(None, None)
    assert found(connection).answer is StoreAnswer.OLDER


def test_a_row_that_was_deleted_and_inserted_by_hand(connection):
    store(connection, acquire(connection), FIRST)
    put(connection, (10, 1))

    assert found(connection) == TamperCheck(None, FIRST)


def test_an_edit_that_was_taken_back_is_none(connection):
    store(connection, acquire(connection), FIRST, SECOND)
    edit(connection, "last_processed_position = 6")
    edit(connection, "last_processed_position = 5")

    assert found(connection) == SECOND


def test_a_first_row_by_hand_is_where_somebody_wants_to_start(connection):
    put(connection, (10, 1))
    edit(connection, "last_processed_position = 2")
    assert found(connection) == Checkpoint(10, 2)
    store_from = acquire(connection)
    answer = checkpoints.store(connection, KEY, store_from, new=SECOND, expected=Checkpoint(10, 2))
    assert answer is StoreAnswer.STORED
    assert found(connection) == SECOND

    connection.execute("DELETE FROM outbox.processor_checkpoints")

    assert found(connection) == TamperCheck(None, None)


def test_the_articles_form_stores_by_the_contract(each_database):
    connection = each_database.connect()
    assert store_by_position(connection, 1, None, 10) == StoreAnswer.STORED
    assert store_by_position(connection, 5, 1, 20) == StoreAnswer.STORED
    assert found(connection) == SECOND
    edit(connection, "last_processed_position = 6")
    assert found(connection) == TamperCheck(SECOND, Checkpoint(20, 6))

    # It names what is there: while nobody claims the processor, that says yes to it.
    assert store_by_position(connection, 8, 6, 30) == StoreAnswer.STORED

    assert found(connection) == Checkpoint(30, 8)


@pytest.mark.parametrize("pairs", [[FIRST, SECOND], WINDOWS[:2]], ids=["pair", "snapshot range"])
@pytest.mark.parametrize("gone", [False, True], ids=["edited", "deleted"])
def test_a_rewind_is_ours(connection, pairs, gone):
    lease = acquire(connection)
    store(connection, lease, *pairs)
    edit(connection, "last_processed_position = last_processed_position + 1")
    if gone:
        connection.execute("DELETE FROM outbox.processor_checkpoints")
    release(connection, lease)

    assert conflicts.rewind(connection, KEY, pairs[0], reason="test", decided_by="somebody")

    stored = found(connection)
    assert isinstance(stored, Checkpoint)
    assert stored.snapshot_range == pairs[0].snapshot_range


def test_an_accepted_pair_is_ours(connection):
    lease = acquire(connection)
    store(connection, lease, FIRST)
    edit(connection, "last_processed_position = 7")
    number = record(connection, lease)
    release(connection, lease)

    decision = Resolution(conflict_id=number, action="Accept", pair="10:7")
    assert conflicts.resolve(connection, "outbox", decision) is conflicts.ResolveAnswer.DONE

    assert found(connection) == Checkpoint(10, 7)


def record(connection, lease):
    refusal = conflicts.Refusal(
        code=StoreAnswer.AHEAD, expected=FIRST, stored=Checkpoint(10, 7), new=None, epoch=lease.epoch, pod="pod-1",
        claim_uid="u1", needs_person=True,
    )  # fmt: skip
    return conflicts.record_refusal(connection, KEY, refusal)


def test_a_refusal_that_is_recorded_after_the_successor_began_opens_nothing(connection):
    first = acquire(connection)
    release(connection, first)
    second = acquire(connection)

    record(connection, first)
    assert conflicts.find_open(connection, KEY) is None
    assert conflicts.summary(connection, KEY).count == 1

    number = record(connection, second)
    found_open = conflicts.find_open(connection, KEY)
    assert found_open is not None
    assert found_open.id == number


@pytest.mark.parametrize("spread", [False, True], ids=["one start", "a start each"])
def test_partitions_begin_unedited(connection, spread):
    lease = acquire(connection)
    assert partitions.begin(connection, KEY, lease, count=1, by="message_id", start=None).begun is False
    with connection.transaction():
        begun = partitions.begin(connection, KEY, lease, count=3, by="column partition_key", start=FIRST)
        assert begun.begun
        if spread:
            assert starts.spread(connection, KEY, lease, {0: FIRST, 1: SECOND, 2: SECOND})

    expected = [FIRST, SECOND if spread else FIRST]
    assert [found(connection, ProcessorKey("outbox", "orders", n)) for n in (0, 1)] == expected
    connection.execute("DELETE FROM outbox.processor_checkpoints WHERE partition = 2")
    assert found(connection, ProcessorKey("outbox", "orders", 2)) == TamperCheck(None, None)


EXEMPT = {
    "settle_processor_checkpoint": "inserts and deletes in one breath",
    "begin_competing": "mode Competing goes on from its dispatch positions, the row is for people to read",
    "advance_competing_checkpoint": "the same",
}


def test_every_function_that_writes_a_checkpoint_writes_its_copy():
    writers = [
        (name, text)
        for name, text in read_functions()
        if re.search(r"(INSERT INTO|UPDATE) processor_checkpoints", text)
    ]
    not_keeping = {name for name, text in writers if not re.search(r"store_shadow_checkpoint|shadow_position =", text)}

    assert len(writers) > len(EXEMPT)
    assert not_keeping == set(EXEMPT)
