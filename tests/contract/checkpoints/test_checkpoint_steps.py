"""Every step of the checkpoint contract, alone, on every PostgreSQL version and through PgBouncer."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from outbox_core.progress.checkpoint import MAX_POSITION, MAX_TRANSACTION_ID
from tests.support.database.contract import (
    AHEAD,
    IGNORED,
    NOT_OWNER,
    NOTHING,
    OLDER,
    STORED,
    own,
    put,
    store,
    store_by_position,
    stored,
)
from tests.support.servers.postgres import EVERYWHERE

TOKEN = str(uuid4())
FAR = (2**63 + 7, 5)

STEPS = [
    pytest.param((20, 5), (20, 5), (10, 1), IGNORED, id="step 3: the row is the new pair"),
    pytest.param((20, 5), (20, 5), NOTHING, IGNORED, id="step 3: the row is the new pair, nothing expected"),
    pytest.param(None, (20, 5), NOTHING, STORED, id="step 4: no row, nothing expected"),
    pytest.param(None, (20, 5), (10, 1), OLDER, id="step 5: no row, something expected"),
    pytest.param((10, 1), (20, 5), (10, 1), STORED, id="step 6: the row is the expected pair"),
    pytest.param((10, 9), (20, 5), (10, 9), STORED, id="step 6: the position falls, the pair rises"),
    pytest.param((10, MAX_POSITION), (20, -5), (10, MAX_POSITION), STORED, id="step 6: positions are bigints"),
    pytest.param(FAR, (2**63 + 8, 1), FAR, STORED, id="step 6: transaction ids above 2**63"),
    pytest.param((9, 9), (MAX_TRANSACTION_ID, 1), (9, 9), STORED, id="step 6: to the last transaction id"),
    pytest.param((15, 1), (20, 5), (10, 1), AHEAD, id="step 7: the row is further than expected"),
    pytest.param((15, 1), (20, 5), (10, 99), AHEAD, id="step 7: further by transaction, though its position is less"),
    pytest.param((10, 2), (20, 5), (10, 1), AHEAD, id="step 7: further within the transaction"),
    pytest.param((30, 1), (20, 5), (10, 1), AHEAD, id="step 7: further than the new pair too"),
    pytest.param((15, 1), (20, 5), NOTHING, AHEAD, id="step 7: a row where none was expected"),
    pytest.param((2**63 + 7, 1), (2**63 + 9, 1), (2**62, 1), AHEAD, id="step 7: transaction ids compare unsigned"),
    pytest.param((5, 1), (20, 5), (10, 1), OLDER, id="step 8: the row is older"),
    pytest.param((5, 999), (20, 5), (10, 1), OLDER, id="step 8: older by transaction, though its position is more"),
]


@pytest.mark.parametrize(("row", "new", "expected", "answer"), STEPS)
@pytest.mark.parametrize("owned", [False, True], ids=["unclaimed", "owned"])
def test_step(each_database, owned, row, new, expected, answer):
    epoch = own(each_database, TOKEN) if owned else None
    connection = each_database.connect()
    put(each_database.direct(), row)

    said = store(connection, new, expected, owner=(epoch, TOKEN) if owned else (None, None))

    assert said == answer
    assert stored(connection) == (new if answer in (STORED, IGNORED) else row)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        pytest.param((None, 5), NOTHING, id="new without transaction id"),
        pytest.param((5, None), NOTHING, id="new without position"),
        pytest.param((None, None), NOTHING, id="no new pair"),
        pytest.param((5, 5), (None, 1), id="expected without transaction id"),
        pytest.param((5, 5), (1, None), id="expected without position"),
        pytest.param((5, 5), (5, 5), id="new equals expected"),
        pytest.param((5, 4), (5, 5), id="new before expected by position"),
        pytest.param((4, 9), (5, 5), id="new before expected by transaction"),
    ],
)
def test_step_1_is_an_error_and_changes_nothing(each_database, new, expected):
    connection = each_database.connect()
    put(connection, (1, 1))

    with pytest.raises(psycopg.DataError) as caught:
        store(connection, new, expected)

    assert caught.value.sqlstate in ("22004", "22023")
    assert "checkpoint" in str(caught.value)
    assert stored(connection) == (1, 1)


@pytest.mark.parametrize(
    ("change", "owner"),
    [
        pytest.param("", (None, None), id="none given while a claim exists"),
        pytest.param("", (2, TOKEN), id="another epoch"),
        pytest.param("", (1, str(uuid4())), id="another token: numbers repeat after a restore"),
        pytest.param("", (1, None), id="epoch without token"),
        pytest.param("", (None, TOKEN), id="token without epoch"),
        pytest.param(
            "UPDATE outbox.processor_leases SET expires_at = clock_timestamp() - interval '1 microsecond'",
            (1, TOKEN),
            id="lapsed, though nobody took over",
        ),
        pytest.param("DELETE FROM outbox.processor_leases", (1, TOKEN), id="no lease"),
        pytest.param(f"SELECT outbox.release_lease('orders', 0, 1, '{TOKEN}')", (1, TOKEN), id="lease given back"),
        pytest.param("SELECT outbox.release_claim('orders', 'u1')", (1, TOKEN), id="claim released with its leases"),
        pytest.param(
            "SELECT outbox.claim_processor('orders', 'x', 'y', 'z', 'u9', true)", (1, TOKEN), id="claim taken by force"
        ),
        pytest.param(
            "DELETE FROM outbox.processor_claims", (None, None), id="none given while an owner lives without a claim"
        ),
    ],
)
@pytest.mark.parametrize("new", [(20, 5), (10, 1)], ids=["a new pair", "the stored pair: 4 comes before 0"])
@EVERYWHERE
def test_step_2_is_4(each_database, change, owner, new):
    assert own(each_database, TOKEN) == 1
    connection = each_database.connect()
    put(each_database.direct(), (10, 1))
    if change:
        each_database.direct().execute(change)

    assert store(connection, new, NOTHING, owner=owner) == NOT_OWNER

    assert stored(connection) == (10, 1)


@EVERYWHERE
def test_a_vacated_claim_is_still_a_claim(each_database):
    own(each_database, TOKEN)
    connection = each_database.connect()
    connection.execute("SELECT outbox.vacate_claim('orders', 'u1')")

    assert store(connection, (5, 5)) == NOT_OWNER


def test_partitions_have_their_own_rows(each_database):
    connection = each_database.connect()

    assert store(connection, (5, 5), partition=0) == STORED
    assert store(connection, (6, 6), partition=1) == STORED

    assert (stored(connection, partition=0), stored(connection, partition=1)) == ((5, 5), (6, 6))


class TestTheArticlesForm:
    def test_stores_and_answers_as_the_article_says_while_nobody_claims(self, each_database):
        connection = each_database.connect()
        answers = [
            store_by_position(connection, 5, None, 100),
            store_by_position(connection, 5, None, 100),
            store_by_position(connection, 6, None, 101),
            store_by_position(connection, 6, 5, 101),
            store_by_position(connection, 7, 5, 102),
            store_by_position(connection, 9, 8, 103),
            store_by_position(connection, 9, 8, 103, processor_id="other"),
        ]

        assert answers == [STORED, IGNORED, AHEAD, STORED, AHEAD, OLDER, OLDER]
        assert stored(connection) == (101, 6)

    @EVERYWHERE
    def test_is_4_wherever_a_claim_exists_and_counted_although_it_rolls_back(self, each_database):
        own(each_database, TOKEN)
        put(each_database.direct(), (100, 5))
        script = each_database.connect(autocommit=False)
        for _ in range(3):
            assert store_by_position(script, 6, 5, 101) == NOT_OWNER
            script.rollback()

        counted = each_database.direct().execute("SELECT outbox.unowned_calls('orders')").fetchone()

        assert counted == (3,)
        assert stored(each_database.direct()) == (100, 5)

    def test_unowned_calls_of_another_processor_are_not_counted(self, each_database):
        own(each_database, TOKEN)
        own(each_database, TOKEN, processor_id="other")
        store_by_position(each_database.connect(), 6, 5, 101, processor_id="other")

        counted = each_database.direct().execute("SELECT outbox.unowned_calls('orders')").fetchone()

        assert counted == (0,)
