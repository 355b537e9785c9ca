"""Messages that fail beside others: found in one step where that may be, and tried again in turns with fresh ones."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from outbox_core.errors import HandlerError, TransientError
from outbox_core.message import Batch, Delayed, Held
from outbox_core.processor import outcomes
from outbox_core.processor.failing import Action, Failure, FailureDecision, PoisonSearch, shown_error
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Reason, WorkerState
from outbox_core.spec import Blocks, Delivery, Mode, Partitions

NOW = 1000.0
A, B = Checkpoint(100, 1), Checkpoint(100, 9)
BAD = HandlerError("no")
FAILED = Failure(Checkpoint(100, 4), FailureDecision(Action.HOLD, 1, "E", "no", 2.0, blocks=True), "k")


def policy(blocks: Blocks = Blocks.KEY, *, isolates: bool = True) -> Policy:
    delivery = Delivery(mode=Mode.PARTITIONED, partitions=Partitions(), blocks=blocks, batch_size=100)
    return Policy(delivery, isolates=isolates)


def batch(matched: int = 8, *, full: bool = True, held: int = 0) -> Batch:
    of_key = tuple(Held(Checkpoint(90, n), f"k{n}", str(n)) for n in range(held))
    return Batch(A, B, (), matched, full=full, matched_count=held or matched, held=of_key)


def owner(**fields: object) -> ProcessorState:
    state = ProcessorState(
        Step.HANDLE,
        NOW,
        WorkerState.ACTIVE,
        Reason.RUNNING,
        lease=outcomes.HeldLease(0, 7, UUID(int=7)),
        stored=A,
        cursor=A,
    )
    return state._replace(**fields)  # type: ignore[arg-type]


def decide(state: ProcessorState, outcome: outcomes.StepOutcome, chosen: Policy | None = None, now: float = NOW):
    return decide_next(state, outcome, now, chosen or policy(), 0.5)


def test_the_messages_of_a_batch_that_fail_are_found_in_one_step():
    after = decide(owner(batch=batch()), outcomes.Failed(BAD))
    assert (after.step, after.batch, after.attempt, after.due) == (Step.ISOLATE, batch(), 0, NOW)


@pytest.mark.parametrize(
    ("state", "chosen", "error"),
    [
        pytest.param({}, policy(Blocks.PARTITION), BAD, id="it blocks its partition"),
        pytest.param({}, policy(isolates=False), BAD, id="the target is no database"),
        pytest.param({"poison_search": PoisonSearch(8)}, policy(), BAD, id="processes died of some"),
        pytest.param({"limit": 8}, policy(), BAD, id="halving already"),
        pytest.param({"step": Step.ISOLATE}, policy(), BAD, id="parts got through, and their commit was refused"),
        pytest.param({}, policy(), HandlerError("slow", reason=Reason.HANDLER_TIMEOUT), id="it took too long"),
    ],
)
def test_else_the_batch_is_halved(state, chosen, error):
    after = decide(owner(batch=batch(), **state), outcomes.Failed(error), chosen)
    assert (after.step, after.limit) == (Step.FETCH, 4)


def test_what_is_no_messages_fault_is_not_looked_for():
    down = TransientError("down", reason=Reason.DATABASE_UNAVAILABLE)
    assert decide(owner(batch=batch()), outcomes.Failed(down)).step is Step.PREPARE


def test_what_was_found_is_held_and_the_next_batch_begins_with_small_parts():
    found = outcomes.Isolated(batch(full=True), (FAILED,), 7, 2, stored=True)
    after = decide(owner(step=Step.ISOLATE, batch=batch()), found)
    assert (after.step, after.stored, after.block, after.blocking) == (Step.FETCH, B, 2, True)
    assert after.held_due == NOW + 2.0
    assert decide(after, outcomes.Fetched(batch())).step is Step.ISOLATE
    assert decide(after, outcomes.Fetched(batch(2))).step is Step.HANDLE


def test_without_a_common_transaction_it_is_held_with_the_checkpoint_that_follows():
    after = decide(owner(step=Step.ISOLATE), outcomes.Isolated(batch(), (FAILED,), 7, 2, stored=False))
    assert (after.step, after.delivered, after.failed) == (Step.STORE, True, (FAILED,))
    assert decide(after, outcomes.Stored(B, 7)).held_due == NOW + 2.0


def test_what_waits_behind_a_message_that_is_skipped_blocks_its_key_until_it_is_handled():
    skipped = replace(FAILED, decision=replace(FAILED.decision, action=Action.SKIP, wait=None, blocks=False))
    done = replace(batch(), excluded=(Checkpoint(100, 5),))
    after = decide(owner(step=Step.ISOLATE, batch=batch()), outcomes.Isolated(done, (skipped,), 6, 2, stored=True))
    assert (after.blocking, after.held_due) == (True, NOW)


def test_after_messages_that_failed_again_fresh_ones_have_longer():
    state = owner(step=Step.ISOLATE, batch=batch(held=8), turn_began=NOW - 1.0, held_due=NOW)
    after = decide(state, outcomes.HeldSorted(0, (FAILED,), 1))
    assert (after.step, after.owed, after.held_block) == (Step.FETCH, 9.0, 1)
    busy = decide(after._replace(step=Step.HANDLE, batch=batch(), turn_began=NOW - 1.0), outcomes.Stored(B, 8))
    assert (busy.step, busy.owed) == (Step.FETCH, 8.0)
    idle = decide(after, outcomes.Fetched(Batch(A, A, (), 0, full=False)))
    assert (idle.step, idle.owed) == (Step.TAKE_HELD, 0.0)


def test_the_time_that_taking_held_messages_took_is_theirs_too():
    state = owner(step=Step.TAKE_HELD, due=NOW - 1.0, held_due=NOW - 1.0)
    taken = decide(state, outcomes.HeldTaken(batch(held=1), 0.0, blocking=True))
    assert decide(taken, outcomes.HeldHandled(1)).owed == 9.0


def test_what_failed_is_tried_again_while_the_next_message_is_delayed():
    """Nothing fresh can be handled, so nothing is owed to it."""
    state = owner(step=Step.FETCH, owed=0.3, held_due=NOW)
    delayed = Delayed(Checkpoint(100, 4), "m-7", 3600.0)
    after = decide(state, outcomes.Fetched(Batch(A, A, (), 0, full=False, waits_for=delayed)))
    assert (after.step, after.due, after.owed) == (Step.TAKE_HELD, NOW, 0.0)


def test_several_held_messages_that_fail_are_sorted_in_one_step_and_halved_where_that_fails():
    state = owner(step=Step.HANDLE_HELD, batch=batch(held=8))
    after = decide(state, outcomes.Failed(BAD))
    assert (after.step, after.batch) == (Step.ISOLATE, state.batch)
    after = decide(after, outcomes.Failed(BAD))
    assert (after.step, after.held_limit) == (Step.TAKE_HELD, 4)


@pytest.mark.parametrize("limit", [None, 1], ids=["it alone was due", "several were halved"])
def test_one_held_message_that_fails_says_nothing_of_the_others_that_are_due(limit):
    after = decide(owner(step=Step.HANDLE_HELD, batch=batch(held=1), held_limit=limit), outcomes.Failed(BAD))
    assert (after.step, after.held_limit) == (Step.FAIL_HELD, limit)
    assert decide(after, outcomes.HeldFailed()).held_limit == limit


def test_an_error_is_text_that_the_database_can_hold():
    assert shown_error(HandlerError("a\0b\ud800")) == "a\N{REPLACEMENT CHARACTER}b?"
