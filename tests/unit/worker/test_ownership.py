"""What the heartbeat may do with a lease while the main thread is busy with another partition."""

from __future__ import annotations

from uuid import UUID

import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.processor.state import Step, initial_state
from outbox_worker.ownership.heartbeat import Ownership

LEASE = HeldLease(3, 7, UUID(int=1))
RESTING = initial_state(0.0)._replace(step=Step.FETCH, lease=LEASE)


@pytest.fixture
def ownership():
    held = Ownership(30.0)
    held.note_lease(LEASE)
    return held


def test_a_partition_that_rests_is_given_back_once(ownership):
    ownership.decided = RESTING
    assert ownership.give_back(LEASE)
    assert not ownership.give_back(LEASE)
    losses = ownership.begin_step()
    assert (losses.given_back, losses.lease) == (True, "another replica shall own the partition")


@pytest.mark.parametrize(
    "decided",
    [
        pytest.param(None, id="nothing is decided yet"),
        pytest.param(RESTING._replace(begun=True), id="the target has begun to take the next batch"),
        pytest.param(RESTING._replace(step=Step.STORE, delivered=True), id="a delivered batch is not stored"),
    ],
)
def test_it_is_kept_where_something_is_in_hand(ownership, decided):
    ownership.decided = decided
    assert not ownership.give_back(LEASE)


def test_it_is_kept_while_a_step_is_done_and_until_the_next_is_decided(ownership):
    ownership.decided = RESTING
    ownership.begin_step()
    assert not ownership.give_back(LEASE)
    ownership.decided = RESTING._replace(idle=1)
    assert ownership.give_back(LEASE)


def test_another_lease_is_not_given_back(ownership):
    ownership.decided = RESTING
    assert not ownership.give_back(HeldLease(3, 8, UUID(int=1)))
