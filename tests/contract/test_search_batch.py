"""The messages of a batch at which a statement fails are found with one call, and it is run over the others."""

from __future__ import annotations

import random
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql

from tests.support.servers.postgres import POOLED, VERSIONS, wait_until

PREPARE = "PREPARE outbox_part (xid8[], bigint[]) AS INSERT INTO done SELECT n FROM unnest($2) AS n"
EVERYWHERE = pytest.mark.parametrize("anywhere", [*VERSIONS, POOLED], indirect=True)


@pytest.fixture
def connection(anywhere):
    made = anywhere.connect(autocommit=False)
    made.execute("CREATE TEMPORARY TABLE parents (n bigint PRIMARY KEY) ON COMMIT DROP")
    made.execute("CREATE TEMPORARY TABLE bad (n bigint PRIMARY KEY) ON COMMIT DROP")
    made.execute("CREATE TEMPORARY TABLE done (n bigint, parent bigint, seen serial) ON COMMIT DROP")
    made.execute(
        "CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF EXISTS (SELECT 1 FROM bad b WHERE b.n = new.n) THEN "
        "RAISE EXCEPTION 'no %', new.n USING ERRCODE = 'AB001', HINT = 'mend ' || new.n; END IF; RETURN new; END $$"
    )
    made.execute("CREATE TRIGGER refuse BEFORE INSERT ON done FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse()")
    made.execute("ALTER TABLE done ADD FOREIGN KEY (parent) REFERENCES parents DEFERRABLE INITIALLY DEFERRED")
    made.execute("SAVEPOINT outbox_part")
    return made


def search(
    connection, count, *, block=4, keys=None, waiting=(), at=0, failing_before=None, most=1000, seconds=60,
    prepare=PREPARE,
    name="outbox_part", positions=None,
):  # fmt: skip
    """Search the messages 1 to `count`; their positions are their numbers, unless others are given."""
    ids, positions = ["7"] * count, positions or list(range(1, count + 1))
    cursor = connection.cursor(row_factory=psycopg.rows.namedtuple_row)
    return cursor.execute(
        sql.SQL(
            "SELECT * FROM outbox.search_batch({}, {}, {}::xid8[], {}, {}::int[], {}::int[], {}, {}, {}, {}, {})"
        ).format(name, prepare, ids, positions, keys, list(waiting), at, failing_before, block, most, seconds)
    ).fetchone()


def refuse(connection, *numbers):
    connection.cursor().executemany("INSERT INTO bad VALUES (%s)", [(number,) for number in numbers])


def done(connection):
    return [row[0] for row in connection.execute("SELECT n FROM done ORDER BY seen").fetchall()]


@EVERYWHERE
def test_each_message_is_handled_in_order_or_named_with_its_error(connection):
    refuse(connection, 3, 8, 9, 20)
    found = search(connection, 20)
    assert (found.at, found.failing_before, found.failed) == (20, None, [3, 8, 9, 20])
    assert (found.states[0], found.messages[1], found.hints[2]) == ("AB001", "no 8", "mend 9")
    assert found.committing == [False] * 4
    assert done(connection) == [n for n in range(1, 20) if n not in (3, 8, 9)]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_fails_and_wherever_a_search_stops_the_outcome_is_the_same(connection, seed):
    """Also with keys: after one that failed no later message of its key is tried, and no message overtakes another."""
    chance = random.Random(seed)
    count = chance.randint(1, 120)
    bad = {n for n in range(1, count + 1) if chance.random() < chance.choice([0.01, 0.1, 0.5, 1.0])}
    keys = [chance.randint(1, chance.choice([3, 40])) for _ in range(count)] if chance.random() < 0.7 else None
    refuse(connection, *bad)
    handled, failed, blocked = [], [], set()
    for number in range(1, count + 1):
        key = None if keys is None else keys[number - 1]
        if key in blocked and keys is not None:
            continue
        if number in bad:
            failed.append(number)
            blocked.add(key)
        else:
            handled.append(number)
    seen: list[int] = []
    at, failing_before, block = 0, None, chance.choice([1, 4, 64])
    while at < count:
        waiting = (
            []
            if keys is None
            else [n for n in range(1, count + 1) for f in seen if n > f and keys[n - 1] == keys[f - 1]]
        )
        found = search(
            connection, count, block=block, keys=keys, waiting=waiting, at=at, failing_before=failing_before,
            most=chance.randint(1, 5), seconds=chance.choice([0, 60]),
        )  # fmt: skip
        assert found.at > at, "however little time or room there is, it gets further"
        at, failing_before, block = found.at, found.failing_before, found.block
        seen += found.failed
    assert (seen, done(connection)) == (failed, handled)


@EVERYWHERE
def test_it_ends_after_so_many_parts_that_got_through_or_when_its_time_is_over(connection):
    found = search(connection, 100, block=2, most=3)
    assert (found.at, found.kept) == (8, 3), "two, two, and then four"
    found = search(connection, 100, block=2, at=found.at, seconds=0)
    assert (found.at, found.kept, done(connection)) == (10, 1, [*range(1, 11)])


@EVERYWHERE
def test_another_statement_takes_the_place_of_the_one_before(connection):
    search(connection, 2)
    search(connection, 4, at=2, prepare=PREPARE.replace("SELECT n", "SELECT -n"))
    search(connection, 5, at=4)
    assert done(connection) == [1, 2, -3, -4, 5]


@EVERYWHERE
def test_no_part_is_planned_anew(connection):
    """Which takes longer than to run a statement over a part."""
    refuse(connection, 30, 60)
    search(connection, 64)
    plans = "SELECT generic_plans > 6, custom_plans FROM pg_prepared_statements WHERE name = 'outbox_part'"
    assert connection.execute(plans).fetchone() == (True, 0)


