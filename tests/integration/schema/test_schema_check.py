"""What a worker says at start about the schema and the table it is given: everything wrong is named with its remedy."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from outbox_core.errors import ConfigurationError
from outbox_core.report import Reason
from outbox_sql import runner
from outbox_sql.guide import quote
from outbox_worker.postgres import identity, schema
from tests.support.servers.postgres import VERSIONS, build_source

MAPPED = {
    "schemaName": "shop",
    "name": "events",
    "columns": {
        "position": "seq", "transactionId": "xid", "messageId": "id", "messageType": "kind", "data": "payload",
        "publicationId": "tenant", "scheduled": "stored_at",
    },
}  # fmt: skip
TABLE = """
CREATE SCHEMA shop;
CREATE TABLE shop.events (
    id uuid DEFAULT gen_random_uuid(), kind varchar(80), payload json, tenant text, stored_at timestamptz DEFAULT now(),
    seq bigserial, xid xid8 NOT NULL DEFAULT pg_current_xact_id()
);
CREATE INDEX events_cursor ON shop.events (xid, seq);
CREATE INDEX events_tenant ON shop.events (tenant, xid, seq);
"""


def refusal(database, source, user="postgres"):
    with pytest.raises(ConfigurationError) as caught:
        schema.ensure_schema(database.connect(user), source)
    return caught.value


def test_manage_brings_an_empty_database_up(empty_database):
    schema.ensure_schema(empty_database.connect(), build_source())
    schema.ensure_schema(empty_database.connect(), build_source(schema="Verify"))

    assert empty_database.direct().execute("SELECT count(*) FROM outbox.messages").fetchone() == (0,)


def test_verify_says_what_is_missing(empty_database):
    missing = refusal(empty_database, build_source(schema="Verify"))
    assert missing.reason is Reason.SCHEMA_MISSING
    assert "outbox migrate --schema outbox" in str(missing)

    schema.ensure_schema(empty_database.connect(), build_source())
    functions = f"functions_{runner.FUNCTIONS_VERSION:04d}"
    empty_database.direct().execute("DELETE FROM outbox.applied_migrations WHERE name = %s", (functions,))
    old = refusal(empty_database, build_source(schema="Verify"))
    assert old.reason is Reason.SCHEMA_MISMATCH
    assert functions in str(old)


def test_verify_waits_for_nothing_else_once_it_is_there(empty_database):
    refusal(empty_database, build_source(schema="Verify"))
    schema.ensure_schema(empty_database.connect(), build_source())

    schema.ensure_schema(empty_database.connect(), build_source(schema="Verify"))
    assert identity.check_identity(empty_database.connect(), build_source()).uuid


def test_a_role_that_may_not_create_is_told_what_to_do(empty_database):
    said = refusal(empty_database, build_source(), "processor")

    assert said.reason is Reason.PERMISSION_DENIED
    assert "source.schema to Verify" in str(said)


def test_edited_migrations_are_a_mismatch(database):
    database.direct().execute("UPDATE outbox.applied_migrations SET checksum = 'x' WHERE name LIKE '0001%'")

    assert refusal(database, build_source()).reason is Reason.SCHEMA_MISMATCH


def test_a_schema_from_before_the_first_release_is_a_mismatch(empty_database):
    former = runner.Migration("0001_pre_tables", runner.Phase.PRE, "SELECT 1")
    runner.migrate(empty_database.connect(), "outbox", migrations=(former,))

    for management in ("Manage", "Verify"):
        said = refusal(empty_database, build_source(schema=management))
        assert said.reason is Reason.SCHEMA_MISMATCH
        assert "before the first release (0001_pre_tables)" in str(said)


class TestAMappedTable:
    @pytest.fixture(autouse=True)
    def _table(self, database):
        database.direct().execute(TABLE)

    def test_is_taken_as_it_is(self, database):
        schema.ensure_schema(database.connect(), build_source(table=MAPPED, publications=["t"]))

        assert database.direct().execute("SELECT count(*) FROM shop.events").fetchone() == (0,)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            pytest.param(
                "ALTER SEQUENCE shop.events_seq_seq CACHE 20",
                ["CACHE 20", "ALTER SEQUENCE shop.events_seq_seq CACHE 1"],
                id="a sequence that caches",
            ),
            pytest.param("ALTER SEQUENCE shop.events_seq_seq CYCLE", ["never cycle"], id="a sequence that cycles"),
            pytest.param("ALTER TABLE shop.events ALTER seq TYPE int", ["seq", "integer", "bigint"], id="int position"),
            pytest.param("ALTER TABLE shop.events DROP seq", ["no column seq", "outbox adopt"], id="no position"),
            pytest.param(
                "ALTER TABLE shop.events ALTER seq DROP DEFAULT, ALTER seq DROP NOT NULL",
                ["does not get its number from a sequence"],
                id="a position from nowhere",
            ),
            pytest.param(
                "ALTER TABLE shop.events ALTER xid DROP DEFAULT, ALTER xid DROP NOT NULL",
                ["ALTER TABLE shop.events ALTER xid SET DEFAULT pg_current_xact_id()"],
                id="no default for the transaction id",
            ),
            pytest.param(
                "ALTER TABLE shop.events DROP xid; ALTER TABLE shop.events ADD xid bigint",
                ["xid", "bigint, not xid8"],
                id="a transaction id of another type",
            ),
            pytest.param(
                "ALTER TABLE shop.events ALTER stored_at TYPE timestamp",
                ["stored_at", "timestamp with time zone"],
                id="times without zone",
            ),
            pytest.param(
                "ALTER TABLE shop.events ALTER payload TYPE bytea USING NULL", ["payload", "jsonb"], id="bytes"
            ),
            pytest.param(
                "DROP INDEX shop.events_cursor",
                ["CREATE INDEX CONCURRENTLY ON shop.events (xid, seq)"],
                id="no index",
            ),
            pytest.param("DROP TABLE shop.events", ["no table shop.events"], id="no table"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_remedy(self, database, change, said):
        database.direct().execute(change)

        error = refusal(database, build_source(table=MAPPED))

        assert error.reason in (Reason.SCHEMA_MISMATCH, Reason.SCHEMA_MISSING)
        for part in said:
            assert part in str(error)

    def test_publications_want_their_index(self, database):
        database.direct().execute("DROP INDEX shop.events_tenant")

        schema.ensure_schema(database.connect(), build_source(table=MAPPED))
        assert "(tenant, xid, seq)" in str(refusal(database, build_source(table=MAPPED, publications=["t"])))

    @pytest.mark.parametrize("remedy", [0, 1], ids=["a policy", "of the role"])
    def test_a_role_that_policies_hide_rows_from_is_refused(self, database, remedy):
        """It would never read hidden rows."""
        direct, source = database.direct(), build_source(table=MAPPED, schema="Verify")
        direct.execute(
            "GRANT USAGE ON SCHEMA outbox, shop TO processor;"
            "GRANT SELECT ON ALL TABLES IN SCHEMA outbox, shop TO processor;"
            "ALTER TABLE shop.events ENABLE ROW LEVEL SECURITY;"
            "CREATE POLICY tenants ON shop.events USING (tenant = current_setting('shop.tenant', true))"
        )
        schema.check_table(direct, source)  # policies are not for owners and superusers

        said = refusal(database, source, "processor")

        assert said.reason is Reason.SCHEMA_MISMATCH
        assert "row-level security may hide messages from role processor" in str(said)
        try:
            direct.execute(str(said).split(": ")[-1].split(", or ")[remedy])
            schema.ensure_schema(database.connect("processor"), source)
        finally:
            direct.execute("ALTER ROLE processor NOBYPASSRLS")

        direct.execute("CREATE POLICY fewer ON shop.events AS RESTRICTIVE USING (tenant <> 'secret')")
        assert "row-level security" in str(refusal(database, source, "processor"))

    def test_the_remedies_work(self, database):
        direct = database.direct()
        direct.execute("ALTER SEQUENCE shop.events_seq_seq CACHE 20")
        direct.execute("DROP INDEX shop.events_cursor")
        for _ in range(2):
            direct.execute(str(refusal(database, build_source(table=MAPPED))).split(": ")[-1])

        schema.ensure_schema(database.connect(), build_source(table=MAPPED))
        assert direct.execute(
            "SELECT seqcache FROM pg_sequence WHERE seqrelid = 'shop.events_seq_seq'::regclass"
        ).fetchone() == (1,)


def remedies(database, source):
    """Run the last remedy of each refusal until there is none; return how many."""
    for count in range(5):
        try:
            schema.check_table(database.connect(), source)
        except ConfigurationError as err:
            database.direct().execute(str(err).rsplit(": ", 1)[-1])
        else:
            return count
    raise AssertionError("the remedies help nothing")


@pytest.mark.parametrize("name", ["Orders", "order", "order-events", 'say "so"', "events"])
@pytest.mark.parametrize("partitioning", ["", "PARTITION BY LIST (kind)"], ids=["ordinary", "partitioned"])
def test_the_remedies_work_for_every_name_and_a_partitioned_table(database, name, partitioning):
    direct, table = database.direct(), sql.Identifier(name, name)
    direct.execute(
        sql.SQL(
            "CREATE SCHEMA {0}; CREATE TABLE {1} (kind int, {0} xid8, position bigserial, message_id text,"
            "message_type text, data text) " + partitioning
        ).format(sql.Identifier(name), table)
    )
    if partitioning:
        direct.execute(sql.SQL("CREATE TABLE {} PARTITION OF {} DEFAULT").format(sql.Identifier(name, "rest"), table))

    mapped = {"schemaName": name, "name": name, "columns": {"transactionId": name}}
    assert remedies(database, build_source(table=mapped, cursor="Snapshot")) == 3


@pytest.mark.parametrize("version", VERSIONS)
def test_words_that_are_no_names_are_quoted(servers, version):
    with servers.database(version) as database:
        words = database.direct().execute("SELECT word FROM pg_get_keywords() WHERE catcode IN ('R', 'T')").fetchall()

    assert len(words) > 90
    assert [word for (word,) in words if quote(word) == word] == []


@pytest.mark.parametrize(
    "index",
    [
        "USING brin (position)",
        "USING hash (position)",
        "(transaction_id) INCLUDE (position)",
        "(transaction_id, position DESC)",
    ],
    ids=["ranges", "not sorted", "half of it not sorted", "up and down"],
)
def test_an_index_that_reading_cannot_use_is_none(database, index):
    database.direct().execute(
        "CREATE TABLE public.t (position bigserial, transaction_id xid8 DEFAULT pg_current_xact_id(),"
        f"message_id text, message_type text, data text); CREATE INDEX ON public.t {index}"
    )

    source = build_source(table={"schemaName": "public", "name": "t"}, cursor="Snapshot")
    assert remedies(database, source) == 2, "one for each cursor"


def test_a_foreign_table_is_refused_without_a_remedy_that_it_has_not(database):
    """No index can be made of it here, and its rows have the transaction ids of another server."""
    database.direct().execute(
        "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w; CREATE FOREIGN TABLE public.t "
        "(position bigint NOT NULL, transaction_id xid8 NOT NULL, message_id text, message_type text, data text) "
        "SERVER s; GRANT SELECT ON public.t TO PUBLIC"
    )
    error = str(refusal(database, build_source(table={"schemaName": "public", "name": "t"})))
    assert "it is a foreign table: name the table behind it, and the database that has it" in error
    assert "CREATE INDEX" not in error


@pytest.mark.parametrize("column", ["position bigint NOT NULL", "position bigint GENERATED ALWAYS AS IDENTITY"])
def test_a_position_that_producers_name_or_an_identity_is_fine(database, column):
    database.direct().execute(
        f"CREATE TABLE public.t ({column}, transaction_id xid8 NOT NULL, message_id text, message_type text, "
        "data text);"
        "CREATE INDEX ON public.t (transaction_id, position)"
    )

    schema.check_table(database.connect(), build_source(table={"schemaName": "public", "name": "t"}))
    with pytest.raises(psycopg.errors.NotNullViolation):
        database.direct().execute("INSERT INTO public.t DEFAULT VALUES")


def test_our_own_sequence_is_checked_too(database):
    database.direct().execute("ALTER SEQUENCE outbox.messages_position_seq CACHE 50")

    assert "ALTER SEQUENCE outbox.messages_position_seq CACHE 1" in str(refusal(database, build_source()))


def test_a_column_is_named_by_its_field_of_the_resource(database):
    database.direct().execute(
        "CREATE TABLE public.events (position bigint, transaction_id bigint, message_type text, data jsonb)"
    )
    source = build_source(table={"schemaName": "public", "name": "events", "columns": {"messageId": "uuid"}})
    said = str(refusal(database, source))
    assert "it has no column uuid (source.table.columns.messageId): name the right one" in said
    assert "column transaction_id (source.table.columns.transactionId) is bigint, not xid8" in said
