"""When an owner that waits for messages looks again: sooner after the source wrote something, later while it rests."""

from __future__ import annotations

import pytest

from outbox_core.processor import outcomes
from outbox_core.processor.state import SETTLED_LOOKS, Step
from outbox_core.progress.checkpoint import BEGINNING
from outbox_core.report import WorkerState
from tests.unit.core.processor.test_lifecycle import NOW, batch, decide, owner


def test_a_source_that_moved_is_looked_at_at_once_and_then_closely():
    idle = owner(due=NOW + 5.0, idle=9)
    moved = decide(idle, outcomes.SourceMoved(useless=0))
    assert (moved.step, moved.due, moved.idle) == (Step.FETCH, NOW, 0)
    assert NOW < decide(idle, outcomes.SourceMoved(useless=1)).due < NOW + 0.001
    assert not decide(owner(idle=1, saw_all=True), outcomes.SourceMoved(useless=1)).saw_all
    in_vain = decide(idle, outcomes.SourceMoved(useless=100))
    assert in_vain.due == NOW + 0.5, "others write all the time"
    assert in_vain.idle == SETTLED_LOOKS - 1, "what is not visible yet is looked for once more"
    assert decide(owner(due=NOW), outcomes.SourceMoved(useless=20)).due == NOW, "never later than without it"


@pytest.mark.parametrize(
    ("state", "awaits"),
    [
        (owner(), True),
        (owner(step=Step.TAKE_HELD), True),
        (owner(step=Step.HANDLE), False),
        (owner(lease=None), False),
        (owner(state=WorkerState.RETRYING), False),
    ],
    ids=["idle", "held messages come next", "busy", "standby", "the breaker is open"],
)
def test_only_an_idle_owner_awaits_messages(state, awaits):
    assert state.awaits_messages is awaits


@pytest.mark.parametrize(
    ("state", "later"),
    [
        (owner(idle=SETTLED_LOOKS), 4.5),
        (owner(idle=SETTLED_LOOKS, held_due=NOW + 2.0), 2.0),
        (owner(idle=SETTLED_LOOKS - 1), 0.0),
        (owner(idle=1, saw_all=True), 4.5),
        (owner(idle=0, saw_all=True), 0.0),
        (owner(idle=SETTLED_LOOKS, unstored_rows=1), 0.0),
        (owner(idle=SETTLED_LOOKS, step=Step.TAKE_HELD), 0.0),
        (owner(idle=SETTLED_LOOKS, state=WorkerState.RETRYING), 0.0),
        (owner(idle=SETTLED_LOOKS, lease=None, joined=True), 4.5),
        (owner(idle=SETTLED_LOOKS, lease=None, joined=True, held_due=NOW + 2.0), 2.0),
    ],
    ids=["idle", "a held message is due", "it looked lately", "nothing was in progress",
         "it found something", "a place is to be stored", "held messages come next",
         "the breaker is open", "mode Competing", "mode Competing, a message is due"],
)  # fmt: skip
def test_while_the_source_writes_nothing_an_idle_owner_looks_less_often(state, later):
    assert state.due_at_rest == state.due + later


@pytest.mark.parametrize(("saw_all", "later"), [(True, 4.5), (False, 0.0)])
def test_after_a_checkpoint_an_owner_looks_soon_unless_it_examined_all_that_is_committed(saw_all, later):
    state = decide(owner(step=Step.STORE, batch=batch(full=False), idle=3), outcomes.Stored(BEGINNING, saw_all=saw_all))
    assert (state.step, state.due) == (Step.FETCH, NOW + 0.01)
    assert state.due_at_rest == state.due + later
    assert not decide(state, outcomes.SourceMoved(useless=0)).saw_all
