"""The barrier of the cursor Snapshot: it sees all that was read by anybody who did not know of the change."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from uuid import uuid4

import psycopg
import pytest

from outbox_core.partition import partition_of
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import ResourceRef
from outbox_core.spec import Partitions
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from outbox_worker.postgres.reading.snapshots import fetch_snapshot
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.messages import insert
from tests.support.servers.postgres import POOLED, VERSIONS, build_source

KEY = ProcessorKey("outbox", "orders")
OURS = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
HOUR = timedelta(hours=1)
BY = "partition key"


@pytest.fixture
def connection(anywhere):
    """Three partitions that start now, begun by the resource's generation 1."""
    connection = anywhere.connect()
    assert ownership.claim(connection, KEY, OURS).granted
    epoch, token = acquire(connection, 0)
    start = Checkpoint(0, 1, SnapshotRange(fetch_snapshot(connection)))
    with connection.transaction():
        begun = partitions.begin(connection, KEY, HeldLease(0, epoch, token), count=3, by=BY, start=start)
    assert begun.begun
    assert ask(connection, 3, 1) == 3
    return connection


def part(number):
    return ProcessorKey("outbox", "orders", number)


def acquire(connection, number):
    token = uuid4()
    answer = ownership.acquire_lease(connection, part(number), claim_uid="u1", pod="pod", token=token, lease=HOUR)
    assert answer.acquired
    return answer.epoch, token


def ask(connection, count, generation):
    return partitions.ask(connection, KEY, OURS, generation=generation, count=count, by=BY)


def draw(connection):
    partitions.draw(connection, KEY, "u1")
    return now(connection).barrier


def now(connection):
    found = partitions.fetch(connection, KEY)
    assert found is not None
    return found


def change(connection):
    return partitions.change(connection, KEY, "u1")


def go_to(connection, snapshot_range, *numbers):
    """Let partitions have examined a snapshot range, as their owners would have stored it."""
    connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position + 1 + partition, "
        "lower_snapshot = %s::text::pg_snapshot, upper_snapshot = %s::text::pg_snapshot, range_position = %s "
        "WHERE partition = ANY (%s)",
        (snapshot_range.lower, snapshot_range.upper, snapshot_range.position, list(numbers)),
    )


def rows(connection):
    return {number: each.pair for number, each in checkpoints.load_all(connection, KEY).items()}


def sees(snapshot, other):
    return parse_snapshot(snapshot).covers(parse_snapshot(other))


class TestTheBarrier:
    def test_it_sees_whatever_was_read_without_knowing_of_the_change(self, anywhere, connection):
        """Readers beside a transaction that asks and has not committed, with writers that end in any order."""
        chance = random.Random(9)
        for generation in range(2, 12):
            asking = anywhere.connect(autocommit=False)
            writers = [anywhere.connect(autocommit=False) for _ in range(4)]
            acts = [*(each.commit for each in writers), partial(ask, asking, 5, 2 * generation)]
            chance.shuffle(acts)
            for writer in writers:
                insert(writer, "message")
            unaware = []
            for act in acts:
                act()
                snapshot_range = fetch_snapshot(connection)
                assert now(connection).mark is None, "it is not visible"
                unaware.append(snapshot_range)
            asking.commit()
            for _ in range(2):
                snapshot_range = fetch_snapshot(connection)
                assert now(connection).is_beyond_barrier(Checkpoint(0, 2, SnapshotRange(snapshot_range))), (
                    "not drawn yet: to be dropped"
                )
            asked = now(connection)
            line = draw(connection).snapshot_range.lower
            assert parse_snapshot(line).sees(asked.mark)
            for snapshot_range in unaware:
                assert sees(line, snapshot_range)
                assert not asked.is_beyond_barrier(Checkpoint(0, 2, SnapshotRange(snapshot_range)))
                assert not now(connection).is_beyond_barrier(
                    Checkpoint(0, 2, SnapshotRange(snapshot_range, line, 5))
                ), "the last snapshot range"
            insert(connection, "later")
            assert now(connection).is_beyond_barrier(Checkpoint(0, 2, SnapshotRange(fetch_snapshot(connection))))
            ask(connection, 3, 2 * generation + 1)
            assert (now(connection).mark, now(connection).barrier) == (None, None)

    def test_the_snapshot_of_the_asking_transaction_would_be_passed(self, anywhere, connection):
        """The fault that is avoided: somebody commits and is read between that snapshot and the asking commit."""
        asking = anywhere.connect(autocommit=False)
        writer = anywhere.connect(autocommit=False)
        insert(writer, "message")
        ask(asking, 5, 2)
        tempting = fetch_snapshot(asking)
        writer.commit()
        read = fetch_snapshot(connection)
        assert now(connection).mark is None
        asking.commit()
        assert not sees(tempting, read)
        assert sees(draw(connection).snapshot_range.lower, read)

    def test_looking_before_taking_the_range_would_pass_it(self, connection):
        """The other one: the look finds nothing, and the range that is taken then sees more than the barrier."""
        assert now(connection).mark is None
        ask(connection, 5, 2)
        line = draw(connection).snapshot_range.lower
        insert(connection, "message")
        assert not sees(line, fetch_snapshot(connection))

    def test_who_asks_cannot_draw_it_before_the_commit(self, anywhere, connection):
        asking = anywhere.connect(autocommit=False)
        ask(asking, 5, 2)
        insert(connection, "so that the asking transaction's id is below the end of its own snapshots")
        assert draw(asking) is None
        asking.commit()
        assert draw(asking) is not None

    def test_it_is_drawn_once_and_stays_when_another_number_is_asked_for(self, connection):
        ask(connection, 5, 2)
        drawn, mark = draw(connection), now(connection).mark
        insert(connection, "message")
        ask(connection, 8, 3)
        assert (now(connection).next_count, now(connection).mark) == (8, mark)
        assert draw(connection).snapshot_range == drawn.snapshot_range
        ask(connection, 3, 4)
        ask(connection, 5, 5)
        assert now(connection).barrier is None, "another change has another line"
        assert draw(connection).snapshot_range != drawn.snapshot_range

    def test_who_waited_for_the_row_takes_a_snapshot_that_sees_what_it_says_by_then(self, anywhere, connection):
        """Taken back and asked for again while it is drawn: the old statement's snapshot would not see the new mark."""
        ask(connection, 5, 2)
        other = anywhere.connect(autocommit=False)
        ask(other, 3, 3)
        ask(other, 4, 4)
        drawing = anywhere.connect()
        with background(lambda: draw(drawing)) as answer:
            wait_until_blocked(anywhere, answer)
            read = fetch_snapshot(connection)
            other.commit()
        line = answer.result().snapshot_range.lower
        assert parse_snapshot(line).sees(now(connection).mark)
        assert sees(line, read)

    def test_only_the_holder_of_the_claim_draws_it(self, connection):
        ask(connection, 5, 2)
        partitions.draw(connection, KEY, "u2")
        assert now(connection).barrier is None

    def test_a_reader_goes_no_further_and_never_back(self, connection):
        reader = build_reader(now(connection))
        insert_key(connection, "a")
        ask(connection, 5, 2)
        line = draw(connection)
        insert_key(connection, "a")
        start = rows(connection)[0]
        stopping = build_reader(now(connection))
        before = stopping.fetch(connection, start, 10)
        after = reader.fetch(connection, start, 10)
        assert (len(before), len(after)) == (1, 2)
        assert before.examined.snapshot_range == line.snapshot_range
        assert len(stopping.fetch(connection, before.examined, 10)) == 0
        beyond = stopping.fetch(connection, after.examined, 10)
        assert (len(beyond), beyond.examined.snapshot_range) == (0, after.examined.snapshot_range)


