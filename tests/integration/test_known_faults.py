"""The faults of the texts this product descends from, one test each: none inherited, and each found when it is put in.

A check takes the thing that could be wrong. It must hold for ours, and it must fail for the same thing with the fault.
Fault 6 (a database behind its own rows) is in test_identity.py; 8 and 10 belong to other cursors and modes.
"""

from __future__ import annotations

import secrets

import psycopg
import pytest
from psycopg import sql

from outbox_core.progress.checkpoint import BEGINNING, MAX_POSITION, Checkpoint
from outbox_core.spec import StartFrom
from outbox_worker.postgres.progress import starts
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.reading.stall import HighWaterMarkObserver, observe_high_water_mark
from tests.support.database.contract import AHEAD, NOTHING, OLDER, STORED, put, store, stored
from tests.support.database.messages import insert
from tests.support.servers.postgres import build_source, wait_until

SOURCE = build_source()
READER = MessageReader(SOURCE)


def replace_in_function(database, right, wrong):
    """Put a fault into the contract's function, in this test's own database."""
    connection = database.direct()
    (text,) = connection.execute(
        "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = 'store_checkpoint'"
    ).fetchone()
    assert right in text
    connection.execute(text.replace(right, wrong))


def types(batch):
    return [message.message_type for message in batch.messages]


class TestFault1TheCheckpointIsTheLastMessageExaminedNotOurOwnTransaction:
    @staticmethod
    def handled_with(database, pair_to_store):
        """A processor that stores what `pair_to_store` says, while a producer is slower than it."""
        handled: list[str] = []
        insert(database, "first")
        slow = database.direct(autocommit=False)
        batch = READER.fetch(database.direct(), BEGINNING, 10)
        insert(slow, "of a transaction older than the processor's")
        processor = database.direct(autocommit=False)
        handled += types(batch)
        pair = pair_to_store(processor, batch)
        assert store(processor, (pair.transaction_id, pair.position)) == STORED
        processor.commit()
        slow.commit()
        insert(database, "last")
        row = stored(database.direct())
        assert row is not None
        after = Checkpoint(*row)
        return handled + types(READER.fetch(database.direct(), after, 10))

    def test_ours(self, database):
        assert self.handled_with(database, lambda _, batch: batch.examined) == [
            "first", "of a transaction older than the processor's", "last",
        ]  # fmt: skip

    def test_with_the_fault(self, database):
        def own_transaction(connection, batch):
            (t,) = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
            return Checkpoint(int(t), batch.examined.position)

        assert "of a transaction older than the processor's" not in self.handled_with(database, own_transaction)


class TestFault2PairsAreCompared:
    @staticmethod
    def answers(database):
        connection = database.direct()
        put(connection, (15, 1))
        ahead = store(connection, (20, 5), (10, 99))
        put(connection, (5, 999))
        older = store(connection, (20, 5), (10, 1))
        return ahead, older

    def test_ours(self, database):
        assert self.answers(database) == (AHEAD, OLDER)

    def test_with_the_fault(self, database):
        replace_in_function(
            database,
            "OR (v_stored.last_processed_transaction_id, v_stored.last_processed_position)\n"
            "             >= (p_expected_transaction_id, p_expected_position)",
            "OR v_stored.last_processed_position >= p_expected_position",
        )
        assert self.answers(database) == (OLDER, AHEAD)

    @pytest.mark.parametrize("by_pair", [True, False], ids=["ours", "with the fault"])
    def test_reading_too(self, database, by_pair):
        early = database.direct(autocommit=False)
        early.execute("SELECT pg_current_xact_id()")
        insert(database, "lower position, later transaction")
        insert(early, "higher position, earlier transaction")
        early.commit()
        batch = READER.fetch(database.direct(), BEGINNING, 1)
        if by_pair:
            rest = types(READER.fetch(database.direct(), batch.examined, 10))
        else:
            rows = database.direct().execute(
                "SELECT message_type FROM outbox.messages WHERE position > %s", (batch.examined.position,)
            )
            rest = [row[0] for row in rows]

        assert types(batch) == ["higher position, earlier transaction"]
        assert (rest == ["lower position, later transaction"]) is by_pair


class TestFault3AnExpectedNullCanBeTold2:
    @staticmethod
    def answer(database):
        connection = database.direct()
        put(connection, (15, 1))
        return store(connection, (20, 5), NOTHING)

    def test_ours(self, database):
        assert self.answer(database) == AHEAD

    def test_with_the_fault(self, database):
        replace_in_function(database, "p_expected_position IS NULL\n          OR ", "")
        assert self.answer(database) != AHEAD


class TestFault4PositionsAreBigint:
    @staticmethod
    def goes_round(database):
        assert store(database.direct(), (20, MAX_POSITION)) == STORED
        return stored(database.direct()) == (20, MAX_POSITION)

    def test_ours(self, database):
        assert self.goes_round(database)
        insert_far = "INSERT INTO outbox.messages (position, message_type, data) VALUES (2147483648, 'far', '{}')"
        database.direct().execute(insert_far)
        assert READER.fetch(database.direct(), BEGINNING, 1).examined.position == 2**31

    def test_with_the_fault(self, database):
        database.direct().execute("ALTER TABLE outbox.processor_checkpoints ALTER last_processed_position TYPE integer")
        with pytest.raises(psycopg.errors.NumericValueOutOfRange):
            self.goes_round(database)


