"""Several callers at once, in all three isolation levels: one gets 1, and no answer comes from an old snapshot."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

import psycopg
import pytest
from psycopg import IsolationLevel

from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.contract import AHEAD, IGNORED, NOT_OWNER, NOTHING, OLDER, STORED, own, put, store, stored
from tests.support.servers.postgres import EVERYWHERE

pytestmark = EVERYWHERE
TOKEN = str(uuid4())
SERIALIZATION_FAILURE = 40001
LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def level(request):
    return request.param


def begin(database, level, *, snapshot=False):
    """A transaction at this level; with its snapshot taken, if asked."""
    connection = database.connect(autocommit=False)
    connection.isolation_level = level
    if snapshot:
        connection.execute("SELECT count(*) FROM outbox.processor_checkpoints")
    return connection


def attempt(connection, *arguments, **owner):
    """The answer, or 40001."""
    try:
        return store(connection, *arguments, **owner)
    except psycopg.errors.SerializationFailure:
        return SERIALIZATION_FAILURE


@pytest.mark.parametrize("row", [None, (10, 1)], ids=["no row", "a row"])
@pytest.mark.parametrize("second_new", [(20, 5), (21, 6)], ids=["the same pair", "another pair"])
def test_of_two_callers_at_once_exactly_one_gets_1(each_database, level, row, second_new):
    put(each_database.direct(), row)
    first, second = begin(each_database, level, snapshot=True), begin(each_database, level, snapshot=True)
    expected = row or NOTHING
    assert store(first, (20, 5), expected) == STORED

    with background(lambda: attempt(second, second_new, expected)) as answer:
        wait_until_blocked(each_database, answer)
        first.commit()

    truth = IGNORED if second_new == (20, 5) else AHEAD
    assert answer.result() == (truth if level is IsolationLevel.READ_COMMITTED else SERIALIZATION_FAILURE)
    assert stored(each_database.direct()) == (20, 5)


@pytest.mark.parametrize("row", [None, (10, 1)], ids=["no row", "a row"])
def test_the_second_gets_1_when_the_first_rolls_back(each_database, level, row):
    put(each_database.direct(), row)
    first, second = begin(each_database, level, snapshot=True), begin(each_database, level, snapshot=True)
    assert store(first, (20, 5), row or NOTHING) == STORED

    with background(lambda: attempt(second, (21, 6), row or NOTHING)) as answer:
        wait_until_blocked(each_database, answer)
        first.rollback()

    assert answer.result() == STORED
    second.commit()
    assert stored(each_database.direct()) == (21, 6)


@pytest.mark.parametrize(
    ("before", "after", "new", "expected", "truth"),
    [
        pytest.param((10, 1), (20, 5), (30, 1), (10, 1), AHEAD, id="it moved ahead"),
        pytest.param((10, 1), (5, 5), (30, 1), (10, 1), OLDER, id="it moved back"),
        pytest.param((10, 1), (30, 1), (30, 1), (10, 1), IGNORED, id="it moved to the new pair"),
        pytest.param((10, 1), None, (30, 1), (10, 1), OLDER, id="it was deleted"),
        pytest.param(None, (20, 5), (30, 1), NOTHING, AHEAD, id="it appeared, nothing expected"),
        pytest.param(None, (20, 5), (30, 1), (10, 1), AHEAD, id="it appeared further than expected"),
        pytest.param(None, (10, 1), (30, 1), (10, 1), STORED, id="it appeared as expected"),
        pytest.param((5, 5), (10, 1), (30, 1), (10, 1), STORED, id="it came to what is expected"),
    ],
)
def test_an_old_snapshot_never_gives_a_code(each_database, level, before, after, new, expected, truth):
    put(each_database.direct(), before)
    late = begin(each_database, level, snapshot=True)
    put(each_database.direct(), after)

    answer = attempt(late, new, expected)

    assert answer == (truth if level is IsolationLevel.READ_COMMITTED else SERIALIZATION_FAILURE)


@pytest.mark.parametrize(
    ("row", "new", "expected", "truth"),
    [
        pytest.param((10, 1), (20, 5), (10, 1), STORED, id="1"),
        pytest.param((20, 5), (20, 5), (10, 1), IGNORED, id="0"),
        pytest.param((15, 1), (20, 5), (10, 1), AHEAD, id="2"),
        pytest.param((5, 1), (20, 5), (10, 1), OLDER, id="3"),
        pytest.param(None, (20, 5), (10, 1), OLDER, id="3 without a row"),
    ],
)
def test_nothing_changed_since_the_snapshot_so_the_answer_is_the_truth(each_database, level, row, new, expected, truth):
    epoch = own(each_database, TOKEN)
    put(each_database.direct(), row)

    caller = begin(each_database, level, snapshot=True)

    assert attempt(caller, new, expected, owner=(epoch, TOKEN)) == truth
    caller.commit()
    assert stored(each_database.direct()) == (new if truth == STORED else row)


@pytest.mark.parametrize("row", [None, (10, 1)], ids=["no row", "a row"])
def test_a_claim_made_after_the_snapshot_is_not_overlooked(each_database, level, row):
    put(each_database.direct(), row)
    stranger = begin(each_database, level, snapshot=True)
    own(each_database, TOKEN)

    answer = attempt(stranger, (20, 5), row or NOTHING)

    assert answer == (NOT_OWNER if level is IsolationLevel.READ_COMMITTED else SERIALIZATION_FAILURE)
    stranger.rollback()
    assert stored(each_database.direct()) == row


def test_a_takeover_after_the_snapshot_is_not_overlooked(each_database, level):
    epoch = own(each_database, TOKEN, lease="0 seconds")
    put(each_database.direct(), (10, 1))
    former = begin(each_database, level, snapshot=True)
    own(each_database, str(uuid4()))

    answer = attempt(former, (20, 5), (10, 1), owner=(epoch, TOKEN))

    assert answer == (NOT_OWNER if level is IsolationLevel.READ_COMMITTED else SERIALIZATION_FAILURE)


def test_a_lease_taken_after_the_snapshot_is_not_denied(each_database, level):
    put(each_database.direct(), (10, 1))
    early = begin(each_database, level, snapshot=True)
    epoch = own(each_database, TOKEN)

    answer = attempt(early, (20, 5), (10, 1), owner=(epoch, TOKEN))

    assert answer == (STORED if level is IsolationLevel.READ_COMMITTED else SERIALIZATION_FAILURE)


def test_a_release_after_the_snapshot_is_not_overlooked(each_database, level):
    own(each_database, TOKEN)
    stranger = begin(each_database, level, snapshot=True)
    each_database.direct().execute("SELECT outbox.release_claim('orders', 'u1')")

    answer = attempt(stranger, (20, 5))

    # Serializable orders the stranger after the release or fails; it never answers 4 from a claim that is gone.
    assert answer in (STORED, SERIALIZATION_FAILURE)


def test_of_many_callers_exactly_one_gets_1(each_database):
    callers = 8
    connections = [each_database.connect() for _ in range(callers)]
    barrier = Barrier(callers)

    def call(number):
        barrier.wait()
        return store(connections[number], (20, number))

    with ThreadPoolExecutor(callers) as pool:
        answers = list(pool.map(call, range(callers)))

    assert sorted(answers) == [STORED] + [AHEAD] * (callers - 1)
