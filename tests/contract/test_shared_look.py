"""One look along the positions for all partitions of a process: each reads what it would read by itself."""

from __future__ import annotations

import pytest
from typing_extensions import override

from outbox_core.partition import partition_of
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import Partitions
from outbox_worker.postgres import identity
from outbox_worker.postgres.reading import shared_look
from outbox_worker.postgres.reading.ahead import ReadAhead
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from outbox_worker.postgres.reading.range_reader import SnapshotReader
from outbox_worker.postgres.reading.range_scan import Limits
from outbox_worker.postgres.reading.shared_look import PartitionLook, SharedLook
from outbox_worker.postgres.reading.snapshots import fetch_snapshot
from tests.support.servers.postgres import build_source, wait_until

START = Checkpoint(0, 0, SnapshotRange())
LIMIT = 10


class Outbox:
    """200 messages of 50 keys, some of which may be delayed, and the readers of its partitions."""

    def __init__(self, database):
        self.direct, self.connection = database.direct(), database.connect()
        self.shared = SharedLook()
        self.produce(200)

    def produce(self, count):
        self.direct.execute(
            "INSERT INTO outbox.messages (partition_key, publication_id, message_type, data, deliver_after) "
            "SELECT 'key-' || n %% 50, 'p' || n %% 3, 't' || n %% 2, '{}', CASE WHEN n %% 7 = 0 THEN now() END "
            "FROM generate_series(1, %s) AS n",
            (count,),
        )

    def reader(self, partition=0, count=2, ahead=None, shared=True, **source):
        part = Slice(partition, Partitions(count=count))
        look = self.shared if shared else None
        return MessageReader(build_source(cursor="Snapshot", **source), part, ahead=ahead, shared=look)

    def behind(self, partition, count=2, ahead=20, remote_target=True):
        """Return the reader of a partition for which everything is a large range."""
        reader = self.reader(partition, count)
        look, limits = PartitionLook(self.shared, partition, count), Limits(small=1, ahead=ahead)
        return SnapshotReader(reader._scan, partition, limits, remote_target=remote_target, look=look)

    def read(self, reader, after=START, limit=LIMIT):
        """Read all that comes after a checkpoint, in pages."""
        while (batch := reader.fetch(self.connection, after, limit)).examined_count:
            yield batch
            after = batch.examined

    def doubt(self, why, database):
        """Forget what was noted, or go on with another connection."""
        if why == "forgotten":
            self.reader().forget()
        elif why == "connection":
            self.connection = database.connect()

    def positions_of(self, partition, count=2, where="true"):
        rows = self.direct.execute(
            f"SELECT partition_key, position FROM outbox.messages WHERE {where} ORDER BY position"
        ).fetchall()
        return [position for key, position in rows if partition_of(key, count) == partition]


@pytest.fixture
def outbox(database):
    return Outbox(database)


def listed(batches):
    return [message.position for batch in batches for message in batch]


@pytest.mark.parametrize("limit", [1, 10, 1000])
@pytest.mark.parametrize(
    ("source", "where"),
    [
        ({}, "true"),
        ({"publications": ["p0", "p2"]}, "publication_id <> 'p1'"),
        ({"messageTypes": ["t1"]}, "message_type = 't1'"),
    ],
    ids=["all", "publications", "types"],
)
def test_each_partition_reads_its_own(outbox, source, where, limit):
    readers = [(partition, outbox.reader(partition, 4, **source)) for partition in range(4)]
    delayed = 0
    for partition, reader in readers:
        expected = list(outbox.read(outbox.reader(partition, 4, shared=False, **source), limit=limit))
        batches = list(outbox.read(reader, limit=limit))
        assert listed(batches) == listed(expected) == outbox.positions_of(partition, 4, where)
        may_wait = sum(message.deliver_after is not None for batch in batches for message in batch)
        assert sum(batch.delayed_count for batch in batches) == may_wait
        delayed += may_wait
    assert delayed > 0


def test_the_statement_over_a_batch_has_its_messages(outbox):
    outbox.reader(1).fetch_extent(outbox.connection, START, LIMIT)
    reader = outbox.reader(0)
    batch = reader.fetch_extent(outbox.connection, START, LIMIT)
    rows = outbox.connection.execute(reader.batch_relation(START, batch.examined, batch.positions)).fetchall()
    assert [row[1] for row in rows] == outbox.positions_of(0)[:LIMIT]
    assert (batch.matched_count, batch.full) == (LIMIT, True)


