"""PURE: the life of a processor as a state machine. Given the state, the outcome and the time: the next step.

The loop that carries steps out is `outbox_worker.engine.loop`; it decides nothing. A normal life is

    PREPARE -> CLAIM -> REVIEW -> CHECK_TARGET -> ACQUIRE -> LOAD -> FETCH -> HANDLE -> FETCH -> ...

It is one table for all modes. A consumer (mode Competing) has no lease, so ACQUIRE is left out, and its batches have
outcomes of their own: what follows those is in `outbox_core.processor.competing`. Of the outcomes that all modes have
two are answered otherwise: `Failed` (it hands its batch back, or lets one message leave it) and `HandlerChanged`.

PREPARE is also the way back after every fault of the database: it reconnects, and what was in hand (a refusal to
record, a commit of unknown outcome, a batch delivered but not stored) is taken up again before anything else, in that
order, by `_resume`. An outcome is one of the small classes of `outbox_core.processor.outcomes`.

Times are seconds of a monotonic clock. Who owns the processor is never judged by them, only by the database.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, assert_never

from outbox_core import retry
from outbox_core.errors import MessagesFailedError
from outbox_core.processor import competing, failing, outcomes, stopping
from outbox_core.processor.holding import after_held_failure, after_holding, or_held, with_newly_held
from outbox_core.processor.isolation import decide_block
from outbox_core.processor.state import HANDS_OVER, SETTLED_LOOKS, Policy, ProcessorState, Step, without_ownership
from outbox_core.processor.turns import Turn, decide_after_turn
from outbox_core.report import Reason, WorkerState
from outbox_core.spec import Blocks

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.message import Batch, Delayed
    from outbox_core.progress.checkpoint import Checkpoint

UNSTORED_ROWS: Final = 10_000
"""Rows examined without a match after which the checkpoint is stored all the same."""
UNSTORED_SECONDS: Final = 5.0
"""The same as a time."""
_WRITING_DOWN: Final = frozenset({Step.HOLD_BATCH, Step.FAIL_HELD, Step.CONFIRM})
"""What fails here is not the handling."""
DELAYED_LOOK: Final = 5.0
"""Longest wait of mode Ordered at a delayed message before it looks again: a user may have changed the row."""
LOOK_SECONDS: Final = 1.0
"""So long batches may follow each other to the target before held messages, the breaker and barriers are looked at."""


def decide_next(
    state: ProcessorState, outcome: outcomes.Outcome, now: float, policy: Policy, chance: float
) -> ProcessorState:
    """Decide what follows a step that was done in this state; `chance`: a random number, 0 to 1, for jitter."""
    if isinstance(outcome, outcomes.ConsumerOutcome):
        after = competing.after_step(state, outcome, now, policy)
    else:
        after = _decide(state, outcome, now, policy, chance)
    if state.claimed is not None:
        return competing.share_time(state, after, outcome, now, policy)
    # What follows a batch follows that one only: if it is read again, so are they.
    if after.batch is None and (after.begun or after.following):
        return after._replace(begun=False, following=())
    return after


def _decide(  # noqa: C901, PLR0911, PLR0912 - a case for each outcome; mypy checks that none is missing
    state: ProcessorState, outcome: outcomes.StepOutcome, now: float, policy: Policy, chance: float
) -> ProcessorState:
    if isinstance(outcome, outcomes.HeldOutcome):
        return after_holding(state, outcome, now, policy)
    match outcome:
        case outcomes.Prepared():
            return _resume(_since_crash(state) if outcome.crashed else state, now)
        case outcomes.ClaimAnswered():
            return _after_claim(state, outcome, now, chance)
        case outcomes.Reviewed():
            return stopping.after_review(state, outcome, now)
        case outcomes.TargetReady():
            return state._replace(step=Step.LOAD if policy.is_consumer else Step.ACQUIRE, due=now)
        case outcomes.LeaseAnswered():
            return _after_acquire(state, outcome, now, policy)
        case outcomes.Loaded():
            return _after_load(state, outcome, now, policy)
        case outcomes.Fetched():
            return _after_fetch(state, outcome, now, policy)
        case outcomes.Delivered():
            following = state.following + outcome.following
            return state._replace(step=Step.STORE, due=now, delivered=True, following=following)
        case outcomes.Stored():
            return _after_store(state, outcome.pair, now, policy, saw_all=outcome.saw_all)
        case outcomes.Isolated():
            return _after_isolation(state, outcome, now, policy)
        case outcomes.Rejected():
            return stopping.after_refusal(state, outcome, now)
        case outcomes.CommitUnknown():
            return _after_lost_transaction(state, outcome, now)
        case outcomes.NotCommitted():
            wait = retry.infrastructure_backoff(state.failures, policy.delivery.retry, chance)
            return _after_rollback(state, now + wait)
        case outcomes.Recorded():
            return stopping.after_record(state, outcome, now)
        case outcomes.Throttled():
            return _throttled(state, outcome, now)
        case outcomes.Decision():
            return stopping.decide_after_look(state, outcome, now)
        case outcomes.Failed() if policy.is_consumer:
            return competing.after_failure(state, outcome.error, now, policy, chance)
        case outcomes.Failed():
            return _after_failure(state, outcome, now, policy, chance)
        case outcomes.OwnershipLost():
            return _after_loss(state, outcome, now)
        case outcomes.SourceMoved():
            return _sooner(state, outcome.useless, now)
        case outcomes.HandlerChanged() if policy.is_consumer:
            return competing.after_handler_change(state, now)
        case outcomes.HandlerChanged():
            return _after_handler_change(state, now)
        case outcomes.Assigned() | outcomes.Revoked() | outcomes.Released():
            return _after_sharing(state, outcome, now)
        case outcomes.StopRequested():
            return _after_stop(state, now)
        case _:
            assert_never(outcome)


def _since_crash(state: ProcessorState) -> ProcessorState:
    """Nothing of before is open: what is stored now says how all transactions ended.

    A 2 or 3 that is not recorded yet may mean a checkpoint that the crash took back. One that was edited by hand is
    seen when it is loaded.
    """
    refusal = None if state.refusal is not None and state.refusal.answer.needs_person else state.refusal
    return state._replace(
        stored=None, cursor=None, batch=None, claimed=None, sifted=None, delivered=False, decision=None,
        unstored_rows=0, doubt=None, refusal=refusal, attempt=0, stopped=None, given_up=None,
    )  # fmt: skip


def _after_rollback(state: ProcessorState, due: float) -> ProcessorState:
    step = Step.STORE if state.delivered else Step.FETCH
    cursor = state.cursor if state.delivered else state.stored
    return state._replace(step=step, due=due, doubt=None, decision=None, cursor=cursor)


def _resume(state: ProcessorState, now: float) -> ProcessorState:
    """After the database answers (again): first what was left unfinished.

    How far was looked beyond the stored checkpoint is forgotten, and looked at again.
    """
    if state.refusal is not None:
        step = Step.RECORD
    elif state.doubt is not None:
        step = Step.CONFIRM
    elif state.lease is None:
        # A consumer may complete what it delivered: its batch is its own as long as the database says so.
        step = Step.STORE if state.delivered else Step.CLAIM
    elif state.stored is None or state.cursor is None or state.stopped is not None:
        step = Step.LOAD
    elif state.delivered:
        step = Step.STORE
    else:
        step = Step.FETCH
        state = state._replace(cursor=state.stored, batch=None, decision=None, unstored_rows=0)
    return state._replace(step=step, due=now)


def _after_claim(state: ProcessorState, answer: outcomes.ClaimAnswered, now: float, chance: float) -> ProcessorState:
    if answer.granted:
        return state._replace(step=Step.REVIEW, due=now)
    failures = state.failures + 1
    return without_ownership(state)._replace(
        step=Step.CLAIM, due=now + retry.claim_backoff(failures, chance), failures=failures,
        state=WorkerState.CLAIM_REFUSED, reason=Reason.CLAIM_HELD,
        message=f"{answer.holder} owns this processorId; delete that resource, hand the claim over, or choose another "
        "processorId",
    )  # fmt: skip


def _after_acquire(state: ProcessorState, answer: outcomes.LeaseAnswered, now: float, policy: Policy) -> ProcessorState:
    if answer.lease is not None:
        return without_ownership(state)._replace(step=Step.LOAD, due=now, lease=answer.lease, failures=0)
    holder = f"pod {answer.pod} holds the lease" if answer.pod else "the lease is being handed over"
    note = f"; {answer.note}" if answer.note else ""
    return state._replace(
        step=Step.REVIEW, due=now + policy.standby_poll, failures=0, state=WorkerState.STANDBY,
        reason=Reason.LEASE_HELD, message=f"{holder}; this one takes over when it lapses{note}",
    )  # fmt: skip


def _after_load(state: ProcessorState, loaded: outcomes.Loaded, now: float, policy: Policy) -> ProcessorState:
    review = loaded.review
    in_flight = review.in_flight or (
        policy.delivery.batch_limit if review.crash_count >= failing.CRASHES_BEFORE_SEARCH else 0
    )
    if review.poison_crashes and not in_flight:
        in_flight = 1
    state = state._replace(
        stored=loaded.pair, cursor=loaded.pair, start_from_used=loaded.start_from_used, due=now,
        unstored_rows=0, forgiven=False, blocking=review.blocking, held_due=now if review.any_held else inf,
        poison_search=failing.PoisonSearch(in_flight) if policy.bisects and in_flight else None,
    )  # fmt: skip
    if state.stopped is not None:
        return stopping.resume(state, state.stopped, now)
    # Another owner may have handled what failed here, so that the next message is another one.
    return state._replace(step=Step.FETCH, attempt=0, state=WorkerState.ACTIVE, reason=Reason.RUNNING, message="")


def _after_fetch(state: ProcessorState, fetched: outcomes.Fetched, now: float, policy: Policy) -> ProcessorState:
    batch = fetched.batch
    if batch.matched_count or batch.excluded:
        some = state.block is not None and batch.matched_count > state.block and _may_isolate(state, policy)
        step = Step.ISOLATE if some else Step.HANDLE if batch.matched_count else Step.HOLD_BATCH
        return state._replace(
            step=step, due=now, batch=batch, begun=False, following=(), look_by=now + LOOK_SECONDS, idle=0,
            failed=(), turn_began=now,
        )  # fmt: skip
    if batch.waits_for is not None and batch.examined == batch.after:
        return _waiting(state, batch.waits_for, now)
    moved = batch.examined > batch.after
    state = state._replace(
        batch=None, cursor=batch.examined, idle=0 if moved else state.idle + 1, saw_all=batch.saw_all,
        unstored_since=state.unstored_since if state.unstored_rows else now,
        unstored_rows=state.unstored_rows + (max(batch.examined_count, 1) if moved else 0),
        owed=0.0, attempt=0, failures=0, state=WorkerState.ACTIVE, reason=Reason.IDLE, message="",
    )  # fmt: skip
    left = state.unstored_since + UNSTORED_SECONDS - now
    if state.unstored_rows and (fetched.at_once or state.unstored_rows >= UNSTORED_ROWS or left <= 0):
        return state._replace(step=Step.STORE, due=now)
    wait = 0.0 if batch.full else retry.idle_wait(state.idle, policy.poll_interval)
    if state.unstored_rows:
        wait = min(wait, left)
    return or_held(state._replace(step=Step.FETCH, due=now + wait), now)


def _waiting(state: ProcessorState, delayed: Delayed, now: float) -> ProcessorState:
    """Mode Ordered at a delayed message: not early, nothing overtakes it. What came before it and failed goes on."""
    state = state._replace(
        step=Step.FETCH, due=now + min(max(delayed.seconds, 0.01), DELAYED_LOOK), batch=None, idle=state.idle + 1,
        owed=0.0, state=WorkerState.RETRYING, reason=Reason.MESSAGE_DELAYED,
        message=f"message {delayed.message_id!r} at {delayed.checkpoint} is not to be handled for "
        f"{delayed.seconds:.0f} s (deliver_after), and everything waits for it, because mode Ordered keeps the order; "
        "use mode Partitioned or Competing for delayed messages, or clear the row's deliver_after",
    )  # fmt: skip
    return or_held(state, now)


def _after_store(
    state: ProcessorState, pair: Checkpoint, now: float, policy: Policy, *, saw_all: bool = False
) -> ProcessorState:
    full = state.batch is None or state.batch.full
    if state.doubt is not None:
        # What was held with it may be forgotten by now: look what is held before the next message.
        state = state._replace(blocking=True, held_due=now)
    owed = state.owed if state.batch is None else decide_after_turn(state.owed, Turn.FRESH, now - state.turn_began)
    if state.step is Step.HANDLE and state.block is not None:
        state = state._replace(block=decide_block(state.block, policy.delivery.batch_limit, through=True))
    state = with_newly_held(_narrowed(_trusted(state), pair), now)
    following = state.following
    # Where all was seen the look in vain that would follow counts as made.
    state = state._replace(
        step=Step.FETCH, due=now if full else now + retry.idle_wait(0, policy.poll_interval), stored=pair, cursor=pair,
        batch=None, delivered=False, doubt=None, attempt=0, failures=0, idle=int(saw_all), saw_all=saw_all,
        decision=None, unstored_rows=0, stopped=None, given_up=None, owed=owed,
        state=WorkerState.ACTIVE, reason=Reason.RUNNING, message="",
    )  # fmt: skip
    if following and not state.blocking and following[0].after.is_same(pair):
        return state._replace(
            step=Step.HANDLE, due=now, batch=following[0], begun=True, following=following[1:], failed=(),
            turn_began=now,
        )  # fmt: skip
    return or_held(state, now)


def _after_isolation(state: ProcessorState, found: outcomes.Isolated, now: float, policy: Policy) -> ProcessorState:
    """What failed is held, or will be with the checkpoint."""
    whole = state.batch is not None and found.batch.examined == state.batch.examined
    block = decide_block(found.next_block, policy.delivery.batch_limit, through=whole and not found.failed)
    state = state._replace(batch=found.batch, failed=found.failed, block=block, begun=False, following=())
    if not found.stored:
        return state._replace(step=Step.STORE, due=now, delivered=True)
    return _after_store(state, found.batch.examined, now, policy)


def _may_isolate(state: ProcessorState, policy: Policy) -> bool:
    """Say whether the messages that fail may be found in one step: not where they block all, or processes died."""
    passes = policy.delivery.blocking is not Blocks.PARTITION
    return policy.isolates and passes and state.poison_search is None and state.limit is None


def _trusted(state: ProcessorState) -> ProcessorState:
    """Messages that may be the poison message were handled, or are excluded."""
    if state.poison_search is None or state.batch is None:
        return state
    left = state.poison_search.left - state.batch.matched_count - len(state.batch.excluded)
    return state._replace(poison_search=failing.PoisonSearch(left) if left > 0 else None)


def _narrowed(state: ProcessorState, examined: Checkpoint) -> ProcessorState:
    """Go on looking for the message that fails: what was good is behind us, so it is in the other half."""
    if state.search_end is None or state.limit is None:
        return state
    if examined >= state.search_end:
        return state._replace(limit=None, search_end=None)
    return state._replace(limit=max(1, state.limit // 2))


def _after_lost_transaction(state: ProcessorState, doubt: outcomes.CommitUnknown, now: float) -> ProcessorState:
    """Reconnect at once and ask the contract; the wait comes before the batch is tried again."""
    return state._replace(
        step=Step.PREPARE, due=now, doubt=doubt, failures=state.failures + 1, state=WorkerState.UNAVAILABLE,
        reason=doubt.error.reason, message=str(doubt.error),
    )  # fmt: skip


def _after_failure(
    state: ProcessorState, failed: outcomes.Failed, now: float, policy: Policy, chance: float
) -> ProcessorState:
    error = failed.error
    batch = state.batch
    counts = failing.is_of_messages(error, policy.delivery.retry)
    if counts and state.lease is not None and state.step not in _WRITING_DOWN:
        if batch is not None and batch.held:
            return after_held_failure(state, batch, error, now, policy, chance)
        if batch is not None and batch.matched_count > 1:
            refused = state.step is Step.HANDLE and failing.is_refusal(error, policy.delivery.retry)
            if refused and _may_isolate(state, policy):
                return state._replace(
                    step=Step.ISOLATE, due=now, block=None, failures=0, state=WorkerState.RETRYING,
                    reason=error.reason, message=str(error),
                )  # fmt: skip
            if policy.bisects and error.reason not in failing.NO_MESSAGES_FAULT:
                return _bisected(state, batch, error, now)
        return _after_attempt(state, batch, failed, now, policy, chance)
    failures = state.failures + 1
    wait = retry.infrastructure_backoff(failures, policy.delivery.retry, chance, error)
    owner = state.lease is not None and retry.is_of_target(error)
    held = state.held_due if batch is None or not batch.held else now + wait
    return state._replace(
        step=Step.PREPARE, due=now + wait, failures=failures, decision=None, held_due=held,
        batch=batch if state.delivered else None,
        state=WorkerState.RETRYING if owner else WorkerState.UNAVAILABLE, reason=error.reason, message=str(error),
    )  # fmt: skip


def _after_attempt(
    state: ProcessorState, batch: Batch | None, failed: outcomes.Failed, now: float, policy: Policy, chance: float
) -> ProcessorState:
    """One message failed alone (or, where nothing is halved, a batch): again here, held, or no more."""
    delivery, error = policy.delivery, failed.error
    attempt = state.attempt + 1
    state = state._replace(attempt=attempt, failures=0, reason=error.reason, message=str(error))
    of_batch = error.reason in failing.NO_MESSAGES_FAULT or not policy.bisects or batch is None
    decision = stopping.decide_given_up(state, failed)
    if decision is None and (delivery.blocking is Blocks.PARTITION or of_batch):
        delay = retry.decide_retry(attempt, delivery.retry, chance, error)
        if delay is not None:
            return state._replace(step=Step.FETCH, due=now + delay, batch=None, state=WorkerState.RETRYING)
        decision = None if of_batch else failing.decide_end(error, attempt, delivery)
    elif decision is None:
        decision = failing.decide_failure(error, attempt, delivery, chance)
    if decision is None:
        return stopping.stop(state, failed, batch, now)
    return state._replace(step=Step.HOLD_BATCH, due=now, batch=batch, decision=decision, state=WorkerState.RETRYING)


def _throttled(state: ProcessorState, throttled: outcomes.Throttled, now: float) -> ProcessorState:
    """The rate is used up: what is in hand stays there. The target is let be: others may have a consumer's batch."""
    if throttled.reason is Reason.RUNNING:
        return state._replace(due=now + throttled.seconds)
    state = state._replace(state=WorkerState.RETRYING, reason=throttled.reason, message=throttled.message)
    if state.step in HANDS_OVER:
        # The pause may be long: it is read again afterwards, as a person may have decided meanwhile.
        held = state.held_due if state.batch is None or not state.batch.held else now + throttled.seconds
        state = state._replace(step=Step.FETCH, batch=None, held_due=held)
    return competing.handed_back(state, now, throttled.seconds)


