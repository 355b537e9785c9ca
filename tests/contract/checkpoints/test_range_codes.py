"""The checkpoint contract for the cursor Snapshot: a counter in place of the pair; the range is compared too."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.contract import AHEAD, IGNORED, NOT_OWNER, OLDER, STORED, own, put
from tests.support.database.contract import store as store_pair
from tests.support.servers.postgres import EVERYWHERE

TOKEN = str(uuid4())
NOTHING = (None, None, None, None)
A = ("10:20:12,15", None, None)
A_OPEN = ("10:20:12,15", "18:30:18", 7)
A_FURTHER = ("10:20:12,15", "18:30:18", 9)
B = ("18:30:18", None, None)
OTHER = ("10:20:12,16", None, None)

STORE = """SELECT outbox.store_processor_range('orders', 0, %s::bigint, %s::text::pg_snapshot, %s::text::pg_snapshot,
    %s::bigint, %s::bigint, %s::text::pg_snapshot, %s::text::pg_snapshot, %s::bigint, %s::bigint, %s::uuid)"""


def store(connection, new, expected=NOTHING, owner=(None, None)):
    return connection.execute(STORE, (*new, *expected, *owner)).fetchone()[0]


def stored(connection):
    return connection.execute(
        "SELECT last_processed_position, lower_snapshot::text, upper_snapshot::text, range_position "
        "FROM outbox.processor_checkpoints WHERE last_processed_transaction_id = '0' AND cursor_kind = 'Snapshot'"
    ).fetchone()


STEPS = [
    pytest.param((5, *A), (5, *A), (3, *A), IGNORED, id="step 3: it is there already"),
    pytest.param((5, *A_OPEN), (5, *A), (3, *A), AHEAD, id="step 3: the same counter with another snapshot range is 2"),
    pytest.param((5, *A), (5, *OTHER), NOTHING, AHEAD, id="step 3: another list in progress is another snapshot range"),
    pytest.param(None, (1, None, None, None), NOTHING, STORED, id="step 4: no row, nothing expected"),
    pytest.param(None, (5, *B), (3, *A), OLDER, id="step 5: no row, something expected"),
    pytest.param((3, *A), (5, *A_OPEN), (3, *A), STORED, id="step 6: the first page"),
    pytest.param((3, *A_OPEN), (5, *A_FURTHER), (3, *A_OPEN), STORED, id="step 6: the next page"),
    pytest.param((3, *A_FURTHER), (4, *B), (3, *A_FURTHER), STORED, id="step 6: the snapshot range is read"),
    pytest.param(
        (3, *A_FURTHER), (4, *B), (3, *A_OPEN), AHEAD, id="step 7: the expected counter, another snapshot range"
    ),
    pytest.param((4, *A), (5, *B), (3, *A), AHEAD, id="step 7: the row is further"),
    pytest.param((4, *A), (5, *B), NOTHING, AHEAD, id="step 7: a row where none was expected"),
    pytest.param((2, *A), (5, *B), (3, *A), OLDER, id="step 8: the row is older"),
]


@pytest.mark.parametrize(("row", "new", "expected", "answer"), STEPS)
@pytest.mark.parametrize("owned", [False, True], ids=["unclaimed", "owned"])
def test_step(each_database, owned, row, new, expected, answer):
    connection = each_database.connect()
    if row is not None:
        assert store(connection, row) == STORED
    owner = (own(each_database, TOKEN), TOKEN) if owned else (None, None)

    assert store(connection, new, expected, owner) == answer
    assert stored(connection) == (new if answer == STORED else row)


@pytest.mark.parametrize("owner", [(None, None), (1, str(uuid4())), (99, TOKEN)], ids=["none", "token", "epoch"])
@EVERYWHERE
def test_step_2_not_the_owner(each_database, owner):
    own(each_database, TOKEN)

    assert store(each_database.connect(), (1, *A), owner=owner) == NOT_OWNER
    assert stored(each_database.connect()) is None


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        pytest.param((None, *A), NOTHING, id="no counter"),
        pytest.param((1, "10:20:", "10:30:", None), NOTHING, id="no position inside"),
        pytest.param((1, "10:20:", None, 5), NOTHING, id="no upper snapshot"),
        pytest.param((2, *A), (None, *A), id="a snapshot range is expected, but no counter"),
        pytest.param((2, *A), (2, *A), id="the counter stands"),
        pytest.param((0, *A), NOTHING, id="counters begin with 1"),
        pytest.param((3, *A), (2, *B), id="the snapshot range moves back"),
        pytest.param((3, None, None, None), (2, *A), id="back to nothing"),
    ],
)
def test_step_1_is_an_error(each_database, new, expected):
    with pytest.raises((psycopg.errors.NullValueNotAllowed, psycopg.errors.InvalidParameterValue)):
        store(each_database.connect(), new, expected)


@EVERYWHERE
def test_of_two_callers_at_once_exactly_one_gets_1(each_database):
    assert store(each_database.connect(), (1, *A)) == STORED
    first, second = each_database.connect(autocommit=False), each_database.connect(autocommit=False)
    assert store(first, (2, *A_OPEN), (1, *A)) == STORED

    with background(lambda: store(second, (2, *A_FURTHER), (1, *A))) as answer:
        wait_until_blocked(each_database, answer)
        first.commit()

    assert answer.result() == AHEAD
    assert stored(each_database.connect()) == (2, *A_OPEN)


def test_kinds_do_not_mix(each_database):
    connection = each_database.connect()
    put(connection, (10, 1))
    with pytest.raises(
        psycopg.errors.InvalidParameterValue,
        match="one of cursor Snapshot means nothing to it",
    ):
        store(connection, (2, *A), (1, *A))
    connection.execute("DELETE FROM outbox.processor_checkpoints")
    assert store(connection, (1, *A)) == STORED

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="one of cursor TransactionOrder means"):
        store_pair(connection, (20, 5), (0, 1))
    assert stored(connection) == (1, *A)


def rewind(connection, pair):
    return connection.execute(
        "SELECT outbox.rewind_processor_checkpoint('orders', 0, %s::text::xid8, %s, 'test', 'somebody')", pair
    ).fetchone()[0]


@pytest.mark.parametrize(
    ("row", "position", "after"),
    [
        pytest.param((4, *B), 3, (5, None, B[0], 2), id="between two snapshot ranges"),
        pytest.param((4, *A_FURTHER), 9, (5, None, A_FURTHER[1], 8), id="inside a snapshot range"),
        pytest.param((4, *A_FURTHER), 12, (5, None, A_FURTHER[0], 11), id="above it: the snapshot range is read again"),
        pytest.param((4, None, None, None), 12, (5, None, None, None), id="before everything"),
    ],
)
def test_a_rewind_to_a_position_passes_over_nothing(each_database, row, position, after):
    connection = each_database.connect()
    assert store(connection, row) == STORED

    assert rewind(connection, ("0", position)) == 1
    assert stored(connection) == after
    act = connection.execute("SELECT to_position, reason FROM outbox.audit_log").fetchone()
    assert act[0] == 5
    assert "test (snapshot range nothing" in act[1]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="name 0:POSITION"):
        rewind(connection, ("17", position))


@EVERYWHERE
def test_a_rewind_is_refused_while_an_owner_is_live(each_database):
    connection = each_database.connect()
    assert store(connection, (4, *B)) == STORED
    own(each_database, TOKEN)

    assert rewind(connection, ("0", 3)) == 4
    assert stored(connection) == (4, *B)
