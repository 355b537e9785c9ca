"""Queues in the database: unique keys, delayed messages, priorities, segments that are emptied; on every version."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from outbox_core.errors import ConfigurationError, HandlerError
from outbox_core.processor.claimed_batch import RefusalAction, RefusalDecision
from outbox_core.processor.turns import Turn
from outbox_core.report import Lag, ResourceRef
from outbox_core.spec import StartFrom
from outbox_sql import runner
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.consuming import (
    HOUR,
    JOBS,
    KEY,
    OVER,
    SETTINGS,
    SOURCE,
    count,
    cut,
    defer,
    drain,
    join,
    look,
    positions,
    put,
    taker,
)
from tests.support.servers.postgres import build_source


def test_a_segment_of_a_lane_whose_frontier_is_gone_is_never_emptied(queue):
    put(queue, 3)
    drain(queue, taker(settings=JOBS))
    queue.execute("DELETE FROM outbox.competing_dispatch_positions WHERE priority = 5")
    queue.execute("SELECT outbox.rotate_queue('orders', '0', 0)")  # producers go on in the next one
    assert queue.execute("SELECT outbox.rotate_queue('orders', '0', 0)").fetchone() == ([],)
    assert count(queue, "queue_jobs") == 3


def test_a_retry_with_the_same_message_id_stores_nothing_while_the_first_is_pending(queue):
    assert len(put(queue, 1, unique_key="k", message_id="m")) == 1
    assert put(queue, 1, unique_key="k", message_id="m") == []
    assert count(queue, "queue_jobs") == 1


def test_whose_insert_was_not_stored_holds_up_nobody_who_takes_the_message(queue, database):
    by = taker(settings=JOBS)
    put(queue, 1, unique_key="k", message_id="m")
    with database.direct(autocommit=False) as producer:
        assert put(producer, 1, unique_key="k", message_id="m") == []
        assert put(producer, 1, unique_key="k") == []
        queue.execute("SET lock_timeout = '300ms'")
        assert cut(queue, by).count == 1


def test_a_unique_key_waits_for_the_transaction_it_is_pending_and_free_once_taken(queue):
    by = taker(settings=JOBS)
    assert len(put(queue, 3, unique_key="k")) == 1
    assert put(queue, 1, unique_key="k") == []
    claimed = cut(queue, by)
    assert len(put(queue, 1, unique_key="k")) == 1, "the one that is being handled may have read what was before"
    assert by.complete(queue, claimed, claimed.upto, 1)
    assert len(drain(queue, by)) == 1
    assert count(queue, "queue_jobs_keys") == 0


def test_a_unique_key_waits_for_the_transaction_that_stores_the_same(queue, database):
    with database.direct(autocommit=False) as first, database.direct() as second:
        assert len(put(first, 1, unique_key="k")) == 1
        second.execute("SET lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            put(second, 1, unique_key="k")
        first.rollback()
        assert len(put(second, 1, unique_key="k")) == 1


def test_a_delayed_message_keeps_its_unique_key_and_comes_when_its_time_has_come(queue):
    by = taker(settings=JOBS)
    queue.execute(
        "INSERT INTO outbox.queue_jobs (message_id, message_type, data, unique_key, deliver_after) "
        "VALUES ('later', 't', '{}', 'k', clock_timestamp() + interval '1 hour')"
    )
    assert put(queue, 1, unique_key="k") == []
    assert drain(queue, by) == []
    queue.execute("UPDATE outbox.queue_jobs SET deliver_after = clock_timestamp()")
    assert len(drain(queue, by)) == 1


def put_due(connection, **columns):
    assert len(put(connection, 1, deliver_after="2000-01-01", **columns)) == 1


def promote(connection, limit=10):
    return connection.execute("SELECT outbox.promote_waiting('jobs', %s, false)", (limit,)).fetchone()[0]


def test_a_delayed_message_is_promoted_once_and_its_key_stays_taken_until_it_is_handed_out(queue):
    by = taker(settings=JOBS)
    put_due(queue, unique_key="k", message_id="m")
    assert (promote(queue), promote(queue)) == (1, 0)
    assert put(queue, 1, unique_key="k") == []
    assert put(queue, 1, unique_key="k", message_id="m") == []
    assert len(drain(queue, by)) == 1
    assert count(queue, "queue_jobs_keys") == 0
    assert len(put(queue, 1, unique_key="k")) == 1


def test_who_stores_the_key_of_a_message_that_is_being_promoted_waits_and_stores_nothing(queue, database):
    put_due(queue, unique_key="k")
    with database.direct(autocommit=False) as promoting, database.direct() as producer:
        assert promote(promoting) == 1
        with background(lambda: put(producer, 1, unique_key="k")) as stored:
            wait_until_blocked(database, stored)
            promoting.commit()
        assert stored.result() == []
    assert len(drain(queue, taker(settings=JOBS))) == 1


def test_a_delayed_message_whose_key_is_anothers_by_now_is_promoted_without(queue):
    """Its key changed by hand; and two of one id and key, which older versions stored."""
    put_due(queue, unique_key="k", message_id="a")
    put_due(queue, unique_key="other", message_id="b")
    put_due(queue, message_id="a")
    queue.execute("UPDATE outbox.queue_jobs_delayed SET unique_key = 'k'")
    assert promote(queue) == 3
    found = queue.execute("SELECT message_id, unique_key FROM outbox.queue_jobs ORDER BY 1, 2").fetchall()
    assert found == [("a", "k"), ("a", None), ("b", None)]


def test_all_that_is_due_is_promoted_in_one_look_however_small_a_batch_is(queue):
    by = taker(settings=JOBS, limit=1)
    put(queue, 50, deliver_after="2000-01-01")
    assert look(queue, by) is None
    assert count(queue, "queue_jobs_delayed") == 0
    assert len(drain(queue, by)) == 50


def test_a_segment_is_emptied_when_all_of_it_is_done_and_not_before(queue, database):
    by = taker(settings=JOBS)
    first = put(queue, 5)
    claimed = cut(queue, by)
    delayed = put(queue, 1, deliver_after="2999-01-01")
    rotate = "SELECT outbox.rotate_queue('orders', %s, %s)"
    queue.execute(rotate, ("0", 0))  # larger than nothing: producers go on in the next one
    second = put(queue, 5)
    assert {position >> 40 for position in first + delayed} == {0}
    assert {position >> 40 for position in second} == {1}
    assert queue.execute(rotate, ("0", 2**40)).fetchone() == ([],)
    assert positions(queue, by, claimed) == first, "a batch that is not done is still there"
    assert by.complete(queue, claimed, claimed.upto, 5)
    later = cut(queue, by)
    assert queue.execute(rotate, ("1 hour", 2**40)).fetchone() == ([],), "kept for a time"
    emptied = [queue.execute(rotate, ("0", 2**40)).fetchone()[0] for _ in range(3)]
    assert emptied == [[], [], ["queue_jobs_0"]]
    assert positions(queue, by, later) == second
    assert count(queue, "queue_jobs_delayed") == 1


@pytest.mark.parametrize("when", ["infinity", "2999-01-01"])
def test_a_time_that_a_producer_said_wrongly_keeps_no_segment(queue, when):
    put(queue, 1, scheduled=when)
    rotate = "SELECT outbox.rotate_queue('orders', '1 hour', %s)"
    queue.execute(rotate, (0,))
    assert len(drain(queue, taker(settings=JOBS))) == 1
    emptied = [queue.execute(rotate, (2**40,)).fetchone()[0] for _ in range(3)]
    assert emptied == [[], [], ["queue_jobs_0"]]


def test_a_transaction_that_stores_into_an_old_segment_keeps_it(queue, database):
    put(queue, 1)
    drain(queue, taker(settings=JOBS))
    with database.direct(autocommit=False) as slow:
        (position,) = put(slow, 1)
        queue.execute("SELECT outbox.rotate_queue('orders', '0', 0)")
        assert queue.execute("SELECT outbox.rotate_queue('orders', '0', 0)").fetchone() == ([],)
        slow.commit()
    queue.execute("SELECT outbox.rotate_queue('orders', '0', 0)")
    assert drain(queue, taker(settings=JOBS)) == [position]


def test_priorities_go_first_and_age(queue):
    by = taker(settings=JOBS, limit=2)
    late = put(queue, 2, priority=9, scheduled="2020-01-01")
    low, high = put(queue, 2, priority=7), put(queue, 2, priority=1)
    assert drain(queue, by) == [*late, *high, *low]


def test_a_failed_message_of_a_queue_waits_in_it_with_its_attempts(queue):
    by = taker(settings=JOBS)
    put(queue, 2)
    claimed = cut(queue, by)
    stretch = ReadRange.of(claimed, limit=1)
    message = by.reader.fetch(queue, stretch)[0]
    assert by.reader.fetch_attempts(queue, stretch) == {}
    assert defer(queue, by, claimed, message, RefusalDecision(RefusalAction.RETRY, 3), HandlerError("no"), OVER)
    assert by.complete(queue, claimed, claimed.upto, 1)
    look(queue, by)
    again = cut(queue, by)
    found = by.reader.fetch(queue, ReadRange.of(again))[0]
    assert found.message_id == message.message_id
    assert by.reader.fetch_attempts(queue, ReadRange.of(again)) == {found.checkpoint: 3}


def test_the_lag_of_a_queue_has_what_waits_for_another_attempt_and_what_is_due_and_not_what_is_delayed(queue):
    def lag(cap=100):
        return competing.measure_lag(queue, KEY, by.reader, cap)

    by = taker(settings=JOBS)
    put(queue, 3)
    claimed = cut(queue, by)
    message = by.reader.fetch(queue, ReadRange.of(claimed, limit=1))[0]
    assert defer(queue, by, claimed, message, RefusalDecision(RefusalAction.RETRY, 3), HandlerError("no"), HOUR)
    assert by.complete(queue, claimed, claimed.upto, 2)
    put(queue, 2, deliver_after=datetime.now(UTC) + HOUR)
    assert lag() == Lag(messages=1, at_least=False, seconds=0)

    put(queue, 4, deliver_after=datetime.now(UTC) - HOUR)
    due = lag()
    assert (due.messages, due.at_least, 3600 <= due.seconds < 3700) == (5, False, True)
    assert by.take_left(queue, Turn.FRESH) is None
    assert count(queue, "queue_jobs_delayed") == 3, "what is due was promoted"
    put(queue, 2)
    assert lag().messages == 7
    assert lag(cap=2).at_least


def test_the_lag_of_a_queue_has_nothing_that_is_filtered_out(queue):
    by = taker(settings=JOBS, source=build_source(messageTypes=["other"]))
    put(queue, 4, deliver_after=datetime.now(UTC) - HOUR)
    assert competing.measure_lag(queue, KEY, by.reader) == Lag(messages=0, at_least=False, seconds=0)


def test_a_queue_asked_for_by_another_role_of_things_is_refused(queue):
    with pytest.raises(ConfigurationError, match="works over queue 'jobs'"):
        join(queue, SETTINGS)
    with pytest.raises(ConfigurationError, match="create_queue"):
        competing.ensure_queue(queue, "outbox", "none", create=False)


def test_the_remedy_for_a_queue_that_is_not_there_can_be_run(database):
    connection = database.direct()
    runner.migrate(connection, 'My "schema"')
    with pytest.raises(ConfigurationError, match="run SELECT") as refused:
        competing.ensure_queue(connection, 'My "schema"', "none", create=False)
    connection.execute(str(refused.value).partition("run ")[2].partition(" as ")[0])
    competing.ensure_queue(connection, 'My "schema"', "none", create=False)


def test_a_queue_has_one_processor(queue):
    other = ProcessorKey("outbox", "other")
    resource = ResourceRef(cluster="c", namespace="n", name="b", uid="u2")
    assert ownership.claim(queue, other, resource).granted
    consumer = competing.Consumer("two", "pod-two", "u2", HOUR)
    with pytest.raises(ConfigurationError, match="another processor's"):
        competing.join(queue, other, consumer, SOURCE, JOBS, StartFrom())