class TestFault5StartFromEndKeepsWhatIsInFlight:
    @staticmethod
    def read_from(database, start_of):
        in_flight = database.direct(autocommit=False)
        insert(in_flight, "in flight")
        insert(database, "committed above it")
        start = start_of(database.direct())
        in_flight.commit()
        return types(READER.fetch(database.direct(), start, 10))

    def test_ours(self, database):
        def our_end(connection):
            return starts.start_pair(connection, SOURCE, StartFrom(type="End"))

        assert "in flight" in self.read_from(database, our_end)

    def test_with_the_fault(self, database):
        def highest_committed(connection):
            (t, position) = connection.execute(
                "SELECT transaction_id::text AS t, position FROM outbox.messages AS m "
                "ORDER BY m.transaction_id DESC, m.position DESC LIMIT 1"
            ).fetchone()
            return Checkpoint(int(t), position)

        assert "in flight" not in self.read_from(database, highest_committed)


class TestFault7TheBound:
    @staticmethod
    def stalls_others(database, poll):
        """Does an idle processor with an open transaction keep others from reading?"""
        idle = database.direct(autocommit=False)
        poll(idle)
        insert(database, "new")
        stalled = READER.fetch(database.direct(), BEGINNING, 10).messages == ()
        idle.rollback()
        return stalled

    def test_our_idle_reader_holds_no_transaction_id(self, database):
        def poll(connection):
            READER.fetch(connection, BEGINNING, 10)
            READER.lag(connection, BEGINNING)
            observe_high_water_mark(connection)

        assert not self.stalls_others(database, poll)

    def test_with_the_fault(self, database):
        put(database.direct(), (1, 1))

        def poll(connection):
            connection.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
            READER.fetch(connection, BEGINNING, 10)

        assert self.stalls_others(database, poll)

    def test_a_stranger_of_another_database_is_named(self, database, servers):
        with servers.database() as elsewhere:
            stranger = psycopg.connect(elsewhere.uri("stranger"), application_name="nightly report")
            stranger.execute("SELECT pg_current_xact_id()")
            observer = HighWaterMarkObserver(READER)
            assert observer.observe(database.connect()).age_seconds == 0, "nothing waits yet"
            insert(database, "waiting")

            bound = observer.observe(database.connect("postgres"))
            stranger.close()

        assert bound.age_seconds > 0
        assert bound.holder is not None
        assert "role stranger" in bound.holder
        assert elsewhere.name in bound.holder
        assert "nightly report" in bound.holder

    def test_a_plain_role_sees_who_it_is_and_counts_the_age_itself(self, database):
        database.direct().execute(
            "GRANT USAGE ON SCHEMA outbox TO processor; GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO processor"
        )
        stranger = database.direct(autocommit=False)
        insert(stranger, "holding")
        insert(database, "waiting")
        now = [100.0]
        observer = HighWaterMarkObserver(READER, clock=lambda: now[0])
        plain = database.connect("processor")

        first = observer.observe(plain)
        now[0] = 107.5
        second = observer.observe(plain)

        assert "role postgres" in (first.holder or "")
        assert (first.age_seconds, second.age_seconds) == (0, 7.5)

    def test_a_prepared_transaction_is_named(self, database):
        writer = database.direct(autocommit=False)
        insert(writer, "prepared")
        writer.execute("PREPARE TRANSACTION 'forgotten'")
        insert(database, "waiting")

        bound = HighWaterMarkObserver(READER).observe(database.connect())

        assert bound.age_seconds > 0
        assert "prepared transaction 'forgotten'" in (bound.holder or "")
        assert database.name in (bound.holder or "")
        assert READER.fetch(database.connect(), BEGINNING, 10).messages == ()
        database.direct().execute("ROLLBACK PREPARED 'forgotten'")
        wait_until(lambda: bool(READER.fetch(database.connect(), BEGINNING, 10).messages), "the bound moves on")

    def test_a_bound_that_moves_has_no_age(self, database):
        insert(database, "read")

        bound = HighWaterMarkObserver(READER).observe(database.connect())

        assert (bound.age_seconds, bound.holder) == (0, None)
        assert int(bound.transaction_id) > 0


class TestFault9AWidePayloadDoesNotBreakTheInsert:
    @staticmethod
    def goes_round(database, size):
        payload = secrets.token_urlsafe(size)  # random: nothing that compression could make small
        database.direct().execute(
            "INSERT INTO outbox.messages (message_type, partition_key, message_id, data, metadata) "
            "VALUES (%s, %s, %s, to_jsonb(%s::text), to_jsonb(%s::text))",
            (payload, payload, payload, payload, payload),
        )
        (message,) = READER.fetch(database.direct(), BEGINNING, 10).messages
        return message.data == f'"{payload}"'

    @pytest.mark.parametrize("size", [2_704, 8_192, 1_000_000])
    def test_ours(self, database, size):
        assert self.goes_round(database, size)

    def test_with_the_fault(self, database):
        database.direct().execute(
            "CREATE INDEX covering ON outbox.messages (transaction_id, position) INCLUDE (message_type, data)"
        )
        with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="2704"):
            self.goes_round(database, 3_000)

    def test_no_index_holds_what_a_producer_may_make_wide(self, database):
        rows = database.direct().execute(
            sql.SQL(
                """SELECT a.attname FROM pg_index x JOIN pg_attribute a ON a.attrelid = x.indrelid
                   AND a.attnum = ANY (x.indkey::int2[]) WHERE x.indrelid = 'outbox.messages'::regclass"""
            )
        )
        assert {row[0] for row in rows} == {"position", "transaction_id", "publication_id"}
        with pytest.raises(psycopg.errors.CheckViolation, match="publication_id_is_short"):
            insert(database, "m", publication="p" * 129)
