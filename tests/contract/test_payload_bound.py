"""A batch is bounded by the bytes of its payloads: what a bounded reader reads is what another one does, in pieces."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql

from outbox_core.errors import TransientError
from outbox_core.processor.claimed_batch import ClaimedBatch
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import Competing, PartitionKey, Partitions
from outbox_worker.postgres import identity
from outbox_worker.postgres.reading.ahead import ReadAhead
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from outbox_worker.postgres.reading.payloads import PayloadBound
from outbox_worker.postgres.reading.read_range import ReadRange
from outbox_worker.postgres.reading.snapshots import fetch_snapshot
from tests.support.servers.postgres import build_source

if TYPE_CHECKING:
    from outbox_core.message import Message

MOST, LIMIT = 20_000, 50
SIZES = (0, 10, 200, 2000, 2100, 3000, 9000, 25_000)
SNAPSHOT = Checkpoint(0, 0, SnapshotRange())
PART = Slice(0, Partitions(count=2, key=PartitionKey()))


def produce(connection, count, *, seed=1, storage="EXTENDED"):
    """Store messages of mixed sizes, in data and in metadata, of one and of several bytes a character."""
    chosen = random.Random(seed)
    connection.execute(f"ALTER TABLE outbox.messages ALTER data SET STORAGE {storage}")
    for n in range(count):
        connection.execute(
            "INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data, metadata) "
            "VALUES (%s, %s, %s, %s, to_jsonb(repeat(%s, %s)), jsonb_build_object('m', repeat('y', %s)))",
            (
                f"shop-{n % 2}", f"key-{n % 7}", f"message-{n}", f"Type{n % 3}",
                chosen.choice(("x", "ä", "日")), chosen.choice(SIZES), chosen.choice((0, 0, 0, 5000)),
            ),
        )  # fmt: skip


def size_of(messages):
    return sum(len(text.encode()) for each in messages for text in (each.data, each.metadata) if text is not None)


def read_all(reader, connection, after, limit=LIMIT):
    """Read batch after batch until nothing is left; a batch that ends early is full, and ends at its last message."""
    batches = []
    while True:
        batch = reader.fetch(connection, after, limit)
        if batch.messages:
            batches.append(batch)
            assert batch.matched_count == len(batch)
        elif batch.examined == after and not batch.full:
            return batches
        after = batch.examined


@pytest.mark.parametrize("storage", ["EXTENDED", "EXTERNAL"])
@pytest.mark.parametrize(
    ("part", "source"),
    [
        pytest.param(None, {}, id="plain"),
        pytest.param(PART, {}, id="partition"),
        pytest.param(None, {"messageTypes": ["Type0", "Type2"]}, id="types"),
        pytest.param(None, {"publications": ["shop-0", "shop-1"]}, id="publications"),
    ],
)
@pytest.mark.parametrize("start", [BEGINNING, SNAPSHOT], ids=["TransactionOrder", "Snapshot"])
def test_a_bounded_reader_reads_the_same_in_pieces(database, start, part, source, storage):
    produce(database.direct(), 120, storage=storage)
    connection, source = database.connect(), build_source(**source)
    expected = read_all(MessageReader(source, part), connection, start)
    found = read_all(MessageReader(source, part, payloads=PayloadBound(MOST, 1000)), connection, start)
    assert [m for batch in found for m in batch] == [m for batch in expected for m in batch]
    assert all(len(batch) == 1 or size_of(batch) <= MOST for batch in found)
    assert max(len(batch) for batch in found) > 1
    assert any(len(batch) == 1 and size_of(batch) > MOST for batch in found), "a larger one alone"


def test_a_batch_that_has_so_many_bytes_is_full_and_ends_at_its_last_message(database):
    produce_equal(database.direct(), 10, 6000)
    reader = MessageReader(build_source(), payloads=PayloadBound(MOST, 1000))
    connection = database.connect()
    reader.fetch(connection, BEGINNING, LIMIT)  # from here on it is known how much text stored bytes are
    batch = reader.fetch(connection, BEGINNING, LIMIT)
    assert (len(batch), batch.full, batch.examined_count) == (3, True, 3)
    assert batch.examined == batch.messages[-1].checkpoint


def produce_equal(connection, count, size):
    connection.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) "
        "SELECT 'message-' || n, 'T', to_jsonb(repeat('x', %s - 2)) FROM generate_series(1, %s::int) AS n",
        (size, count),
    )


def test_no_more_is_sent_than_a_batch_may_have(database):
    """Messages of a megabyte, stored as it is: each time a small page, and the payloads that fit."""
    database.direct().execute("ALTER TABLE outbox.messages ALTER data SET STORAGE EXTERNAL")
    produce_equal(database.direct(), 30, 1 << 20)
    connection: Any = Counting(database.connect())
    after = BEGINNING
    reader = MessageReader(build_source(), payloads=PayloadBound(4 << 20, 1000))
    counts = []
    for _ in range(5):
        connection.bytes = 0
        batch = reader.fetch(connection, after, 1000)
        after = batch.examined
        counts.append(len(batch))
        assert connection.bytes < (4 << 20) + 100_000
    assert counts == [1, 2, 4, 4, 4]


def test_what_becomes_more_by_decompression_than_expected_is_sent_once_and_dropped(database):
    """Payloads that are stored in a hundredth of their bytes: the first batch learns it."""
    produce_equal(database.direct(), 200, 1 << 20)
    connection: Any = Counting(database.connect())
    after = BEGINNING
    reader = MessageReader(build_source(), payloads=PayloadBound(4 << 20, 1000))
    sent, counts = [], []
    for _ in range(4):
        connection.bytes = 0
        batch = reader.fetch(connection, after, 1000)
        after = batch.examined
        sent.append(connection.bytes)
        counts.append(len(batch))
        assert size_of(batch) <= 4 << 20
    assert sent[0] > 8 << 20
    assert max(sent[1:]) < (4 << 20) + 100_000
    assert min(counts) >= 3


def test_small_payloads_are_read_with_one_statement(database):
    produce_equal(database.direct(), 30, 200)
    connection: Any = Counting(database.connect())
    reader = MessageReader(build_source(), payloads=PayloadBound(MOST, 1000))
    assert len(reader.fetch(connection, BEGINNING, LIMIT)) == 30
    assert connection.statements == 1


class Counting:
    """A connection that counts statements, and the bytes that they returned."""

    def __init__(self, connection):
        self._connection = connection
        self.statements = self.bytes = 0

    def execute(self, *arguments):
        self.statements += 1
        cursor = self._connection.execute(*arguments)
        result = cursor.pgresult
        for row in range(result.ntuples):
            self.bytes += sum(len(result.get_value(row, column) or b"") for column in range(result.nfields))
        return cursor

    def cursor(self):
        return self

    def stream(self, statement):
        self.statements += 1
        for row in self._connection.cursor().stream(statement):
            self.bytes += sum(len(str(value)) for value in row)
            yield row


def test_a_text_column_with_an_empty_text_is_read_as_it_is(database):
    connection = database.direct()
    connection.execute(
        "CREATE TABLE outbox.mapped (t xid8 DEFAULT pg_current_xact_id(), p bigserial, id text, kind text, body text)"
    )
    connection.execute(
        "INSERT INTO outbox.mapped (id, kind, body) VALUES ('1', 'T', ''), ('2', 'T', NULL), ('3', 'T', '1')"
    )
    columns = {"transactionId": "t", "position": "p", "messageId": "id", "messageType": "kind", "data": "body"}
    source = build_source(table={"schemaName": "outbox", "name": "mapped", "columns": columns})
    batch = MessageReader(source, payloads=PayloadBound(MOST, 1000)).fetch(database.connect(), BEGINNING, LIMIT)
    assert [each.data for each in batch] == ["", None, "1"]


def test_of_messages_that_vanish_while_they_are_read_nothing_is_handed_out(database):
    direct = database.direct()
    produce_equal(direct, 3, 6000)
    reader = MessageReader(build_source(), payloads=PayloadBound(MOST, 1000))
    bound = PayloadBound(MOST, 1000)
    page = reader.fetch_outline(database.connect(), BEGINNING, LIMIT)
    assert [each.data for each in page] == [""] * 3

    def find(_pairs):
        none = "SELECT t.*, NULL AS copied_data, NULL AS copied_metadata FROM outbox.messages AS t WHERE false"
        return sql.SQL(none), sql.SQL("position")

    with pytest.raises(TransientError, match="vanish"):
        bound.read(database.connect(), LIMIT, lambda _: page, find)


def test_what_was_read_ahead_is_bounded_too(database, monkeypatch):
    produce_equal(database.direct(), 12, 6000)
    connection, run = database.connect(), identity.fetch_run(database.connect(), "outbox")
    ahead = ReadAhead(database.connect)
    reader = MessageReader(build_source(), ahead=ahead, payloads=PayloadBound(MOST, 1000))
    after = reader.fetch(connection, reader.fetch(connection, BEGINNING, LIMIT).examined, LIMIT).examined
    taken: list[int] = []
    original = ahead.take

    def take(*given):
        rows = original(*given)
        taken.append(len(rows or ()))
        return rows

    monkeypatch.setattr(ahead, "take", take)
    assert run is not None
    reader.read_ahead(after, LIMIT, run)
    batch = reader.fetch(connection, after, LIMIT)
    ahead.close()
    assert [len(each.data or "") for each in batch] == [6000] * 3
    assert taken[0] == 6, "what was asked for ahead is what was asked for then"


def test_a_consumer_reads_its_batch_in_pieces_too(database):
    produce(database.direct(), 60)
    connection = database.connect()
    source, competing = build_source(), Competing()
    upper = fetch_snapshot(connection)
    reader = DispatchReader(source, competing, "orders", PayloadBound(MOST, 1000))
    whole = DispatchReader(source, competing, "orders")
    claimed = ClaimedBatch(1, 0, 1, SnapshotRange(None, upper), (), BEGINNING, Checkpoint(1 << 62, 0), 60)
    expected = whole.fetch(connection, ReadRange.of(claimed))
    found: list[Message] = []
    after, pieces = BEGINNING, 0
    while True:
        page = reader.fetch_page(
            connection, ReadRange.of(ClaimedBatch(1, 0, 1, claimed.snapshot_range, (), after, claimed.upto, 60))
        )
        assert len(page.messages) <= 1 or size_of(page.messages) <= MOST
        found += page.messages
        pieces += 1
        if not page.is_full:
            break
        after = page.messages[-1].checkpoint
    assert tuple(found) == expected
    assert len(found) == 60
    assert pieces > 3