def _bisected(state: ProcessorState, batch: Batch, error: OutboxError, now: float) -> ProcessorState:
    """Try the first half at once: what is good gets through, and in the end the message that fails is alone.

    Where the target names the messages that failed, all before the first of them instead.
    """
    half = (batch.matched_count + len(batch.excluded)) // 2
    if isinstance(error, MessagesFailedError):
        half = max(1, [message.checkpoint in error.failed for message in batch].index(True))
    return state._replace(
        step=Step.FETCH, due=now, batch=None, failures=0, limit=half, search_end=batch.examined,
        state=WorkerState.RETRYING, reason=error.reason,
        message=f"{error}; looking for the message among {batch.matched_count}",
    )  # fmt: skip


def _after_loss(state: ProcessorState, lost: outcomes.OwnershipLost, now: float) -> ProcessorState:
    return without_ownership(state)._replace(
        step=Step.PREPARE, due=now, state=WorkerState.STARTING, reason=Reason.LEASE_LOST,
        message=f"{lost.message}; asking for ownership again",
    )  # fmt: skip


def _after_sharing(
    state: ProcessorState, outcome: outcomes.Assigned | outcomes.Revoked | outcomes.Released, now: float
) -> ProcessorState:
    """The replicas share the partitions: this one becomes ours, or another's."""
    match outcome:
        case outcomes.Assigned():
            return state._replace(step=Step.REVIEW, due=now)
        case outcomes.Revoked() if state.lease is not None:
            return state._replace(step=Step.RELEASE, due=now)
        case outcomes.Revoked() | outcomes.Released():
            return without_ownership(state)._replace(
                step=Step.PARK, due=inf, attempt=0, failures=0, stopped=None, state=WorkerState.STANDBY,
                reason=Reason.LEASE_HELD, message="another replica owns this partition",
            )  # fmt: skip


def _after_handler_change(state: ProcessorState, now: float) -> ProcessorState:
    """The handler's file changed: what was given up is tried again."""
    if state.step is Step.PARK:
        return state
    state = state._replace(attempt=0, stopped=None, due=now)
    if state.lease is None or state.step not in (Step.HOLD, Step.FETCH, Step.TAKE_HELD):
        return state
    return state._replace(step=Step.LOAD, batch=None, forgiven=True)


def _sooner(state: ProcessorState, useless: int, now: float) -> ProcessorState:
    """Look for messages now, or soon where looks were in vain; what is not visible yet is looked for again."""
    due = min(state.due, now + retry.wake_wait(useless))
    idle = min(state.idle, SETTLED_LOOKS - 1) if useless > 0 else 0
    return state._replace(step=Step.FETCH, due=due, idle=idle, saw_all=False)


def _after_stop(state: ProcessorState, now: float) -> ProcessorState:
    state = state._replace(due=now, state=WorkerState.DRAINING, reason=Reason.DRAINING, message="asked to stop")
    return state if state.is_last_work and state.failures == 0 else state._replace(step=Step.END)
