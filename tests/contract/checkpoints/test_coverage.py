"""The swap's last statements: whose checkpoint has examined what, and that nobody moved meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.coverage import as_snapshot_range, covers, decide_catch_up, join
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints, rebuilds
from outbox_worker.postgres.progress.rebuilds import SupersedeAnswer
from tests.support.database.stored import stored_pair
from tests.support.servers.postgres import EVERYWHERE

OLD, NEW = ProcessorKey("outbox", "orders"), ProcessorKey("outbox", "orders-v2")
OTHER_LANE = ProcessorKey("outbox", "orders-v2", 1)
OURS = ResourceRef(cluster="c", namespace="n", name="v2", uid="u2")
HOUR = timedelta(hours=1)

HAS_EXAMINED = """SELECT outbox.has_examined(
    jsonb_populate_record(NULL::outbox.processor_checkpoints, %s::text::jsonb),
    jsonb_populate_record(NULL::outbox.processor_checkpoints, %s::text::jsonb))"""


def a_snapshot(chance):
    end = chance.randrange(1, 12)
    listed = sorted(each for each in range(1, end) if chance.random() < 0.3)
    return f"{listed[0] if listed else end}:{end}:{','.join(map(str, listed))}"


def a_place(chance):
    what = chance.random()
    if what < 0.35:
        return Checkpoint(chance.randrange(1, 12), chance.randrange(4))
    lower = a_snapshot(chance) if what < 0.9 else None
    upper = join(lower, a_snapshot(chance))
    return Checkpoint(0, 7, SnapshotRange(lower) if what < 0.6 else SnapshotRange(lower, upper, chance.randrange(4)))


def row_of(place):
    snapshot_range = place.snapshot_range or SnapshotRange()
    snapshot = lambda text: "null" if text is None else f'"{text}"'  # noqa: E731 - JSON of a text
    kind = "TransactionOrder" if place.snapshot_range is None else "Snapshot"
    return (
        f'{{"cursor_kind": "{kind}", "last_processed_transaction_id": "{place.transaction_id}", '
        f'"last_processed_position": {place.position}, "lower_snapshot": {snapshot(snapshot_range.lower)}, '
        f'"upper_snapshot": {snapshot(snapshot_range.upper)}, '
        f'"range_position": {"null" if snapshot_range.position is None else snapshot_range.position}}}'
    )


def has_examined(connection, one, other):
    return connection.execute(HAS_EXAMINED, (row_of(one), row_of(other))).fetchone()[0]


def test_the_database_judges_as_the_worker_does(each_database):
    """Whatever the worker's way leads to, the database agrees that it is enough; and never that less is."""
    connection, chance = each_database.connect(), random.Random(4)
    seen = {True: 0, False: 0}
    for _ in range(400):
        one, other = a_place(chance), a_place(chance)
        assert has_examined(connection, decide_catch_up(one, [other]).goal, other)
        if one.snapshot_range is not None:
            mine, theirs = one.snapshot_range, as_snapshot_range(other)
            enough = covers(mine.lower, theirs.end) or (
                mine.position is not None
                and theirs.position is not None
                and mine.position >= theirs.position
                and covers(mine.lower, theirs.lower)
                and covers(mine.upper, theirs.upper)
            )
            assert has_examined(connection, one, other) is enough, (one, other)
            seen[enough] += 1
    assert min(seen.values()) > 20


@pytest.fixture
def swap(each_database):
    """Two owners of `orders-v2` and a former `orders`; a call of the swap's last two statements."""
    connection = each_database.connect()
    old, mine, other = uuid4(), uuid4(), uuid4()
    theirs = ResourceRef(cluster="c", namespace="n", name="v1", uid="u1")
    put(connection, OLD, theirs, old, SnapshotRange("20:20:"))
    epoch = put(connection, NEW, OURS, mine, SnapshotRange("20:20:"))
    put(connection, OTHER_LANE, OURS, other, SnapshotRange("10:10:"))
    return connection, HeldLease(0, epoch, mine)


def put(connection, key, resource, token, snapshot_range):
    assert ownership.claim(connection, key, resource).granted
    answer = ownership.acquire_lease(connection, key, claim_uid=resource.uid, pod="pod", token=token, lease=HOUR)
    assert answer.epoch is not None
    place = Checkpoint(0, 1, snapshot_range)
    checkpoints.store(connection, key, HeldLease(0, answer.epoch, token), new=place, expected=None)
    return answer.epoch


def advance(connection, owner, snapshot_range, coverage=None):
    seen = coverage or rebuilds.find_coverage(connection, NEW, but_partition=0)
    return rebuilds.advance_partitions(connection, NEW, owner, seen, {1: Checkpoint(0, 5, snapshot_range)})


def supersede(connection, owner, coverage=None):
    seen = coverage or rebuilds.find_coverage(connection, OLD)
    assert seen is not None
    return rebuilds.supersede(connection, NEW, owner, "orders", seen, decided_by="test")


def test_no_partition_may_be_behind(swap):
    connection, owner = swap
    assert supersede(connection, owner) is SupersedeAnswer.NOT_OWNER
    assert advance(connection, owner, SnapshotRange("20:20:"))
    assert supersede(connection, owner) is SupersedeAnswer.DONE


@EVERYWHERE
def test_a_partition_that_was_moved_has_no_owner_any_more(swap):
    connection, owner = swap
    assert advance(connection, owner, SnapshotRange("20:20:"))
    rows = connection.execute(
        "SELECT partition, token IS NULL FROM outbox.processor_leases WHERE processor_id = 'orders-v2' ORDER BY 1"
    ).fetchall()
    assert rows == [(0, False), (1, True)]
    assert stored_pair(connection, OTHER_LANE).snapshot_range == SnapshotRange("20:20:")


def test_a_partition_is_moved_where_the_word_null_in_a_list_is_a_word(swap):
    """A snapshot range that is read to its end has no position, and its list a null."""
    connection, owner = swap
    connection.execute("SET array_nulls = off")
    with connection.transaction():
        assert advance(connection, owner, SnapshotRange("20:20:"))
    assert stored_pair(connection, OTHER_LANE).snapshot_range == SnapshotRange("20:20:")


@EVERYWHERE
def test_what_was_stored_meanwhile_rolls_the_swap_back(swap):
    connection, owner = swap
    mine, theirs = rebuilds.find_coverage(connection, NEW, but_partition=0), rebuilds.find_coverage(connection, OLD)
    connection.execute("UPDATE outbox.processor_checkpoints SET range_position = 3, upper_snapshot = '30:30:'")
    assert not advance(connection, owner, SnapshotRange("20:20:"), mine)
    assert supersede(connection, owner, theirs) is SupersedeAnswer.MOVED


@EVERYWHERE
def test_only_the_live_owner_moves_partitions(swap):
    connection, owner = swap
    assert not advance(connection, replace(owner, token=uuid4()), SnapshotRange("20:20:"))
    assert supersede(connection, replace(owner, token=uuid4())) is SupersedeAnswer.NOT_OWNER
