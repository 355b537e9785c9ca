"""The migrations make the schema, whoever runs them, wherever from and however often."""

from __future__ import annotations

import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from outbox_sql import runner
from outbox_sql.runner import Migration, Phase
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.sql_functions import read_functions
from tests.support.servers.postgres import POOLED, ROLES, VERSIONS

SQL = Path(runner.__file__).parent
SHIPPED = runner.load_migrations()
NAMES = [migration.name for migration in SHIPPED if migration.phase is Phase.PRE]
SET = SHIPPED[-1]
CHECKSUMS = {
    1: "2975995b6e08daedb4a6e67d6c23a63616e6a038ccbaeef7088075c1646568e2",
    2: "c5908ccd341f5ba07103510280871ad7f8cc35e55d439250c047f38946d0a882",
    3: "ca0f9841ecc454865ceaf9b7bedf95a89ca30eb2c8e50d0c8648b425ee45eb5c",
    4: "12f6b8f77385d68e2a3f66219e816ac238ca3c4cb6ad30e884c17be3bb805845",
}
"""Of each set of functions, by its number: a former one is never edited."""
FUNCTIONS = """
    SELECT p.proname, p.pronargs, pg_get_functiondef(p.oid) FROM pg_proc p
    WHERE p.pronamespace = 'outbox'::regnamespace ORDER BY 1, 2
"""


@pytest.fixture(params=[*VERSIONS, POOLED])
def anywhere(servers, request):
    """A database without our schema, on every version and behind PgBouncer."""
    with servers.database(request.param, template="empty_template") as database:
        yield database


def migration(name="9001_pre_test", text='CREATE TABLE :"schema".extra (x int)'):
    return Migration(name, Phase(name.split("_")[1]), text)


def test_a_frozen_run_keeps_its_locks_for_a_bounded_time(empty_database):
    shown = """CREATE TABLE :"schema".bounds AS SELECT current_setting('lock_timeout') AS lock,
               current_setting('idle_in_transaction_session_timeout') AS idle"""
    connection = empty_database.direct()

    runner.migrate(connection, "outbox", migrations=(migration(text=shown),))

    found = connection.execute("SELECT lock, idle FROM outbox.bounds").fetchone()
    assert found == (runner.LOCK_TIMEOUT, runner.IDLE_TIMEOUT)
    assert connection.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("0",)


def test_applied_once_however_often(anywhere):
    first = runner.migrate(anywhere.connect(), "outbox")
    again = runner.migrate(anywhere.connect(), "outbox")

    assert (list(first), again) == (NAMES, ())
    assert list(runner.fetch_applied(anywhere.connect(), "outbox")) == NAMES


def test_a_complete_schema_is_only_read(anywhere):
    runner.migrate(anywhere.connect(), "outbox")
    connection = anywhere.connect(autocommit=False)

    runner.fetch_applied(connection, "outbox")

    assert connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)


def test_from_several_places_at_once_each_is_applied_once(anywhere):
    connections = [anywhere.connect() for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda connection: runner.migrate(connection, "outbox"), connections))

    assert sorted(name for names in done for name in names) == NAMES


def test_by_an_owner_without_other_rights(anywhere):
    anywhere.direct().execute("CREATE SCHEMA outbox AUTHORIZATION owner")

    assert list(runner.migrate(anywhere.connect("owner"), "outbox")) == NAMES

    rows = anywhere.direct().execute(
        "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relnamespace = 'outbox'::regnamespace"
    )
    assert [row[0] for row in rows] == ["owner"]


def test_by_a_role_that_may_create_schemas(empty_database):
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        runner.migrate(empty_database.connect("owner"), "outbox")
    empty_database.direct().execute(f'GRANT CREATE ON DATABASE "{empty_database.name}" TO owner')

    assert list(runner.migrate(empty_database.connect("owner"), "outbox")) == NAMES


@pytest.mark.parametrize("schema", ["other", "Odd \"name\" of 'mine'", "select"])
def test_in_a_schema_of_any_name(empty_database, schema):
    connection = empty_database.connect()
    runner.migrate(connection, "outbox")
    runner.migrate(connection, schema)
    quoted = '"' + schema.replace('"', '""') + '"'

    stored = connection.execute(
        f"SELECT {quoted}.store_processor_checkpoint('p', 0, '5', 1, NULL, NULL, NULL, NULL)"
    ).fetchone()

    assert stored == (1,)
    assert connection.execute(f"SELECT count(*) FROM {quoted}.processor_checkpoints").fetchone() == (1,)
    assert connection.execute("SELECT count(*) FROM outbox.processor_checkpoints").fetchone() == (0,)


