"""Mode Competing in the database: messages that fail leave their batch together, and starve no others."""

from __future__ import annotations

import pytest

from outbox_core.errors import HandlerError
from outbox_core.processor.claimed_batch import Refusal, RefusalAction, RefusalDecision
from outbox_core.processor.outcomes import NothingTaken
from outbox_core.processor.turns import Turn
from outbox_core.progress.snapshot import parse_snapshot
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.database.consuming import (
    JOBS,
    KEY,
    OVER,
    claim,
    count,
    cut,
    find,
    join,
    maintain,
    positions,
    produce,
    put,
    taker,
)
from tests.support.servers.postgres import EVERYWHERE

NO = HandlerError("no", classes=("ValueError",))


@pytest.fixture
def connection(each_database):
    connection = each_database.connect()
    claim(connection)
    return connection


def fail_all(connection, by, claimed, actions, wait=0.0):
    """All messages of a batch are behind, and these of them failed."""
    messages = by.reader.fetch(connection, ReadRange.of(claimed))
    failed = [Refusal(messages[n], NO, RefusalDecision(action, 1, wait)) for n, action in actions.items()]
    return by.defer(connection, claimed, claimed.upto, claimed.count, failed)


def test_messages_that_fail_leave_their_batch_in_one_call_each_as_was_decided(connection):
    join(connection)
    produced = produce(connection, 6)
    by = taker()
    claimed = cut(connection, by)
    assert fail_all(
        connection,
        by,
        claimed,
        {1: RefusalAction.RETRY, 2: RefusalAction.DEAD_LETTER, 3: RefusalAction.SKIP, 5: RefusalAction.RETRY},
    )
    assert count(connection, "competing_batches") == 0
    again = by.take_left(connection, Turn.AGAIN)
    assert again is not None
    assert positions(connection, by, again) == [produced[1], produced[5]]
    assert [failures for _, failures in again.listed] == [1, 1]
    letters = connection.execute("SELECT position, attempts, error_class FROM outbox.dead_letters").fetchall()
    assert letters == [(produced[2], 1, "ValueError")]
    acts = connection.execute("SELECT action, to_position FROM outbox.audit_log").fetchall()
    assert acts == [("Skip", produced[3])]


def test_only_the_beginning_of_a_batch_is_behind_and_the_rest_stays_in_hand(connection):
    join(connection)
    produced = produce(connection, 6)
    by = taker()
    claimed = cut(connection, by)
    messages = by.reader.fetch(connection, ReadRange.of(claimed))
    failed = [Refusal(messages[1], NO, RefusalDecision(RefusalAction.RETRY, 1, 3600.0))]
    assert by.defer(connection, claimed, messages[3].checkpoint, 4, failed)
    rest = connection.execute("SELECT messages, after_position, owner FROM outbox.competing_batches").fetchall()
    assert rest == [(2, produced[3], "one")]


@EVERYWHERE
def test_of_a_batch_that_another_consumer_has_nothing_leaves(connection):
    join(connection)
    produce(connection, 3)
    old = taker("one", lease=OVER)
    claimed = cut(connection, old)
    assert taker("two").take_left(connection, Turn.FRESH) is not None
    assert not fail_all(connection, old, claimed, {0: RefusalAction.RETRY, 1: RefusalAction.DEAD_LETTER})
    assert (count(connection, "competing_retries"), count(connection, "dead_letters")) == (0, 0)


def test_starve_nothing_what_failed_before_and_what_did_not_are_taken_apart(connection):
    join(connection)
    failing = produce(connection, 5)
    by = taker()
    assert fail_all(connection, by, cut(connection, by), dict.fromkeys(range(5), RefusalAction.RETRY))
    delayed = produce(connection, 2, deliver_after="1 hour")
    fresh = produce(connection, 3)
    claimed = cut(connection, by)
    assert (positions(connection, by, claimed), claimed.again) == (fresh, False)
    assert by.complete(connection, claimed, claimed.upto, 3)
    connection.execute("UPDATE outbox.competing_retries SET due_at = clock_timestamp() WHERE error_class IS NULL")
    due = by.take_left(connection, Turn.FRESH)
    assert due is not None
    assert (positions(connection, by, due), due.again) == (delayed, False)
    assert by.take_left(connection, Turn.FRESH) is None
    again = by.take_left(connection, Turn.AGAIN, 4)
    assert again is not None
    assert (positions(connection, by, again), again.again) == (failing[:4], True)


def test_what_was_handed_back_comes_in_the_turn_of_its_kind(connection):
    join(connection)
    produce(connection, 2)
    one = taker("one")
    assert fail_all(connection, one, cut(connection, one), dict.fromkeys(range(2), RefusalAction.RETRY))
    again = one.take_left(connection, Turn.AGAIN)
    assert again is not None
    produce(connection, 2)
    claimed = cut(connection, one)
    assert one.hand_back(connection) == 2
    two = taker("two")
    found = [two.take_left(connection, turn) for turn in (Turn.FRESH, Turn.FRESH, Turn.AGAIN)]
    assert [each and each.id for each in found] == [claimed.id, None, again.id]