class Counting:
    """A connection that counts looks along the positions and for beginnings, and pages that are found by sorting."""

    def __init__(self, connection):
        self._connection, self.looks, self.beginnings, self.sorts = connection, 0, 0, 0

    def execute(self, query, *arguments):
        text = query.as_string(None)
        self.looks += "r.partition" in text
        self.beginnings += "SELECT r.position" in text
        self.sorts += "f.position + 0" in text and "MATERIALIZED (SELECT f.*" not in text and "r.position" not in text
        return self._connection.execute(query, *arguments)


@pytest.mark.parametrize(
    ("source", "least", "looks"),
    [({}, LIMIT, 1), ({"messageTypes": ["t1"]}, 5, 2)],
    ids=["all", "types, where the first look leaves too few"],
)
def test_partitions_use_one_look(outbox, source, least, looks):
    outbox.connection = counting = Counting(outbox.connection)
    for partition in range(4):
        assert next(outbox.read(outbox.reader(partition, 4, **source))).matched_count >= least
    assert counting.looks == looks


def test_what_a_filter_lets_through_seldom_is_not_sorted(outbox):
    """Few messages of a partition along the positions say that they lie far apart, but not where some are left out."""
    outbox.connection = counting = Counting(outbox.connection)
    assert listed(outbox.read(outbox.reader(0, messageTypes=["t9"]))) == []
    assert (counting.looks, counting.sorts) == (3, 0)


def test_what_commits_after_a_look_is_found_in_a_later_range(outbox):
    outbox.reader(0).fetch(outbox.connection, START, LIMIT)
    before = outbox.positions_of(1)
    outbox.produce(50)
    after = outbox.positions_of(1)
    assert len(after) > len(before)
    assert listed(outbox.read(outbox.reader(1))) == after


def test_of_what_is_deleted_after_a_look_nothing_is_read_and_the_rest_is(outbox):
    outbox.reader(1).fetch(outbox.connection, START, LIMIT)
    gone, rest = outbox.positions_of(0)[: 2 * LIMIT + 3], outbox.positions_of(0)[2 * LIMIT + 3 :]
    outbox.direct.execute("DELETE FROM outbox.messages WHERE position = ANY (%s)", (gone,))
    assert listed(outbox.read(outbox.reader(0))) == rest


@pytest.fixture
def after(outbox, database):
    """A checkpoint behind 200 messages; 200 more follow, and one that had its position then."""
    late = database.connect()
    late.execute("BEGIN")
    late.execute(
        "INSERT INTO outbox.messages (partition_key, publication_id, message_type, data) "
        "VALUES ('late', 'p', 't', '{}')"
    )
    lower = fetch_snapshot(outbox.direct)
    outbox.produce(200)
    late.execute("COMMIT")
    return Checkpoint(0, 1, SnapshotRange(lower))


def test_the_beginning_of_a_large_range_is_found_once_for_all_partitions(outbox, after):
    expected = [outbox.positions_of(partition, 4, "position > 200") for partition in range(4)]
    outbox.connection = counting = Counting(outbox.connection)
    assert [listed(outbox.read(outbox.behind(partition, 4), after)) for partition in range(4)] == expected
    assert sum(len(each) for each in expected) == 201
    assert (counting.beginnings, counting.sorts) == (1, 0)


def test_partitions_read_the_range_that_one_of_them_found_large(outbox, after):
    """Each stores a checkpoint meanwhile: the present snapshot is another one for each, and would need a look."""
    expected = [outbox.positions_of(partition, 4, "position > 200") for partition in range(4)]
    outbox.connection = counting = Counting(outbox.connection)
    for partition in range(4):
        outbox.direct.execute("SELECT pg_current_xact_id()")
        reader = outbox.behind(partition, 4, ahead=160, remote_target=False)
        assert listed(outbox.read(reader, after)) == expected[partition]
    assert (counting.beginnings, counting.looks) == (1, 2)


