"""The barrier in the database: nobody has read beyond it, nobody stores past the change."""

from __future__ import annotations

import random
from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import MAX_POSITION, Checkpoint
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.messages import MessageReader
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.contract import NOT_OWNER, STORED, store
from tests.support.database.messages import insert
from tests.support.servers.postgres import POOLED, VERSIONS, build_source

KEY = ProcessorKey("outbox", "orders")
OURS = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
HOUR = timedelta(hours=1)
BY = "partition key"
START = Checkpoint(1, 0)


@pytest.fixture
def connection(anywhere):
    """Three partitions, begun by the resource's generation 1."""
    connection = anywhere.connect()
    assert ownership.claim(connection, KEY, OURS).granted
    epoch, token = acquire(connection, 0)
    begun = partitions.begin(connection, KEY, HeldLease(0, epoch, token), count=3, by=BY, start=START)
    assert begun.begun
    assert ask(connection, 3, 1) == 3
    return connection


def acquire(connection, partition):
    token = uuid4()
    key = ProcessorKey("outbox", "orders", partition)
    answer = ownership.acquire_lease(connection, key, claim_uid="u1", pod="pod", token=token, lease=HOUR)
    assert answer.acquired
    return answer.epoch, token


def ask(connection, count, generation, resource=OURS, by=BY):
    return partitions.ask(connection, KEY, resource, generation=generation, count=count, by=by)


def now(connection):
    found = partitions.fetch(connection, KEY)
    assert found is not None
    return found


def go_to(connection, pair, *numbers):
    """Store the pair in partitions, as their owners would have."""
    connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_transaction_id = %s::text::xid8, "
        "last_processed_position = %s WHERE partition = ANY (%s)",
        (str(pair.transaction_id), pair.position, list(numbers)),
    )


def change(connection):
    return partitions.change(connection, KEY, "u1")


def all_at_line(connection, count=3):
    go_to(connection, now(connection).barrier, *range(count))


class TestAsking:
    def test_another_number_draws_the_line_and_the_number_there_is_takes_it_back(self, connection):
        assert ask(connection, 5, 2) == 3
        drawn = now(connection)
        assert (drawn.count, drawn.next_count) == (3, 5)
        assert drawn.barrier is not None
        assert drawn.barrier.position == MAX_POSITION
        ask(connection, 3, 3)
        assert (now(connection).next_count, now(connection).barrier) == (None, None)

    def test_the_line_stays_when_the_number_changes_once_more(self, connection):
        ask(connection, 5, 2)
        drawn = now(connection).barrier
        ask(connection, 8, 3)
        assert (now(connection).next_count, now(connection).barrier) == (8, drawn)

    @pytest.mark.parametrize("generation", [1, 2], ids=["an older generation", "the same generation"])
    def test_a_text_that_was_heeded_before_changes_nothing(self, connection, generation):
        ask(connection, 5, 2)
        drawn = now(connection)
        assert ask(connection, 4, generation) == 3
        assert now(connection) == drawn

    def test_another_resource_is_heeded_once_it_holds_the_claim(self, connection):
        other = ResourceRef(cluster="c", namespace="n", name="b", uid="u2")
        ask(connection, 5, 7, other)
        assert now(connection).next_count is None
        assert ownership.claim(connection, KEY, other, force=True).granted
        ask(connection, 5, 1, other)
        assert now(connection).next_count == 5

    def test_another_key_changes_nothing(self, connection):
        ask(connection, 5, 2, by="column customer")
        assert now(connection).next_count is None

    def test_what_was_asked_before_takes_no_transaction_id(self, connection):
        ask(connection, 5, 2)
        before = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()
        for _ in range(3):
            ask(connection, 5, 2)
            assert not change(connection)
        after = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()
        assert before == after


class TestTheBarrier:
    def test_nobody_who_does_not_see_it_has_read_beyond_it(self, anywhere, connection):
        """Readers beside a transaction that has drawn the barrier and not committed, with writers on both sides."""
        reader = MessageReader(build_source())
        chance = random.Random(9)
        for generation in range(2, 8):
            drawing = anywhere.connect(autocommit=False)
            writers = [anywhere.connect(autocommit=False) for _ in range(4)]
            for writer in writers[:2]:
                insert(writer, "early")
            ask(drawing, 5, 2 * generation)
            line = now(drawing).barrier
            assert line is not None
            late = writers[2:]
            for writer in late:
                insert(writer, "late")
            chance.shuffle(writers)
            for writer in writers:
                settled = partitions.is_settled(connection, line)
                assert settled is all(each in late for each in writers[writers.index(writer) :])
                writer.commit()
                batch = reader.fetch(connection, START, 1000)
                assert now(connection).barrier != line, "it is not visible"
                assert batch.examined <= line
            drawing.commit()
            read = reader.fetch(connection, START, 1000)
            assert read.examined > line, "who does not stop reads on"
            assert partitions.is_settled(connection, line)
            ask(connection, 3, 2 * generation + 1)

    def test_with_the_line_at_the_reading_bound_a_reader_would_pass_it(self, anywhere, connection):
        """The fault that is avoided: the high-water mark moves between the look at it and the commit of the barrier."""
        reader = MessageReader(build_source())
        drawing = anywhere.connect()
        (bound,) = drawing.execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text").fetchone()
        insert(anywhere, "in between")
        assert reader.fetch(connection, START, 10).examined > Checkpoint(int(bound) - 1, MAX_POSITION)


