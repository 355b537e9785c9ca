"""PURE: when held messages are looked at, and what follows from an attempt at some of them.

The part of `outbox_core.processor.lifecycle` that is about messages which their partition has passed: they take turns
with fresh ones (`outbox_core.processor.turns`), several are tried at once, and those that fail again are put off
together.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from outbox_core.processor import failing, outcomes
from outbox_core.processor.isolation import decide_block
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.processor.turns import Turn, decide_after_turn, decide_turn
from outbox_core.report import Reason, WorkerState

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.message import Batch


def or_held(state: ProcessorState, now: float) -> ProcessorState:
    """Let held messages that are due before the next look at the outbox come first, if it is their turn."""
    if state.held_due > state.due or decide_turn(state.owed) is Turn.FRESH:
        return state
    return state._replace(step=Step.TAKE_HELD, due=max(now, state.held_due))


def with_newly_held(state: ProcessorState, now: float) -> ProcessorState:
    """What the checkpoint passed without handling it is held from now on."""
    batch = state.batch
    for decision in (*(each.decision for each in state.failed), state.decision):
        if decision is not None and decision.action is not failing.Action.SKIP:
            wait = inf if decision.wait is None else decision.wait
            state = state._replace(blocking=state.blocking or decision.blocks, held_due=min(state.held_due, now + wait))
    if batch is not None and batch.excluded and (batch.delayed_count or state.failed):
        # When they are due the database says. What waits behind a failed message of its key blocks that key, too.
        state = state._replace(held_due=now, blocking=state.blocking or bool(state.failed))
    return state


def after_holding(state: ProcessorState, outcome: outcomes.HeldOutcome, now: float, policy: Policy) -> ProcessorState:
    """After a look at what is held, or an attempt at some of it."""
    match outcome:
        case outcomes.HeldTaken():
            return _after_take(state, outcome, now, policy)
        case outcomes.HeldHandled():
            return _after_held(_after_turn(state, now), now, policy)
        case outcomes.HeldFailed():
            return _after_turn(state, now)._replace(step=Step.FETCH, due=now, batch=None, decision=None, held_due=now)
        case outcomes.HeldSorted():
            return _after_turn(state, now)._replace(
                step=Step.FETCH, due=now, batch=None, held_due=now, failures=0,
                held_block=decide_block(
                    outcome.next_block, policy.delivery.batch_limit, through=not (outcome.failed or outcome.more)
                ),
            )  # fmt: skip
        case outcomes.HeldChanged():
            return state._replace(step=Step.TAKE_HELD, due=now, batch=None, decision=None)


def _after_turn(state: ProcessorState, now: float) -> ProcessorState:
    return state._replace(owed=decide_after_turn(state.owed, Turn.AGAIN, now - state.turn_began))


def _after_take(state: ProcessorState, taken: outcomes.HeldTaken, now: float, policy: Policy) -> ProcessorState:
    if taken.batch is not None:
        held, block = taken.batch.held, state.held_block
        some = block is not None and len(held) > block and state.held_limit is None
        step = Step.ISOLATE if some and policy.isolates else Step.HANDLE_HELD
        # Their turn began with the look.
        began = min(now, state.due)
        return state._replace(step=step, due=now, batch=taken.batch, blocking=True, turn_began=began)
    due = inf if taken.next_in is None else now + max(taken.next_in, 0.01)
    return state._replace(step=Step.FETCH, due=now, held_due=due, blocking=taken.blocking, held_limit=None, batch=None)


def _after_held(state: ProcessorState, now: float, policy: Policy) -> ProcessorState:
    """Held messages were handled: more of them at once next time, but first a look at the outbox."""
    limit = None if state.held_limit is None else state.held_limit * 2
    if limit is not None and limit >= policy.delivery.batch_limit:
        limit = None
    block = state.held_block and decide_block(state.held_block, policy.delivery.batch_limit, through=True)
    return state._replace(
        step=Step.FETCH, due=now, batch=None, held_due=now, held_limit=limit, held_block=block, failures=0,
        idle=0, state=WorkerState.ACTIVE, reason=Reason.RUNNING, message="",
    )  # fmt: skip


def after_held_failure(
    state: ProcessorState, batch: Batch, error: OutboxError, now: float, policy: Policy, chance: float
) -> ProcessorState:
    """Several: in parts at once. One: another attempt of it is used up, and the outbox goes on meanwhile."""
    if len(batch.held) > 1:
        refused = state.step is Step.HANDLE_HELD and failing.is_refusal(error, policy.delivery.retry)
        if policy.isolates and state.held_limit is None and refused:
            return state._replace(step=Step.ISOLATE, due=now, held_block=None, failures=0)
        return state._replace(step=Step.TAKE_HELD, due=now, batch=None, held_limit=len(batch.held) // 2, failures=0)
    (held,) = batch.held
    attempt = held.attempts + 1
    decision = failing.decide_held_failure(error, attempt, policy.delivery, chance)
    # It says nothing of the others that are due: those are tried together, unless several were halved down to it.
    return state._replace(step=Step.FAIL_HELD, due=now, decision=decision, failures=0)
