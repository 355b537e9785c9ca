"""What waits behind what: held messages, taken when they are due, and given back by a person."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from outbox_core.processor.failing import Action, Failure, FailureDecision
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.report import ResourceRef
from outbox_worker.postgres.admin import dead_letters
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints
from tests.support.processes import memory_mb

KEY = ProcessorKey("outbox", "orders")
HOUR = timedelta(hours=1)
LARGE_ROWS = """
    SELECT '700'::xid8 AS transaction_id, n::bigint AS position, n::text AS message_id, 't' AS message_type,
           'default' AS publication_id, NULL AS partition_key, repeat('x', {size}) AS data, NULL AS metadata,
           NULL::timestamptz AS scheduled, now() - interval '1 s' AS deliver_after, 'k' AS key
    FROM generate_series(1, {count}) AS n ORDER BY n
"""
"""A range with large messages, as the reader selects it; they are delayed, and due now."""


@pytest.fixture
def connection(database):
    connection = database.connect()
    resource = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
    assert ownership.claim(connection, KEY, resource).granted
    return connection


def acquire(connection):
    connection.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")
    token = uuid4()
    answer = ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="pod", token=token, lease=HOUR)
    assert answer.epoch is not None
    return HeldLease(0, answer.epoch, token)


@pytest.fixture
def lease(connection):
    lease = acquire(connection)
    checkpoints.store(connection, KEY, HeldLease(0, lease.epoch, lease.token), new=BEGINNING, expected=None)
    return lease


def hold(connection, position, *, key="k", behind=False, blocks=True, attempts=0, crash_count=0, due="0 s"):
    """Hold a message: its place is its position."""
    connection.execute(
        "INSERT INTO outbox.held_messages (processor_id, key, place, transaction_id, position, message_id, "
        "message_type, data, blocks, behind, attempts, crash_count, next_attempt_at) "
        "VALUES ('orders', %(key)s, %(n)s, '700', %(n)s, %(n)s::text, 't', '{}', %(blocks)s, %(behind)s, %(attempts)s, "
        "%(crash_count)s, clock_timestamp() + %(due)s::interval)",
        {"n": position, "key": key, "behind": behind, "blocks": blocks, "attempts": attempts,
         "crash_count": crash_count,
         "due": due},
    )  # fmt: skip


def hold_rows(connection, lease, rows, decision):
    """Hold messages of key k; `rows` are position, attempts (1: it failed, with the decision), an interval from now."""
    judged = [
        {"t": "700", "p": position, "action": decision.action.value, "attempts": decision.attempts, "class": "E",
         "error": "no", "wait": decision.wait, "blocks": decision.blocks}
        for position, attempts, _ in rows if attempts
    ]  # fmt: skip
    return connection.execute(
        "SELECT outbox.hold_messages('orders', 0, %s, %s, (SELECT array_agg(ROW(NULL, 0, 'k', NULL, 0, '700', n, "
        "n::text, 't', 'default', NULL, '{}', NULL, NULL, false, false, a, 0, NULL, NULL, NULL, "
        "clock_timestamp() + d::interval)::outbox.held_messages ORDER BY n) "
        "FROM unnest(%s::int[], %s::int[], %s::text[]) AS r (n, a, d)), %s)",
        (lease.epoch, lease.token, *map(list, zip(*rows, strict=True)), Jsonb(judged)),
    ).fetchone()


def hold_large(connection, lease, count, size, *failed):
    """Hold that many messages of that many bytes, as a batch of which these failed."""
    rows = sql.SQL(LARGE_ROWS).format(count=sql.Literal(count), size=sql.Literal(size))
    out = {each.checkpoint for each in failed}
    excluded = [pair for n in range(1, count + 1) if (pair := Checkpoint(700, n)) not in out]
    return holding.hold(connection, KEY, lease, rows, excluded=excluded, failed=failed)


def take(connection, lease, limit=10):
    taken = holding.take_due(connection, KEY, lease, limit=limit)
    return [each.checkpoint.position for each in taken.held]


def drain(connection, lease, limit=10):
    """Take and settle until nothing is due; return the positions in the order in which they were handled."""
    order: list[int] = []
    while True:
        taken = holding.take_due(connection, KEY, lease, limit=limit)
        if not taken.held:
            return order
        assert holding.settle(connection, KEY, lease, taken.held) == len(taken.held)
        order += [each.checkpoint.position for each in taken.held]


@pytest.mark.parametrize(
    "decision",
    [
        FailureDecision(Action.SKIP, 1, "E", "no", None, blocks=True),
        FailureDecision(Action.DEAD_LETTER, 1, "E", "no", None, blocks=False),
        FailureDecision(Action.HOLD, 1, "E", "no", 3600.0, blocks=False),
    ],
    ids=["skipped", "a dead letter that blocks nothing", "held, blocking nothing"],
)
def test_nothing_waits_behind_what_blocks_nothing(connection, lease, decision):
    """A delayed message of the batch became due while the message before it, of its key, was handled and failed."""
    hold_rows(connection, lease, [(1, 1, None), (2, 0, "-1 s"), (3, 0, "-1 s"), (4, 0, "1 hour")], decision)
    assert drain(connection, lease) == [2, 3]


def test_what_became_due_waits_behind_what_blocks_its_key(connection, lease):
    decision = FailureDecision(Action.HOLD, 1, "E", "no", 0.05, blocks=True)
    hold_rows(connection, lease, [(1, 1, None), (2, 0, "-1 s"), (3, 0, "-1 s")], decision)
    assert take(connection, lease) == []
    connection.execute("SELECT pg_sleep(0.1)")
    assert drain(connection, lease) == [1, 2, 3]


def test_what_becomes_due_waits_behind_all_that_is_held_of_its_key_by_then(connection, lease):
    """As if it had been stored then: the one that failed, and the one behind that, were stored after it and before."""
    hold(connection, 1, blocks=False)
    hold(connection, 2, attempts=1, due="0.3 s")
    hold(connection, 3, behind=True)
    connection.execute("SELECT setval('outbox.held_order', 100)")
    assert drain(connection, lease) == []
    connection.execute("SELECT pg_sleep(0.4)")
    assert drain(connection, lease) == [2, 3, 1]


def test_no_message_overtakes_one_that_somebody_died_of(connection, lease):
    """It is to be tried alone: those of its key behind it wait for it also when the first one is tried with others."""
    hold(connection, 1)
    hold(connection, 2, behind=True, crash_count=1)
    hold(connection, 3, behind=True)
    assert drain(connection, lease) == [1, 2, 3]


def test_a_redriven_message_is_not_followed_past_one_that_somebody_died_of(connection, lease):
    """The same, as it comes about: two are tried, their process dies, the first fails and becomes a dead letter."""
    for position in (1, 2, 3):
        hold(connection, position, behind=position > 1)
    assert take(connection, lease, limit=2) == [1, 2]
    lease = acquire(connection)
    taken = holding.take_due(connection, KEY, lease, limit=2)
    assert [(each.checkpoint.position, each.crash_count) for each in taken.held] == [(1, 1)]
    decision = FailureDecision(Action.DEAD_LETTER, 1, "E", "no", None, blocks=True)
    assert holding.fail(connection, KEY, lease, [Failure(taken.held[0].checkpoint, decision)]) == 1
    assert take(connection, lease) == []
    (dead,) = dead_letters.list_dead(connection, "outbox", dead_letters.Filter(), limit=10)
    assert dead_letters.decide_dead(connection, KEY, [dead.id], drop=False, reason="mended", decided_by="me") == 1
    assert drain(connection, lease) == [1, 2, 3]


def test_no_message_overtakes_one_that_waits_for_its_next_attempt(connection, lease):
    """Two delayed messages that failed: the earlier one is tried again by a person, the later one waits."""
    hold(connection, 1)
    hold(connection, 2, attempts=2, due="0.3 s")
    hold(connection, 3, behind=True)
    assert drain(connection, lease) == [1]
    connection.execute("SELECT pg_sleep(0.4)")
    assert drain(connection, lease) == [2, 3]


def test_however_many_messages_wait_behind_one_key_other_keys_are_taken_when_they_are_due(connection, lease):
    for position in range(1, 10):
        hold(connection, position, behind=position > 1)
    hold(connection, 20, key="other")
    hold(connection, 21, key="failed before", attempts=1)
    assert take(connection, lease, limit=4) == [1, 2, 20, 21]
    assert drain(connection, lease, limit=4) == [1, 2, 20, 21, *range(3, 10)]


def test_of_many_keys_with_messages_behind_each_is_taken_when_it_is_due(connection, lease):
    for position in range(1, 13):
        hold(connection, position, key=f"k{(position - 1) // 4}", behind=position % 4 != 1)
    assert take(connection, lease, limit=4) == [1, 2, 5, 9]
    assert sorted(drain(connection, lease, limit=4)) == list(range(1, 13))


def test_delayed_messages_that_have_to_wait_for_their_key_make_room_for_others_that_are_due(connection, lease):
    """However few are looked at: all of the first ones may have to wait."""
    hold(connection, 1, attempts=1, due="1 h")
    for position in range(2, 7):
        hold(connection, position, blocks=False)
    connection.execute("UPDATE outbox.held_messages SET key = 'other' WHERE position = 6")

    assert take(connection, lease, limit=2) == [6]
    waiting = "SELECT array_agg(position ORDER BY place) FROM outbox.held_messages WHERE behind"
    assert connection.execute(waiting).fetchone() == ([2, 3, 4, 5],)


def test_of_several_redriven_messages_of_a_key_the_later_ones_wait_for_the_first(connection, lease):
    for position in (1, 2):
        hold(connection, position)
        held = holding.take_due(connection, KEY, lease, limit=1).held[0]
        decision = FailureDecision(Action.DEAD_LETTER, 1, "E", "no", None, blocks=True)
        assert holding.fail(connection, KEY, lease, [Failure(held.checkpoint, decision)]) == 1
    ids = [dead.id for dead in dead_letters.list_dead(connection, "outbox", dead_letters.Filter(keys=["k"]), limit=10)]
    assert dead_letters.decide_dead(connection, KEY, ids, drop=False, reason="mended", decided_by="me") == 2
    taken = holding.take_due(connection, KEY, lease, limit=1)
    assert [each.checkpoint.position for each in taken.held] == [1]
    again = FailureDecision(Action.HOLD, 1, "E", "no", 0.3, blocks=True)
    assert holding.fail(connection, KEY, lease, [Failure(taken.held[0].checkpoint, again)]) == 1
    assert take(connection, lease) == []
    connection.execute("SELECT pg_sleep(0.4)")
    assert drain(connection, lease) == [1, 2]


def test_dead_letters_that_are_redriven_the_later_one_first_keep_their_keys_order(connection, lease):
    for position in (1, 2):
        hold(connection, position)
        held = holding.take_due(connection, KEY, lease, limit=1).held[0]
        decision = FailureDecision(Action.DEAD_LETTER, 1, "E", "no", None, blocks=True)
        assert holding.fail(connection, KEY, lease, [Failure(held.checkpoint, decision)]) == 1
    found = dead_letters.list_dead(connection, "outbox", dead_letters.Filter(), limit=10)
    dead = {each.pair.position: each.id for each in found}
    for position in (2, 1):
        assert (
            dead_letters.decide_dead(connection, KEY, [dead[position]], drop=False, reason="mended", decided_by="me")
            == 1
        )
    assert drain(connection, lease) == [1, 2]


def test_a_message_that_died_twice_is_redriven_once(connection, lease):
    """It blocked nothing, was read again after a rewind, and failed again: its dead letters are given back together."""
    dead = FailureDecision(Action.DEAD_LETTER, 1, "E", "no", None, blocks=False)
    for _ in range(2):
        hold_rows(connection, lease, [(1, 1, None)], dead)
    ids = [each.id for each in dead_letters.list_dead(connection, "outbox", dead_letters.Filter(), limit=10)]
    assert len(ids) == 2
    assert dead_letters.decide_dead(connection, KEY, ids, drop=False, reason="mended", decided_by="me") == 2
    assert dead_letters.list_dead(connection, "outbox", dead_letters.Filter(), limit=10) == []
    assert drain(connection, lease) == [1]


def test_an_attempt_at_held_messages_that_was_answered_is_no_death(connection, lease):
    hold(connection, 1)
    assert take(connection, lease) == [1]
    holding.clear_in_flight(connection, KEY, lease)
    lease = acquire(connection)
    taken = holding.take_due(connection, KEY, lease, limit=1)
    assert [each.crash_count for each in taken.held] == [0]


def test_who_comes_again_did_not_die_of_a_held_message(connection, lease):
    """Cut off, or frozen, while it tried two held messages; a third one was another's."""
    for position in (1, 2, 3):
        hold(connection, position, behind=position > 1)
    for _ in range(4):
        taken = holding.take_due(connection, KEY, lease, limit=2)
        assert [(each.checkpoint.position, each.crash_count) for each in taken.held] == [(1, 0), (2, 0)]
        former, lease = lease, acquire(connection)
        again = ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="pod", token=former.token, lease=HOUR)
        assert not again.acquired
    former, lease = lease, acquire(connection)
    ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="pod", token=former.token, lease=HOUR)
    assert drain(connection, lease) == [1, 2, 3]


