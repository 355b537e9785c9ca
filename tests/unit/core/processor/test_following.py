"""Batches that the target began to take before their turn: the next one is stored first, and each comes to its end."""

from __future__ import annotations

import pytest

from outbox_core.errors import TransientError
from outbox_core.processor import outcomes
from outbox_core.processor.failing import Action, Failure, FailureDecision
from outbox_core.processor.lifecycle import LOOK_SECONDS
from outbox_core.processor.state import Step
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Reason, WorkerState
from tests.unit.core.processor.test_lifecycle import NOW, B, C, batch, decide, owner

D = Checkpoint(300, 1)
SECOND, THIRD = batch(after=B, examined=C), batch(after=C, examined=D)
DELIVERED = outcomes.Delivered(5, (SECOND, THIRD))


def storing(**fields):
    """The first of three batches is delivered."""
    state = decide(owner(step=Step.HANDLE, batch=batch()), DELIVERED)
    assert (state.step, state.following) == (Step.STORE, (SECOND, THIRD))
    return state._replace(**fields)


def test_each_is_delivered_and_stored_in_its_turn_without_a_look_at_the_source():
    state = decide(storing(), outcomes.Stored(B, 5))
    assert (state.step, state.batch, state.begun, state.following) == (Step.HANDLE, SECOND, True, (THIRD,))
    assert (state.stored, state.due) == (B, NOW)
    state = decide(decide(state, outcomes.Delivered(5)), outcomes.Stored(C, 5))
    assert (state.step, state.batch, state.begun, state.following) == (Step.HANDLE, THIRD, True, ())
    state = decide(decide(state, outcomes.Delivered(5)), outcomes.Stored(D, 5))
    assert (state.step, state.batch, state.begun) == (Step.FETCH, None, False)


def test_another_look_is_due_a_while_after_the_last_one():
    assert decide(owner(), outcomes.Fetched(batch())).look_by == NOW + LOOK_SECONDS


def test_what_is_begun_is_not_left_to_others():
    """Another worker would publish it again."""
    begun = decide(storing(), outcomes.Stored(B, 5))
    assert not begun.rests
    assert owner(step=Step.HANDLE, batch=SECOND).rests
    asked = decide(begun, outcomes.StopRequested())
    assert (asked.state, asked.step, asked.is_last_work) == (WorkerState.DRAINING, Step.HANDLE, True)
    assert decide(owner(step=Step.HANDLE, batch=SECOND), outcomes.StopRequested()).step is Step.END


@pytest.mark.parametrize(
    "outcome",
    [
        outcomes.Failed(TransientError("the broker is down", reason=Reason.TARGET_UNAVAILABLE)),
        outcomes.OwnershipLost("another has it"),
    ],
)
def test_after_a_fault_all_is_read_again(outcome):
    begun = decide(storing(), outcomes.Stored(B, 5))
    state = decide(begun, outcome)
    assert (state.batch, state.begun, state.following) == (None, False, ())


def test_a_database_that_recovered_from_a_crash_may_not_have_it():
    state = decide(storing(step=Step.PREPARE), outcomes.Prepared(crashed=True))
    assert (state.step, state.following) == (Step.LOAD, ())


def test_a_store_that_failed_is_repeated_and_they_follow():
    down = outcomes.Failed(TransientError("the database is down", reason=Reason.DATABASE_UNAVAILABLE))
    state = decide(decide(storing(), down), outcomes.Prepared())
    assert (state.step, state.delivered, state.following) == (Step.STORE, True, (SECOND, THIRD))


@pytest.mark.parametrize("blocks", [True, False])
def test_behind_a_message_that_failed_they_are_read_again(blocks):
    """Of a key that waits they may have a message; and the target forgot those that were begun in this step."""
    begun = decide(storing(), outcomes.Stored(B, 5))
    failed = Failure(C, FailureDecision(Action.HOLD, 1, "HandlerError", "no", 1.0, blocks=blocks), "key")
    state = decide(begun, outcomes.Isolated(SECOND, (failed,), 4, 100, stored=False))
    assert (state.step, state.following) == (Step.STORE, ())
    state = decide(state, outcomes.Stored(C, 4))
    assert (state.step, state.blocking) == (Step.FETCH, blocks)


def test_only_what_begins_at_the_checkpoint_follows():
    state = decide(storing(following=(THIRD,)), outcomes.Stored(B, 5))
    assert (state.step, state.following) == (Step.FETCH, ())


def test_held_messages_wait_for_them():
    state = decide(storing(held_due=NOW), outcomes.Stored(B, 5))
    assert (state.step, state.batch) == (Step.HANDLE, SECOND)
    state = decide(state._replace(following=()), outcomes.Delivered(5))
    assert decide(state, outcomes.Stored(C, 5)).step is not Step.HANDLE
