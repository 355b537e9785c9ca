"""A small range of several pages is looked for once: its later pages are read by the positions that look found."""

from __future__ import annotations

import pytest

from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import Partitions
from outbox_worker.postgres import identity
from outbox_worker.postgres.reading import range_reader
from outbox_worker.postgres.reading.ahead import ReadAhead
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from outbox_worker.postgres.reading.range_reader import SnapshotReader
from outbox_worker.postgres.reading.range_scan import Limits, RangeScan
from tests.support.servers.postgres import build_source, wait_until

LIMIT = 10


class Counting:
    """A connection that counts looks at all keys of a range, and notes what else is read."""

    def __init__(self, connection):
        self._connection, self.looks = connection, 0

    def execute(self, query, *arguments):
        self.looks += "found AS MATERIALIZED" in query.as_string(None)
        return self._connection.execute(query, *arguments)


class Outbox:
    """An empty range is behind; the next one has 200 messages."""

    def __init__(self, database):
        self.direct = database.direct()
        self.connection = Counting(database.connect())
        beginning = Checkpoint(0, 0, SnapshotRange())
        self.start = self.reader().fetch(self.connection, beginning, LIMIT).examined
        self.produce(200)

    def produce(self, count):
        self.direct.execute(
            "INSERT INTO outbox.messages (partition_key, message_type, data, deliver_after) "
            "SELECT 'key-' || n %% 50, 't', '{}', CASE WHEN n %% 7 = 0 THEN now() END FROM generate_series(1, %s) AS n",
            (count,),
        )

    def reader(self, partition=None, ahead=None):
        part = None if partition is None else Slice(partition, Partitions(count=2))
        return MessageReader(build_source(cursor="Snapshot"), part, ahead=ahead)

    def positions(self):
        return [row[0] for row in self.direct.execute("SELECT position FROM outbox.messages ORDER BY position")]


@pytest.fixture
def outbox(database):
    return Outbox(database)


def pages(fetch, connection, after):
    while (batch := fetch(connection, after, LIMIT)).examined_count:
        yield after, batch
        after = batch.examined


def positions_of(batches):
    return [message.position for _, batch in batches for message in batch]


@pytest.mark.parametrize("partitions", [(None,), (0, 1)], ids=["Ordered", "Partitioned"])
def test_the_keys_of_a_range_are_looked_at_once(outbox, partitions):
    found = []
    for looks, partition in enumerate(partitions, start=1):
        batches = list(pages(outbox.reader(partition).fetch, outbox.connection, outbox.start))
        assert all(len(batch.messages) == LIMIT for _, batch in batches[:-1])
        may_wait = [sum(message.deliver_after is not None for message in batch) for _, batch in batches]
        assert [batch.delayed_count for _, batch in batches] == may_wait
        assert outbox.connection.looks == looks
        found += positions_of(batches)
    assert sorted(found) == outbox.positions()


@pytest.mark.parametrize("partition", [None, 0])
def test_the_statement_over_each_batch_has_its_messages(outbox, partition):
    """Where messages are not shipped the keys are looked at once too, and those that may be delayed are counted."""
    expected = [batch for _, batch in pages(outbox.reader(partition).fetch, outbox.connection, outbox.start)]
    outbox.connection.looks = 0
    reader = outbox.reader(partition)
    found = list(pages(reader.fetch_extent, outbox.connection, outbox.start))
    assert outbox.connection.looks == 1
    assert [batch.delayed_count for _, batch in found] == [batch.delayed_count for batch in expected]
    for (after, batch), same in zip(found, expected, strict=True):
        relation = reader.batch_relation(after, batch.examined, batch.positions)
        rows = outbox.connection.execute(relation).fetchall()
        assert [row[1] for row in rows] == [message.position for message in same]
        without = outbox.connection.execute(reader.batch_relation(after, batch.examined)).fetchall()
        assert rows == without


