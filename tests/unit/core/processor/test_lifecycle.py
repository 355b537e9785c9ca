"""The state machine as a table: in this state, when that happens, this is next."""

from __future__ import annotations

from math import inf
from uuid import UUID

import pytest

from outbox_core.errors import ConfigurationError, HandlerError, TransientError
from outbox_core.message import Batch
from outbox_core.processor import lifecycle as p
from outbox_core.processor import outcomes
from outbox_core.processor.failing import Action, Failure, FailureDecision
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.state import NEEDS_CLAIM, NEEDS_LEASE, Policy, ProcessorState, Step, Stopped, initial_state
from outbox_core.processor.stopping import DECISION_POLL, NAMING_POLL, Named
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.report import Reason, ResourceRef, WorkerState
from outbox_core.spec import Delivery, Retry

NOW = 1000.0
LEASE = outcomes.HeldLease(0, 7, UUID(int=7))
A, B, C = Checkpoint(100, 1), Checkpoint(100, 9), Checkpoint(200, 3)
POLICY = Policy(Delivery(retry=Retry(max_attempts=3, initial_backoff="1s", max_backoff="8s", jitter=0)))
DOWN = TransientError("the database is down", reason=Reason.DATABASE_UNAVAILABLE)


def batch(
    *, matched: int = 5, full: bool = True, after: Checkpoint = A, examined: Checkpoint = B, count: int = 9
) -> Batch:
    return Batch(after, examined, (), count, full=full, matched_count=matched)


def owner(**fields: object) -> ProcessorState:
    state = ProcessorState(
        step=Step.FETCH, due=NOW, state=WorkerState.ACTIVE, reason=Reason.RUNNING, lease=LEASE, stored=A, cursor=A
    )
    return state._replace(**fields)  # type: ignore[arg-type]


def decide(
    state: ProcessorState, outcome: outcomes.StepOutcome, now: float = NOW, chance: float = 0.5
) -> ProcessorState:
    return decide_next(state, outcome, now, POLICY, chance)


def test_a_normal_life_reaches_the_first_batch_without_waiting():
    state = initial_state(NOW)
    steps = []
    for outcome in (
        outcomes.Prepared(),
        outcomes.ClaimAnswered(granted=True, holder=None),
        outcomes.Reviewed(None),
        outcomes.TargetReady(),
        outcomes.LeaseAnswered(LEASE),
        outcomes.Loaded(A, start_from_used=True),
        outcomes.Fetched(batch()),
        outcomes.Stored(B, 5),
    ):
        state = decide(state, outcome)
        steps.append(state.step)
        assert state.due == NOW
    assert steps == [
        Step.CLAIM,
        Step.REVIEW,
        Step.CHECK_TARGET,
        Step.ACQUIRE,
        Step.LOAD,
        Step.FETCH,
        Step.HANDLE,
        Step.FETCH,
    ]
    assert (state.stored, state.cursor, state.state, state.start_from_used) == (B, B, WorkerState.ACTIVE, True)


