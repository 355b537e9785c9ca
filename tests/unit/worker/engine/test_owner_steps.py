"""What an owner does before its checkpoint is loaded, where the target has transactions of its own."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from typing_extensions import override

from outbox_core.errors import TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.processor import outcomes
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.outcomes import HeldLease
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.report import Reason
from outbox_core.spec import Delivery
from outbox_worker.engine.owner_steps import OwnerSteps

if TYPE_CHECKING:
    from outbox_core.message import Batch

LOADING = ProcessorState(Step.LOAD, 10.0, lease=HeldLease(3, 7, UUID(int=1)))


class Slow(OutsideTransaction):
    """Has shut former owners out when it was asked three times."""

    def __init__(self):
        self.asked = []

    @override
    def check(self) -> None:
        return

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        raise AssertionError("nothing is delivered")

    @override
    def shut_out(self, database: str, partition: int, epoch: int) -> float:
        self.asked.append((partition, epoch))
        return 0.0 if len(self.asked) == 3 else 0.25


class Loading:
    """The database, at which the test ends."""

    def connection(self):
        raise TransientError("the row is loaded", reason=Reason.DATABASE_UNAVAILABLE)


@pytest.fixture
def target():
    return Slow()


@pytest.fixture
def owner(target):
    delivery = SimpleNamespace(lease_duration=timedelta(seconds=3), timeout=timedelta(seconds=30))
    context: Any = SimpleNamespace(
        target=target, databases=SimpleNamespace(target=Loading()), config=SimpleNamespace(delivery=delivery)
    )
    nothing: Any = None
    return OwnerSteps(context, nothing, nothing, nothing, nothing, nothing, take_over=False)


def test_others_have_their_turns_until_former_owners_are_shut_out_and_only_then_the_row_is_loaded(owner, target):
    state, policy = LOADING, Policy(Delivery())
    for now in (10.0, 20.0):
        outcome = owner.load(state)
        assert isinstance(outcome, outcomes.Throttled)
        state = decide_next(state, outcome, now, policy, 0.5)
        assert (state.step, state.due, state.lease) == (Step.LOAD, now + 0.25, LOADING.lease)
    with pytest.raises(TransientError, match="the row is loaded"):
        owner.load(state)
    assert target.asked == [(3, 7)] * 3
