"""Plans on a seeded table: keyset scans of the right index, whatever the filters; work in proportion to the page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import sql

from outbox_core.processor.claimed_batch import ClaimedBatch
from outbox_core.progress.checkpoint import BEGINNING, MAX_POSITION, Checkpoint
from outbox_core.progress.snapshot_range import Plan, SnapshotRange
from outbox_core.spec import Competing, Partitions
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.reading.read_range import ReadRange
from outbox_worker.postgres.reading.snapshots import take_snapshot
from tests.support.database.statistics import choose_statistics
from tests.support.servers.postgres import VERSIONS, build_source

ROWS = 60_000
LIMIT = 100
FILTERS = [
    pytest.param({}, "messages_cursor", id="all"),
    pytest.param({"publications": ["p7"]}, "messages_publication_cursor", id="one publication"),
    pytest.param({"publications": ["p7", "p9", "p11"]}, "messages_publication_cursor", id="three publications"),
    pytest.param({"messageTypes": ["t1"]}, "messages_cursor", id="types"),
    pytest.param({"publications": ["p7", "p9"], "messageTypes": ["t1"]}, "messages_publication_cursor", id="both"),
]


class Explaining:
    """Runs what the adapter runs, and keeps each statement's plan as it was executed."""

    def __init__(self, connection):
        self.connection = connection
        self.plans = []

    def execute(self, query, parameters=None):
        text = sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON) {}").format(query)
        row = self.connection.execute(text, parameters).fetchone()
        self.plans.append((row[0] if isinstance(row[0], list) else json.loads(row[0]))[0]["Plan"])
        return self.connection.execute(query, parameters)

    def nodes(self):
        todo = list(self.plans)
        while todo:
            node = todo.pop()
            todo += node.get("Plans", [])
            yield node


@pytest.fixture(scope="module", params=VERSIONS)
def seeded(servers, request):
    """Rows of 50 publications and 10 types in 600 transactions."""
    with servers.database(request.param) as database:
        connection = database.direct()
        # ids below the server's counter: rows of the past, so that the bound cuts off none
        connection.execute(
            "INSERT INTO outbox.messages (transaction_id, publication_id, message_type, data) "
            "SELECT (3 + i / 100)::text::xid8, 'p' || i %% 50, 't' || i / 50 %% 10, "
            "jsonb_build_object('x', repeat('x', 200)) "
            "FROM generate_series(1, %s) AS i",
            (ROWS,),
        )
        yield database


@pytest.fixture(params=VERSIONS)
def any_database(servers, request):
    with servers.database(request.param) as database:
        yield database


@pytest.fixture(params=[True, False], ids=["analyzed", "never analyzed"])
def analyzed(seeded, request):
    """Without statistics, as after a restore, a publication may be read by a bitmap: slower, but no scan."""
    connection = seeded.direct()
    choose_statistics(connection, "outbox.messages", wanted=request.param)
    return seeded, request.param


@pytest.mark.parametrize(("fields", "index"), FILTERS)
def test_plans(analyzed, fields, index):
    database, has_statistics = analyzed
    reader = MessageReader(build_source(**fields))
    explaining: Any = Explaining(database.connect())
    middle = Checkpoint(300, 0)

    batch = reader.fetch(explaining, middle, LIMIT)
    reader.fetch_extent(explaining, middle, LIMIT)
    reader.lag(explaining, middle, cap=LIMIT)
    explaining.execute(reader.batch_relation(middle, batch.examined))

    assert len(batch.messages) == LIMIT
    nodes = list(explaining.nodes())
    assert not [n for n in nodes if n["Node Type"] == "Seq Scan"]
    assert {n["Index Name"] for n in nodes if "Index Name" in n} == {index}
    keyed = [n for n in nodes if "Index Name" in n]
    assert all("position" in n["Index Cond"] and "transaction_id" in n["Index Cond"] for n in keyed)
    if "messageTypes" not in fields and (has_statistics or "publications" not in fields):
        assert max(n["Actual Rows"] for n in keyed) <= LIMIT + 1
        assert sum(n.get("Rows Removed by Filter", 0) for n in keyed) == 0


@pytest.mark.parametrize(("fields", "index"), FILTERS[:3])
def test_a_range_for_another_database_costs_one_row_for_each_publication(seeded, fields, index):
    """Its end is that of the last committed message, looked up with the snapshot at every poll."""
    choose_statistics(seeded.direct(), "outbox.messages", wanted=True)
    source = build_source(**fields)
    explaining: Any = Explaining(seeded.connect())

    assert take_snapshot(explaining, RangeScan.whole(source)).startswith(("602:", "603:", "604:"))

    keyed = [n for n in explaining.nodes() if "Index Name" in n]
    assert {n["Index Name"] for n in keyed} == {index}
    assert max(n["Actual Rows"] for n in keyed) == 1
    assert not [n for n in explaining.nodes() if n["Node Type"] == "Seq Scan"]


