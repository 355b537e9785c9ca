"""What a process knows to be empty without reading: never where a read would find a message."""

from __future__ import annotations

import random
from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.partition import partition_of, slots_of
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import ResourceRef
from outbox_core.spec import PartitionKey, Partitions
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases
from outbox_worker.postgres.ownership import partitions as divide
from outbox_worker.postgres.reading import arrivals
from outbox_worker.postgres.reading.arrivals import Arrivals, PartitionArrivals
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from tests.support.nightly import at_night
from tests.support.servers.crash import CrashingServer
from tests.support.servers.postgres import build_source, wait_until

COUNT = 2
INSERT = "INSERT INTO outbox.messages (partition_key, publication_id, message_type, data) VALUES (%s, %s, 't', '{}')"
CURSORS = pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"])
KEYS = {partition_of(f"key-{n}", COUNT): f"key-{n}" for n in range(8)}


class Partition:
    """Reads one partition to its end, and asks before each read whether that is needed."""

    def __init__(self, connection, shared, number=0, **source):
        self.connection = connection
        self.reader = MessageReader(build_source(**source), Slice(number, Partitions(count=COUNT)))
        self.arrivals = PartitionArrivals(shared, slots_of(number, COUNT))
        self.after = Checkpoint(0, 0, SnapshotRange()) if source.get("cursor") == "Snapshot" else BEGINNING

    def is_at_end(self):
        return self.arrivals.find_end(lambda: self.connection, self.after) is not None

    def read(self):
        batch = self.reader.fetch(self.connection, self.after, 10)
        self.arrivals.note(batch)
        self.after = batch.examined
        return [message.message_id for message in batch]

    def look(self):
        """Return what a read found; None: none was needed."""
        return None if self.is_at_end() else self.read()

    def settle(self):
        while self.look() is not None:
            pass


@pytest.fixture(autouse=True)
def _look_each_time(monkeypatch):
    monkeypatch.setattr(arrivals, "FRESH", 0.0)


@CURSORS
def test_after_reads_in_vain_nothing_is_read_until_a_message_is_there(database, cursor):
    producer = database.direct()
    partition = Partition(database.connect(), Arrivals(build_source(), "orders", PartitionKey()), cursor=cursor)
    assert [partition.look() for _ in range(4)] == [[], [], None, None]
    producer.execute("CREATE TABLE of_others AS SELECT 1")
    assert partition.look() is None

    producer.execute(INSERT, (KEYS[0], "p0"))
    assert len(partition.look()) == 1
    assert [partition.look() for _ in range(3)] == [[], None, None]


@CURSORS
@pytest.mark.parametrize("count", [1, arrivals.FEW, arrivals.FEW + 1])
@pytest.mark.parametrize("key", [PartitionKey(), None])
def test_messages_of_another_partition_cost_no_read_or_one(database, cursor, key, count):
    """One, where there are many of them, or where their slots would cost too much."""
    partition = Partition(database.connect(), Arrivals(build_source(), "orders", key), cursor=cursor)
    partition.settle()
    producer = database.direct()
    for _ in range(2):
        with producer.transaction():
            producer.cursor().executemany(INSERT, [(KEYS[1], "p0")] * count)
        first: list[str] | None = [] if key is None or count > arrivals.FEW else None
        assert [partition.look() for _ in range(2)] == [first, None]
    producer.execute(INSERT, (KEYS[0], "p0"))
    assert len(partition.look()) == 1


@CURSORS
def test_messages_of_others_are_passed_by_a_read_now_and_then(database, cursor, monkeypatch):
    partition = Partition(database.connect(), Arrivals(build_source(), "orders", PartitionKey()), cursor=cursor)
    partition.settle()
    database.direct().execute(INSERT, (KEYS[1], "p0"))
    assert [partition.look() for _ in range(2)] == [None, None]
    monkeypatch.setattr(arrivals, "PASSED", 0.0)
    assert [partition.look() for _ in range(2)] == [[], None]


def test_no_message_is_passed_below_which_another_may_be_committed(database):
    shared, connection = Arrivals(build_source(), "orders", PartitionKey()), database.connect()
    early, late = database.direct(), database.direct()
    assert shared.look(connection).passed is None
    with early.transaction():
        early.execute(INSERT, (KEYS[0], "p0"))
        late.execute(INSERT, (KEYS[1], "p0"))
        seen = shared.look(connection)
        assert seen.newest is not None
        assert seen.passed is None
    assert shared.look(connection).passed == seen.newest


@CURSORS
def test_what_was_begun_before_the_read_and_committed_after_newer_messages_is_found(database, cursor):
    partition = Partition(database.connect(), Arrivals(build_source(), "orders", PartitionKey()), cursor=cursor)
    early, late = database.direct(), database.direct()
    with early.transaction():
        early.execute(INSERT, (KEYS[0], "p0"))
        partition.settle()
        late.execute(INSERT, (KEYS[0], "p0"))
        found = [partition.look() for _ in range(3)]
        assert None not in found, "it may be readable at any moment"
    assert sum(map(len, [*found, partition.look()])) == 2


def test_partitions_that_are_due_together_share_a_look_until_the_server_wrote_something(database, monkeypatch):
    shared, connection = Arrivals(build_source(), "orders", PartitionKey()), database.connect()
    partitions = [Partition(connection, shared, number) for number in range(COUNT)]
    for partition in partitions:
        partition.settle()
    monkeypatch.setattr(arrivals, "FRESH", 60.0)
    seen = shared.look(connection)
    database.direct().execute(INSERT, (KEYS[1], "p0"))
    assert [partition.look() for partition in partitions] == [None, None]
    assert shared.look(connection) is seen
    shared.forget()
    assert partitions[0].look() is None
    assert len(partitions[1].look()) == 1


