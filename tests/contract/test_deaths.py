"""What the database remembers of owners that died: how many messages were tried, and which one was tried alone."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.checkpoint import BEGINNING, Checkpoint, StoreAnswer
from outbox_core.happening import HeldLease
from outbox_core.report import ResourceRef
from outbox_worker.postgres import checkpoints, holding, ownership
from outbox_worker.postgres.key import ProcessorKey

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
    return lease, (review.deaths, review.suspects, review.kills)


def die(connection):
    connection.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")


def suspect(connection, lease, count, pair=AT):
    return holding.begin_suspect(connection, KEY, lease, pair, suspects=count, generation=1)


def store(connection, lease, expected, new):
    answer = checkpoints.store(connection, KEY, new=new, expected=expected, epoch=lease.epoch, token=lease.token)
    assert answer is StoreAnswer.STORED


def test_what_was_tried_when_an_owner_died_is_under_suspicion_and_less_each_time(connection):
    lease, told = begin(connection)
    store(connection, lease, None, BEGINNING)
    for deaths in (1, 2):
        die(connection)
        lease, told = begin(connection)
        assert told == (deaths, 0, 0)
    assert suspect(connection, lease, 500) == 0
    store(connection, lease, BEGINNING, Checkpoint(700, 1))  # they got through
    assert suspect(connection, lease, 250) == 0
    die(connection)
    lease, told = begin(connection)
    assert told == (1, 250, 0)
    for kills in (0, 1):
        assert suspect(connection, lease, 1) == kills
        die(connection)
        lease, told = begin(connection)
        assert told[1:] == (1, kills + 1)
    assert suspect(connection, lease, 1) == 2


def test_another_message_alone_is_not_taken_for_it(connection):
    """With the cursor Snapshot another window may bring another message to the same counter."""
    lease, _ = begin(connection)
    store(connection, lease, None, BEGINNING)
    assert suspect(connection, lease, 1) == 0
    die(connection)
    lease, told = begin(connection)
    assert told == (1, 1, 1)

    assert suspect(connection, lease, 1, Checkpoint(701, 3)) == 0


def test_a_death_outside_a_trial_leaves_nobody_under_suspicion(connection):
    lease, _ = begin(connection)
    store(connection, lease, None, BEGINNING)
    assert suspect(connection, lease, 10) == 0
    store(connection, lease, BEGINNING, Checkpoint(700, 1))
    die(connection)

    assert begin(connection)[1] == (1, 0, 0)
