"""When an owner that waits for messages looks again: sooner after the source wrote something, later while it rests."""

from __future__ import annotations

import pytest

from outbox_core.processor import outcomes
from outbox_core.processor.state import SETTLED_LOOKS, Step
from outbox_core.report import WorkerState
from tests.unit.core.processor.test_lifecycle import NOW, decide, owner


def test_a_source_that_moved_is_looked_at_soon_and_then_closely():
    idle = owner(due=NOW + 5.0, idle=9)
    moved = decide(idle, outcomes.SourceMoved(useless=0))
    assert (moved.step, moved.idle) == (Step.FETCH, 0)
    assert NOW < moved.due < NOW + 0.001
    own = decide(idle, outcomes.SourceMoved(useless=-1))
    assert (own.due, own.idle) == (NOW, 0), "our own checkpoint is visible to us"
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