def test_where_a_range_leaves_the_first_message_costs_what_lies_before_it(seeded):
    """For one that starts there by pairs: nothing below the snapshot range's lower end is looked at."""
    choose_statistics(seeded.direct(), "outbox.messages", wanted=True)
    scan = RangeScan.whole(build_source())
    explaining: Any = Explaining(seeded.connect())

    row = explaining.execute(scan.first_unexamined(SnapshotRange("300:310:300,305"))).fetchone()

    assert row[0] == "300"
    assert max(n["Actual Rows"] for n in explaining.nodes() if "Index Name" in n) == 1
    assert not [n for n in explaining.nodes() if n["Node Type"] == "Seq Scan"]


def test_one_publication_costs_its_own_rows(seeded):
    """A tenant with a handful of rows does not pay for the others' sixty thousand."""
    connection = seeded.direct()
    connection.execute(
        "INSERT INTO outbox.messages (transaction_id, publication_id, message_type, data) "
        "SELECT '500', 'small', 't', '{}' FROM generate_series(1, 5)"
    )
    connection.execute("VACUUM ANALYZE outbox.messages")
    reader = MessageReader(build_source(publications=["small"]))
    explaining: Any = Explaining(seeded.connect())

    batch = reader.fetch(explaining, BEGINNING, LIMIT)

    assert len(batch.messages) == 5
    assert sum(n["Actual Rows"] for n in explaining.nodes() if "Index Name" in n) == 5


def test_the_first_page_of_a_large_range_reads_no_row_but_its_own(seeded):
    """A processor that was away: the keys of its range are in an index, and of other rows none is read."""
    for statement in ("CHECKPOINT", "VACUUM ANALYZE outbox.messages"):  # what is not flushed is not all-visible
        seeded.direct().execute(statement)
    connection = seeded.connect()
    reader = MessageReader(build_source())
    explaining: Any = Explaining(connection)
    beginning = reader.fetch_extent(explaining, Checkpoint(0, 5, SnapshotRange("50:50:")), LIMIT)
    assert beginning.matched_count == 0
    assert not [n for n in explaining.nodes() if n["Node Type"] in {"Seq Scan", "Bitmap Heap Scan"}]
    found = reader.fetch_extent(connection, beginning.examined, LIMIT)
    assert found.matched_count == LIMIT
    assert found.examined.snapshot_range is not None
    assert found.examined.snapshot_range.plan is Plan.BY_POSITION
    explaining = Explaining(connection)

    rows = explaining.execute(reader.batch_relation(beginning.examined, found.examined)).fetchall()

    assert len(rows) == LIMIT
    read = [n for n in explaining.nodes() if n["Node Type"] in {"Seq Scan", "Index Scan", "Bitmap Heap Scan"}]
    assert [n["Node Type"] for n in read] == ["Index Scan"]
    assert read[0]["Actual Rows"] * read[0]["Actual Loops"] + read[0].get("Rows Removed by Filter", 0) == LIMIT


def test_a_claimed_batch_is_walked_in_the_order_of_the_index(analyzed):
    """Of a pair as the end the planner expects a large part of the table, which it would read and sort."""
    database, _ = analyzed
    reader = DispatchReader(build_source(cursor=None), Competing(), "orders")
    explaining: Any = Explaining(database.connect())
    claimed = ClaimedBatch(
        1, 0, 1, SnapshotRange("3:3:", "700:700:"), (), Checkpoint(5, 249), Checkpoint(6, 349), count=LIMIT
    )

    page = reader.fetch_page(explaining, ReadRange.page_of(claimed, LIMIT))

    assert not page.is_full
    assert {n["Node Type"] for n in explaining.nodes()} <= {"Index Scan", "Limit", "Subquery Scan"}
    assert [n["Actual Rows"] for n in explaining.nodes() if "Index Name" in n] == [len(page.messages)]


@pytest.mark.parametrize("has_statistics", [False, True], ids=["never analyzed", "analyzed"])
@pytest.mark.parametrize("table", ["held_messages", "dead_letters"])
def test_what_is_aside_in_a_range_is_looked_up_by_key_or_read_once(any_database, table, has_statistics):
    """A message that failed may stay for long, and each batch asks for it.

    Of a backlog that one transaction wrote the planner expects one row, and of a table that was never analyzed too:
    then any index seems as good as another.
    """
    connection = any_database.direct()
    connection.execute(
        "INSERT INTO outbox.messages (message_type, data) SELECT 't', '{}' FROM generate_series(1, 3000) AS i"
    )
    connection.execute("VACUUM ANALYZE outbox.messages")
    if table == "held_messages":
        columns, values = "place, next_attempt_at, behind", "i, 'infinity', false"
    else:
        columns, values = "error_class, error", "'E', 'no'"
    connection.execute(
        f"INSERT INTO outbox.{table} (processor_id, key, transaction_id, position, message_id, attempts, blocks, "
        f"{columns}) SELECT 'orders', 'key' || i, '2', i, i::text, 1, true, {values} "
        "FROM generate_series(1, 3000) AS i"
    )
    if has_statistics:
        connection.execute(f"ANALYZE outbox.{table}")
    reader = MessageReader(build_source())
    first = reader.fetch_extent(connection, BEGINNING, LIMIT).examined
    batch = reader.fetch_extent(connection, first, LIMIT)
    explaining: Any = Explaining(connection)

    rows = reader.keyed_relation(first, batch.examined, None)
    places, excluded = holding.survey(explaining, ProcessorKey("outbox", "orders"), rows, with_places=True)

    assert (len(places), excluded) == (LIMIT, ())
    looks = [node for node in explaining.nodes() if node.get("Relation Name") in {"held_messages", "dead_letters"}]
    assert len(looks) == 3
    for node in looks:
        assert (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] <= 3000


