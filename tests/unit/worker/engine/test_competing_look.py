"""What a consumer's look for work costs, and whose time that is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_core.ports import OutsideTransaction
from outbox_core.processor.claimed_batch import ClaimedBatch
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.outcomes import NothingTaken, Taken
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.processor.turns import Turn, decide_turn
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.report import WorkerState
from outbox_core.spec import Competing, Delivery, Guarantee, Mode
from outbox_worker.competing import steps
from outbox_worker.competing.steps import CompetingSteps
from outbox_worker.engine.throttle import Throttle

SLOW = 0.05
DELIVERY = Delivery(mode=Mode.COMPETING, competing=Competing())
BATCH = ClaimedBatch(1, 0, 1, None, (), BEGINNING, Checkpoint(10, 100), 8)
FETCHING = ProcessorState(Step.FETCH, 0.0, WorkerState.ACTIVE)


class Counted(OutsideTransaction):
    needs_payload = False

    def check(self):
        raise NotImplementedError

    def deliver(self, batch, epoch):
        raise NotImplementedError


class Taker:
    """Takes long to say what failed before; it is the clock, too."""

    def __init__(self, *, fresh, again=None, is_queue=False):
        self.reader = SimpleNamespace(is_queue=is_queue)
        self.fresh = fresh
        self.again = again
        self.looks = 0
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def take_left(self, connection, turn, most):
        return self.again if turn is Turn.AGAIN and self.promote_failed(connection, most) == 0 else None

    def promote_failed(self, _connection, _most):
        self.looks += 1
        self.now += SLOW
        return 0

    def claim_next(self, _connection, _most):
        return self.fresh


def look(taker, monkeypatch):
    monkeypatch.setattr(steps, "time", taker)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(delivery=DELIVERY, guarantee=Guarantee.AT_LEAST_ONCE),
        databases=SimpleNamespace(target=SimpleNamespace(connection=lambda: None)),
        throttle=Throttle(DELIVERY), ownership=None, shutdown=None, target=Counted(),
    )  # fmt: skip
    nothing: Any = None
    consumer: Any = SimpleNamespace(taker=taker)
    return CompetingSteps(context, nothing, nothing, consumer).actions[Step.FETCH](FETCHING)


def test_a_look_in_vain_for_what_failed_before_is_time_of_theirs(monkeypatch):
    taker = Taker(fresh=BATCH)
    taken = look(taker, monkeypatch)
    assert isinstance(taken, Taken)
    assert (taken.chunk.claimed, taker.looks) == (BATCH, 1)
    state = decide_next(FETCHING, taken, SLOW, Policy(DELIVERY), 0.0)
    assert decide_turn(state.turns) is Turn.FRESH
    assert state.turns.owed == pytest.approx(9 * SLOW)


def test_in_a_queue_messages_are_counted_and_no_time(monkeypatch):
    """Fresh ones that take long, a thousandth of a second each by that count, would pay for a look for minutes."""
    taken = look(Taker(fresh=BATCH, is_queue=True), monkeypatch)
    queue = DELIVERY.model_copy(update={"competing": Competing(queue="jobs")})
    state = decide_next(FETCHING, taken, SLOW, Policy(queue), 0.0)
    assert decide_turn(state.turns) is Turn.AGAIN


def test_so_is_a_look_that_finds_some(monkeypatch):
    taken = look(Taker(fresh=BATCH, again=replace(BATCH, again=True)), monkeypatch)
    state = decide_next(FETCHING, taken, SLOW, Policy(DELIVERY), 0.0)
    assert state.claimed is not None
    assert state.claimed.again
    assert state.turns.owed == pytest.approx(9 * SLOW)


def test_where_nothing_fresh_is_found_nothing_is_owed_to_it(monkeypatch):
    taker = Taker(fresh=NothingTaken())
    found = look(taker, monkeypatch)
    assert isinstance(found, NothingTaken)
    state = decide_next(FETCHING, found, SLOW, Policy(DELIVERY), 0.0)
    assert decide_turn(state.turns) is Turn.AGAIN


def test_time_of_a_look_is_not_counted_twice(monkeypatch):
    """Where only messages of others were seen, the whole step was time of fresh ones but for that look."""
    taker = Taker(fresh=NothingTaken(moved=True))
    found = look(taker, monkeypatch)
    state = decide_next(FETCHING, found, SLOW + 0.1, Policy(DELIVERY), 0.0)
    assert state.turns.owed == pytest.approx(9 * SLOW - 0.1)
