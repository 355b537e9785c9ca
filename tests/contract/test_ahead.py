"""Reading ahead: what was asked for early is used for just that, in the same run of the server; else nothing shows."""

from __future__ import annotations

import os
import socket
import time

import pytest

from outbox_core.errors import TransientError
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import Reason
from outbox_core.spec import PartitionKey, Partitions
from outbox_worker.postgres import identity
from outbox_worker.postgres.reading import ahead
from outbox_worker.postgres.reading.ahead import ReadAhead
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from tests.support.servers.postgres import EVERYWHERE, build_source, wait_until

LIMIT = 3


class World:
    """An outbox whose messages are deleted behind the reader's back: only what was read before can still be found."""

    def __init__(self, database):
        self.direct = database.direct()
        self.connection = database.connect()
        self.run = identity.fetch_run(self.connection, "outbox")
        self.opened = []
        self._connect = database.connect
        self.takes_little_at_once = False
        self.ahead = ReadAhead(self._open)

    def _open(self):
        self.opened.append(self._connect())
        if self.takes_little_at_once:
            with socket.socket(fileno=os.dup(self.opened[-1].fileno())) as network:
                network.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return self.opened[-1]

    def reader(self, part=None, **source):
        return MessageReader(build_source(**source), part, ahead=self.ahead)

    def produce(self, count, size=10):
        self.direct.execute(
            "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
            "SELECT 'key-' || n, 'message', 'T', jsonb_build_object('text', repeat('x', %s)) "
            "FROM generate_series(1, %s::int) AS n",
            (size, count),
        )

    def empty(self):
        """Delete all, once the server has found what it was asked for."""
        time.sleep(0.2)
        self.direct.execute("DELETE FROM outbox.messages")

    def end_connections(self):
        for each in self.opened:
            self.direct.execute("SELECT pg_terminate_backend(%s)", (each.info.backend_pid,))


@pytest.fixture
def world(each_database):
    world = World(each_database)
    yield world
    world.ahead.close()


@pytest.fixture
def here(database):
    world = World(database)
    yield world
    world.ahead.close()


def begin(world, reader, count=9, after=BEGINNING, limit=LIMIT):
    """Read the first batch and the second one ahead, and delete all."""
    world.produce(count)
    first = reader.fetch(world.connection, after, limit)
    assert len(first) == limit
    reader.read_ahead(first.examined, limit, world.run)
    world.empty()
    return first


@EVERYWHERE
@pytest.mark.parametrize("after", [BEGINNING, Checkpoint(0, 0, SnapshotRange())], ids=["TransactionOrder", "Snapshot"])
def test_the_next_batch_is_what_was_read_ahead_and_is_used_once(world, after):
    reader = world.reader()
    first = begin(world, reader, after=after)

    second = reader.fetch(world.connection, first.examined, LIMIT)

    positions = [message.checkpoint.position for message in (*first, *second)]
    assert len(second) == LIMIT
    assert positions == sorted(set(positions))
    assert second.full
    assert not reader.fetch(world.connection, first.examined, LIMIT).messages
    assert len(world.opened) == 1


@pytest.mark.parametrize("count", [100, 4000])
def test_it_is_the_same_batch_as_without(here, count):
    """4,000 messages of 1,000 bytes are more than the network holds while nothing takes them."""
    here.produce(2 * count, 1000)
    reader, plain = here.reader(), MessageReader(build_source())
    first = reader.fetch(here.connection, BEGINNING, count)
    expected = plain.fetch(here.connection, first.examined, count)
    reader.read_ahead(first.examined, count, here.run)
    assert reader.fetch(here.connection, first.examined, count) == expected


@pytest.mark.parametrize("by", ["place", "size", "barrier", "partition", "forgotten", "late", "run"])
def test_another_question_is_not_answered_by_it(here, by, monkeypatch):
    if by == "late":
        monkeypatch.setattr(ahead, "FRESH", 0.0)
    partitions = Partitions(count=2, key=PartitionKey())
    reader = here.reader(Slice(0, partitions))
    first = begin(here, reader, count=40)
    after, limit = first.examined, LIMIT
    if by == "place":
        after = BEGINNING
    elif by == "size":
        limit = LIMIT - 1
    elif by == "barrier":
        reader = here.reader(Slice(0, partitions, Checkpoint(2**40, 0)))
    elif by == "partition":
        reader = here.reader(Slice(1, partitions))
    elif by == "forgotten":
        reader.forget()
    elif by == "run":
        reader.fetch(here.connection, first.examined, LIMIT)
        here.produce(40)
        first = reader.fetch(here.connection, BEGINNING, LIMIT)
        reader.read_ahead(first.examined, LIMIT, "another run")
        here.empty()
        after = first.examined
    assert not reader.fetch(here.connection, after, limit).messages