@pytest.mark.parametrize("fields", [each.values[0] for each in FILTERS[:4]], ids=[each.id for each in FILTERS[:4]])
def test_a_batch_in_the_middle_of_the_table_is_no_scan_of_it(seeded, fields):
    """The planner takes a quarter of the table to lie between two compared rows there, also where few messages do."""
    choose_statistics(seeded.direct(), "outbox.messages", wanted=True)
    source, after = build_source(**fields), Checkpoint(300, 0)
    reader, connection = MessageReader(source), seeded.connect()
    # So that for a quarter of such small rows a scan is the cheaper one, as it is for larger ones.
    connection.execute("SET random_page_cost = 10")
    explaining: Any = Explaining(connection)
    batch = reader.fetch_extent(connection, after, LIMIT)
    snapshot_range = SnapshotRange(None, "1000:1000:")
    claimed = ClaimedBatch(1, 0, 1, snapshot_range, (), after, Checkpoint(310, MAX_POSITION), 0)
    consumer = DispatchReader(source, Competing(), "orders")

    rows = {
        "batch": explaining.execute(
            reader.batch_relation(after, batch.examined, count=batch.examined_count)
        ).fetchall(),
        "keyed": explaining.execute(
            reader.keyed_relation(after, batch.examined, None, count=batch.examined_count)
        ).fetchall(),
        "range": reader.fetch_range(explaining, after, batch.examined, batch.examined_count).messages,
        "consumer's messages": consumer.fetch(explaining, ReadRange.of(claimed)),
        "consumer's batch": explaining.execute(consumer.relation(ReadRange.of(claimed))).fetchall(),
    }

    assert {name: len(found) > 0 for name, found in rows.items()} == dict.fromkeys(rows, True)
    assert not [n for n in explaining.nodes() if "Seq Scan" in n["Node Type"]]


@pytest.mark.parametrize("reading", ["TransactionOrder", "Snapshot", "Competing"])
def test_behind_the_last_match_of_a_batch_no_row_is_read(seeded, reading):
    """A filter may let few messages through, so that many rows are asked for; few are read where it does not."""
    choose_statistics(seeded.direct(), "outbox.messages", wanted=True)
    explaining: Any = Explaining(seeded.connect())
    fields = {"messageTypes": ["t1", "t2"]}  # a hundred rows of each five hundred
    if reading == "Competing":
        consumer = DispatchReader(build_source(cursor=None, **fields), Competing(), "orders")
        wanted = ReadRange(Checkpoint(300, 0), limit=20_000, snapshot_range=SnapshotRange(None, "1000:1000:"))
        found = consumer.examine(explaining, wanted, LIMIT)
        assert found is not None
        assert (found.matched, found.is_last) == (LIMIT, False)
    else:
        after = Checkpoint(0, 0, SnapshotRange()) if reading == "Snapshot" else Checkpoint(300, 0)
        batch = MessageReader(build_source(cursor=reading, **fields)).fetch_extent(explaining, after, LIMIT)
        assert (batch.matched_count, batch.full) == (LIMIT, True)
    assert 0 < sum(node["Actual Rows"] for node in explaining.nodes() if "Index Name" in node) <= 5 * LIMIT + 1


def test_the_lag_of_a_partition_in_a_backlog_costs_what_is_counted_and_is_said_to_be_more(seeded):
    """Most rows behind its place are of other partitions, and all that was committed since lies behind it too."""
    choose_statistics(seeded.direct(), "outbox.messages", wanted=True)
    reader = MessageReader(build_source(cursor="Snapshot"), Slice(0, Partitions(count=8)))
    explaining: Any = Explaining(seeded.connect())

    lag = reader.lag(explaining, Checkpoint(0, 1000, SnapshotRange(None, "300:300:", 1000)), LIMIT)

    assert 0 < lag.messages < LIMIT
    assert lag.at_least
    read = [node for node in explaining.nodes() if "Index Name" in node]
    assert sum(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in read) <= 2 * (LIMIT + 1)