def test_a_locked_table_is_waited_for_briefly_and_tried_again(empty_database):
    connection = empty_database.connect()
    runner.migrate(connection, "outbox")
    producer = empty_database.direct(autocommit=False)
    producer.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('m', '{}')")
    change = migration(text='ALTER TABLE :"schema".messages ADD COLUMN later int')

    with background(lambda: runner.migrate(connection, "outbox", migrations=(change,))) as done:
        wait_until_blocked(empty_database, done)
        started = time.monotonic()
        insert = "INSERT INTO outbox.messages (message_type, data) VALUES ('queued', '{}')"
        empty_database.direct().execute(insert)  # waits behind the migration no longer than its lock timeout
        assert time.monotonic() - started < 10
        producer.commit()

    assert done.result() == ("9001_pre_test",)


def test_a_migration_that_fails_leaves_nothing(empty_database):
    connection = empty_database.connect()
    runner.migrate(connection, "outbox")
    broken = migration(text='CREATE TABLE :"schema".half (x int); SELECT 1 / 0')

    with pytest.raises(psycopg.errors.DivisionByZero):
        runner.migrate(connection, "outbox", migrations=(broken,))

    assert connection.execute("SELECT to_regclass('outbox.half')").fetchone() == (None,)
    assert list(runner.fetch_applied(connection, "outbox")) == NAMES


def test_an_edited_migration_is_refused(empty_database):
    connection = empty_database.connect()
    runner.migrate(connection, "outbox", migrations=(migration(),))

    with pytest.raises(runner.ChecksumMismatchError, match="9001_pre_test"):
        runner.migrate(connection, "outbox", migrations=(migration(text="SELECT 1"),))
    windows = migration(text=migration().text.replace("\n", "\r\n"))
    assert runner.migrate(connection, "outbox", migrations=(windows,)) == ()


def test_a_newer_schema_is_no_error(empty_database):
    connection = empty_database.connect()
    runner.migrate(connection, "outbox", migrations=(*runner.load_migrations(), migration()))

    assert runner.migrate(connection, "outbox") == ()


def test_a_schema_whose_name_no_statement_can_have_is_refused_in_words(empty_database):
    with pytest.raises(runner.MigrationError, match="'100%' has a per cent sign in its name: choose a name without"):
        runner.migrate(empty_database.direct(), "100%")


def test_post_runs_only_when_asked_for(empty_database):
    connection = empty_database.connect()
    both = (migration(), migration("9002_post_test", 'DROP TABLE :"schema".extra'))

    assert runner.migrate(connection, "outbox", migrations=both) == ("9001_pre_test",)
    assert runner.migrate(connection, "outbox", migrations=both, phases=tuple(Phase)) == ("9002_post_test",)


def test_the_files_run_in_psql_too(empty_database):
    empty_database.direct().execute("CREATE SCHEMA outbox")
    files = [str(file) for folder in ("migrations", "functions") for file in sorted((SQL / folder).glob("*.sql"))]
    named = [argument for file in files for argument in ("-f", file)]
    command = ["psql", "-q", "-v", "ON_ERROR_STOP=1", "-v", "schema=outbox", *named, empty_database.uri()]
    unchecked = os.environ | {"PGOPTIONS": "-c check_function_bodies=off -c client_min_messages=warning"}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=unchecked)

    assert (result.returncode, result.stderr) == (0, "")
    made = empty_database.direct().execute(FUNCTIONS).fetchall()
    assert ("store_processor_checkpoint", 8) in [(name, count) for name, count, _ in made]