@pytest.mark.parametrize("anywhere", [*VERSIONS, POOLED], indirect=True)
class TestChanging:
    @pytest.mark.parametrize("count", [2, 5])
    def test_all_at_the_line_it_changes_and_new_partitions_start_there(self, connection, count):
        ask(connection, count, 2)
        line = now(connection).barrier
        go_to(connection, line, 0, 1)
        assert not change(connection)
        go_to(connection, line, 2)
        assert change(connection)
        assert (now(connection).count, now(connection).next_count) == (count, None)
        pairs = checkpoints.load_all(connection, KEY)
        assert {number: each.pair for number, each in pairs.items()} == dict.fromkeys(range(count), line)
        assert not change(connection), "once"

    def test_no_former_owner_stores_and_no_epoch_repeats(self, connection):
        owners = {number: acquire(connection, number) for number in (1, 2)}
        ask(connection, 2, 2)
        all_at_line(connection)
        line = now(connection).barrier
        assert change(connection)
        further = (line.transaction_id + 1, 1)
        for number, (epoch, token) in owners.items():
            pair = (line.transaction_id, line.position)
            assert store(connection, further, pair, owner=(epoch, str(token)), partition=number) == NOT_OWNER
        assert acquire(connection, 1)[0] > owners[1][0]
        ask(connection, 3, 3)
        all_at_line(connection, 2)
        assert change(connection)
        assert acquire(connection, 2)[0] > owners[2][0], "a partition that was gone goes on counting"

    def test_it_waits_for_an_owner_who_has_stored_and_not_committed(self, anywhere, connection):
        epoch, token = acquire(connection, 1)
        ask(connection, 2, 2)
        line = now(connection).barrier
        go_to(connection, line, 0, 2)
        owner = anywhere.connect(autocommit=False)
        pair = (line.transaction_id, line.position)
        assert store(owner, pair, (1, 0), owner=(epoch, str(token)), partition=1) == STORED
        assert not change(connection)
        owner.commit()
        assert change(connection)

    def test_who_stores_while_it_changes_is_told_4(self, anywhere, connection):
        epoch, token = acquire(connection, 1)
        ask(connection, 2, 2)
        all_at_line(connection)
        line = now(connection).barrier
        changing = anywhere.connect(autocommit=False)
        assert change(changing)
        owner = anywhere.connect()
        late = ((line.transaction_id + 1, 1), (line.transaction_id, line.position))
        with background(lambda: store(owner, *late, owner=(epoch, str(token)), partition=1)) as answer:
            wait_until_blocked(anywhere, answer)
            changing.commit()
        assert answer.result() == NOT_OWNER

    def test_of_two_at_once_one_changes_it(self, anywhere, connection):
        ask(connection, 2, 2)
        all_at_line(connection)
        first = anywhere.connect(autocommit=False)
        assert change(first)
        second = anywhere.connect()
        with background(lambda: change(second)) as answer:
            wait_until_blocked(anywhere, answer)
            first.commit()
        assert answer.result() is False
        assert now(connection).count == 2

    def test_only_the_holder_of_the_claim_changes_it(self, connection):
        ask(connection, 2, 2)
        all_at_line(connection)
        assert not partitions.change(connection, KEY, "u2")

    def test_an_open_conflict_stops_it(self, connection):
        ask(connection, 2, 2)
        all_at_line(connection)
        connection.execute(
            "INSERT INTO outbox.processor_conflicts (processor_id, partition, code, pod, needs_person) "
            "VALUES ('orders', 1, 2, 'pod', true)"
        )
        assert not change(connection)
        (obstacle,) = partitions.fetch_obstacles(connection, KEY)
        assert (obstacle.partition, obstacle.conflict is not None) == (1, True)
        connection.execute(
            "UPDATE outbox.processor_conflicts SET resolved_at = now(), resolution = 'Accept', decided_by = 'x'"
        )
        assert change(connection)

    def test_a_checkpoint_that_a_person_put_beyond_the_line_moves_it(self, connection):
        ask(connection, 2, 2)
        line = now(connection).barrier
        for _ in range(3):
            connection.execute("SELECT pg_current_xact_id()")
        go_to(connection, Checkpoint(line.transaction_id + 2, 5), 1)
        assert not change(connection)
        moved = now(connection).barrier
        assert moved > Checkpoint(line.transaction_id + 2, 5)
        assert not change(connection)
        assert now(connection).barrier == moved, "once"
        all_at_line(connection)
        assert change(connection)
