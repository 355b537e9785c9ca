"""Outboxes that exist already: columns come without a rewrite, old rows are numbered or left, the rest is refused."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from outbox_core.progress.checkpoint import BEGINNING
from outbox_sql import adopt
from outbox_sql.adopt import Adoption, AdoptionError
from outbox_worker.postgres import schema
from outbox_worker.postgres.reading.messages import MessageReader
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.servers.postgres import VERSIONS, build_source, mostly_nightly, wait_until

SCALED = """
CREATE TABLE public.outbox_messages (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), type varchar(255) NOT NULL, content jsonb NOT NULL,
    occurred_on_utc timestamptz NOT NULL, processed_on_utc timestamptz, error text
);
CREATE INDEX ON public.outbox_messages (occurred_on_utc, processed_on_utc) INCLUDE (id, type, content)
    WHERE processed_on_utc IS NULL;
CREATE INDEX by_age ON public.outbox_messages (occurred_on_utc);
INSERT INTO public.outbox_messages (type, content, occurred_on_utc, processed_on_utc)
SELECT 'old', jsonb_build_object('n', i), now() - make_interval(secs => i), CASE WHEN i > 2000 THEN now() END
FROM generate_series(1, 3000) AS i;
"""
SCALED_SOURCE = build_source(
    table={
        "schemaName": "public",
        "name": "outbox_messages",
        "columns": {"messageId": "id", "messageType": "type", "data": "content", "scheduled": "occurred_on_utc"},
    }
)
DEBEZIUM = """
CREATE TABLE public.outboxevent (
    id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
    type varchar(255) NOT NULL, payload jsonb
);
INSERT INTO public.outboxevent SELECT gen_random_uuid(), 'order', i::text, 'old', '{}' FROM generate_series(1, 10) AS i;
"""
DEBEZIUM_SOURCE = build_source(
    table={
        "schemaName": "public",
        "name": "outboxevent",
        "columns": {
            "messageId": "id", "messageType": "type", "data": "payload", "partitionKey": "aggregateid",
            "publicationId": "aggregatetype",
        },
    },
    publications=["order"],
)  # fmt: skip
SCALED_ADOPTION = Adoption(
    "public", "outbox_messages", ordered_by="occurred_on_utc", only_where_null="processed_on_utc", batch=300
)


@pytest.fixture(params=mostly_nightly(*VERSIONS))
def anywhere(servers, request):
    with servers.database(request.param) as database:
        yield database


def read(database, source):
    return MessageReader(source).fetch(database.connect(), BEGINNING, 10_000).messages


def file_of(database, table):
    return database.direct().execute("SELECT pg_relation_filenode(%s::regclass)", (table,)).fetchone()[0]


def test_the_scaled_outbox(anywhere):
    anywhere.direct().execute(SCALED)
    before = file_of(anywhere, "outbox_messages")
    said: list[str] = []

    adopt.adopt(anywhere.direct(), SCALED_ADOPTION, announce=said.append)
    anywhere.direct().execute(
        "INSERT INTO public.outbox_messages (type, content, occurred_on_utc) VALUES ('new', '{\"n\": 0}', now())"
    )

    assert file_of(anywhere, "outbox_messages") == before, "the table was rewritten"
    schema.ensure_schema(anywhere.connect(), SCALED_SOURCE)
    found = read(anywhere, SCALED_SOURCE)
    # the oldest first: n counts the seconds into the past; processed ones are left; the new one is last
    assert [m.data for m in found] == [f'{{"n": {n}}}' for n in range(2000, -1, -1)]
    assert {m.checkpoint.transaction_id for m in found[:-1]} == {adopt.FROZEN_TRANSACTION_ID}
    assert found[-1].message_type == "new"
    assert "backfilled 2000 old rows in the order of occurred_on_utc" in said
    assert any("about" in line and "transaction_id, position" in line for line in said)


def test_debeziums_outbox(anywhere):
    anywhere.direct().execute(DEBEZIUM)
    said: list[str] = []

    adopt.adopt(
        anywhere.direct(), Adoption("public", "outboxevent", publication_id="aggregatetype"), announce=said.append
    )
    anywhere.direct().execute(
        "INSERT INTO public.outboxevent VALUES (gen_random_uuid(), 'order', '7', 'OrderPaid', '{\"cents\": 5}')"
    )

    schema.ensure_schema(anywhere.connect(), DEBEZIUM_SOURCE)
    (message,) = read(anywhere, DEBEZIUM_SOURCE)
    assert (message.message_type, message.partition_key, message.publication_id) == ("OrderPaid", "7", "order")
    assert message.data == '{"cents": 5}'
    assert any("never read" in line for line in said)
    lag = MessageReader(DEBEZIUM_SOURCE).lag(anywhere.connect(), BEGINNING)
    assert (lag.messages, lag.seconds) == (1, 0)


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("uuid", "md5(i::text)::uuid"),
        ("bytea", "decode(md5(i::text), 'hex')"),
        ("boolean", "i % 2 = 0"),
        ("varchar(40)", "md5(i::text)"),
    ],
)
def test_rows_get_the_order_of_a_column_of_any_type_that_can_be_sorted(anywhere, type_, value):
    direct = anywhere.direct()
    direct.execute(
        f"CREATE TABLE public.t (id {type_}, message_id text, message_type text DEFAULT 'T', data text DEFAULT '{{}}');"
        "CREATE INDEX ON public.t (id);"
        f"INSERT INTO public.t (id, message_id) SELECT {value}, i FROM generate_series(1, 100) AS i"
    )

    adopt.adopt(direct, Adoption("public", "t", ordered_by="id", batch=7))

    expected = direct.execute("SELECT id FROM public.t ORDER BY id").fetchall()
    assert direct.execute("SELECT id FROM public.t WHERE position > 0 ORDER BY position").fetchall() == expected


@pytest.mark.parametrize(
    ("change", "left"),
    [pytest.param("error = 'later'", 0, id="fails"), pytest.param("processed_on_utc = now()", 1, id="handled")],
)
def test_what_the_old_poller_changes_meanwhile_keeps_its_place_and_ends_no_backfill(anywhere, change, left):
    direct, connection, poller = anywhere.direct(), anywhere.direct(), anywhere.direct(autocommit=False)
    direct.execute(SCALED)
    adopt.adopt(direct, Adoption("public", "outbox_messages"))
    poller.execute(f"UPDATE public.outbox_messages SET {change} WHERE content = '{{\"n\": 1990}}'")

    with background(lambda: adopt.adopt(connection, SCALED_ADOPTION)) as done:
        wait_until_blocked(anywhere, done)
        poller.commit()

    assert done.exception() is None
    found = [message.data for message in read(anywhere, SCALED_SOURCE)]
    expected = [f'{{"n": {n}}}' for n in range(2000, 0, -1) if n != 1990 or not left]
    assert found == expected


def test_rows_without_a_place_in_the_order_are_refused_until_they_have_one(database):
    """With batches of 10 they came after all others, and were left out without a word."""
    direct, adoption = database.direct(), Adoption("public", "t", ordered_by="at", only_where_null="done", batch=10)
    direct.execute(
        'CREATE TABLE public.t (id int, at timestamptz, done timestamptz); CREATE INDEX ON public.t ("at");'
        "INSERT INTO public.t (id, at) SELECT i, CASE WHEN i <> 7 THEN now() END FROM generate_series(1, 30) AS i"
    )

    for dry_run in (True, False):
        with pytest.raises(AdoptionError, match="old rows in which at is NULL"):
            adopt.adopt(direct, adoption, dry_run=dry_run)
    assert "position" not in adopt.inspect(direct, Adoption("public", "t")).columns

    direct.execute("UPDATE public.t SET done = now() WHERE at IS NULL")
    adopt.adopt(direct, adoption)
    # What comes from now on has a pair of its own, with or without a value.
    direct.execute("INSERT INTO public.t (id) VALUES (31)")
    adopt.adopt(direct, adoption)
    assert direct.execute("SELECT id FROM public.t WHERE position IS NULL").fetchall() == [(7,)]

    direct.execute("UPDATE public.t SET done = NULL WHERE id = 7")
    with pytest.raises(AdoptionError, match="at is NULL"):
        adopt.adopt(direct, adoption)
    direct.execute("UPDATE public.t SET at = now() WHERE id = 7")
    adopt.adopt(direct, adoption)
    assert direct.execute("SELECT count(*) FROM public.t WHERE position IS NULL").fetchone() == (0,)


RESISTING = "CREATE FUNCTION public.resist() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN {}; END';"
RESISTING += "CREATE TRIGGER resist BEFORE UPDATE ON public.t FOR EACH ROW EXECUTE FUNCTION public.resist()"


@pytest.mark.parametrize(
    "resisting",
    [
        pytest.param(RESISTING.format("NULL"), id="a trigger that skips the row"),
        pytest.param(RESISTING.format("OLD"), id="a trigger that keeps the row"),
        pytest.param("CREATE RULE resist AS ON UPDATE TO public.t DO INSTEAD NOTHING", id="a rule"),
    ],
)
def test_a_table_whose_rows_cannot_be_changed_is_not_said_to_be_numbered(database, resisting):
    """It said that all old rows were backfilled, and none of them was ever read."""
    direct, adoption = database.direct(), Adoption("public", "t", ordered_by="id", batch=10)
    direct.execute(
        f"CREATE TABLE public.t (id int PRIMARY KEY); INSERT INTO public.t SELECT generate_series(1, 30); {resisting}"
    )

    with pytest.raises(AdoptionError, match=r"a trigger or a rule of public\.t keeps rows from being changed"):
        adopt.adopt(direct, adoption)

    direct.execute("DROP RULE IF EXISTS resist ON public.t; DROP TRIGGER IF EXISTS resist ON public.t")
    adopt.adopt(direct, adoption)
    assert direct.execute("SELECT count(position) FROM public.t").fetchone() == (30,)


def test_rows_that_are_hidden_from_the_owner_are_not_passed_over(database):
    direct, owner = database.direct(), database.direct("owner")
    direct.execute(
        "CREATE TABLE public.t (id int PRIMARY KEY, tenant int); INSERT INTO public.t SELECT n, n FROM "
        "generate_series(1, 30) AS n; CREATE POLICY own ON public.t USING (tenant > 15);"
        "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY; ALTER TABLE public.t FORCE ROW LEVEL SECURITY;"
        "ALTER TABLE public.t OWNER TO owner; GRANT CREATE ON SCHEMA public TO owner"
    )

    with pytest.raises(AdoptionError, match=r"ALTER TABLE public\.t NO FORCE ROW LEVEL SECURITY"):
        adopt.adopt(owner, Adoption("public", "t", ordered_by="id"))

    owner.execute("ALTER TABLE public.t NO FORCE ROW LEVEL SECURITY")
    adopt.adopt(owner, Adoption("public", "t", ordered_by="id"))
    assert direct.execute("SELECT count(position) FROM public.t").fetchone() == (30,)


@pytest.mark.parametrize("type_", ["bigserial", "bigint GENERATED ALWAYS AS IDENTITY"])
def test_a_position_that_a_table_has_of_its_own_stays(database, type_):
    """Rows were given other ones: of a primary key too, by which the old poller and other tables know them."""
    direct = database.direct()
    direct.execute(
        f"CREATE TABLE public.t (position {type_} PRIMARY KEY, at date DEFAULT '2026-01-01', processed_at date);"
        "CREATE INDEX ON public.t (at); INSERT INTO public.t (at) SELECT '2026-01-01' FROM generate_series(1, 30);"
        "CREATE TABLE public.refers (position bigint REFERENCES public.t); INSERT INTO public.refers VALUES (7)"
    )
    with pytest.raises(AdoptionError, match=r"--ordered-by position, or .* with --position-column"):
        adopt.adopt(direct, Adoption("public", "t", ordered_by="at"))

    adopt.adopt(direct, Adoption("public", "t", ordered_by="position", batch=10))

    found = direct.execute("SELECT position, transaction_id::text FROM public.t ORDER BY 1").fetchall()
    assert found == [(n, "2") for n in range(1, 31)]


def test_who_waits_is_told_for_whom(database):
    direct, other = database.direct(), database.direct(autocommit=False)
    direct.execute("CREATE TABLE public.t (id int)")
    other.execute("SET application_name = 'nightly report'; SELECT FROM public.t")
    said: list[str] = []
    holder = f"pid {other.info.backend_pid} nightly report"
    told = f"public.t is in use by {holder}: trying again to lock it, for about two minutes"

    with background(lambda: adopt.adopt(direct, Adoption("public", "t"), announce=said.append)):
        wait_until(lambda: told in said, "it says so")
        other.rollback()

    waits = "building an index on (transaction_id, position): it waits for transactions that are open now"
    assert waits in said


def test_two_who_adopt_at_once_are_told_to_run_it_again(database):
    """Each builds an index, and waits for the other one to end."""
    direct, other = database.direct(), database.direct(autocommit=False)
    direct.execute("CREATE TABLE public.t (id int)")
    adopt.adopt(direct, Adoption("public", "t"))
    direct.execute("DROP INDEX public.t_position_idx")
    other.execute("SET deadlock_timeout = '1min'; INSERT INTO public.t VALUES (1)")

    with background(lambda: adopt.adopt(direct, Adoption("public", "t"))) as done:
        wait_until_blocked(database, done)
        other.execute("LOCK TABLE public.t IN SHARE ROW EXCLUSIVE MODE")

    with pytest.raises(AdoptionError, match=r"a second `outbox adopt`.*run it again"):
        raise done.exception() or AssertionError("it saw no deadlock")
    other.rollback()
    adopt.adopt(direct, Adoption("public", "t"))


def test_run_again_it_changes_nothing(database):
    database.direct().execute(SCALED)
    adopt.adopt(database.direct(), SCALED_ADOPTION)
    pairs = [m.checkpoint for m in read(database, SCALED_SOURCE)]
    said: list[str] = []

    adopt.adopt(database.direct(), SCALED_ADOPTION, announce=said.append)

    assert [m.checkpoint for m in read(database, SCALED_SOURCE)] == pairs
    assert "backfilled 0 old rows in the order of occurred_on_utc" in said


@pytest.mark.parametrize(
    ("first", "second"),
    [("t", "t"), ("orders_" * 7 + "east", "orders_" * 7 + "west")],
    ids=["its name was another's", "names that begin alike"],
)
def test_each_table_has_a_sequence_of_its_own(database, first, second):
    connection = database.direct()
    for number, table in enumerate((first, second)):
        named = sql.Identifier("public", table)
        connection.execute(sql.SQL("CREATE TABLE {} (id int)").format(named))
        adopt.adopt(connection, Adoption("public", table))
        connection.execute(sql.SQL("INSERT INTO {} VALUES (1)").format(named))
        assert connection.execute(sql.SQL("SELECT position FROM {}").format(named)).fetchall() == [(1,)]
        connection.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(named, sql.Identifier(f"old_{number}")))


def test_an_interrupted_run_is_taken_up(database):
    direct = database.direct()
    direct.execute(SCALED)
    adopt.adopt(direct, Adoption("public", "outbox_messages"))
    direct.execute(
        "UPDATE pg_index SET indisvalid = false "
        "WHERE indexrelid = 'outbox_messages_transaction_id_position_idx'::regclass"
    )
    with pytest.raises(Exception, match="no index"):
        schema.ensure_schema(database.connect(), SCALED_SOURCE)

    adopt.adopt(direct, SCALED_ADOPTION)

    schema.ensure_schema(database.connect(), SCALED_SOURCE)
    assert len(read(database, SCALED_SOURCE)) == 2000


def test_a_dry_run_changes_nothing(database):
    database.direct().execute(SCALED)
    said: list[str] = []

    adopt.adopt(database.direct(), SCALED_ADOPTION, dry_run=True, announce=said.append)

    columns = database.direct().execute("SELECT * FROM public.outbox_messages LIMIT 0").description
    assert "position" not in [column.name for column in columns]
    assert any("where processed_on_utc is NULL get transaction_id 2" in line for line in said)


def test_a_table_that_was_never_analysed_is_not_said_to_be_empty(database):
    connection = database.direct()
    said: list[str] = []
    connection.execute("CREATE TABLE public.o (id uuid DEFAULT gen_random_uuid(), type text, payload text)")
    connection.execute(
        "INSERT INTO public.o (type, payload) SELECT 't', repeat('x', 120) FROM generate_series(1, 10000)"
    )
    adopt.adopt(connection, adopt.Adoption("public", "o"), dry_run=True, announce=said.append)
    assert 5_000 < int(said[0].removeprefix("public.o: about ").split(" rows")[0]) < 20_000


def test_a_suspended_run_keeps_its_lock_for_a_bounded_time(database):
    connection = database.direct()
    connection.execute(SCALED)
    connection.execute(
        """CREATE TABLE public.noted (idle text);
           CREATE FUNCTION public.note() RETURNS event_trigger LANGUAGE plpgsql AS $$
           BEGIN INSERT INTO public.noted VALUES (current_setting('idle_in_transaction_session_timeout')); END $$;
           CREATE EVENT TRIGGER noted ON ddl_command_end WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION public.note()"""
    )

    adopt.adopt(connection, Adoption("public", "outbox_messages"))

    noted = connection.execute("SELECT DISTINCT idle FROM public.noted").fetchall()
    assert noted == [(adopt.IDLE_TIMEOUT,)]


def test_writers_are_not_queued_behind_a_long_transaction(database):
    """The lock is asked for briefly and again: between the tries, producers go on."""
    database.direct().execute(SCALED)
    long = database.direct(autocommit=False)
    long.execute("SELECT count(*) FROM public.outbox_messages")
    connection = database.direct()

    with background(lambda: adopt.adopt(connection, Adoption("public", "outbox_messages"))) as done:
        wait_until_blocked(database, done)
        producer = database.direct()
        producer.execute("SET statement_timeout = '10s'")
        producer.execute(
            "INSERT INTO public.outbox_messages (type, content, occurred_on_utc) VALUES ('m', '{}', now())"
        )
        long.rollback()

    assert done.exception() is None


@pytest.mark.parametrize(
    ("table", "adoption", "said"),
    [
        pytest.param("", Adoption("public", "nowhere"), "no table public.nowhere", id="no such table"),
        pytest.param("CREATE VIEW public.t AS SELECT 1 AS x", Adoption("public", "t"), "is a view", id="a view"),
        pytest.param(
            "CREATE TABLE public.t (x int) PARTITION BY RANGE (x)",
            Adoption("public", "t"),
            "a partitioned table",
            id="a partitioned table",
        ),
        pytest.param(
            "CREATE TABLE public.t (x int); CREATE TABLE public.child () INHERITS (public.t)",
            Adoption("public", "t"),
            "adopt each of its tables by itself (ALTER TABLE … NO INHERIT public.t)",
            id="a table that others inherit from",
        ),
        pytest.param(
            "CREATE TABLE public.t (position int)",
            Adoption("public", "t"),
            "--position-column",
            id="a column of that name and another type",
        ),
        pytest.param(
            "CREATE TABLE public.t (at timestamptz)",
            Adoption("public", "t", ordered_by="at"),
            "CREATE INDEX CONCURRENTLY ON public.t (at)",
            id="an order without an index",
        ),
        pytest.param(
            'CREATE TABLE public."T" ("At" int); CREATE INDEX ON public."T" USING brin ("At"); '
            'CREATE INDEX ON public."T" USING hash ("At")',
            Adoption("public", "T", ordered_by="At"),
            'CREATE INDEX CONCURRENTLY ON public."T" ("At")',
            id="an order whose indexes are not sorted",
        ),
        pytest.param(
            "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
            "CREATE FOREIGN TABLE public.t (x int) SERVER s",
            Adoption("public", "t"),
            "is a foreign table; only an ordinary table can be adopted: adopt the table behind it, in its own database",
            id="a foreign table",
        ),
        pytest.param(
            "CREATE TABLE public.t (x int)",
            Adoption("public", "t", only_where_null="processed"),
            "no column processed",
            id="a column that is not there",
        ),
    ],
)
def test_what_cannot_be_adopted_is_refused_with_the_remedy(database, table, adoption, said):
    if table:
        database.direct().execute(table)

    with pytest.raises(AdoptionError, match=said.replace("(", r"\(").replace(")", r"\)")):
        adopt.adopt(database.direct(), adoption)


@pytest.mark.parametrize(
    ("index", "built"),
    [
        pytest.param("USING brin (position)", 2, id="not sorted"),
        pytest.param("(position)", 1, id="one of the two"),
        pytest.param("(transaction_id) INCLUDE (position)", 2, id="half of it not sorted"),
        pytest.param("(transaction_id, lower(x), position)", 2, id="an expression between"),
        pytest.param("(transaction_id, position, lower(x))", 1, id="an expression behind"),
        pytest.param("(transaction_id, position) INCLUDE (x)", 1, id="one that carries more"),
        pytest.param("(transaction_id, position DESC)", 2, id="one that goes up and down"),
        pytest.param("(transaction_id DESC, position DESC)", 1, id="one that is read backwards"),
        pytest.param("(position NULLS FIRST)", 2, id="nulls where no order has them"),
    ],
)
def test_only_an_index_that_reading_can_use_is_left_as_it_is(database, index, built):
    database.direct().execute(
        f"CREATE TABLE public.t (x text, transaction_id xid8, position bigint); CREATE INDEX ON public.t {index}"
    )
    said: list[str] = []

    adopt.adopt(database.direct(), Adoption("public", "t"), announce=said.append)

    assert sum(line.startswith("built an index") for line in said) == built, said


def test_only_its_owner_can(database):
    database.direct().execute("CREATE TABLE public.t (x int); GRANT ALL ON public.t TO producer")

    with pytest.raises(AdoptionError, match="as the table's owner"):
        adopt.adopt(database.direct("producer"), Adoption("public", "t"))


def test_other_names_and_producers_without_more_rights(database):
    database.direct().execute(
        "CREATE TABLE public.t (position text); GRANT INSERT ON public.t TO producer; "
        "ALTER TABLE public.t OWNER TO owner"
    )
    with pytest.raises(AdoptionError, match="GRANT CREATE ON SCHEMA public"):
        adopt.adopt(
            database.direct("owner"), Adoption("public", "t", transaction_id="outbox_xid", position="outbox_seq")
        )
    database.direct().execute("GRANT CREATE ON SCHEMA public TO owner")
    adopt.adopt(database.direct("owner"), Adoption("public", "t", transaction_id="outbox_xid", position="outbox_seq"))

    database.direct("producer").execute("INSERT INTO public.t (position) VALUES ('somewhere')")

    row = (
        database.direct()
        .execute(sql.SQL("SELECT outbox_xid IS NOT NULL, outbox_seq FROM {}").format(sql.Identifier("public", "t")))
        .fetchone()
    )
    assert row == (True, 1)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        database.direct("producer").execute("SELECT * FROM public.t")
