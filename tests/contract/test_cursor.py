"""Reading: what is in flight is neither skipped nor waited for longer than it lives."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from outbox_core.errors import ConfigurationError
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import PartitionKey, Partitions
from outbox_worker.postgres.admin.preview import count_between
from outbox_worker.postgres.reading import messages
from outbox_worker.postgres.reading.messages import MessageReader, Slice
from tests.support.database.messages import insert
from tests.support.servers.postgres import EVERYWHERE, build_source

if TYPE_CHECKING:
    from outbox_core.message import Message

EVERYTHING = MessageReader(build_source())


def names(batch):
    return [message.message_type for message in batch.messages]


def read_pages(connection, reader, after=BEGINNING, limit=3):
    """Read to the end in pages; returns the messages and where it ended."""
    found = []
    while True:
        batch = reader.fetch(connection, after, limit)
        found += batch.messages
        if batch.examined == after:
            return found, after
        after = batch.examined


def test_a_row_is_mapped(each_database):
    direct = each_database.direct()
    direct.execute(
        "INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data, metadata) "
        """VALUES ('tenant', 'k', 'id-1', 'OrderPlaced', '{"a": "ä", "n": 1.50}', '{"trace": null}')"""
    )
    position, t, scheduled = direct.execute(
        "SELECT position, transaction_id::text, scheduled FROM outbox.messages"
    ).fetchone()

    (message,) = EVERYTHING.fetch(each_database.connect(), BEGINNING, 10).messages

    assert (message.checkpoint.transaction_id, message.checkpoint.position) == (int(t), position)
    assert (message.publication_id, message.partition_key) == ("tenant", "k")
    assert (message.message_id, message.message_type) == ("id-1", "OrderPlaced")
    assert (message.data, message.metadata) == ('{"a": "ä", "n": 1.50}', '{"trace": null}')
    assert message.scheduled == scheduled


def test_a_moment_that_python_cannot_hold_stops_nobody(each_database):
    each_database.direct().execute(
        "INSERT INTO outbox.messages (message_type, data, scheduled) "
        "SELECT 't', '{}', unnest(ARRAY['infinity', '-infinity', '20000-01-01', '4000-01-01 BC']::timestamptz[])"
    )
    connection = each_database.connect()

    batch = EVERYTHING.fetch(connection, BEGINNING, 10)

    assert [message.scheduled and message.scheduled.year for message in batch.messages] == [9999, 1, 9999, 1]
    assert EVERYTHING.lag(connection, BEGINNING).messages == 4


def test_what_a_producer_does_not_name_has_defaults(each_database):
    insert(each_database, "OrderPlaced", "OrderPaid")

    first, second = EVERYTHING.fetch(each_database.connect(), BEGINNING, 10).messages

    assert (first.publication_id, first.partition_key, first.metadata) == ("default", None, None)
    assert len(first.message_id) == 36
    assert first.message_id != second.message_id
    assert first.scheduled is not None and second.scheduled is not None  # noqa: PT018 - for mypy
    assert second.scheduled > first.scheduled


@EVERYWHERE
def test_a_transaction_in_flight_holds_back_what_came_after_it(each_database):
    reader = each_database.connect()
    slow = each_database.direct(autocommit=False)
    insert(each_database, "before")
    insert(slow, "slow")
    insert(each_database, "after")

    before = EVERYTHING.fetch(reader, BEGINNING, 10)
    slow.commit()
    rest = EVERYTHING.fetch(reader, before.examined, 10)

    assert (names(before), names(rest)) == (["before"], ["slow", "after"])
    assert rest.messages[0].checkpoint.position < rest.messages[1].checkpoint.position


@EVERYWHERE
def test_a_number_that_was_rolled_back_is_not_waited_for(each_database):
    failing = each_database.direct(autocommit=False)
    insert(each_database, "one")
    insert(failing, "never")
    failing.rollback()
    insert(each_database, "two")

    assert names(EVERYTHING.fetch(each_database.connect(), BEGINNING, 10)) == ["one", "two"]


@EVERYWHERE
def test_positions_that_commit_out_of_order_come_by_pair(each_database):
    first, second = each_database.direct(autocommit=False), each_database.direct(autocommit=False)
    first.execute("SELECT pg_current_xact_id()")
    insert(second, "second transaction, lower position")
    second.commit()
    reader = each_database.connect()
    assert names(EVERYTHING.fetch(reader, BEGINNING, 10)) == []
    insert(first, "first transaction, higher position")
    first.commit()

    batch = EVERYTHING.fetch(reader, BEGINNING, 10)

    assert names(batch) == ["first transaction, higher position", "second transaction, lower position"]
    assert batch.messages[0].checkpoint.position > batch.messages[1].checkpoint.position
    assert batch.examined == batch.messages[1].checkpoint
    behind = EVERYTHING.fetch(reader, batch.messages[0].checkpoint, 10)
    assert names(behind) == ["second transaction, lower position"]


@EVERYWHERE
def test_savepoints_belong_to_their_transaction(each_database):
    writer = each_database.direct(autocommit=False)
    insert(writer, "kept")
    writer.execute("SAVEPOINT one")
    insert(writer, "undone")
    writer.execute("ROLLBACK TO SAVEPOINT one")
    writer.execute("SAVEPOINT two")
    insert(writer, "kept too")
    writer.execute("RELEASE SAVEPOINT two")
    writer.commit()

    found = EVERYTHING.fetch(each_database.connect(), BEGINNING, 10).messages

    assert [message.message_type for message in found] == ["kept", "kept too"]
    assert len({message.checkpoint.transaction_id for message in found}) == 1


def test_pages_within_a_transaction(each_database):
    insert(each_database, *"abcdefg")

    found, _ = read_pages(each_database.connect(), EVERYTHING, limit=2)

    assert [message.message_type for message in found] == list("abcdefg")


def test_an_empty_read_stays_where_it_was(each_database):
    batch = EVERYTHING.fetch(each_database.connect(), BEGINNING, 10)

    assert (batch.examined, batch.messages, batch.full, batch.examined_count) == (BEGINNING, (), False, 0)


def test_full_means_that_more_is_probably_waiting(each_database):
    insert(each_database, *"abc")
    reader = each_database.connect()

    assert [EVERYTHING.fetch(reader, BEGINNING, limit).full for limit in (2, 3, 4)] == [True, True, False]


@pytest.mark.parametrize("seed", range(3))
@EVERYWHERE
def test_random_producers_lose_nothing_and_repeat_nothing(each_database, seed):
    """Transactions that begin, write, save, commit and roll back in any order, and a reader that polls in between."""
    rng = random.Random(seed)
    producers = [each_database.direct(autocommit=False) for _ in range(6)]
    written: dict[Any, list[str]] = {producer: [] for producer in producers}
    seen: list[Message] = []
    committed: list[str] = []
    reader, after = each_database.connect(), BEGINNING
    for number in range(250):
        producer = rng.choice(producers)
        match rng.choice(["write", "write", "write", "begin", "commit", "rollback", "poll"]):
            case "write":
                insert(producer, f"m{number}", publication=rng.choice(["p", "q"]))
                written[producer].append(f"m{number}")
            case "begin":
                producer.execute("SELECT pg_current_xact_id()")
            case "commit":
                producer.commit()
                committed += written[producer]
                written[producer] = []
            case "rollback":
                producer.rollback()
                written[producer] = []
            case _:
                batch = EVERYTHING.fetch(reader, after, rng.randint(1, 5))
                seen += batch.messages
                after = batch.examined
    for producer in producers:
        producer.rollback()
    rest, _ = read_pages(reader, EVERYTHING, after)
    seen += rest

    assert sorted(str(message.message_type) for message in seen) == sorted(committed)
    assert [message.checkpoint for message in seen] == sorted(message.checkpoint for message in seen)


@pytest.mark.parametrize(
    ("cursor", "start"), [("TransactionOrder", BEGINNING), ("Snapshot", Checkpoint(0, 0, SnapshotRange()))]
)
@pytest.mark.parametrize("fields", [{}, {"messageTypes": ["50 %", "%(limit)s"]}], ids=["all types", "two types"])
def test_a_per_cent_sign_in_what_is_asked_for_stands_for_itself(database, cursor, start, fields):
    insert(database, "50 %", publication="100 %s")
    source = build_source(cursor=cursor, publications=["100 %s", "p%"], **fields)
    partitions = Partitions(count=2, key=PartitionKey(data=["%(limit)s", "%"]))
    connection = database.connect()

    whole = MessageReader(source)
    parts = [MessageReader(source, Slice(number, partitions)) for number in range(2)]

    assert names(whole.fetch(connection, start, 10)) == ["50 %"]
    assert whole.fetch_extent(connection, start, 10).matched_count == 1
    assert [name for part in parts for name in names(part.fetch(connection, start, 10))] == ["50 %"]
    assert sum(part.fetch_extent(connection, start, 10).matched_count for part in parts) == 1
    after = whole.fetch(connection, start, 10).examined
    assert count_between(connection, whole, start, after, cap=10).by_type == {"50 %": 1}


class TestFilters:
    @pytest.fixture(autouse=True)
    def _messages(self, each_database):
        writer = each_database.direct(autocommit=False)
        for number in range(60):
            insert(writer, f"t{number % 3}", publication=f"p{number % 4}", data=json.dumps({"n": number}))
            if number % 7 == 0:
                writer.commit()
        writer.commit()

    @pytest.mark.parametrize(
        ("fields", "wanted"),
        [
            pytest.param({}, lambda _: True, id="all"),
            pytest.param({"publications": ["p1"]}, lambda n: n % 4 == 1, id="one publication"),
            pytest.param({"publications": ["p1", "p3", "p1"]}, lambda n: n % 4 in (1, 3), id="two publications"),
            pytest.param({"messageTypes": ["t2"]}, lambda n: n % 3 == 2, id="one type"),
            pytest.param({"messageTypes": ["t0", "t2"]}, lambda n: n % 3 != 1, id="two types"),
            pytest.param(
                {"publications": ["p0", "p1"], "messageTypes": ["t1"]},
                lambda n: n % 4 in (0, 1) and n % 3 == 1,
                id="both",
            ),
            pytest.param({"publications": ["nobody"]}, lambda _: False, id="a publication without messages"),
            pytest.param(
                {"messageTypes": ["x'; DROP TABLE outbox.messages; --"]}, lambda _: False, id="a hostile type"
            ),
        ],
    )
    @pytest.mark.parametrize("limit", [1, 4, 100])
    def test_every_matching_message_once_and_in_order(self, each_database, fields, wanted, limit):
        reader = MessageReader(build_source(**fields))
        connection = each_database.connect()

        found, end = read_pages(connection, reader, limit=limit)

        assert [json.loads(message.data)["n"] for message in found] == [n for n in range(60) if wanted(n)]
        after = BEGINNING
        while after != end:  # the extent alone, and the relation for a statement, say the same page by page
            batch, bound = reader.fetch(connection, after, limit), reader.fetch_extent(connection, after, limit)
            relation = connection.execute(reader.batch_relation(after, batch.examined)).fetchall()
            assert (bound.examined, bound.examined_count, bound.matched_count, bound.full) == (
                batch.examined, batch.examined_count, len(batch.messages), batch.full,
            )  # fmt: skip
            assert [row[6]["n"] for row in relation] == [m.json()["n"] for m in batch.messages]
            after = batch.examined

    def test_examined_ends_with_the_last_match_of_a_full_batch_and_else_with_the_last_message(self, each_database):
        reader = MessageReader(build_source(messageTypes=["t0"]))
        connection = each_database.connect()

        batch = reader.fetch(connection, BEGINNING, 5)
        last = EVERYTHING.fetch(connection, BEGINNING, 1000)

        assert (len(batch.messages), batch.examined_count, batch.full) == (5, 13, True)
        assert batch.examined == batch.messages[-1].checkpoint
        rest = reader.fetch(connection, batch.examined, 1000)
        assert (len(rest.messages), rest.examined_count) == (15, 47)
        assert rest.examined == last.examined > rest.messages[-1].checkpoint
        nothing = MessageReader(build_source(messageTypes=["no such type"])).fetch(connection, BEGINNING, 5)
        assert (nothing.messages, nothing.examined, nothing.examined_count) == ((), last.examined, 60)

    def test_lag_counts_what_matches_up_to_a_cap(self, each_database):
        connection = each_database.connect()
        some = MessageReader(build_source(messageTypes=["t0"], publications=["p0", "p1"]))

        everything, capped, filtered = (
            EVERYTHING.lag(connection, BEGINNING),
            EVERYTHING.lag(connection, BEGINNING, cap=59),
            some.lag(connection, BEGINNING),
        )

        assert (everything.messages, everything.at_least) == (60, False)
        assert (capped.messages, capped.at_least) == (59, True)
        assert (filtered.messages, filtered.at_least) == (10, False)
        assert EVERYTHING.lag(connection, BEGINNING, cap=60).at_least is False


def test_lag_in_seconds_is_the_age_of_the_oldest(each_database):
    insert(each_database, "old", "new")
    direct = each_database.direct()
    direct.execute(
        "UPDATE outbox.messages SET scheduled = clock_timestamp() - interval '90 s' WHERE message_type = 'old'"
    )
    connection = each_database.connect()
    old = EVERYTHING.fetch(connection, BEGINNING, 1).examined

    assert timedelta(seconds=90) <= timedelta(seconds=EVERYTHING.lag(connection, BEGINNING).seconds)
    assert EVERYTHING.lag(connection, old).seconds < 60
    assert EVERYTHING.lag(connection, EVERYTHING.fetch(connection, old, 1).examined).seconds == 0


@EVERYWHERE
def test_lag_sees_what_the_bound_still_hides(each_database):
    open_writer = each_database.direct(autocommit=False)
    open_writer.execute("SELECT pg_current_xact_id()")
    insert(each_database, "hidden")
    connection = each_database.connect()

    assert EVERYTHING.fetch(connection, BEGINNING, 10).messages == ()
    assert EVERYTHING.lag(connection, BEGINNING).messages == 1


def test_a_filter_looks_at_a_bounded_range(each_database):
    rows = messages.WINDOW + 500
    each_database.direct().execute(
        "INSERT INTO outbox.messages (message_type, data) "
        "SELECT CASE i WHEN %s THEN 'rare' ELSE 'common' END, '{}' FROM generate_series(1, %s) AS i",
        (rows, rows),
    )
    reader = MessageReader(build_source(messageTypes=["rare"]))
    connection = each_database.connect()

    first = reader.fetch(connection, BEGINNING, 10)
    second = reader.fetch(connection, first.examined, 10)

    assert (first.messages, first.examined_count, first.full) == ((), messages.WINDOW, True)
    assert (names(second), second.examined_count, second.full) == (["rare"], 500, False)


@EVERYWHERE
def test_reading_takes_no_transaction_id(each_database):
    insert(each_database, *"abc")
    connection = each_database.connect(autocommit=False)
    for fields in ({}, {"messageTypes": ["a"]}, {"publications": ["default", "p"]}):
        reader = MessageReader(build_source(**fields))
        batch = reader.fetch(connection, BEGINNING, 10)
        reader.fetch_extent(connection, BEGINNING, 10)
        reader.lag(connection, BEGINNING)
        reader.has_waiting(connection)
        connection.execute(reader.batch_relation(BEGINNING, batch.examined))

    assert connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)


def test_publications_need_a_column():
    table = {"schemaName": "s", "name": "t"}
    with pytest.raises(ConfigurationError, match="publicationId"):
        MessageReader(build_source(table=table, publications=["p"]))