@pytest.mark.parametrize(
    ("state", "outcome", "step", "worker_state", "reason", "wait"),
    [
        pytest.param(
            owner(lease=None, step=Step.CLAIM),
            outcomes.ClaimAnswered(granted=False, holder=ResourceRef(cluster="c", namespace="n", name="x", uid="u")),
            Step.CLAIM,
            WorkerState.CLAIM_REFUSED,
            Reason.CLAIM_HELD,
            0.9,
            id="a claim of another is asked for",
        ),
        pytest.param(
            owner(lease=None, step=Step.ACQUIRE),
            outcomes.LeaseAnswered(None, "pod-1"),
            Step.REVIEW,
            WorkerState.STANDBY,
            Reason.LEASE_HELD,
            1.0,
            id="a lease held by another pod makes a standby",
        ),
        pytest.param(
            owner(lease=None, step=Step.REVIEW),
            outcomes.Reviewed(outcomes.OpenConflict(4, 2, A, C)),
            Step.REVIEW,
            WorkerState.BLOCKED,
            Reason.CHECKPOINT_AHEAD,
            2.0,
            id="an open conflict blocks, ahead",
        ),
        pytest.param(
            owner(lease=None, step=Step.REVIEW),
            outcomes.Reviewed(outcomes.OpenConflict(4, 3, B, None)),
            Step.REVIEW,
            WorkerState.BLOCKED,
            Reason.CHECKPOINT_OLDER,
            2.0,
            id="an open conflict blocks, gone",
        ),
        pytest.param(
            owner(step=Step.HANDLE, batch=batch(matched=1)),
            outcomes.Failed(HandlerError("no")),
            Step.FETCH,
            WorkerState.RETRYING,
            Reason.HANDLER_FAILED,
            1.0,
            id="a rejected message is tried again",
        ),
        pytest.param(
            owner(step=Step.HANDLE, batch=batch()),
            outcomes.Failed(HandlerError("no")),
            Step.FETCH,
            WorkerState.RETRYING,
            Reason.HANDLER_FAILED,
            0.0,
            id="of a rejected batch the half is tried",
        ),
        pytest.param(
            owner(step=Step.HANDLE, batch=batch()),
            outcomes.Failed(HandlerError("no", reason=Reason.HANDLER_ENDED_TRANSACTION)),
            Step.FETCH,
            WorkerState.RETRYING,
            Reason.HANDLER_ENDED_TRANSACTION,
            1.0,
            id="no message ends transactions",
        ),
        pytest.param(
            owner(step=Step.HANDLE, attempt=1),
            outcomes.Failed(HandlerError("no")),
            Step.FETCH,
            WorkerState.RETRYING,
            Reason.HANDLER_FAILED,
            2.0,
            id="the backoff doubles",
        ),
        pytest.param(
            owner(step=Step.HANDLE, attempt=2),
            outcomes.Failed(HandlerError("no")),
            Step.HOLD,
            WorkerState.STOPPED,
            Reason.ATTEMPTS_EXHAUSTED,
            inf,
            id="when attempts run out it stops",
        ),
        pytest.param(
            owner(step=Step.FETCH),
            outcomes.Failed(DOWN),
            Step.PREPARE,
            WorkerState.UNAVAILABLE,
            Reason.DATABASE_UNAVAILABLE,
            1.0,
            id="a database that is down",
        ),
        pytest.param(
            owner(step=Step.HANDLE, failures=50),
            outcomes.Failed(TransientError("x", reason=Reason.TARGET_UNAVAILABLE)),
            Step.PREPARE,
            WorkerState.RETRYING,
            Reason.TARGET_UNAVAILABLE,
            8.0,
            id="a broker that is down",
        ),
        pytest.param(
            owner(step=Step.HANDLE),
            outcomes.Failed(TransientError("x", reason=Reason.MESSAGE_UNROUTABLE)),
            Step.PREPARE,
            WorkerState.RETRYING,
            Reason.MESSAGE_UNROUTABLE,
            1.0,
            id="unroutable uses no attempt",
        ),
        pytest.param(
            owner(lease=None, step=Step.CHECK_TARGET),
            outcomes.Failed(ConfigurationError("x", reason=Reason.HANDLER_INVALID)),
            Step.PREPARE,
            WorkerState.UNAVAILABLE,
            Reason.HANDLER_INVALID,
            1.0,
            id="an invalid handler",
        ),
        pytest.param(
            owner(),
            outcomes.OwnershipLost("frozen"),
            Step.PREPARE,
            WorkerState.STARTING,
            Reason.LEASE_LOST,
            0.0,
            id="a lost lease is asked for again at once",
        ),
        pytest.param(
            owner(),
            outcomes.StopRequested(),
            Step.END,
            WorkerState.DRAINING,
            Reason.DRAINING,
            0.0,
            id="SIGTERM between batches ends",
        ),
        pytest.param(
            owner(step=Step.STORE, delivered=True, batch=batch()),
            outcomes.StopRequested(),
            Step.STORE,
            WorkerState.DRAINING,
            Reason.DRAINING,
            0.0,
            id="SIGTERM after delivery stores first",
        ),
        pytest.param(
            owner(step=Step.STORE, delivered=True, batch=batch(), failures=1),
            outcomes.StopRequested(),
            Step.END,
            WorkerState.DRAINING,
            Reason.DRAINING,
            0.0,
            id="SIGTERM does not wait for a store that failed",
        ),
    ],
)
def test_what_happens_leads_to(state, outcome, step, worker_state, reason, wait):
    after = decide(state, outcome)
    assert (after.step, after.state, after.reason) == (step, worker_state, reason)
    assert after.due - NOW == pytest.approx(wait)