def build_reader(division):
    """Return the reader of key a's partition."""
    return MessageReader(
        build_source(cursor="Snapshot"), Slice(partition_of("a", 3), Partitions(count=3), division.barrier)
    )


def insert_key(connection, key):
    connection.execute("INSERT INTO outbox.messages (partition_key, message_type, data) VALUES (%s, 't', '{}')", (key,))


@pytest.mark.parametrize("anywhere", [*VERSIONS, POOLED], indirect=True)
class TestChanging:
    @pytest.mark.parametrize("count", [2, 5])
    def test_all_at_the_line_it_changes_and_new_partitions_start_there(self, connection, count):
        ask(connection, count, 2)
        assert not change(connection), "no line is drawn"
        line = draw(connection).snapshot_range
        go_to(connection, line, 0, 1)
        open_range = SnapshotRange(rows(connection)[2].snapshot_range.lower, line.lower, 7)
        go_to(connection, open_range, 2)
        assert not change(connection), "partition 2 is inside its last snapshot range"
        go_to(connection, line, 2)
        assert change(connection)
        assert (now(connection).count, now(connection).next_count, now(connection).mark) == (count, None, None)
        found = rows(connection)
        assert len(found) == count
        assert {(each.transaction_id, each.position, each.snapshot_range) for each in found.values()} == {
            (0, found[0].position, line)
        }
        assert not change(connection), "once"

    def test_no_former_owner_stores_and_no_counter_falls(self, connection):
        epoch, token = acquire(connection, 1)
        highest = 0
        for generation, count in enumerate([2, 5, 3], 2):
            before = now(connection).count
            ask(connection, count, generation)
            go_to(connection, draw(connection).snapshot_range, *range(before))
            highest = max(highest, *(each.position for each in rows(connection).values()))
            assert change(connection)
            assert {each.position for each in rows(connection).values()} == {highest + 1}
        expected = rows(connection)[1]
        new = Checkpoint(0, expected.position + 1, expected.snapshot_range)
        answer = checkpoints.store(connection, part(1), HeldLease(0, epoch, token), new=new, expected=expected)
        assert answer is StoreAnswer.NOT_OWNER

    def test_what_a_person_put_beyond_it_moves_it(self, connection):
        ask(connection, 2, 2)
        line = draw(connection)
        mark = now(connection).mark
        go_to(connection, line.snapshot_range, 0, 2)
        insert(connection, "skipped")
        go_to(connection, SnapshotRange(fetch_snapshot(connection)), 1)
        connection.execute(
            "INSERT INTO outbox.processor_conflicts (processor_id, partition, code, pod, needs_person) "
            "VALUES ('orders', 1, 2, 'pod', true)"
        )
        assert not change(connection)
        assert now(connection).mark == mark, "while the conflict is open nobody knows where the checkpoint will be"
        connection.execute(
            "UPDATE outbox.processor_conflicts SET resolved_at = now(), resolution = 'Accept', decided_by = 'x'"
        )
        assert not change(connection)
        assert now(connection).barrier is None
        assert now(connection).mark > mark
        assert not now(connection).is_beyond_barrier(rows(connection)[1])
        assert sees(draw(connection).snapshot_range.lower, rows(connection)[1].snapshot_range.lower)
        mark = now(connection).mark
        assert not change(connection)
        assert now(connection).mark == mark, "once"
        go_to(connection, now(connection).barrier.snapshot_range, 0, 1, 2)
        assert change(connection)


def test_a_change_has_one_kind_of_line(connection):
    ask(connection, 2, 2)
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute("UPDATE outbox.processor_partitions SET barrier_transaction_id = '5', barrier_position = 1")
