"""Mode Competing in the database: what a frozen consumer left open is ended by the one that took its batch over."""

from __future__ import annotations

import contextlib

import psycopg

from outbox_core.processor.outcomes import CommitUnknown, Failed
from outbox_worker.postgres.transactions.transaction import TransactionRunner
from tests.support.database.consuming import KEY, OVER, claim, cut, join, left, produce, taker
from tests.support.database.copying import COPY, wait_for_copy
from tests.support.servers.postgres import EVERYWHERE


def copy_and_wait(database, connection, claimed, meanwhile):
    """What came of a transaction of the batch that waits for its client in a COPY, while something else is done."""

    def copy(transaction):
        # Behind PgBouncer psycopg stumbles over two errors at once.
        with (
            contextlib.suppress(psycopg.OperationalError, ValueError),
            transaction.connection.cursor().copy(COPY) as copying,
        ):
            wait_for_copy(database)
            meanwhile()
            copying.write("m\t{}\n")
        return 1

    return TransactionRunner(KEY, lease=3600, timeout=3600).run(connection, claimed.id, None, copy)


@EVERYWHERE
def test_what_waits_in_a_copy_is_ended_by_the_next_attempt_of_its_batch_and_by_no_other(each_database):
    connection = each_database.connect()
    claim(connection)
    join(connection)
    produce(connection, 20)
    one, two, ended = taker("one", lease=OVER), taker("two"), []
    first, other = cut(connection, one), cut(connection, two)

    def take_over():
        ended.append(two.end_stuck_attempts(connection, first).ended)
        again = left(connection, two)
        assert (again.id, again.attempt) == (first.id, 2)
        ended.append(two.end_stuck_attempts(connection, other).ended)
        ended.append(one.end_stuck_attempts(connection, first).ended)
        ended.append(two.end_stuck_attempts(connection, again).ended)

    happened = copy_and_wait(each_database, each_database.connect(), first, take_over)

    assert ended == [0, 0, 0, 1]
    assert isinstance(happened, CommitUnknown | Failed)


def test_what_another_role_left_stuck_is_named_with_the_grants_that_are_missing(database):
    admin = database.direct()
    for kind in ("TABLES", "FUNCTIONS", "SEQUENCES"):
        admin.execute(f"GRANT ALL ON ALL {kind} IN SCHEMA outbox TO owner, processor")
    admin.execute("GRANT USAGE ON SCHEMA outbox TO owner, processor")
    connection, frozen = database.connect("processor"), database.connect("owner")
    claim(connection)
    join(connection)
    produce(connection, 10)
    first, two, found = cut(connection, taker("one", lease=OVER)), taker("two"), []

    def take_over():
        again = left(connection, two)
        found.append(two.end_stuck_attempts(connection, again))
        frozen.cancel()

    copy_and_wait(database, frozen, first, take_over)

    (stuck,) = found
    assert stuck.ended == 0
    assert stuck.left.startswith(f"session {frozen.info.backend_pid} of role owner")
    assert "GRANT pg_read_all_stats, pg_signal_backend TO processor" in stuck.left
