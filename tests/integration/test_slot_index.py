"""Reading one partition costs its own rows; the index for it is built, or a person is told how."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_core.checkpoint import BEGINNING, Checkpoint
from outbox_core.errors import ConfigurationError
from outbox_core.partition import partition_of, slot_of
from outbox_core.spec import PartitionKey, Partitions
from outbox_worker.postgres.messages import MessageReader, Slice
from outbox_worker.postgres.slots import can_read_by_slot, ensure_slot_index
from tests.integration.test_query_plans import Explaining
from tests.support.postgres import VERSIONS, build_source

LIMIT = 100
KEYS = [
    pytest.param({}, "partition_key", id="the partition key column"),
    pytest.param({"column": "publication_id"}, "publication_id", id="another column"),
    pytest.param({"data": ["order", "customer"]}, "data #>> '{order,customer}'", id="a path in the payload"),
    pytest.param({"metadata": ["tenant"]}, "metadata ->> 'tenant'", id="a path in the metadata"),
]


@pytest.fixture(scope="module", params=VERSIONS)
def seeded(servers, request):
    """60,000 rows of 500 keys in 600 transactions of the past; one in ten has no key."""
    with servers.database(request.param) as database:
        database.direct().execute(
            """INSERT INTO outbox.messages
                   (transaction_id, publication_id, partition_key, message_id, message_type, data, metadata)
               SELECT (3 + i / 100)::text::xid8, 'p' || i % 50, CASE WHEN i % 10 > 0 THEN 'key-' || i % 500 END,
                      'id-' || i, 't' || i / 50 % 10,
                      jsonb_build_object('order', jsonb_build_object('customer', 'c-' || i % 300)),
                      jsonb_build_object('tenant', CASE WHEN i % 3 > 0 THEN i % 40 END)
               FROM generate_series(1, 60000) AS i"""
        )
        yield database


def reader_of(partition, count, key=None, **fields):
    partitions = Partitions.model_validate({"count": count, "key": key or {}})
    return MessageReader(build_source(**fields), Slice(partition, partitions))


@pytest.mark.parametrize(("key", "expression"), KEYS)
def test_the_partitions_together_are_the_outbox_and_each_is_in_order(seeded, key, expression):
    connection = seeded.direct()
    assert ensure_slot_index(connection, build_source(), PartitionKey.model_validate(key)) is None
    rows = connection.execute(
        f"SELECT coalesce({expression}, message_id), position FROM outbox.messages ORDER BY transaction_id, position"
    ).fetchall()
    for partition in range(3):
        batch = reader_of(partition, 3, key).fetch(connection, BEGINNING, 100_000)
        assert batch.partition == partition
        expected = [position for text, position in rows if partition_of(text, 3) == partition]
        assert [message.checkpoint.position for message in batch.messages] == expected


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("fields", [{}, {"messageTypes": ["t1"]}, {"publications": ["p7", "p8"]}], ids=str)
@pytest.mark.parametrize("has_statistics", [True, False], ids=["analyzed", "never analyzed"])
def test_a_partition_is_read_by_its_index(seeded, count, fields, has_statistics):
    connection = seeded.direct()
    assert ensure_slot_index(connection, build_source(), PartitionKey()) is None
    if has_statistics:
        connection.execute("VACUUM ANALYZE outbox.messages")
    else:
        connection.execute("DELETE FROM pg_statistic WHERE starelid = 'outbox.messages'::regclass")
    reader = reader_of(1, count, **fields)
    explaining: Any = Explaining(seeded.connect())
    middle = Checkpoint(300, 0)

    batch = reader.fetch(explaining, middle, LIMIT)
    reader.bound_of(explaining, middle, LIMIT)
    reader.lag(explaining, middle, cap=LIMIT)
    if batch.matched:
        explaining.execute(reader.batch_relation(middle, batch.examined))

    nodes = list(explaining.nodes())
    assert not [n for n in nodes if n["Node Type"] == "Seq Scan"]
    if "publications" not in fields:  # else that index may be the better one
        assert all("_slots_" in n["Index Name"] for n in nodes if "Index Name" in n)
    if not fields:
        scanned = [n["Actual Rows"] for n in explaining.plans]
        assert max(scanned) <= LIMIT + 1
        assert sum(n.get("Rows Removed by Filter", 0) for n in nodes) == 0


def test_paging_and_types_see_the_same_as_one_look(seeded):
    connection = seeded.direct()
    ensure_slot_index(connection, build_source(), PartitionKey())
    for fields in ({}, {"messageTypes": ["t1", "t2"]}, {"publications": ["p1", "p2"], "messageTypes": ["t0"]}):
        reader = reader_of(2, 6, **fields)
        whole = reader.fetch(connection, BEGINNING, 100_000).messages
        assert whole
        paged, after = [], BEGINNING
        while (batch := reader.fetch(connection, after, 777)).examined > after:
            paged += batch.messages
            after = batch.examined
        assert paged == list(whole)
        assert reader.lag(connection, BEGINNING, cap=100_000).messages == len(whole)
        related = connection.execute(reader.batch_relation(BEGINNING, after)).fetchall()
        assert len(related) == len(whole)


def test_it_is_built_once_and_again_after_a_builder_was_cut(database):
    connection = database.direct()
    key, source = PartitionKey(), build_source()
    assert not can_read_by_slot(connection, source, key)
    assert ensure_slot_index(connection, source, key) is None
    assert can_read_by_slot(connection, source, key)
    (name,) = connection.execute(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'outbox.messages'::regclass "
        "AND indexprs IS NOT NULL"
    ).fetchone()
    connection.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = %s::regclass", [name])

    assert not can_read_by_slot(connection, source, key)
    assert ensure_slot_index(connection, source, key) is None
    assert can_read_by_slot(connection, source, key)


MAPPED = {"schemaName": "outbox", "name": "messages", "columns": {"partitionKey": "partition_key"}}


@pytest.mark.parametrize("fields", [{"schema": "Verify"}, {"table": MAPPED}], ids=["verified", "mapped"])
def test_what_is_not_ours_is_advised_and_the_advice_works(database, fields):
    connection = database.direct()
    key, source = PartitionKey(data=["order", "customer's"]), build_source(**fields)

    advice = ensure_slot_index(connection, source, key)

    assert advice is not None
    assert not can_read_by_slot(connection, source, key)
    connection.execute(advice[advice.index("CREATE INDEX") :])
    assert ensure_slot_index(connection, source, key) is None


def test_a_role_that_may_not_build_is_told_what_to_run(database):
    connection = database.direct()
    connection.execute("GRANT USAGE ON SCHEMA outbox TO processor; GRANT SELECT ON outbox.messages TO processor")
    advice = ensure_slot_index(database.connect("processor"), build_source(), PartitionKey())
    assert advice is not None
    assert "CREATE INDEX CONCURRENTLY" in advice


def test_a_producer_without_any_right_on_the_functions_can_store(database):
    connection = database.direct()
    ensure_slot_index(connection, build_source(), PartitionKey())
    connection.execute("GRANT USAGE ON SCHEMA outbox TO producer; GRANT INSERT ON outbox.messages TO producer")
    producer = database.connect("producer")
    producer.execute("INSERT INTO outbox.messages (partition_key, message_type, data) VALUES ('k', 't', '{}')")
    assert len(reader_of(slot_of("k") % 2, 2).fetch(connection, BEGINNING, 10)) == 1


@pytest.mark.parametrize(
    ("key", "field"), [({}, "partitionKey"), ({"metadata": ["a"]}, "source.table.columns.metadata")]
)
def test_a_key_that_the_table_does_not_have(key, field):
    table = {"schemaName": "outbox", "name": "messages"}
    with pytest.raises(ConfigurationError, match=field):
        reader_of(0, 2, key, table=table)
