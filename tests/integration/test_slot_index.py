"""Reading one partition costs its own rows; the index for it is built, or a person is told how."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from psycopg import sql

from outbox_core.config import ProcessorConfig
from outbox_core.errors import ConfigurationError
from outbox_core.partition import partition_of, slot_of
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot_range import Plan, SnapshotRange
from outbox_core.spec import PartitionKey, Partitions
from outbox_worker.postgres.call import Template
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from outbox_worker.postgres.reading.range_scan import Limits, RangeScan
from outbox_worker.postgres.reading.read_range import Lookup, Walk
from outbox_worker.postgres.reading.slots import can_read_by_slot, ensure_slot_index
from outbox_worker.postgres.reading.table import OutboxTable
from outbox_worker.targets.batch_relation import build_batch_relation
from tests.integration.test_query_plans import Explaining
from tests.support.database.statistics import choose_statistics
from tests.support.nightly import at_night, by_day
from tests.support.servers.postgres import VERSIONS, build_source, wait_until
from tests.support.worker import build_config

LIMIT = 100
BEYOND = Checkpoint(2**62, 0)
AFTER_A_SHORT_PAGE = pytest.mark.parametrize("short", [False, True], ids=["", "after a short page"])
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


@pytest.mark.parametrize(("key", "expression"), by_day(KEYS, "the partition key column", "a path in the payload"))
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


FILTERS: list[dict[str, Any]] = [{}, {"messageTypes": ["t1"]}, {"publications": ["p7", "p8"]}]
LOOKS = [
    pytest.param(fields, short, id=f"{fields}, after a short page" if short else str(fields))
    for fields in FILTERS
    for short in (False, True)
]


@pytest.mark.parametrize("count", [2, *at_night(8), 64])
@pytest.mark.parametrize(("fields", "short"), by_day(LOOKS, *map(str, FILTERS), "{}, after a short page"))
@pytest.mark.parametrize("has_statistics", [True, False], ids=["analyzed", "never analyzed"])
def test_a_partition_is_read_by_its_index(seeded, count, fields, has_statistics, short):
    connection = seeded.direct()
    assert ensure_slot_index(connection, build_source(), PartitionKey()) is None
    choose_statistics(connection, "outbox.messages", wanted=has_statistics)
    reader = reader_of(1, count, **fields)
    explaining: Any = Explaining(seeded.connect())
    middle = Checkpoint(300, 0)
    if short:
        assert not reader.fetch(connection, BEYOND, LIMIT).messages

    batch = reader.fetch(explaining, middle, LIMIT)
    reader.fetch_extent(explaining, middle, LIMIT)
    reader.lag(explaining, middle, cap=LIMIT)
    if batch.matched_count:
        explaining.execute(reader.batch_relation(middle, batch.examined))

    nodes = list(explaining.nodes())
    assert not [n for n in nodes if n["Node Type"] == "Seq Scan"]
    if "publications" not in fields:  # else that index may be the better one
        assert all("_slots_" in n["Index Name"] for n in nodes if "Index Name" in n)
    if not fields:
        scanned = [n["Actual Rows"] for n in explaining.plans]
        assert max(scanned) <= LIMIT + 1
        assert sum(n.get("Rows Removed by Filter", 0) for n in nodes) == 0


@pytest.mark.parametrize("count", [2, *at_night(8), 64])
@pytest.mark.parametrize("has_statistics", [True, False], ids=["analyzed", "never analyzed"])
def test_what_a_page_of_a_backlog_found_is_not_looked_for_again(seeded, count, has_statistics):
    """With the cursor Snapshot a page passes the rows of the other partitions, the statement over it does not."""
    connection = seeded.direct()
    choose_statistics(connection, "outbox.messages", wanted=has_statistics)
    fields = build_config(
        None, {"sql": {"statement": "SELECT count(*) FROM batch"}}, source={"cursor": "Snapshot"},
        delivery={"mode": "Partitioned", "partitions": {"count": count}},
    )  # fmt: skip
    relation, _ = build_batch_relation(ProcessorConfig.model_validate(fields))
    reader, after = reader_of(1, count, cursor="Snapshot"), Checkpoint(0, 0, SnapshotRange())
    for _ in range(3):
        batch = replace(reader.fetch_extent(connection, after, LIMIT), partition=1)
        expected = [
            message.message_id
            for message in reader.fetch_range(connection, after, batch.examined, batch.examined_count)
        ]
        explaining: Any = Explaining(connection)
        rows = explaining.execute(relation(batch)).fetchall()

        assert [row[2] for row in rows] == expected
        assert len(rows) == batch.matched_count == LIMIT
        looks = [node for node in explaining.nodes() if "Index Name" in node]
        assert sum(node["Actual Rows"] * node["Actual Loops"] for node in looks) == LIMIT
        assert sum(node.get("Rows Removed by Filter", 0) for node in explaining.nodes()) == 0
        after = batch.examined


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


@pytest.mark.parametrize("fields", [{}, {"messageTypes": ["t1", "t2"]}, {"publications": ["p1", "p2"]}], ids=str)
def test_a_page_after_a_short_one_begins_as_any_other_and_may_be_shorter(seeded, fields):
    connection = seeded.direct()
    ensure_slot_index(connection, build_source(), PartitionKey())
    for partition in range(3):
        reader = reader_of(partition, 3, **fields)
        assert not reader.fetch(connection, BEYOND, 777).messages
        short = reader.fetch(connection, BEGINNING, 777)
        whole = reader_of(partition, 3, **fields).fetch(connection, BEGINNING, 777).messages
        assert short.messages
        assert short.messages == whole[: len(short)]
        assert short.full, "so the next page is read at once"
        assert reader.fetch(connection, short.examined, 777).messages[: 777 - len(short)] == whole[len(short) :]


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


def is_there(connection):
    return ensure_slot_index(connection, build_source(), PartitionKey()) is None


def test_of_two_that_build_it_at_once_neither_fails_and_the_next_look_finds_it(servers):
    """Each waits for what the other holds: PostgreSQL ends one, by its name or in a deadlock."""
    told = set()
    for _ in range(6):
        with servers.database("18") as database:
            database.direct().execute(
                "INSERT INTO outbox.messages (partition_key, message_type, data) SELECT i, 't', '{}' "
                "FROM generate_series(1, 5000) AS i"
            )
            connections = [database.direct() for _ in range(3)]
            for connection in connections:
                connection.execute("SET deadlock_timeout = '50ms'")
            with ThreadPoolExecutor(3) as pool:
                answers = list(pool.map(lambda c: ensure_slot_index(c, build_source(), PartitionKey()), connections))
            told |= set(answers)
            for connection in connections:
                wait_until(partial(is_there, connection), "it is there")
            assert can_read_by_slot(connections[0], build_source(), PartitionKey())
    assert all(answer is None or "is being built" in answer for answer in told), told
    assert len(told) == 2, "some were told that another one builds it"


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


@pytest.mark.parametrize("fields", [{}, {"table": MAPPED}], ids=["ours", "mapped"])
def test_of_a_partitioned_table_it_is_advised_and_the_advice_works(database, fields):
    """PostgreSQL builds it only while producers wait."""
    connection = database.direct()
    connection.execute(
        "ALTER TABLE outbox.messages RENAME TO ordinary;"
        "CREATE TABLE outbox.messages (LIKE outbox.ordinary INCLUDING DEFAULTS) PARTITION BY RANGE (position);"
        "CREATE TABLE outbox.first PARTITION OF outbox.messages DEFAULT"
    )

    advice = ensure_slot_index(connection, build_source(**fields), PartitionKey())

    assert advice is not None
    connection.execute(advice[advice.index("CREATE INDEX") :])
    assert ensure_slot_index(connection, build_source(**fields), PartitionKey()) is None


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


UNNAMED: dict[str, Any] = {
    "schemaName": "public", "name": "unnamed", "columns": {"messageId": "id", "partitionKey": "customer"},
}  # fmt: skip


@pytest.fixture(scope="module", params=VERSIONS)
def unnamed(servers, request):
    """A mapped table, where 20,000 of 40,000 rows have neither key nor id, with the index that a person is told of."""
    with servers.database(request.param) as database:
        connection = database.direct()
        connection.execute(
            """CREATE TABLE public.unnamed (
                   position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text, message_type text DEFAULT 't',
                   transaction_id xid8 DEFAULT pg_current_xact_id(), customer text, data jsonb DEFAULT '{}');
               CREATE INDEX unnamed_pair ON public.unnamed (transaction_id, position);
               INSERT INTO public.unnamed (transaction_id, id, customer)
               SELECT (3 + i / 100)::text::xid8, CASE WHEN i % 4 = 0 THEN 'id-' || i END,
                      CASE WHEN i % 4 = 1 THEN 'key-' || i END
               FROM generate_series(1, 40000) AS i"""
        )
        advice = ensure_slot_index(connection, build_source(table=UNNAMED), PartitionKey())
        assert advice is not None
        connection.execute(advice[advice.index("CREATE INDEX") :])
        yield database


@pytest.fixture(params=[True, False], ids=["analyzed", "never analyzed"])
def analyzed(unnamed, request):
    """Without statistics nulls are taken for few, and may be read by a bitmap: slower, but no scan."""
    connection = unnamed.direct()
    choose_statistics(connection, "public.unnamed", wanted=request.param)
    return unnamed, request.param


@pytest.mark.parametrize("line", [None, Checkpoint(200, 10**6)], ids=["all", "to a barrier"])
def test_rows_with_neither_key_nor_id_are_of_one_partition(unnamed, line):
    connection = unnamed.direct()
    rows = connection.execute(
        "SELECT coalesce(customer, id), position, transaction_id::text::int FROM public.unnamed "
        "ORDER BY transaction_id, position"
    ).fetchall()
    for partition in range(3):
        part = Slice(partition, Partitions.model_validate({"count": 3}), line)
        batch = MessageReader(build_source(table=UNNAMED), part).fetch(connection, BEGINNING, 100_000)
        expected = [
            position
            for text, position, transaction_id in rows
            if (partition == 0 if text is None else partition_of(text, 3) == partition)
            and (line is None or transaction_id <= line.transaction_id)
        ]
        assert [message.checkpoint.position for message in batch.messages] == expected


@pytest.mark.parametrize("count", [2, *at_night(8), 64])
@AFTER_A_SHORT_PAGE
def test_rows_with_neither_key_nor_id_are_read_by_the_index_of_slots(analyzed, count, short):
    database, has_statistics = analyzed
    reader = reader_of(0, count, table=UNNAMED)
    explaining: Any = Explaining(database.connect())
    middle = Checkpoint(200, 0)
    if short:
        assert not reader.fetch(database.direct(), BEYOND, LIMIT).messages

    batch = reader.fetch(explaining, middle, LIMIT)
    reader.fetch_extent(explaining, middle, LIMIT)
    assert reader.lag(explaining, middle, cap=LIMIT).messages == LIMIT
    explaining.execute(reader.batch_relation(middle, batch.examined))

    assert len(batch.messages) == LIMIT
    nodes = list(explaining.nodes())
    assert not [n for n in nodes if n["Node Type"] == "Seq Scan"]
    assert {n["Index Name"].split("_")[1] for n in nodes if "Index Name" in n} == {"slots"}
    unnamed_rows = [n for n in nodes if "IS NULL" in n.get("Index Cond", "")]
    assert len(unnamed_rows) == len(explaining.plans)
    assert all("transaction_id" in n["Index Cond"] for n in unnamed_rows)
    if has_statistics:
        assert max(n["Actual Rows"] + n.get("Rows Removed by Filter", 0) for n in unnamed_rows) <= LIMIT + 1


ODD_KEYS = ["", "k", "ключ", "日本", "a\\b", "\\x41", "'quoted'", "x" * 5000, *(f"key-{i}" for i in range(200))]


@pytest.mark.parametrize("key", ["partition_key", "message_id"])
def test_a_slot_that_is_computed_is_the_slot_of_the_index(database, key):
    """The cursor Snapshot reads a backlog along the positions, and computes what the index would have said."""
    connection = database.direct()
    insert = (
        f"INSERT INTO outbox.messages ({key}, message_type, data) SELECT k, 't', '{{}}' FROM unnest(%s::text[]) AS k"
    )
    connection.execute(insert, [ODD_KEYS])
    table, by = OutboxTable.of(build_source()), PartitionKey()
    both = sql.SQL("SELECT coalesce(partition_key, message_id), {}, {} FROM outbox.messages AS o")
    rows = connection.execute(both.format(table.computed_slot(by), table.slot(by, "outbox"))).fetchall()
    assert sorted(row[0] for row in rows) == sorted(ODD_KEYS)
    assert all(computed == of_index == slot_of(text) for text, computed, of_index in rows)


@pytest.mark.parametrize("plan", list(Plan))
def test_a_range_finds_rows_with_neither_key_nor_id(analyzed, plan):
    """Some were in progress for the lower snapshot, some are later; by a plan that sorts, along the index of slots."""
    database, _ = analyzed
    table = OutboxTable.of(build_source(table=UNNAMED))
    slot, span = table.slot(PartitionKey(), "outbox"), SnapshotRange("103:150:103,120", "300:300:")
    columns = sql.SQL("o.position AS position, o.transaction_id AS transaction_id")
    expected = {
        position
        for position, transaction_id, text in database.direct().execute(
            "SELECT position, transaction_id::text::int, coalesce(customer, id) FROM public.unnamed"
        )
        if (transaction_id in {103, 120} or 150 <= transaction_id < 300) and (text is None or slot_of(text) % 8 == 0)
    }
    computed = table.computed_slot(PartitionKey())
    scan = RangeScan(table, slot=slot, computed_slot=computed, slots=(*range(0, 64, 8), None))
    explaining: Any = Explaining(database.connect())
    if plan is Plan.BY_POSITION:
        walk = Walk(span.lower, span.upper, span.position)
        page = matching = Template(scan.walk(columns, walk)).fill(walk.numbers)
    else:
        wanted = Lookup(span.lower, span.upper, span.position, size=50_000)
        found, rows = scan.page(columns, wanted, plan, Limits().ahead)
        page = Template(sql.SQL("WITH {} {}").format(found, rows)).fill(wanted.numbers)
        matching = Template(scan.matching(columns, wanted, plan)).fill(wanted.numbers)
    assert [row[0] for row in explaining.execute(page).fetchall()] == sorted(expected)
    assert {row[0] for row in explaining.execute(matching).fetchall()} == expected
    if plan is not Plan.BY_POSITION:
        assert any(
            "IS NULL" in n.get("Index Cond", "") and "_slots_" in n.get("Index Name", "") for n in explaining.nodes()
        )
        assert not [n for n in explaining.nodes() if n["Node Type"] == "Seq Scan"]
        sorted_by = {key for node in explaining.nodes() for key in node.get("Sort Key", [])}
        assert not [key for key in sorted_by if "transaction_id" in key], "each slot is read in the index's order"