@pytest.mark.parametrize(
    ("answer", "step"),
    [(StoreAnswer.IGNORED, Step.FETCH), (StoreAnswer.AHEAD, Step.RECORD), (StoreAnswer.OLDER, Step.RECORD),
     (StoreAnswer.NOT_OWNER, Step.RECORD)],
)  # fmt: skip
def test_each_refusal_has_its_way(answer, step):
    after = decide(owner(step=Step.HANDLE, batch=batch(), attempt=1), outcomes.Rejected(answer, A, B, C))
    assert after.step is step
    if answer is StoreAnswer.IGNORED:
        assert (after.stored, after.cursor, after.attempt, after.refusal) == (B, B, 0, None)
    else:
        assert after.refusal is not None
        assert after.stored == A


def test_what_was_decided_of_a_batch_that_was_stored_before_does_not_meet_the_next():
    decision = FailureDecision(Action.SKIP, 3, "E", "no", None, blocks=True)
    state = owner(step=Step.HOLD_BATCH, batch=batch(matched=1), decision=decision)
    after = decide(
        decide(state, outcomes.Rejected(StoreAnswer.IGNORED, A, B, B)), outcomes.Fetched(batch(after=B, examined=C))
    )
    assert (after.step, after.decision) == (Step.HANDLE, None)


def test_what_was_set_aside_in_a_lost_transaction_is_looked_for_although_it_was_forgotten():
    """The COMMIT had no answer, and neither had the question whether it arrived: the decision is gone by then."""
    decision = FailureDecision(Action.DEAD_LETTER, 3, "E", "no", None, blocks=True)
    state = decide(
        owner(step=Step.HOLD_BATCH, batch=batch(matched=1), decision=decision), outcomes.CommitUnknown(A, B, True, DOWN)
    )
    for outcome in (outcomes.Failed(DOWN), outcomes.Prepared()):
        state = decide(state, outcome)
    assert (state.step, state.decision) == (Step.CONFIRM, None)
    after = decide(state, outcomes.Stored(B, 0))
    assert (after.step, after.blocking) == (Step.TAKE_HELD, True)


def test_to_ask_about_a_lost_transaction_is_no_attempt_at_a_message():
    doubt = outcomes.CommitUnknown(A, B, committing=True, error=DOWN)
    state = owner(step=Step.CONFIRM, doubt=doubt, batch=batch(matched=1))
    after = decide(state, outcomes.Failed(HandlerError("a lock was not free in time")))
    assert (after.step, after.doubt, after.attempt) == (Step.PREPARE, doubt, 0)


def test_after_2_or_3_only_a_person_goes_on():
    refused = outcomes.Rejected(StoreAnswer.AHEAD, A, B, C)
    after = decide(owner(step=Step.RECORD, refusal=refused), outcomes.Recorded(12))
    assert (after.step, after.state, after.lease) == (Step.REVIEW, WorkerState.BLOCKED, None)
    assert 'accept-checkpoint: "12=200:3"' in after.message
    assert "expected 100:1" in after.message


def test_after_4_ownership_is_asked_for_again():
    refused = outcomes.Rejected(StoreAnswer.NOT_OWNER, A, B, C)
    after = decide(owner(step=Step.RECORD, refusal=refused), outcomes.Recorded(12))
    assert (after.step, after.lease, after.stored, after.reason) == (Step.CLAIM, None, None, Reason.NOT_OWNER)
    assert after.due > NOW


@pytest.mark.parametrize("committing", [True, False], ids=["in COMMIT", "before COMMIT"])
def test_a_lost_transaction_is_asked_about_before_anything_else(committing):
    lost = decide(owner(step=Step.HANDLE, batch=batch()), outcomes.CommitUnknown(A, B, committing, DOWN))
    assert lost.step is Step.PREPARE
    asked = decide(lost, outcomes.Prepared())
    assert asked.step is Step.CONFIRM
    assert decide(asked, outcomes.NotCommitted()).step is Step.FETCH
    assert decide(asked, outcomes.Stored(B, 5)).stored == B
    refused = decide(asked, outcomes.Rejected(StoreAnswer.NOT_OWNER, A, B, C))
    # A commit that may have arrived is no conflict; a batch that was certainly rolled back is reported.
    assert refused.step is (Step.CLAIM if committing else Step.RECORD)


def test_a_session_that_breaks_every_time_is_not_a_busy_loop():
    state = owner()
    waits = []
    for _ in range(5):
        state = decide(state, outcomes.CommitUnknown(A, B, committing=False, error=DOWN))
        state = decide(decide(state, outcomes.Prepared()), outcomes.NotCommitted())
        waits.append(state.due - NOW)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_what_was_delivered_is_stored_later_without_delivering_again():
    delivered = decide(owner(step=Step.HANDLE, batch=batch()), outcomes.Delivered(5))
    failed = decide(delivered, outcomes.Failed(DOWN))
    assert failed.step is Step.PREPARE
    assert decide(failed, outcomes.Prepared()).step is Step.STORE
    unsure = decide(delivered, outcomes.CommitUnknown(A, B, committing=True, error=DOWN))
    assert decide(decide(unsure, outcomes.Prepared()), outcomes.NotCommitted()).step is Step.STORE