def test_delayed_messages_that_were_handed_back_are_no_retries(connection):
    join(connection)
    produced = produce(connection, 3, deliver_after="1 hour")
    one = taker("one", lease=OVER)
    assert find(connection, one) is None
    connection.execute("UPDATE outbox.competing_retries SET due_at = clock_timestamp()")
    due = one.take_left(connection, Turn.FRESH)
    assert due is not None
    two = taker("two")
    assert two.take_left(connection, Turn.AGAIN) is None
    lapsed = two.take_left(connection, Turn.FRESH)
    assert lapsed is not None
    assert two.hand_back(connection) == 1
    assert two.take_left(connection, Turn.AGAIN) is None
    back = two.take_left(connection, Turn.FRESH)
    assert back is not None
    assert [each.id for each in (due, lapsed, back)] == [due.id] * 3
    assert (positions(connection, two, back), back.again) == (produced, False)


def test_a_delayed_message_that_fails_keeps_its_copy(connection):
    join(connection)
    produce(connection, 2, deliver_after="1 hour")
    by = taker()
    assert find(connection, by) is None
    connection.execute("UPDATE outbox.competing_retries SET due_at = clock_timestamp()")
    connection.execute("DELETE FROM outbox.messages")
    due = by.take_left(connection, Turn.FRESH)
    assert due is not None
    assert fail_all(connection, by, due, {1: RefusalAction.RETRY})
    again = by.take_left(connection, Turn.AGAIN)
    assert again is not None
    assert [m.data for m in by.reader.fetch(connection, ReadRange.of(again))] == ['{"n": 2}']
    assert count(connection, "competing_copies") == 1


def test_starve_nothing_in_a_queue_what_failed_before_is_handed_out_again_as_it_is_asked_for(queue):
    by = taker(settings=JOBS)
    put(queue, 6, priority=3)
    assert fail_all(queue, by, cut(queue, by), dict.fromkeys(range(6), RefusalAction.RETRY))
    put(queue, 2, deliver_after="2020-01-01")
    assert by.take_left(queue, Turn.FRESH) is None
    claimed = cut(queue, by)
    assert (claimed.count, by.reader.fetch_attempts(queue, ReadRange.of(claimed))) == (2, {})
    assert by.complete(queue, claimed, claimed.upto, 2)
    assert [by.promote(queue, 4, failed=True) for _ in range(3)] == [4, 2, 0]
    claimed = cut(queue, by)
    assert (claimed.priority, claimed.count) == (3, 6)
    assert set(by.reader.fetch_attempts(queue, ReadRange.of(claimed)).values()) == {1}


@EVERYWHERE
def test_the_frontier_reaches_the_last_message_once_what_was_in_progress_beside_it_is_over(connection, each_database):
    """Also where that stored nothing: else a consumer that has done all would never be seen to have caught up."""
    join(connection)
    beside = each_database.connect(autocommit=False)
    beside.execute("SELECT pg_current_xact_id()")
    (last,) = produce(connection, 1)
    by = taker()
    claimed = cut(connection, by)
    assert by.complete(connection, claimed, claimed.upto, 1)
    assert find(connection, by) is None
    assert stored(connection).position != last
    beside.rollback()
    assert find(connection, by) is None
    of_last = connection.execute("SELECT transaction_id::text::bigint FROM outbox.messages").fetchone()[0]
    assert stored(connection).transaction_id >= of_last, "everything up to the last message is done"
    rows = count(connection, "competing_dispatch_positions")
    for _ in range(3):
        assert by.claim_next(connection) == NothingTaken()
    assert count(connection, "competing_dispatch_positions") == rows, "an idle consumer writes nothing"


@EVERYWHERE
def test_a_consumer_that_comes_later_moves_the_frontier_to_the_last_message_too(connection, each_database):
    join(connection)
    beside = each_database.connect(autocommit=False)
    beside.execute("SELECT pg_current_xact_id()")
    produce(connection, 1)
    first = taker("one")
    claimed = cut(connection, first)
    assert first.complete(connection, claimed, claimed.upto, 1)
    assert find(connection, first) is None
    beside.rollback()
    assert find(connection, taker("two")) is None
    (lower,) = connection.execute(
        "SELECT lower_snapshot::text FROM outbox.competing_dispatch_positions ORDER BY id DESC LIMIT 1"
    ).fetchone()
    assert parse_snapshot(lower).in_progress == frozenset()


def stored(connection):
    maintain(connection)
    found = checkpoints.load(connection, KEY)
    assert found is not None
    return found.pair
