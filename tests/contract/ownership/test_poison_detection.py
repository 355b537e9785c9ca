"""What the database remembers of owners that died: how many messages were tried, and which one was tried alone."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint, StoreAnswer
from outbox_core.report import ResourceRef
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints

KEY = ProcessorKey("outbox", "orders")
RESOURCE = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
HOUR = timedelta(hours=1)
AT = Checkpoint(700, 8)


@pytest.fixture
def connection(database):
    connection = database.connect()
    assert ownership.claim(connection, KEY, RESOURCE).granted
    return connection


def begin(connection):
    """A new owner: its lease, and what it is told of its predecessors."""
    token = uuid4()
    answer = ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="pod", token=token, lease=HOUR)
    assert answer.epoch is not None
    lease = HeldLease(0, answer.epoch, token)
    review = holding.review(connection, KEY, lease, generation=1, forgive=False)
    assert review is not None
    return lease, (review.crash_count, review.in_flight, review.poison_crashes)


def die(connection):
    connection.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")


def mark(connection, lease, count, pair=AT):
    return holding.mark_in_flight(connection, KEY, lease, pair, in_flight=count, generation=1)


def store(connection, lease, expected, new):
    answer = checkpoints.store(connection, KEY, HeldLease(0, lease.epoch, lease.token), new=new, expected=expected)
    assert answer is StoreAnswer.STORED


def test_what_was_tried_when_an_owner_died_is_under_suspicion_and_less_each_time(connection):
    lease, told = begin(connection)
    store(connection, lease, None, BEGINNING)
    for crash_count in (1, 2):
        die(connection)
        lease, told = begin(connection)
        assert told == (crash_count, 0, 0)
    assert mark(connection, lease, 500) == 0
    store(connection, lease, BEGINNING, Checkpoint(700, 1))  # they got through
    assert mark(connection, lease, 250) == 0
    die(connection)
    lease, told = begin(connection)
    assert told == (1, 250, 0)
    for poison_crashes in (0, 1):
        assert mark(connection, lease, 1) == poison_crashes
        die(connection)
        lease, told = begin(connection)
        assert told[1:] == (1, poison_crashes + 1)
    assert mark(connection, lease, 1) == 2


def test_another_message_alone_is_not_taken_for_it(connection):
    """With the cursor Snapshot another snapshot range may bring another message to the same counter."""
    lease, _ = begin(connection)
    store(connection, lease, None, BEGINNING)
    assert mark(connection, lease, 1) == 0
    die(connection)
    lease, told = begin(connection)
    assert told == (1, 1, 1)

    assert mark(connection, lease, 1, Checkpoint(701, 3)) == 0


def test_a_death_outside_a_trial_leaves_nobody_under_suspicion(connection):
    lease, _ = begin(connection)
    store(connection, lease, None, BEGINNING)
    assert mark(connection, lease, 10) == 0
    store(connection, lease, BEGINNING, Checkpoint(700, 1))
    die(connection)

    assert begin(connection)[1] == (1, 0, 0)


def come_again(connection, lease):
    """The process calls as a standby does, while another one holds the lease."""
    answer = ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="pod", token=lease.token, lease=HOUR)
    assert not answer.acquired


def test_whoever_comes_again_was_not_killed(connection):
    """Owners that lose their leases in turn and live: cut off, or frozen, while they try one message alone."""
    first, _ = begin(connection)
    store(connection, first, None, BEGINNING)
    former = first
    for _ in range(5):
        assert mark(connection, former, 1) == 0
        die(connection)
        owner, told = begin(connection)
        assert told == (1, 1, 1)
        come_again(connection, former)
        former = owner
    assert mark(connection, former, 1) == 0


def test_only_the_survivor_takes_its_death_back(connection):
    dead, _ = begin(connection)
    store(connection, dead, None, BEGINNING)
    assert mark(connection, dead, 1) == 0
    die(connection)
    alive, told = begin(connection)
    assert told == (1, 1, 1)
    assert mark(connection, alive, 1) == 1
    die(connection)
    third, told = begin(connection)
    assert told == (2, 1, 2)
    for _ in range(3):
        come_again(connection, alive)
    assert mark(connection, third, 1) == 1


def test_who_has_an_answer_did_not_die_of_the_attempt(connection):
    """It lives, waits, and loses its lease later: a death at this checkpoint, of no message."""
    lease, _ = begin(connection)
    store(connection, lease, None, BEGINNING)
    assert mark(connection, lease, 1) == 0
    holding.clear_in_flight(connection, KEY, lease)
    die(connection)
    _, told = begin(connection)
    assert told == (1, 0, 0)