def test_holding_takes_no_more_memory_the_more_bytes_are_held(connection, lease):
    """No payload of a batch of target `sql` is in the worker, so nothing bounds its bytes."""
    assert hold_large(connection, lease, 64, 1 << 20) is None
    order = "SELECT array_agg(position ORDER BY place), sum(length(data)) FROM outbox.held_messages"
    assert connection.execute(order).fetchone() == ([*range(1, 65)], 64 << 20)
    assert 0 < memory_mb(connection.info.backend_pid, "peak") < 200


def test_what_became_due_waits_behind_a_large_dead_letter_that_comes_later(connection, lease):
    decision = FailureDecision(Action.DEAD_LETTER, 1, "E", "no", None, blocks=True)
    assert hold_large(connection, lease, 3, 5_000_000, Failure(Checkpoint(700, 3), decision)) is None
    assert take(connection, lease) == []
    (dead,) = dead_letters.list_dead(connection, "outbox", dead_letters.Filter(), limit=10)
    assert dead.pair.position == 3
    assert dead_letters.decide_dead(connection, KEY, [dead.id], drop=True, reason="old", decided_by="me") == 1
    assert drain(connection, lease) == [1, 2]


DEAD = FailureDecision(Action.DEAD_LETTER, 1, "E", "no", None, blocks=True)