class TestTheTextsAgree:
    def test_each_function_has_one_text(self, database):
        made = database.direct().execute(FUNCTIONS).fetchall()

        assert sorted(name for name, _ in read_functions()) == [name for name, _, _ in made]
        everything = "".join(file.read_text() for file in SQL.glob("functions/*.sql"))
        assert len(re.findall(r"^CREATE", everything, re.MULTILINE)) == len(made)
        migrations = "".join(file.read_text() for file in SQL.glob("migrations/*.sql"))
        again = re.findall(r'FUNCTION :"schema"\.(\w+)\(.*\) RETURNS', migrations)
        assert {name for name, _, _ in made}.isdisjoint(again)

    def test_each_function_can_be_run_as_its_language_says(self, database):
        """The set is applied without looking into the bodies, because they call each other in any order."""
        before = database.direct().execute(FUNCTIONS).fetchall()
        connection = database.direct()
        connection.execute("SET check_function_bodies = on")
        connection.execute(runner.render(SET.text, "outbox"))

        assert connection.execute(FUNCTIONS).fetchall() == before

    def test_files_of_functions_are_short(self):
        assert [file.name for file in SQL.glob("functions/*.sql") if len(file.read_text().splitlines()) > 500] == []

    def test_the_number_of_the_set_rises_with_its_text(self):
        assert CHECKSUMS.get(runner.FUNCTIONS_VERSION) == SET.checksum, (
            f"a text in sql/functions changed: raise FUNCTIONS_VERSION, and add it here with {SET.checksum}"
        )
        assert SET.name == f"functions_{max(CHECKSUMS):04d}"

    def test_every_migration_has_a_name_in_order_and_says_why(self):
        files = sorted((SQL / "migrations").glob("*.sql"))
        for number, file in enumerate(files, 1):
            assert re.fullmatch(rf"{number:04d}_(pre|post)_[a-z0-9_]+\.sql", file.name)
            assert file.read_text().startswith("-- ")
        assert [*(file.stem for file in files), SET.name] == [migration.name for migration in SHIPPED]

    def test_functions_run_with_their_owners_rights_on_a_fixed_path_and_are_nobodys_by_default(self, database):
        rows = (
            database.direct()
            .execute(
                """SELECT p.proname, p.prosecdef, p.proconfig::text,
                       has_function_privilege('stranger', p.oid, 'EXECUTE')
               FROM pg_proc p WHERE p.pronamespace = 'outbox'::regnamespace"""
            )
            .fetchall()
        )

        assert rows
        for name, as_owner, settings, public in rows:
            # Whoever inserts into an indexed outbox computes the one, which reads nothing; the other runs the caller's
            # own statement, which is to have the caller's rights and search path.
            if name in ("hash_slot", "search_batch"):
                own = "{plan_cache_mode=force_generic_plan}" if name == "search_batch" else None
                assert (as_owner, settings, public) == (False, own, True)
                continue
            assert (as_owner, public) == (True, False), name
            assert "search_path=outbox, pg_temp" in settings, name

    def test_the_test_roles_own_nothing(self, database):
        rows = database.direct().execute(
            "SELECT rolname FROM pg_roles WHERE rolsuper AND rolname = ANY (%s)", (list(ROLES),)
        )
        assert rows.fetchall() == []


class TestFunctions:
    def later(self, answer):
        text = (
            SET.text
            + f"""
            CREATE OR REPLACE FUNCTION :"schema".unowned_calls() RETURNS bigint
            LANGUAGE sql AS 'SELECT {answer}::bigint';"""
        )
        return Migration(f"functions_{runner.FUNCTIONS_VERSION + answer:04d}", Phase.PRE, text)

    def answer(self, connection):
        return connection.execute("SELECT outbox.unowned_calls()").fetchone()[0]

    def test_are_applied_again_when_their_number_rises_and_never_go_back(self, database):
        connection = database.direct()
        first, second = self.later(1), self.later(2)

        assert runner.migrate(connection, "outbox", migrations=(*SHIPPED[:-1], second)) == (second.name,)
        assert runner.migrate(connection, "outbox", migrations=(*SHIPPED[:-1], first)) == ()
        assert runner.migrate(connection, "outbox") == ()
        assert self.answer(connection) == 2

    def test_an_older_run_that_waited_for_a_newer_one_applies_nothing(self, database):
        connection = database.direct()
        holder = database.direct(autocommit=False)
        holder.execute("SELECT pg_advisory_xact_lock(%s)", (runner.LOCK_KEY,))
        older = (*SHIPPED[:-1], self.later(1))
        with background(lambda: runner.migrate(connection, "outbox", migrations=older)) as done:
            wait_until_blocked(database, done)
            newer = self.later(2)
            holder.execute(runner.render(newer.text, "outbox"))
            holder.execute("INSERT INTO outbox.applied_migrations VALUES (%s, %s)", (newer.name, newer.checksum))
            holder.commit()

        assert done.result() == ()
        assert self.answer(connection) == 2

    def test_other_texts_with_the_same_number_are_refused(self, database):
        other = Migration(SET.name, Phase.PRE, SET.text + "-- other")

        with pytest.raises(runner.ChecksumMismatchError, match=SET.name):
            runner.migrate(database.direct(), "outbox", migrations=(*SHIPPED[:-1], other))

    def test_keep_what_was_granted(self, database):
        connection = database.direct()
        connection.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox TO processor")
        runner.migrate(connection, "outbox", migrations=(*SHIPPED[:-1], self.later(1)))

        rows = connection.execute(
            """SELECT bool_and(has_function_privilege('processor', oid, 'EXECUTE')) FROM pg_proc
               WHERE pronamespace = 'outbox'::regnamespace"""
        )
        assert rows.fetchone() == (True,)


def test_a_schema_from_before_the_first_release_is_refused_with_the_remedy(empty_database):
    connection = empty_database.direct()
    runner.migrate(connection, "outbox", migrations=(migration("0001_pre_tables", "SELECT 1"),))

    with pytest.raises(
        runner.MigrationError, match=r"before the first release \(0001_pre_tables\).*name another schema"
    ):
        runner.migrate(connection, "outbox")