def test_a_plan_is_made_anew_after_some_seconds_since_the_tables_may_have_been_empty(connection):
    made = "SELECT prepare_time FROM pg_prepared_statements WHERE name = 'outbox_part'"

    def search_again():
        search(connection, 2)
        return connection.execute(made).fetchone()[0]

    first = search_again()
    wait_until(lambda: search_again() != first, "the plan is made anew")
    assert search_again() - first >= timedelta(seconds=10)


NEAR = (
    "PREPARE outbox_near (xid8[], bigint[]) AS INSERT INTO done SELECT n, NULL FROM generate_series(1, 1000) AS n "
    "WHERE n BETWEEN ($2)[1] AND ($2)[cardinality($2)] AND ($1 IS NULL OR n = ANY ($2))"
)


@EVERYWHERE
def test_messages_without_others_between_them_are_named_by_the_first_and_the_last(connection):
    refuse(connection, 7)
    seen = NEAR.replace("SELECT n, NULL", "SELECT n + 1000 * coalesce(cardinality($1), 0), NULL")
    found = search(connection, 12, block=4, name="outbox_near", prepare=seen)
    assert (found.failed, done(connection)) == ([7], [n for n in range(1, 13) if n != 7])


@pytest.mark.parametrize("seed", range(10))
def test_near_others_each_message_is_named(connection, seed):
    """What lies between them and is another processor's, or waits behind one of its key, is not touched."""
    chance = random.Random(seed)
    positions = sorted(chance.sample(range(1, 200), 80))
    bad = sorted(chance.sample(range(1, 81), 6))
    keys = [chance.randint(1, 30) for _ in positions]
    refuse(connection, *(positions[n - 1] for n in bad))
    found = search(connection, 80, block=16, keys=keys, name="outbox_near", prepare=NEAR, positions=positions)
    failed, handled, blocked = [], [], set()
    for number, (position, key) in enumerate(zip(positions, keys, strict=True), 1):
        if key in blocked:
            continue
        if number in bad:
            failed.append(number)
            blocked.add(key)
        else:
            handled.append(position)
    assert (found.at, found.failed, done(connection)) == (80, failed, handled)


STREAMING = (
    "PREPARE outbox_near (xid8[], bigint[]) AS INSERT INTO done SELECT o.position, NULL FROM outbox.messages AS o "
    "WHERE o.position >= ($2)[1] AND o.position <= ($2)[cardinality($2)] "
    "AND ($1 IS NULL OR o.position + 0 = ANY ($2)) ORDER BY o.position"
)


@EVERYWHERE
def test_what_the_server_read_last_names_the_message_that_fails(connection):
    """A sequence counts the parts that fail: by halves they are four or more for each message, and here two."""
    connection.execute(
        "INSERT INTO outbox.messages (position, message_type, data) OVERRIDING SYSTEM VALUE "
        "SELECT n, 'T', '{}' FROM generate_series(1, 400) AS n"
    )
    # The table has no statistics here, and this is about the plan that large ones have.
    connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off")
    connection.execute("CREATE TEMPORARY SEQUENCE failures")
    connection.execute(
        "CREATE OR REPLACE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF EXISTS (SELECT 1 FROM bad b WHERE b.n = new.n) THEN PERFORM nextval('failures'); "
        "RAISE EXCEPTION 'no %', new.n; END IF; RETURN new; END $$"
    )
    bad = [37, 120, 121, 255, 390]
    refuse(connection, *bad)
    keys = [37 if n == 300 else n for n in range(1, 401)]
    found = search(connection, 400, block=32, keys=keys, name="outbox_near", prepare=STREAMING)
    assert (found.at, found.failed) == (400, bad)
    assert done(connection) == [n for n in range(1, 401) if n not in (*bad, 300)], "one waits behind the first"
    assert connection.execute("SELECT last_value FROM failures").fetchone() == (2 * len(bad),)


def test_a_statement_that_reads_all_before_it_fails_is_searched_by_halves(connection):
    """What it read last is the last message of each part, and fails nowhere."""
    connection.execute(
        "INSERT INTO outbox.messages (position, message_type, data) OVERRIDING SYSTEM VALUE "
        "SELECT n, 'T', '{}' FROM generate_series(1, 100) AS n"
    )
    bad = [3, 40, 77]
    refuse(connection, *bad)
    whole = STREAMING.replace("ORDER BY o.position", "ORDER BY -o.position")
    found = search(connection, 100, block=16, name="outbox_near", prepare=whole)
    assert (found.at, found.failed) == (100, bad)
    assert sorted(done(connection)) == [n for n in range(1, 101) if n not in bad]


def test_a_constraint_that_waits_for_the_commit_refuses_its_message_and_goes_on_waiting(connection):
    connection.execute("INSERT INTO parents VALUES (1)")
    children = PREPARE.replace("SELECT n", "SELECT n, CASE WHEN n = 4 THEN 9 ELSE 1 END")
    found = search(connection, 6, prepare=children)
    assert (found.failed, found.committing, found.states) == ([4], [True], ["23503"])
    assert done(connection) == [1, 2, 3, 5, 6]
    connection.execute("INSERT INTO done VALUES (5, 2)")
    connection.execute("INSERT INTO parents VALUES (2)")
    connection.execute("SET CONSTRAINTS ALL IMMEDIATE")


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "53100", "57014", "25006", "0A000"])
def test_what_is_no_messages_fault_is_the_callers_to_see(connection, state):
    connection.execute(
        "CREATE FUNCTION pg_temp.fail(n bigint) RETURNS bigint LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$"
    )
    with pytest.raises(psycopg.Error) as caught:
        search(connection, 2, prepare=PREPARE.replace("SELECT n", "SELECT pg_temp.fail(n)"))
    assert caught.value.sqlstate == state
