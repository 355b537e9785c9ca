"""A process's status in the database is for users: where it cannot be stored, leases are renewed all the same."""

from __future__ import annotations

import time

import pytest

from outbox_worker.postgres.ownership import process_statuses
from tests.support.nightly import by_day
from tests.support.servers.postgres import wait_until
from tests.support.worker import SQL_TARGET, build_config

MODES = {
    "Ordered": ({"mode": "Ordered"}, {}),
    "Partitioned": ({"mode": "Partitioned", "partitions": {"count": 2}}, {}),
    "Competing": ({"mode": "Competing", "competing": {"leaseDuration": "2s"}}, {"cursor": None}),
}
LEASES = (
    "SELECT (SELECT jsonb_object_agg(l.partition, l.epoch) FROM outbox.processor_leases l "
    "WHERE l.expires_at > clock_timestamp()), "
    "(SELECT count(*) FROM outbox.processor_members WHERE expires_at > clock_timestamp())"
)


def look_at(connection):
    return connection.execute(LEASES).fetchone()


def is_fresh(connection):
    return any(each.is_fresh for each in process_statuses.list_statuses(connection, "outbox"))


@pytest.fixture
def silence(database):
    """Make storing a status impossible; what is returned makes it possible again."""
    other = database.direct()

    def silence(how):
        if how == "missing":
            other.execute("ALTER TABLE outbox.process_statuses RENAME TO away")
            return lambda: other.execute("ALTER TABLE outbox.away RENAME TO process_statuses")
        # No stronger: it would hold the high-water mark, too.
        other.execute("BEGIN; LOCK TABLE outbox.process_statuses IN EXCLUSIVE MODE")
        return lambda: other.execute("COMMIT")

    return silence


CASES = [pytest.param(how, mode, id=f"{how}-{mode}") for how in ("missing", "locked") for mode in MODES]


@pytest.mark.parametrize(("how", "mode"), by_day(CASES, "missing-Ordered", "locked-Partitioned", "locked-Competing"))
def test_where_it_cannot_be_stored_nothing_else_fails(outbox, workers, silence, how, mode):
    delivery, source = MODES[mode]
    ids = outbox.produce(5)
    worker = workers.start(
        build_config(outbox.database, SQL_TARGET, delivery=delivery, source=source), outbox.database.uri()
    )
    wait_until(lambda: outbox.count() == 5, "the first messages are handled")
    wait_until(lambda: is_fresh(outbox.connection), "a word is said")
    before = look_at(outbox.connection)
    again = silence(how)
    until = time.monotonic() + 7
    while time.monotonic() < until:
        assert look_at(outbox.connection) == before, "a lease was not renewed in time"
        assert worker.report().state == "Active"
        time.sleep(0.1)
    ids += outbox.produce(5, start=5)
    wait_until(lambda: outbox.count() == 10, "messages are handled meanwhile", 10)
    assert "heartbeat failed" not in worker.log()
    assert worker.log().count("the status could not be stored in the database") == 1
    again()
    wait_until(lambda: is_fresh(outbox.connection), "a word is said again", 10)