def test_behind_a_range_that_another_partition_found_is_what_came_since(outbox, after):
    first = outbox.behind(0, remote_target=False)
    opened = first.fetch(outbox.connection, after, LIMIT).examined
    outbox.produce(50)
    for partition, reader, begin in ((0, first, opened), (1, outbox.behind(1, remote_target=False), after)):
        assert listed(outbox.read(reader, begin)) == outbox.positions_of(partition, where="position > 200")
        assert listed(outbox.read(reader, after)) == outbox.positions_of(partition, where="position > 200")


@pytest.mark.parametrize("by_itself", [False, True], ids=["another partition's range", "its own"])
def test_a_page_that_is_read_again_is_of_the_same_range(outbox, after, monkeypatch, by_itself):
    """So that looking for a message that fails gets nearer to it, though another partition opens one meanwhile."""
    reader = outbox.behind(1, remote_target=False)
    if not by_itself:
        outbox.behind(0, remote_target=False).fetch(outbox.connection, after, LIMIT)
    first = reader.fetch(outbox.connection, after, LIMIT).examined
    outbox.produce(50)
    outbox.shared.forget()  # as when it grows old
    if not by_itself:
        monkeypatch.setattr(shared_look, "FRESH", -1.0)
    outbox.behind(0, remote_target=False).fetch(outbox.connection, after, LIMIT)
    assert reader.fetch(outbox.connection, after, LIMIT).examined.snapshot_range == first.snapshot_range


def test_another_number_of_partitions_looks_anew(outbox):
    outbox.reader(0, 2).fetch(outbox.connection, START, LIMIT)
    for partition in range(3):
        assert listed(outbox.read(outbox.reader(partition, 3))) == outbox.positions_of(partition, 3)


@pytest.mark.parametrize("why", ["forgotten", "connection", "old"])
def test_a_beginning_that_may_be_wrong_is_not_used(outbox, after, database, monkeypatch, why):
    if why == "old":
        monkeypatch.setattr(shared_look, "FRESH", 0.0)
    outbox.behind(0).fetch(outbox.connection, after, LIMIT)
    outbox.direct.execute("UPDATE outbox.messages SET position = position - 1000 WHERE position > 200")
    outbox.doubt(why, database)
    assert listed(outbox.read(outbox.behind(1), after)) == outbox.positions_of(1, where="position < 0")


def test_a_large_range_of_which_nothing_is_left_is_passed(outbox, after):
    class Pruned(Counting):
        """All is deleted between the count of the keys and the look for the first one."""

        @override
        def execute(self, query, *arguments):
            if "SELECT r.position" in query.as_string(None):
                outbox.direct.execute("DELETE FROM outbox.messages")
            return super().execute(query, *arguments)

    pruned = Pruned(outbox.connection)
    found = outbox.behind(1).fetch(pruned, after, LIMIT)
    assert pruned.beginnings == 1
    assert (found.matched_count, found.full, found.examined.snapshot_range.is_open) == (0, False, False)


@pytest.mark.parametrize("why", ["forgotten", "connection", "old"])
def test_a_look_that_may_be_wrong_is_not_used(outbox, database, monkeypatch, why):
    """What a crash took back is gone, and its places are other messages' now."""
    if why == "old":
        monkeypatch.setattr(shared_look, "FRESH", 0.0)
    outbox.reader(0).fetch(outbox.connection, START, LIMIT)
    outbox.direct.execute("UPDATE outbox.messages SET partition_key = 'key-' || (position + 1) % 50")
    outbox.doubt(why, database)
    assert listed(outbox.read(outbox.reader(1))) == outbox.positions_of(1)


def test_the_next_batch_is_read_ahead_where_a_look_noted_it(outbox, database):
    other = database.connect()
    ahead = ReadAhead(lambda: other)
    reader = outbox.reader(0, ahead=ahead)
    first = reader.fetch(outbox.connection, START, LIMIT)
    second = outbox.positions_of(0)[LIMIT : 2 * LIMIT]
    reader.read_ahead(first.examined, LIMIT, identity.fetch_run(outbox.connection, "outbox"))
    found = "SELECT state = 'idle' AND query LIKE '%%server_run()%%' FROM pg_stat_activity WHERE pid = %s"
    pid = other.info.backend_pid
    wait_until(lambda: outbox.direct.execute(found, (pid,)).fetchone()[0], "the server has read it")
    outbox.direct.execute("DELETE FROM outbox.messages")
    try:
        assert listed([reader.fetch(outbox.connection, first.examined, LIMIT)]) == second
    finally:
        ahead.close()