def redrive(connection):
    ids = [each.id for each in dead_letters.list_dead(connection, "outbox", dead_letters.Filter(), limit=10)]
    return dead_letters.decide_dead(connection, KEY, ids, drop=False, reason="mended", decided_by="me")


def test_a_dead_letter_that_is_read_again_after_a_rewind_comes_back_in_front_of_what_waits_for_it(connection, lease):
    """It fails again, and another owner takes over while it waits for its next attempt."""
    hold_rows(connection, lease, [(1, 1, None), (2, 0, None), (3, 0, None)], DEAD)
    hold_rows(connection, lease, [(1, 0, None), (2, 0, None), (3, 0, None)], DEAD)
    assert redrive(connection) == 1
    taken = holding.take_due(connection, KEY, lease, limit=1)
    assert [each.checkpoint.position for each in taken.held] == [1]
    again = FailureDecision(Action.HOLD, 1, "E", "no", 0.3, blocks=True)
    assert holding.fail(connection, KEY, lease, [Failure(taken.held[0].checkpoint, again)]) == 1
    lease = acquire(connection)
    holding.review(connection, KEY, lease, generation=1, forgive=False)
    assert take(connection, lease) == []
    connection.execute("SELECT pg_sleep(0.4)")
    assert drain(connection, lease) == [1, 2, 3]


