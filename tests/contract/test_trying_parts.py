"""Several parts of a batch tried with one call, in the order given, until one is refused."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from tests.support.servers.postgres import POOLED, VERSIONS

PREPARE = (
    "PREPARE outbox_part (xid8, bigint, xid8, bigint) AS INSERT INTO done SELECT n FROM generate_series($2 + 1, $4) n"
)
EVERYWHERE = pytest.mark.parametrize("anywhere", [*VERSIONS, POOLED], indirect=True)


@pytest.fixture
def connection(anywhere):
    made = anywhere.connect(autocommit=False)
    made.execute("CREATE TEMPORARY TABLE parents (n bigint PRIMARY KEY) ON COMMIT DROP")
    made.execute(
        "CREATE TEMPORARY TABLE done (n bigint CHECK (n <> 13), parent bigint REFERENCES parents "
        "DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP"
    )
    made.execute("INSERT INTO parents VALUES (1)")
    made.execute("SAVEPOINT outbox_part")
    return made


def try_parts(connection, *bounds, prepare=PREPARE):
    parts = [f"'0', {begin}, '0', {end}" for begin, end in bounds]
    statement = sql.SQL("SELECT outbox.try_parts({}, {})").format(prepare, parts)
    return connection.execute(statement).fetchone()[0]


def done(connection):
    return [row[0] for row in connection.execute("SELECT n FROM done ORDER BY n").fetchall()]


@EVERYWHERE
def test_parts_are_done_until_one_is_refused_and_no_further(connection):
    assert try_parts(connection, (0, 2), (2, 5)) == 2
    assert try_parts(connection, (5, 10), (10, 20), (20, 30)) == 1
    assert done(connection) == list(range(1, 11))


@EVERYWHERE
def test_another_statement_takes_the_place_of_the_one_before(connection):
    other = PREPARE.replace("SELECT n", "SELECT -n")
    assert try_parts(connection, (0, 2)) == 1
    assert try_parts(connection, (2, 3), prepare=other) == 1
    assert try_parts(connection, (3, 4)) == 1
    assert done(connection) == [-3, 1, 2, 4]


def test_a_constraint_that_waits_for_the_commit_refuses_its_part_and_goes_on_waiting(connection):
    children = PREPARE.replace("SELECT n", "SELECT n, CASE WHEN n = 4 THEN 9 ELSE 1 END")
    assert try_parts(connection, (0, 2), (2, 6), (6, 8), prepare=children) == 1
    assert done(connection) == [1, 2]
    connection.execute("INSERT INTO done VALUES (5, 2)")
    connection.execute("INSERT INTO parents VALUES (2)")
    connection.commit()


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "53100", "57014", "25006"])
def test_what_is_no_messages_fault_is_the_callers_to_see(connection, state):
    connection.execute(
        "CREATE FUNCTION pg_temp.fail(n bigint) RETURNS bigint LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$"
    )
    failing = PREPARE.replace("SELECT n", "SELECT pg_temp.fail(n)")
    with pytest.raises(psycopg.Error) as caught:
        try_parts(connection, (0, 2), prepare=failing)
    assert caught.value.sqlstate == state
