"""PURE: the part of `outbox_core.processor.lifecycle` that is about a consumer's batches (mode Competing).

    PREPARE -> CLAIM -> REVIEW -> CHECK_TARGET -> LOAD -> FETCH -> HANDLE -> FETCH -> ...

LOAD joins the processor and hands back batches that this process may still have in its name; FETCH takes a batch, or
the next chunk of the one in hand. No consumer owns the processor: each batch names its owner and the number of its
attempt, and completion is refused to every other owner or attempt. A batch that fails is handled in smaller chunks
until the message that fails is alone; that one leaves the batch (DEFER), the rest goes on. While the target is down
nothing is kept: what is in hand is handed back (RELEASE), and nothing is taken until its breaker lets it through.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, assert_never

from outbox_core import retry
from outbox_core.errors import HandlerError
from outbox_core.processor import failing, outcomes, stopping
from outbox_core.processor.claimed_batch import RefusalAction, RefusalDecision
from outbox_core.processor.isolation import decide_block
from outbox_core.processor.state import Step
from outbox_core.processor.turns import Turn, decide_after_turn
from outbox_core.report import Reason, WorkerState
from outbox_core.spec import WhenExhausted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from outbox_core.errors import OutboxError
    from outbox_core.processor.claimed_batch import ClaimedBatch
    from outbox_core.processor.state import Policy, ProcessorState
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import Delivery

AGAIN_SECONDS: Final = 0.25
"""After so long, what is left of messages that failed before waits for their next turn: the others come meanwhile."""
CONTENDED_WAIT: Final = 0.002
"""Another consumer is cutting a batch at this moment, which takes about so long; doubled while that goes on."""
_MOST_DOUBLINGS: Final = 20
_A_MESSAGE: Final = 0.001
"""Seconds, where messages are counted in place of their time."""


def choose_priority(heads: Mapping[int, datetime], ageing: timedelta) -> int:
    """Choose the priority of the next batch: the one whose first message has the earliest claim.

    A level of priority is worth `ageing` of waiting: of two messages the less urgent one goes first once it has waited
    longer by `ageing` for each level between them. Every message is handed out in the end.

    `heads` holds, for each priority that has messages, when its first one was stored or its delay was over. `ageing` is
    more than zero.
    """
    return min(heads, key=lambda priority: (heads[priority] + priority * ageing, priority))


def decide_refusal(
    attempts: int, error: OutboxError, delivery: Delivery, chance: float, *, given_up: bool = False
) -> RefusalDecision:
    """Say what becomes of a message that failed with `error`, for the `attempts`-th time.

    `given_up`: a person gave the message up, so when its attempts ran out it is a dead letter.
    """
    delay = retry.decide_retry(attempts, delivery.retry, chance, error)
    if delay is not None:
        return RefusalDecision(RefusalAction.RETRY, attempts, delay)
    end = WhenExhausted.DEAD_LETTER if given_up else delivery.when_exhausted
    if end is WhenExhausted.REQUEUE:
        return RefusalDecision(RefusalAction.RETRY, 0, delivery.retry.max_backoff.total_seconds())
    return RefusalDecision(RefusalAction(end.value), attempts)


def share_time(
    state: ProcessorState, after: ProcessorState, outcome: outcomes.Outcome, now: float, policy: Policy
) -> ProcessorState:
    """Let what is decided (`after`) wait, where it is others' turn; and note whose time was spent."""
    claimed = after.claimed
    if (
        claimed is not None
        and claimed.again
        and now - after.turn_began >= AGAIN_SECONDS
        and _may_release(after, outcome)
    ):
        return after._replace(step=Step.RELEASE, batch=None, resume=now)
    if claimed is None and state.claimed is not None and not _is_queue(policy):
        turn, spent = Turn.AGAIN if state.claimed.again else Turn.FRESH, now - state.turn_began
        return after._replace(owed=decide_after_turn(after.owed, turn, spent))
    return after


def _may_release(after: ProcessorState, outcome: outcomes.Outcome) -> bool:
    """Say whether the batch may go back without losing what was learned of the message that fails.

    While that is looked for by handing over less, or tried again where it is, the next turn would begin all anew, and
    come no further.
    """
    searches = after.limit is not None and not isinstance(outcome, outcomes.Deferred)
    return after.step is Step.FETCH and not after.attempt and not searches


