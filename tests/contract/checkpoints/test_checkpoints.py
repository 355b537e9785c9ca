"""The adapter's checkpoint: load, store, start, settle."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from outbox_core.errors import PermanentError, TransientError
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import BEGINNING, MAX_POSITION, MAX_TRANSACTION_ID, Checkpoint, StoreAnswer
from outbox_core.spec import StartFrom
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import checkpoints, starts
from outbox_worker.postgres.reading.messages import MessageReader
from tests.support.database.contract import own, put, stored
from tests.support.database.messages import insert
from tests.support.database.stored import stored_pair
from tests.support.servers.postgres import EVERYWHERE, build_source

KEY = ProcessorKey("outbox", "orders")
SOURCE = build_source()
TOKEN = uuid4()


def read_all(connection, after):
    return [m.message_type for m in MessageReader(SOURCE).fetch(connection, after, 1000).messages]


def begin(database, start_from, epoch=1):
    connection = database.connect(autocommit=False)
    start = checkpoints.ensure_start(
        connection,
        KEY,
        HeldLease(0, epoch, TOKEN),
        SOURCE,
        lambda: starts.compute_start(connection, SOURCE, start_from),
    )
    connection.commit()
    return start


def test_the_row_is_mapped(each_database):
    connection = each_database.connect()
    assert checkpoints.load(connection, KEY) is None
    pair = Checkpoint(MAX_TRANSACTION_ID, MAX_POSITION)
    before = connection.execute("SELECT clock_timestamp()").fetchone()[0]

    assert checkpoints.store(connection, KEY, None, new=pair, expected=None) is StoreAnswer.STORED

    found = checkpoints.load(connection, KEY)
    assert found is not None
    assert found.pair == pair
    assert timedelta(0) <= found.stored_at - before < timedelta(minutes=1)


def test_moving_back_is_an_error_of_the_caller(each_database):
    with pytest.raises(PermanentError, match="never moves back"):
        checkpoints.store(each_database.connect(), KEY, None, new=BEGINNING, expected=Checkpoint(5, 5))


class TestStart:
    @pytest.fixture(autouse=True)
    def _owned(self, each_database):
        own(each_database, str(TOKEN))

    def test_is_stored_before_anything_is_read_and_computed_once(self, each_database):
        insert(each_database, "old")

        first = begin(each_database, StartFrom(type="End"))
        insert(each_database, "new")
        again = begin(each_database, StartFrom(type="Beginning"))

        assert first is not None
        assert again is not None
        assert (first.start_from_used, again.start_from_used) == (True, False)
        assert again.pair == first.pair == stored_pair(each_database.connect(), KEY)
        assert read_all(each_database.connect(), again.pair) == ["new"]

    def test_beginning(self, each_database):
        insert(each_database, "old")

        start = begin(each_database, StartFrom())

        assert start is not None
        assert start.pair == BEGINNING
        assert stored(each_database.connect()) == (0, 0)
        assert read_all(each_database.connect(), start.pair) == ["old"]

    def test_not_for_somebody_who_is_not_the_owner(self, each_database):
        assert begin(each_database, StartFrom(), epoch=7) is None

    @EVERYWHERE
    def test_end_keeps_what_is_in_flight(self, each_database):
        insert(each_database, "old")
        in_flight = each_database.direct(autocommit=False)
        insert(in_flight, "in flight")
        insert(each_database, "committed meanwhile")

        start = begin(each_database, StartFrom(type="End"))
        in_flight.commit()

        assert read_all(each_database.connect(), start.pair) == ["in flight", "committed meanwhile"]

    @EVERYWHERE
    def test_position_is_the_first_row_in_reading_order_at_or_above_it(self, each_database):
        early = each_database.direct(autocommit=False)
        early.execute("SELECT pg_current_xact_id()")
        insert(each_database, "low")
        insert(each_database, "middle")
        middle = each_database.direct().execute("SELECT max(position) FROM outbox.messages").fetchone()[0]
        insert(early, "high, but of the oldest transaction")
        early.commit()
        insert(each_database, "last")

        start = begin(each_database, StartFrom(type="Position", position=middle))

        assert read_all(each_database.connect(), start.pair) == [
            "high, but of the oldest transaction", "low", "middle", "last",
        ]  # fmt: skip

    def test_position_within_a_transaction(self, each_database):
        insert(each_database, "one", "two", "three")
        lowest = each_database.direct().execute("SELECT min(position) FROM outbox.messages").fetchone()[0]

        start = begin(each_database, StartFrom(type="Position", position=lowest + 1))

        assert read_all(each_database.connect(), start.pair) == ["two", "three"]

    @pytest.mark.parametrize("kind", ["Position", "Timestamp"])
    @EVERYWHERE
    def test_a_start_that_no_row_has_reached_keeps_what_is_in_flight(self, each_database, kind):
        insert(each_database, "old")
        in_flight = each_database.direct(autocommit=False)
        insert(in_flight, "in flight")
        asked = (
            StartFrom(type=kind, position=10**12)
            if kind == "Position"
            else StartFrom(type=kind, timestamp=datetime(2999, 1, 1, tzinfo=UTC))
        )

        start = begin(each_database, asked)
        in_flight.commit()

        assert read_all(each_database.connect(), start.pair) == ["in flight"]

    @EVERYWHERE
    def test_a_row_above_the_bound_does_not_hide_one_in_flight_below_it(self, each_database):
        in_flight = each_database.direct(autocommit=False)
        in_flight.execute("SELECT pg_current_xact_id()")
        insert(each_database, "committed")
        lowest = each_database.direct().execute("SELECT min(position) FROM outbox.messages").fetchone()[0]

        start = begin(each_database, StartFrom(type="Position", position=lowest))
        insert(in_flight, "in flight, higher position, lower transaction")
        in_flight.commit()

        assert read_all(each_database.connect(), start.pair) == [
            "in flight, higher position, lower transaction", "committed",
        ]  # fmt: skip

    def test_timestamp_is_before_the_lowest_row_stored_at_or_after_it(self, each_database):
        direct = each_database.direct()
        for name, day in (("first", 1), ("third", 3), ("late clock", 2), ("fourth", 4)):
            direct.execute(
                "INSERT INTO outbox.messages (message_type, data, scheduled) VALUES (%s, '{}', %s)",
                (name, datetime(2026, 1, day, tzinfo=UTC)),
            )

        start = begin(each_database, StartFrom(type="Timestamp", timestamp=datetime(2026, 1, 3, tzinfo=UTC)))

        assert read_all(each_database.connect(), start.pair) == ["third", "late clock", "fourth"]


class TestSettle:
    def test_tells_the_owner_what_is_stored(self, each_database):
        epoch = own(each_database, str(TOKEN))
        connection = each_database.connect()
        assert checkpoints.settle(connection, KEY, HeldLease(0, epoch, TOKEN)) == checkpoints.Settled(True, None)
        put(each_database.direct(), (10, 1))

        settled = checkpoints.settle(connection, KEY, HeldLease(0, epoch, TOKEN))

        assert settled == checkpoints.Settled(True, Checkpoint(10, 1))
        assert stored(connection) == (10, 1)

    def test_tells_nobody_else(self, each_database):
        epoch = own(each_database, str(TOKEN))
        put(each_database.direct(), (10, 1))

        settled = checkpoints.settle(each_database.connect(), KEY, HeldLease(0, epoch, uuid4()))

        assert settled == checkpoints.Settled(False, None)

    @pytest.mark.parametrize("row", [None, (10, 1)], ids=["first row", "a row"])
    @EVERYWHERE
    def test_does_not_answer_while_the_old_transaction_is_open(self, each_database, row):
        epoch = own(each_database, str(TOKEN))
        put(each_database.direct(), row)
        old = each_database.connect(autocommit=False)
        expected = None if row is None else Checkpoint(*row)
        checkpoints.store(old, KEY, HeldLease(0, epoch, TOKEN), new=Checkpoint(20, 5), expected=expected)
        asking = each_database.connect()

        with pytest.raises(TransientError):
            checkpoints.settle(asking, KEY, HeldLease(0, epoch, TOKEN))
        old.commit()

        assert checkpoints.settle(asking, KEY, HeldLease(0, epoch, TOKEN)).pair == Checkpoint(20, 5)