def test_while_the_number_of_partitions_is_to_change_each_reads_up_to_the_barrier(database):
    connection, token, hour = database.connect(), uuid4(), timedelta(hours=1)
    key, ours = ProcessorKey("outbox", "orders"), ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
    assert leases.claim(connection, key, ours).granted
    lease = leases.acquire_lease(connection, key, claim_uid="u1", pod="pod", token=token, lease=hour)
    assert lease.epoch is not None
    by = "partition key"
    divide.begin(connection, key, HeldLease(0, lease.epoch, token), count=COUNT, by=by, start=BEGINNING)
    partition = Partition(connection, Arrivals(build_source(), "orders", PartitionKey()))
    partition.settle()
    assert divide.ask(connection, key, ours, generation=1, count=COUNT + 1, by=by) == COUNT
    assert [partition.look() for _ in range(3)] == [[], [], []]
    assert divide.ask(connection, key, ours, generation=2, count=COUNT, by=by) == COUNT
    assert [partition.look() for _ in range(2)] == [[], None], "what was read in vain ended at the barrier"


def test_a_range_that_is_read_again_is_not_taken_for_one_up_to_now(database):
    """Its messages are gone meanwhile, so that the read is in vain; what came since lies behind it."""
    partition = Partition(database.connect(), Arrivals(build_source(), "orders", PartitionKey()), cursor="Snapshot")
    producer = database.direct()
    partition.settle()
    producer.execute(INSERT, (KEYS[0], "p0"))
    assert len(partition.reader.fetch(partition.connection, partition.after, 10)) == 1
    producer.execute("DELETE FROM outbox.messages")
    producer.execute(INSERT, (KEYS[0], "p0"))
    assert partition.look() == [], "the range is read again"
    assert len(partition.look() or ()) == 1


@CURSORS
@pytest.mark.parametrize("source", [{}, {"publications": ["p0", "p1"]}, {"message_types": ["t"]}])
@pytest.mark.parametrize("seed", [0, *at_night(1, 2)])
def test_wherever_nothing_is_read_nothing_would_be_found(database, seed, source, cursor):
    """Producers begin, store, commit and roll back as they like."""
    source = source | {"cursor": cursor}
    chance, shared = random.Random(seed), Arrivals(build_source(**source), "orders", PartitionKey())
    producers = [database.direct() for _ in range(3)]
    for producer in producers:
        producer.autocommit = False
    partitions = [Partition(database.connect(), shared, number, **source) for number in range(COUNT)]
    found, spared = [], 0
    for _ in range(400):
        if chance.random() < 0.15:
            chance.choice(producers).execute(INSERT, (f"key-{chance.randrange(8)}", f"p{chance.randrange(3)}"))
        elif chance.random() < 0.3:
            producer = chance.choice(producers)
            chance.choice([producer.commit, producer.rollback])()
        partition = chance.choice(partitions)
        if not partition.is_at_end():
            found += partition.read()
            continue
        spared += 1
        assert partition.reader.fetch(partition.connection, partition.after, 10).messages == ()
    for producer in producers:
        producer.commit()
    for partition in partitions:
        while read := partition.read():
            found += read
    wanted = producers[0].execute(
        "SELECT message_id FROM outbox.messages WHERE publication_id = ANY (%s)",
        (source.get("publications", ["p0", "p1", "p2"]),),
    )
    assert sorted(found) == sorted(name for (name,) in wanted)
    assert spared > 20


def test_after_a_crash_of_the_server_all_is_read_again():
    """Ids that were handed out before may be handed out again."""
    server = CrashingServer("18")
    try:
        name, shared = server.create("outbox_template"), Arrivals(build_source(), "orders", PartitionKey())
        with server.connect(name) as connection:
            before = Partition(connection, shared)
            before.settle()
        with server.crashed():
            pass
        with server.connect(name) as connection:
            before.connection = connection
            assert not before.is_at_end()
    finally:
        server.stop()


def test_a_row_that_a_user_stored_under_an_old_id_is_read_within_the_time_that_a_look_is_believed(
    database, monkeypatch
):
    partition = Partition(database.connect(), Arrivals(build_source(), "orders", PartitionKey()))
    producer = database.direct()
    (old,) = producer.execute("SELECT pg_current_xact_id()::text").fetchone()
    partition.settle()
    producer.execute(
        "INSERT INTO outbox.messages (transaction_id, partition_key, message_type, data) VALUES (%s, %s, 't', '{}')",
        (old, KEYS[0]),
    )
    assert partition.look() is None
    monkeypatch.setattr(arrivals, "BELIEVED", 0.0)
    assert len(partition.look()) == 1


@pytest.mark.parametrize("newest", [True, False], ids=["the newest transaction", "an older one"])
def test_a_look_says_whether_a_transaction_is_in_progress(database, newest):
    open_one, other = database.direct(autocommit=False), database.direct()
    connection, shared = database.connect(), Arrivals(build_source(), "orders")

    def saw_all():
        shared.forget()
        return shared.look(connection).saw_all

    wait_until(saw_all, "nothing is in progress", 30.0)
    open_one.execute("SELECT pg_current_xact_id()")
    if not newest:
        other.execute("SELECT pg_current_xact_id()")
    assert not saw_all()
    open_one.commit()
    wait_until(saw_all, "nothing is in progress any more", 30.0)
