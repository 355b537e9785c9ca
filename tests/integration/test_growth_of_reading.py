"""A look at the outbox costs what it returns, however many rows are behind the checkpoint and ahead of it.

What it costs is the pages that the server touches: no clock is asked, so the figures are the same on every machine.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import sql

from outbox_core.partition import partition_of
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import Competing, PartitionKey, Partitions
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from outbox_worker.postgres.reading.read_range import ReadRange
from outbox_worker.postgres.reading.slots import ensure_slot_index
from tests.support.database.statistics import choose_statistics
from tests.support.servers.postgres import VERSIONS, build_source

ROWS = 40_000
LIMIT = 100
FEW = 50
"""Rows of a transaction of their own behind all others."""
FIRST = 3
"""The first transaction."""
PLACES = {"one behind": 1, "half behind": ROWS // 2, "nearly all behind": ROWS - 10, "all behind": ROWS}
MAPPED: dict[str, Any] = {
    "schemaName": "public", "name": "mapped", "columns": {"messageId": "id", "partitionKey": "customer"},
}  # fmt: skip


class Counting:
    """Runs what the adapter runs, and counts the pages that each statement touches."""

    def __init__(self, connection):
        self.connection = connection
        self.pages = []

    def execute(self, query, parameters=None):
        text = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {}").format(query)
        row = self.connection.execute(text, parameters).fetchone()
        plan = (row[0] if isinstance(row[0], list) else json.loads(row[0]))[0]["Plan"]
        self.pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        return self.connection.execute(query, parameters)


class Outbox:
    """A database whose outbox has one key or many, stored by one transaction or by many; few rows are newer."""

    def __init__(self, connection, *, keys, transactions, mapped):
        self.connection = connection
        self.transactions = transactions
        self.source = build_source(table=MAPPED) if mapped else build_source()
        self.name = "public.mapped" if mapped else "outbox.messages"
        self.key = "key-0"
        self.fill(keys)
        (self._first,) = connection.execute(f"SELECT min(position) FROM {self.name}").fetchone()

    def fill(self, keys):
        connection = self.connection
        if self.name == "public.mapped":
            connection.execute(
                """CREATE TABLE public.mapped (
                       position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text, message_type text DEFAULT 't',
                       transaction_id xid8 DEFAULT pg_current_xact_id(), customer text, data jsonb);
                   CREATE INDEX mapped_pair ON public.mapped (transaction_id, position)"""
            )
        # So that the rows are of the past, with ids that the server has given out.
        connection.execute(
            f"""DO $$ BEGIN
                    WHILE pg_current_xact_id()::text::int <= {FIRST + ROWS // FEW} LOOP COMMIT; END LOOP;
                END $$"""
        )
        key, message_id = ("customer", "id") if self.name == "public.mapped" else ("partition_key", "message_id")
        advice = ensure_slot_index(connection, self.source, PartitionKey())
        if advice is not None:
            connection.execute(advice[advice.index("CREATE INDEX") :])
        connection.execute(
            f"INSERT INTO {self.name} (transaction_id, {key}, {message_id}, message_type, data) "
            "SELECT (%s + (i - 1) * %s / %s)::text::xid8, 'key-' || i %% %s, 'id-' || i, 't', "
            "jsonb_build_object('x', repeat('x', 100)) FROM generate_series(1, %s) AS i",
            (FIRST, self.transactions, ROWS, keys, ROWS + FEW),
        )

    def has_statistics(self, wanted):
        choose_statistics(self.connection, self.name, wanted=wanted)

    def place(self, rows):
        """The checkpoint behind so many rows."""
        return Checkpoint(FIRST + (rows - 1) * self.transactions // ROWS, self._first + rows - 1)

    def reader(self, count):
        """What reads the partition of the first key; None: the whole outbox."""
        if count is None:
            return MessageReader(self.source)
        partitions = Partitions.model_validate({"count": count, "key": {}})
        return MessageReader(self.source, Slice(partition_of(self.key, count), partitions))


OUTBOXES = [
    {"keys": 1, "transactions": 1, "mapped": False},
    {"keys": 1, "transactions": ROWS // FEW, "mapped": True},
    {"keys": 1000, "transactions": ROWS // FEW, "mapped": False},
    {"keys": 1000, "transactions": 1, "mapped": True},
]


@pytest.fixture(scope="module", params=OUTBOXES, ids=lambda fields: ", ".join(f"{v} {k}" for k, v in fields.items()))
def shape(request):
    return request.param


@pytest.fixture(scope="module", params=VERSIONS)
def outbox(servers, request, shape):
    with servers.database(request.param) as database:
        yield Outbox(database.direct(), **shape)


def afford(rows, slots):
    """The pages that a look may touch: one for each row, a few for each slot to find its place, and what holds none."""
    return rows + 6 * slots + 20


@pytest.mark.parametrize("count", [None, 2, 64], ids=["Ordered", "2 partitions", "64 partitions"])
@pytest.mark.parametrize("has_statistics", [True, False], ids=["analyzed", "never analyzed"])
def test_a_look_by_pairs_costs_what_it_returns(outbox, count, has_statistics):
    outbox.has_statistics(has_statistics)
    slots = 1 if count is None else 64 // count
    for name, rows in PLACES.items():
        reader, after = outbox.reader(count), outbox.place(rows)
        counting: Any = Counting(outbox.connection)
        found = reader.fetch_extent(counting, after, LIMIT)
        counting.execute(reader.batch_relation(after, found.examined))
        reader.lag(counting, after, cap=LIMIT)
        reader.fetch(counting, after, LIMIT)

        assert max(counting.pages) <= afford(found.examined_count + slots, slots), (name, counting.pages)


@pytest.mark.parametrize("count", [2, 64], ids=["2 partitions", "64 partitions"])
@pytest.mark.parametrize("has_statistics", [True, False], ids=["analyzed", "never analyzed"])
def test_a_look_by_snapshots_costs_what_it_returns(outbox, count, has_statistics):
    """Where few messages came since the lower snapshot, or none, as a processor that keeps up finds them."""
    outbox.has_statistics(has_statistics)
    newest = FIRST + outbox.transactions
    for lower in (newest, newest + 1):
        after = Checkpoint(0, ROWS, SnapshotRange(f"{lower}:{lower}:"))
        reader = outbox.reader(count)
        counting: Any = Counting(outbox.connection)
        found = reader.fetch_extent(counting, after, LIMIT)
        reader.lag(counting, after, cap=LIMIT)
        if found.examined_count:
            counting.execute(reader.batch_relation(after, found.examined))
        assert (found.examined_count == 0) == (lower > newest)
        # Each page of a range looks up once more what it found.
        assert max(counting.pages) <= afford(5 * found.examined_count, 64 // count), counting.pages


def test_a_chunk_of_a_consumer_costs_what_it_returns(outbox):
    reader = DispatchReader(outbox.source, Competing(), "orders")
    snapshot_range = SnapshotRange(
        "2:2:", f"{outbox.place(ROWS).transaction_id + 1}:{outbox.place(ROWS).transaction_id + 1}:"
    )
    for name, rows in list(PLACES.items())[:2]:
        counting: Any = Counting(outbox.connection)
        wanted = ReadRange(outbox.place(rows), outbox.place(rows + LIMIT), snapshot_range=snapshot_range)

        assert len(counting.execute(reader.relation(wanted)).fetchall()) == LIMIT
        assert max(counting.pages) <= afford(LIMIT, 1), (name, counting.pages)