def after_step(  # noqa: C901, PLR0911 - a case for each outcome; mypy checks that none is missing
    state: ProcessorState, outcome: outcomes.ConsumerOutcome, now: float, policy: Policy
) -> ProcessorState:
    """Decide what follows an outcome that only consumers have."""
    match outcome:
        case outcomes.Joined():
            return _empty_handed(state)._replace(
                step=Step.FETCH, due=now, joined=True, failures=0, start_from_used=outcome.start_from_used,
                state=WorkerState.ACTIVE, reason=Reason.IDLE, message="",
            )  # fmt: skip
        case outcomes.Taken():
            return _after_take(state, outcome, now, policy)
        case outcomes.NothingTaken():
            return _after_nothing(state, outcome, now, policy)
        case outcomes.Completed():
            return _after_completion(_grown(state, policy), now)
        case outcomes.Sifted() if not outcome.settled:
            return state._replace(step=Step.STORE, due=now, delivered=True, sifted=outcome)
        case outcomes.Sifted():
            return _after_sifting(state, outcome, now, policy)
        case outcomes.Lost():
            # Delivered, it may have been completed by a call whose answer was lost: then the rest is still in our name.
            step = Step.RELEASE if state.delivered else Step.FETCH
            return _empty_handed(state)._replace(
                step=step, due=now, state=WorkerState.ACTIVE, reason=Reason.LEASE_LOST,
                message="a batch was not completed in time and is another consumer's now; its effects were rolled back "
                "where they are transactional",
            )  # fmt: skip
        case outcomes.Deferred() if outcome.decision.action is RefusalAction.STOP:
            error = state.failure or HandlerError("it failed")
            return _stop(state, outcome.decision.attempts, error, outcome.named, now)
        case outcomes.Deferred():
            return _after_completion(state, now, outcome.pair)
        case outcomes.HandedBack():
            return _empty_handed(state)._replace(step=Step.FETCH, due=max(now, state.resume))
        case _:
            assert_never(outcome)


def after_handler_change(state: ProcessorState, now: float) -> ProcessorState:
    """The handler's file changed: a message that it stopped at is tried again."""
    return state._replace(step=Step.FETCH, due=now, state=WorkerState.ACTIVE) if state.step is Step.HOLD else state


def _empty_handed(state: ProcessorState) -> ProcessorState:
    return state._replace(claimed=None, batch=None, delivered=False, sifted=None, limit=None, failure=None, attempt=0)


def handed_back(state: ProcessorState, now: float, wait: float) -> ProcessorState:
    """Begin nothing for so long, and keep nothing from others meanwhile."""
    if state.claimed is None:
        return state._replace(due=now + wait)
    return state._replace(step=Step.RELEASE, due=now, resume=now + wait)


def _is_queue(policy: Policy) -> bool:
    return policy.delivery.competing is not None and policy.delivery.competing.queue is not None


def _owed_after_look(
    state: ProcessorState, found: outcomes.Taken | outcomes.NothingTaken, now: float, policy: Policy
) -> float:
    """Share the time. In a queue what failed before is handed out among the others, so there messages are counted."""
    owed = state.owed
    if found.promoted:
        owed = decide_after_turn(owed, Turn.AGAIN, found.promoted * _A_MESSAGE)
    if isinstance(found, outcomes.NothingTaken):
        if found.moved:
            return decide_after_turn(owed, Turn.FRESH, max(0.0, now - state.due))
        return owed if found.contended else 0.0
    if _is_queue(policy):
        return decide_after_turn(owed, Turn.FRESH, found.chunk.claimed.count * _A_MESSAGE)
    # Out of their turn those that failed before come only where nothing fresh was found.
    return 0.0 if found.chunk.claimed.again else owed


def _after_take(state: ProcessorState, taken: outcomes.Taken, now: float, policy: Policy) -> ProcessorState:
    chunk = taken.chunk
    claimed = chunk.claimed
    begins = state.claimed is None
    state = state._replace(
        claimed=claimed, batch=chunk, idle=0, step=Step.HANDLE, due=now,
        turn_began=now if begins else state.turn_began,
        owed=_owed_after_look(state, taken, now, policy) if begins else state.owed,
    )  # fmt: skip
    if claimed.chunk == 1 and claimed.crash_count >= policy.delivery.retry.max_attempts:
        killed = HandlerError(
            f"{claimed.crash_count} processes in a row died while they handled this message alone",
            reason=Reason.PROCESS_KILLED,
        )
        return state._replace(step=Step.DEFER, failure=killed)
    if state.state is WorkerState.RETRYING and (state.attempt or state.failures):
        return state
    return state._replace(state=WorkerState.ACTIVE, reason=Reason.RUNNING, message="")


def _after_nothing(state: ProcessorState, found: outcomes.NothingTaken, now: float, policy: Policy) -> ProcessorState:
    if state.claimed is None:
        state = state._replace(owed=_owed_after_look(state, found, now, policy))
    idle = 0 if found.moved else state.idle + 1
    wait = 0.0 if found.moved else retry.idle_wait(idle, policy.poll_interval)
    if found.contended:
        wait = min(CONTENDED_WAIT * 2.0 ** min(idle, _MOST_DOUBLINGS), policy.poll_interval)
    state = _empty_handed(state)._replace(step=Step.FETCH, due=now + wait, idle=idle, held_due=now + found.next_due)
    if found.contended:
        return state
    return state._replace(failures=0, state=WorkerState.ACTIVE, reason=Reason.IDLE, message="")