def test_where_messages_lie_far_apart_the_keys_are_sorted_once_for_several_pages(outbox):
    """Of 2,000 rows 50 are wanted: more than may be counted, and a list has 31."""
    outbox.produce(1800)
    wanted = outbox.positions()[::40]
    outbox.direct.execute("UPDATE outbox.messages SET publication_id = 'p' WHERE position = ANY (%s)", (wanted,))
    scan = RangeScan.of(build_source(cursor="Snapshot", publications=["p"]))
    reader = SnapshotReader(scan, limits=Limits(small=1, ahead=30), remote_target=True)
    assert positions_of(pages(reader.fetch, outbox.connection, outbox.start)) == wanted
    assert outbox.connection.looks == 4


def test_of_what_is_deleted_after_the_look_nothing_is_read_and_the_rest_is(outbox):
    reader = outbox.reader()
    first = reader.fetch(outbox.connection, outbox.start, LIMIT)
    gone, rest = outbox.positions()[LIMIT : 3 * LIMIT + 3], outbox.positions()[3 * LIMIT + 3 :]
    outbox.direct.execute("DELETE FROM outbox.messages WHERE position = ANY (%s)", (gone,))
    assert positions_of(pages(reader.fetch, outbox.connection, first.examined)) == rest


@pytest.mark.parametrize("why", ["forgotten", "connection", "old", "another range"])
def test_a_list_that_may_be_wrong_is_not_used(outbox, database, monkeypatch, why):
    """What a crash took back is gone, and its places are other messages' now."""
    if why == "old":
        monkeypatch.setattr(range_reader, "FRESH", 0.0)
    reader = outbox.reader()
    first = reader.fetch(outbox.connection, outbox.start, LIMIT)
    after = first.examined
    if why == "forgotten":
        reader.forget()
    elif why == "connection":
        outbox.connection = Counting(database.connect())
    elif why == "another range":
        # As another owner opened it, before the last message.
        upper = outbox.direct.execute(
            "SELECT min(transaction_id)::text || ':' || min(transaction_id)::text || ':' FROM outbox.messages"
        ).fetchone()[0]
        after = Checkpoint(
            0, first.examined.position, SnapshotRange(after.snapshot_range.lower, upper, after.snapshot_range.position)
        )
    looks = outbox.connection.looks
    begin = 0 if why == "another range" else LIMIT  # nothing is in that one, so that the next one is opened
    batch = reader.fetch(outbox.connection, after, LIMIT)
    assert outbox.connection.looks > looks
    assert [message.position for message in batch] == outbox.positions()[begin : begin + LIMIT]


@pytest.mark.parametrize("partition", [None, 0])
def test_lag_inside_a_range_is_exact_up_to_its_cap(outbox, partition):
    """What was committed since the range began lies behind the place too: it counts once."""
    reader = outbox.reader(partition)
    after = reader.fetch(outbox.connection, outbox.start, LIMIT).examined
    outbox.produce(60)
    lag, capped = (reader.lag(outbox.connection, after, cap) for cap in (300, 100))
    left = len(positions_of(pages(reader.fetch, outbox.connection, after)))
    assert (lag.messages, lag.at_least) == (left, False)
    assert 0 < capped.messages <= 100
    assert capped.at_least


def test_the_next_batch_is_read_ahead_by_the_list(outbox, database):
    other = database.connect()
    ahead = ReadAhead(lambda: other)
    reader, outbox.connection = outbox.reader(ahead=ahead), database.connect()
    first = reader.fetch(outbox.connection, outbox.start, LIMIT)
    second = outbox.positions()[LIMIT : 2 * LIMIT]
    reader.read_ahead(first.examined, LIMIT, identity.fetch_run(outbox.direct, "outbox"))
    found = "SELECT state = 'idle' AND query LIKE '%%server_run()%%' FROM pg_stat_activity WHERE pid = %s"
    wait_until(lambda: outbox.direct.execute(found, (other.info.backend_pid,)).fetchone()[0], "the server has read it")
    outbox.direct.execute("DELETE FROM outbox.messages")
    try:
        assert [message.position for message in reader.fetch(outbox.connection, first.examined, LIMIT)] == second
    finally:
        ahead.close()
