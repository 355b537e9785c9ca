"""What the observer counts of a processor's partitions in the time that it has."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from psycopg import sql

from outbox_core.config import ProcessorConfig
from outbox_core.errors import PermanentError
from outbox_core.processor.state import initial_state
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Lag
from outbox_worker.competing.consumer import ThisConsumer
from outbox_worker.observe.sight import CompetingSight, PartitionedSight, Sight
from outbox_worker.observe.status import Identity, ProcessStatus
from outbox_worker.ownership.membership import Membership
from outbox_worker.postgres.call import fetch_row
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress.checkpoints import StoredCheckpoint
from outbox_worker.postgres.reading import arrivals
from outbox_worker.postgres.reading.messages import MessageReader
from tests.support.worker import build_config

STORED = {number: StoredCheckpoint(Checkpoint(0, 0), datetime.now(UTC)) for number in range(4)}


def test_a_partition_that_cannot_be_counted_in_time_is_left_out_and_the_others_are_not(database, monkeypatch):
    fields = build_config(database, {"sql": {"statement": "SELECT 1"}}, delivery={"mode": "Partitioned"})
    membership = Membership(4, uuid4())
    config = ProcessorConfig.model_validate(fields)
    status = ProcessStatus(config, Identity("pod", "uid", "instance"), initial_state(time.monotonic()))
    sight = PartitionedSight(ProcessorKey("outbox", "orders"), status, config, membership)
    monkeypatch.setattr(
        sight._readers[1], "lag", lambda connection, *_: fetch_row(connection, sql.SQL("SELECT pg_sleep(10)"))
    )
    connection = database.connect()
    database.direct().execute(
        "INSERT INTO outbox.messages (partition_key, message_type, data) "
        "SELECT 'key-' || n, 't', '{}' FROM generate_series(1, 100) AS n"
    )
    found = sight.measure(connection, sight._readers[0], STORED, time.monotonic() + 60, 0.2)
    alone = [sight._readers[number].lag(connection, STORED[number].pair) for number in (0, 2, 3)]
    assert isinstance(found, Lag)
    assert found.messages == sum(lag.messages for lag in alone) > 0
    assert found.at_least
    assert sight.measure(connection, sight._readers[0], STORED, 0.0, 0.2) == found, "there is no time left"


def test_batches_that_cannot_be_counted_in_time_are_left_out_and_all_else_is_seen(database, monkeypatch):
    fields = build_config(database, {"sql": {"statement": "SELECT 1"}}, delivery={"mode": "Competing", "competing": {}})
    config, key = ProcessorConfig.model_validate(fields), ProcessorKey("outbox", "orders")
    status = ProcessStatus(config, Identity("pod", "uid", "instance"), initial_state(time.monotonic()))
    consumer = ThisConsumer(config, key, "pod", "uid", uuid4())
    sight, connection = CompetingSight(key, status, config, consumer), database.connect()
    sight.look(connection, 5.0)
    seen = status.report().unfinished
    assert seen is not None
    slow = sql.SQL("SELECT pg_sleep(10)")
    monkeypatch.setattr(competing, "count_unfinished", lambda connection, _: fetch_row(connection, slow))
    sight.look(connection, 0.2)
    assert status.report().unfinished == seen
    assert sight.load(connection) == {}


def test_what_can_never_be_counted_is_told(database):
    """A table may be a view of the user's, whose columns can fail."""
    config = ProcessorConfig.model_validate(build_config(database, {"sql": {"statement": "SELECT 1"}}))
    sight, reader = Sight(ProcessorKey("outbox", "orders")), MessageReader(config.source)
    connection, owner = database.connect(), database.direct()
    owner.execute("ALTER TABLE outbox.messages RENAME TO kept; ALTER TABLE outbox.kept ADD divisor int DEFAULT 0")
    columns = owner.execute(
        "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute "
        "WHERE attrelid = 'outbox.kept'::regclass AND attnum > 0 AND attname NOT IN ('scheduled', 'divisor')"
    ).fetchone()[0]
    owner.execute(
        f"CREATE VIEW outbox.messages AS SELECT {columns}, scheduled + interval '1 s' * (1 / divisor) AS scheduled "
        "FROM outbox.kept"
    )
    owner.execute("INSERT INTO outbox.kept (message_type, data) VALUES ('t', '{}')")
    with pytest.raises(PermanentError, match="division by zero"):
        sight.measure(connection, reader, {0: STORED[0]}, time.monotonic() + 60, 5.0)


def test_where_nothing_waits_and_nothing_came_no_partition_is_counted_again(database, monkeypatch):
    delivery = {"mode": "Partitioned", "partitions": {"count": 4}}
    fields = build_config(database, {"sql": {"statement": "SELECT 1"}}, delivery=delivery)
    config = ProcessorConfig.model_validate(fields)
    status = ProcessStatus(config, Identity("pod", "uid", "instance"), initial_state(time.monotonic()))
    sight = PartitionedSight(ProcessorKey("outbox", "orders"), status, config, Membership(4, uuid4()))
    counted = []
    count_partition = MessageReader.lag

    def count_and_note(reader, *given):
        counted.append(reader)
        return count_partition(reader, *given)

    monkeypatch.setattr(MessageReader, "lag", count_and_note)
    connection = database.connect()

    def measure(stored):
        time.sleep(arrivals.FRESH)  # a look is used for so long
        counted.clear()
        lag = sight.measure(connection, sight._readers[0], stored, time.monotonic() + 60, 10.0)
        return lag and lag.messages, len(counted)

    assert [measure(STORED) for _ in range(3)] == [(0, 4), (0, 0), (0, 0)]
    database.direct().execute(
        "INSERT INTO outbox.messages (partition_key, message_type, data) "
        "SELECT 'key-' || n, 't', '{}' FROM generate_series(1, 100) AS n"
    )
    assert [measure(STORED) for _ in range(2)] == [(100, 4), (100, 4)]
    newest_first = "SELECT transaction_id::text::bigint, position FROM outbox.messages ORDER BY 1 DESC, 2 DESC"
    newest = Checkpoint(*database.direct().execute(newest_first).fetchone())
    handled = {number: StoredCheckpoint(newest, datetime.now(UTC)) for number in range(4)}
    assert [measure(handled) for _ in range(2)] == [(0, 4), (0, 0)]
    assert measure(STORED) == (100, 4), "the checkpoints are others"