def _grown(state: ProcessorState, policy: Policy) -> ProcessorState:
    """All of a chunk got through."""
    if state.block is None:
        return state
    return state._replace(block=decide_block(state.block, policy.delivery.batch_limit, through=True))


def _after_sifting(state: ProcessorState, sifted: outcomes.Sifted, now: float, policy: Policy) -> ProcessorState:
    again = state.claimed is not None and state.claimed.again
    if not again:
        whole = state.batch is not None and sifted.behind == state.batch.matched_count
        through = whole and not sifted.refusals and sifted.stop is None
        state = state._replace(block=decide_block(sifted.block, policy.delivery.batch_limit, through=through))
    state = state._replace(failures=0, state=WorkerState.ACTIVE, reason=Reason.RUNNING, message="")
    if sifted.refusals and not sifted.handled and not again:
        error = sifted.refusals[-1].error
        state = state._replace(state=WorkerState.RETRYING, reason=error.reason, message=str(error))
    if sifted.upto is None:
        state = state._replace(step=Step.FETCH, batch=None, delivered=False, sifted=None, due=now)
    else:
        state = _after_completion(state, now, sifted.upto, sifted.behind)
        state = state._replace(attempt=1 if state.state is WorkerState.RETRYING else 0)
    if sifted.stop is None:
        return state
    return _stop(state, sifted.stop.decision.attempts, sifted.stop.error, sifted.named, now)


def _after_completion(
    state: ProcessorState, now: float, done_upto: Checkpoint | None = None, done: int | None = None
) -> ProcessorState:
    """Go on behind the chunk, or behind its first `done` messages up to `done_upto`, which the database was told."""
    claimed, chunk = state.claimed, state.batch
    limit = None if state.limit is None else state.limit * 2
    left: ClaimedBatch | None = None
    if claimed is not None and chunk is not None:
        after = chunk.examined if done_upto is None else done_upto
        count = max(0, claimed.count - (chunk.matched_count if done is None else done))
        rest = None if claimed.chunk is None or claimed.chunk * 2 >= count else claimed.chunk * 2
        if after < claimed.upto:
            left = replace(claimed, after=after, count=count, crash_count=0, chunk=rest)
    return state._replace(
        claimed=left, batch=None, delivered=False, sifted=None, failure=None, failures=0, attempt=0, due=now,
        limit=None if left is None or limit is None or limit >= left.count else limit,
        step=Step.END if state.state is WorkerState.DRAINING else Step.FETCH,
    )  # fmt: skip


def _stop(
    state: ProcessorState, attempts: int, error: OutboxError, named: stopping.Named | None, now: float
) -> ProcessorState:
    """Attempts ran out: the batch stays in hand."""
    stopped = stopping.build_stopped(attempts, error, named)
    return stopping.hold(state._replace(attempt=attempts, failure=None), stopped, now)


def after_failure(
    state: ProcessorState, error: OutboxError, now: float, policy: Policy, chance: float
) -> ProcessorState:
    """Halve a batch that failed, let the one message that failed leave it, or hand it back."""
    settings = policy.delivery.retry
    batch = state.batch
    if failing.is_of_messages(error, settings) and state.step is Step.HANDLE and batch is not None:
        said = state._replace(failures=0, state=WorkerState.RETRYING, reason=error.reason)
        if error.reason in failing.NO_MESSAGES_FAULT:
            attempt = state.attempt + 1
            delay = retry.decide_retry(attempt, settings, chance, error)
            if delay is None:
                return _stop(said, attempt, error, None, now)
            return said._replace(step=Step.FETCH, due=now + delay, attempt=attempt, message=str(error))
        if batch.matched_count > 1:
            looking = f"{error}; looking for the message among {batch.matched_count}"
            said, half = said._replace(due=now, message=looking, attempt=1), batch.matched_count // 2
            parts = policy.isolates and failing.is_refusal(error, settings)
            return said._replace(block=half) if parts else said._replace(step=Step.FETCH, limit=half)
        return said._replace(step=Step.DEFER, due=now, failure=error, message=str(error), attempt=1)
    failures = state.failures + 1
    wait = retry.infrastructure_backoff(failures, settings, chance, error)
    busy = state.claimed is not None and retry.is_of_target(error)
    told = state._replace(
        failures=failures, state=WorkerState.RETRYING if busy else WorkerState.UNAVAILABLE, reason=error.reason,
        message=str(error),
    )  # fmt: skip
    if busy and state.step is Step.HANDLE:
        return handed_back(told, now, wait)
    return (told if state.delivered else _empty_handed(told))._replace(step=Step.PREPARE, due=now + wait)