def test_of_a_server_that_crashed_only_what_is_stored_is_believed():
    delivered = decide(owner(step=Step.HANDLE, batch=batch()), outcomes.Delivered(5))
    unsure = decide(delivered, outcomes.CommitUnknown(A, B, committing=True, error=DOWN))
    for state in (decide(delivered, outcomes.Failed(DOWN)), unsure):
        again = decide(state, outcomes.Prepared(crashed=True))
        assert (again.step, again.stored, again.cursor, again.batch) == (Step.LOAD, None, None, None)
        assert (again.delivered, again.doubt, again.lease) == (False, None, state.lease)


def test_of_a_message_that_a_crash_may_have_taken_back_no_attempt_is_counted():
    stopped = Stopped("100:1", "gave up", pair=A)
    state = owner(step=Step.PREPARE, attempt=10, stopped=stopped, given_up="100:1")
    again = decide(state, outcomes.Prepared(crashed=True))
    assert (again.step, again.attempt, again.stopped, again.given_up) == (Step.LOAD, 0, None, None)


def test_attempts_at_a_message_that_another_owner_may_have_handled_do_not_count():
    lost = decide(owner(attempt=9), outcomes.OwnershipLost("it lapsed"))
    loaded = decide(lost._replace(step=Step.LOAD, lease=LEASE), outcomes.Loaded(B, start_from_used=False))
    assert (loaded.step, loaded.attempt) == (Step.FETCH, 0)


@pytest.mark.parametrize(
    ("answer", "step"),
    [(StoreAnswer.AHEAD, Step.LOAD), (StoreAnswer.OLDER, Step.LOAD), (StoreAnswer.NOT_OWNER, Step.RECORD)],
)
def test_a_refusal_that_a_crash_explains_is_no_conflict(answer, step):
    refused = decide(owner(step=Step.HANDLE, batch=batch()), outcomes.Rejected(answer, A, B, None))
    failed = decide(refused, outcomes.Failed(DOWN))
    assert decide(failed, outcomes.Prepared()).step is Step.RECORD
    assert decide(failed, outcomes.Prepared(crashed=True)).step is step


def test_how_far_was_looked_beyond_the_checkpoint_is_forgotten_with_the_connection():
    looked = decide(owner(), outcomes.Fetched(batch(matched=0, count=6000)))
    assert (looked.stored, looked.cursor) == (A, B)
    again = decide(decide(looked, outcomes.Failed(DOWN)), outcomes.Prepared())
    assert (again.step, again.cursor, again.unstored_rows) == (Step.FETCH, A, 0)


def test_filtered_rows_move_the_cursor_and_are_stored_by_count_or_time():
    nothing = batch(matched=0, count=6000)
    first = decide(owner(), outcomes.Fetched(nothing))
    assert (first.step, first.cursor, first.stored) == (Step.FETCH, B, A)
    second = decide(first, outcomes.Fetched(batch(matched=0, count=6000, after=B, examined=C)))
    assert (second.step, second.cursor) == (Step.STORE, C)
    idle = batch(matched=0, after=B, examined=B, count=0, full=False)
    late = decide(first, outcomes.Fetched(idle), now=NOW + p.UNSTORED_SECONDS)
    assert late.step is Step.STORE
    assert decide(late, outcomes.Stored(B)).unstored_rows == 0


def test_polling_adapts():
    idle = batch(matched=0, after=A, examined=A, count=0, full=False)
    state, waits = owner(), []
    for _ in range(8):
        state = decide(state, outcomes.Fetched(idle))
        waits.append(round(state.due - NOW, 3))
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    busy = decide(owner(step=Step.HANDLE, batch=batch(full=True)), outcomes.Stored(B, 5))
    trickle = decide(owner(step=Step.HANDLE, batch=batch(full=False)), outcomes.Stored(B, 5))
    assert busy.due == NOW
    assert 0 < trickle.due - NOW <= 0.01