def test_what_a_rewind_reads_again_is_handled_in_the_order_of_its_key_though_a_dead_letter_blocks_it(connection, lease):
    """Message 1 was handled, 2 is dead and 3 waits behind it; all are read again, and then 2 is redriven."""
    hold_rows(connection, lease, [(2, 1, None), (3, 0, None)], DEAD)
    hold_rows(connection, lease, [(1, 0, None), (2, 0, None), (3, 0, None)], DEAD)
    assert redrive(connection) == 1
    assert drain(connection, lease) == [1, 2, 3]


def test_what_a_rewind_reads_again_is_handled_in_the_order_of_its_key_though_a_held_message_blocks_it(
    connection, lease
):
    hold_rows(
        connection, lease, [(2, 1, None), (3, 0, None)], FailureDecision(Action.HOLD, 1, "E", "no", 0.3, blocks=True)
    )
    hold_rows(connection, lease, [(1, 0, None), (2, 0, None), (3, 0, None)], DEAD)
    connection.execute("SELECT pg_sleep(0.4)")
    assert drain(connection, lease) == [1, 2, 3]


def test_a_dead_letter_that_is_dropped_is_not_handled_though_a_rewind_reads_it_again(connection, lease):
    hold_rows(connection, lease, [(1, 1, None), (2, 0, None)], DEAD)
    hold_rows(connection, lease, [(1, 0, None), (2, 0, None)], DEAD)
    ids = [each.id for each in dead_letters.list_dead(connection, "outbox", dead_letters.Filter(), limit=10)]
    assert dead_letters.decide_dead(connection, KEY, ids, drop=True, reason="old", decided_by="me") == 1
    assert drain(connection, lease) == [2]