def test_what_is_not_full_is_read_again(here):
    """What comes meanwhile belongs to the batch: it must not look as if there were no more."""
    here.produce(LIMIT + 1)
    reader = here.reader()
    first = reader.fetch(here.connection, BEGINNING, LIMIT)
    reader.read_ahead(first.examined, LIMIT, here.run)
    time.sleep(0.2)
    here.produce(1)
    second = reader.fetch(here.connection, first.examined, LIMIT)
    assert (len(second), second.full) == (2, False)


def test_partitions_share_one_connection_and_do_not_disturb_each_other(here):
    one, other = here.reader(), here.reader()
    first = begin(here, one)
    other.read_ahead(first.examined, LIMIT, here.run)
    assert not other.fetch(here.connection, first.examined, LIMIT).messages
    other.forget()
    assert len(one.fetch(here.connection, first.examined, LIMIT)) == LIMIT
    assert len(here.opened) == 1


def test_a_fault_is_silent_and_ends_reading_ahead_for_a_while(here):
    reader = here.reader()
    first = begin(here, reader)
    here.end_connections()
    here.produce(LIMIT)
    reader.read_ahead(first.examined, LIMIT, here.run)
    assert len(reader.fetch(here.connection, first.examined, LIMIT)) == LIMIT
    reader.read_ahead(first.examined, LIMIT, here.run)
    assert len(here.opened) == 1


def test_a_server_without_a_connection_to_spare_is_not_asked_again_at_once(here):
    asked = []

    def refuse():
        asked.append(1)
        raise TransientError("too many clients already", reason=Reason.DATABASE_UNAVAILABLE)

    here.ahead = ReadAhead(refuse)
    here.produce(2 * LIMIT)
    reader = here.reader()
    for _ in range(3):
        reader.read_ahead(BEGINNING, LIMIT, here.run)
        assert len(reader.fetch(here.connection, BEGINNING, LIMIT)) == LIMIT
    assert len(asked) == 1


def test_a_statement_that_waits_for_a_lock_ends_by_itself(here, monkeypatch):
    monkeypatch.setattr(ahead, "LONGEST", 1.0)
    here.produce(2 * LIMIT)
    reader = here.reader()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with here.direct.transaction():
        here.direct.execute("LOCK TABLE outbox.messages")
        reader.read_ahead(BEGINNING, LIMIT, here.run)
        wait_until(lambda: here.direct.execute(waiting).fetchone() == (1,), "it waits")
        wait_until(lambda: here.direct.execute(waiting).fetchone() == (0,), "it gave up", 10)
    assert len(reader.fetch(here.connection, BEGINNING, LIMIT)) == LIMIT


def test_rows_that_are_not_taken_keep_no_lock(here, monkeypatch):
    """The process is frozen, or its handler takes long: a change of the table must not wait for it."""
    monkeypatch.setattr(ahead, "LONGEST", 2.0)  # many times as long as the server takes until it can send no more
    here.produce(2_000, 5000)
    here.takes_little_at_once = True
    reader = here.reader()
    reader.read_ahead(BEGINNING, 2_000, here.run)
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ClientWrite' AND datname = current_database()"
    wait_until(lambda: here.direct.execute(blocked).fetchone() == (1,), "more is found than the network holds")
    here.direct.execute("SET lock_timeout = '20s'")
    here.direct.execute("ALTER TABLE outbox.messages ADD COLUMN note text")
    assert len(reader.fetch(here.connection, BEGINNING, LIMIT)) == LIMIT


def test_without_a_backlog_the_connection_is_closed(here, monkeypatch):
    reader = here.reader()
    first = begin(here, reader)
    reader.fetch(here.connection, first.examined, LIMIT)
    reader.forget_ahead()
    assert not here.opened[0].closed
    monkeypatch.setattr(ahead, "IDLE", 0.0)
    reader.forget_ahead()
    assert here.opened[0].closed