def test_parts_grow_only_after_a_batch_of_which_all_got_through():
    whole, part = batch(), batch(examined=Checkpoint(100, 5))
    failure = Failure(B, FailureDecision(Action.HOLD, 1, "E", "no", 1.0, blocks=True))

    def block(found: Batch, failed: tuple[Failure, ...] = ()) -> int | None:
        isolated = outcomes.Isolated(found, failed, 8, next_block=6, stored=True)
        return decide(owner(step=Step.ISOLATE, batch=whole, block=4), isolated).block

    assert block(whole) == 12
    assert block(part) == 6, "there was no time for the rest"
    assert block(whole, (failure,)) == 6


def test_a_changed_handler_restarts_what_was_given_up():
    stopped = decide(owner(step=Step.HANDLE, attempt=2), outcomes.Failed(HandlerError("no")))
    again = decide(stopped, outcomes.HandlerChanged())
    assert (again.step, again.attempt, again.stopped, again.due) == (Step.LOAD, 0, None, NOW)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (StoreAnswer.IGNORED, Step.FETCH),
        (StoreAnswer.NOT_OWNER, Step.RECORD),
        (StoreAnswer.AHEAD, Step.RECORD),
    ],
)
def test_after_sigterm_a_store_and_a_report_are_the_last_work(answer, told):
    stopping = decide(owner(step=Step.STORE, delivered=True, batch=batch()), outcomes.StopRequested())
    assert stopping.is_last_work
    refused = decide(stopping, outcomes.Rejected(answer, A, B, C))
    assert (refused.step, refused.is_last_work) == (told, told is Step.RECORD)
    assert not decide(stopping, outcomes.Stored(B, 5)).is_last_work
    assert not decide(stopping, outcomes.Failed(DOWN)).is_last_work
    assert not owner(step=Step.STORE).is_last_work


def test_a_stopped_processor_stays_stopped_under_a_new_lease():
    stopped = decide(owner(step=Step.HANDLE, attempt=2), outcomes.Failed(HandlerError("no")))
    lost = decide(stopped, outcomes.OwnershipLost("database restarted"))
    back = decide(lost._replace(lease=LEASE), outcomes.Loaded(A, start_from_used=False))
    assert (back.step, back.state) == (Step.HOLD, WorkerState.STOPPED)


def test_a_stop_ends_where_another_owner_has_passed_the_message():
    stopped = decide(owner(step=Step.HANDLE, attempt=2), outcomes.Failed(HandlerError("no")))
    lost = decide(stopped, outcomes.OwnershipLost("database restarted"))
    back = decide(lost._replace(lease=LEASE), outcomes.Loaded(B, start_from_used=False))
    assert (back.step, back.state, back.attempt, back.stopped) == (Step.FETCH, WorkerState.ACTIVE, 0, None)
    assert back.message == ""


def test_a_message_that_could_not_be_named_is_named_later_and_waits_for_a_decision_then():
    alone = batch(matched=1)
    stopped = decide(owner(step=Step.HANDLE, attempt=2, batch=alone), outcomes.Failed(HandlerError("no")))
    assert stopped.stopped is not None
    assert (stopped.stopped.unnamed, stopped.due) == (alone, NOW + NAMING_POLL)
    waiting = decide(stopped, outcomes.Decision(given_up=False), now=stopped.due)
    assert (waiting.step, waiting.due) == (Step.HOLD, NOW + 2 * NAMING_POLL)

    named = decide(
        waiting, outcomes.Decision(given_up=False, named=Named("100:4", "message 'm'", "outbox it")), now=NOW
    )
    assert named.stopped is not None
    assert (named.step, named.due, named.stopped.place) == (Step.HOLD, NOW + DECISION_POLL, "100:4")
    assert named.message.endswith("it is message 'm'; or let the rest go on without this message: outbox it")
    decided = decide(named, outcomes.Decision(given_up=True))
    assert (decided.step, decided.given_up, decided.limit) == (Step.FETCH, "100:4", 1)


def test_a_refusal_that_could_not_be_recorded_is_recorded_later():
    refused = decide(owner(step=Step.HANDLE, batch=batch()), outcomes.Rejected(StoreAnswer.OLDER, A, B, None))
    down = decide(refused, outcomes.Failed(DOWN))
    assert decide(down, outcomes.Prepared()).step is Step.RECORD


def test_what_was_refused_is_recorded_without_the_lease_and_a_lease_needs_the_claim():
    assert Step.RECORD not in NEEDS_LEASE
    assert Step.ACQUIRE in NEEDS_CLAIM


def test_a_partition_rests_before_it_stores_what_was_only_read_not_what_was_delivered():
    assert owner(step=Step.STORE).rests
    assert not owner(step=Step.STORE, batch=batch(), delivered=True).rests
