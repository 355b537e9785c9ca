"""What a consumer does next, which priority goes first, and what becomes of a message that failed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.errors import HandlerError, TransientError
from outbox_core.message import Message
from outbox_core.processor import outcomes
from outbox_core.processor.claimed_batch import Chunk, ClaimedBatch, Refusal, RefusalAction, RefusalDecision
from outbox_core.processor.competing import choose_priority, decide_refusal
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.outcomes import Completed, Deferred, Joined, Lost, NothingTaken, Sifted, Taken
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.processor.stopping import DECISION_POLL, Named
from outbox_core.processor.turns import Turn, decide_turn
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot import Snapshot, parse_snapshot
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import Reason, ResourceRef, WorkerState
from outbox_core.spec import Competing, Delivery, Mode, Retry, WhenExhausted

NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
POLICY = Policy(Delivery(mode=Mode.COMPETING, competing=Competing()))
END = Checkpoint(10, 100)
WORK = ClaimedBatch(1, 0, 1, SnapshotRange("5:5:", "11:11:"), (), BEGINNING, END, 8)


def piece_of(claimed, count, examined=END):
    return Chunk(claimed.after, examined, (), count, full=True, matched_count=count, claimed=claimed)


def decide(state, outcome, chance=0.0):
    return decide_next(state, outcome, 0.0, POLICY, chance)


def handling(count=8, examined=END, claimed=WORK):
    return decide(ProcessorState(Step.FETCH, 0.0, WorkerState.ACTIVE), Taken(piece_of(claimed, count, examined)))


@pytest.mark.parametrize(
    ("heads", "chosen"),
    [
        pytest.param({5: NOON}, 5, id="the only one"),
        pytest.param({0: NOON, 9: NOON}, 0, id="the more urgent one"),
        pytest.param(
            {0: NOON, 9: NOON - 9 * MINUTE}, 0, id="just as old as its levels are worth: still the urgent one"
        ),
        pytest.param({0: NOON, 9: NOON - 9.1 * MINUTE}, 9, id="it has waited for longer than that"),
        pytest.param({4: NOON, 5: NOON - 2 * MINUTE, 6: NOON - 2.5 * MINUTE}, 5, id="the best of several"),
    ],
)
def test_priority_ages(heads, chosen):
    assert choose_priority(heads, MINUTE) == chosen


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_nothing_waits_for_ever_behind_what_is_more_urgent(arrivals, priority):
    """One message a minute is handled; more urgent ones arrive all the time; the old one's turn comes all the same."""
    heads = {priority: NOON}
    urgent = [NOON + MINUTE * minute for minute, count in enumerate(arrivals * 20) for _ in range(count)]
    handled_before = 0
    while urgent:
        if choose_priority(heads | {0: urgent[0]}, MINUTE) == priority:
            break
        urgent.pop(0)
        handled_before += 1
    stored_in_time = sum(1 for minute, count in enumerate(arrivals * 20) for _ in range(count) if minute <= priority)
    assert handled_before <= stored_in_time


def delivering(retry, when):
    return POLICY.delivery.model_copy(update={"retry": retry, "when_exhausted": when})


@pytest.mark.parametrize(
    ("when", "action", "attempts"),
    [
        (WhenExhausted.STOP, RefusalAction.STOP, 3),
        (WhenExhausted.DEAD_LETTER, RefusalAction.DEAD_LETTER, 3),
        (WhenExhausted.SKIP, RefusalAction.SKIP, 3),
        (WhenExhausted.REQUEUE, RefusalAction.RETRY, 0),
    ],
)
def test_what_becomes_of_a_message_whose_attempts_ran_out(when, action, attempts):
    delivery = delivering(Retry(max_attempts=3), when)
    error = HandlerError("no")
    assert decide_refusal(2, error, delivery, 0.0) == RefusalDecision(RefusalAction.RETRY, 2, 2.0)
    decision = decide_refusal(3, error, delivery, 0.0)
    assert (decision.action, decision.attempts) == (action, attempts)
    assert decision.wait == (60.0 if action is RefusalAction.RETRY else 0.0)


def test_a_message_that_a_person_gave_up_is_tried_and_then_dead():
    delivery = delivering(Retry(max_attempts=3), WhenExhausted.STOP)
    assert decide_refusal(2, HandlerError("no"), delivery, 0.0, given_up=True) == RefusalDecision(
        RefusalAction.RETRY, 2, 2.0
    )
    assert decide_refusal(3, HandlerError("no"), delivery, 0.0, given_up=True) == RefusalDecision(
        RefusalAction.DEAD_LETTER, 3
    )
    assert decide_refusal(3, HandlerError("no"), delivery, 0.0) == RefusalDecision(RefusalAction.STOP, 3)


def test_a_batch_that_fails_is_halved_until_one_is_alone_which_leaves_it():
    state = handling(8)
    state = decide(state, outcomes.Failed(HandlerError("no")))
    assert (state.step, state.limit, state.state) == (Step.FETCH, 4, WorkerState.RETRYING)
    state = decide(state, Taken(piece_of(WORK, 1, Checkpoint(10, 93))))
    state = decide(state, outcomes.Failed(HandlerError("no")))
    assert state.step is Step.DEFER
    state = decide(state, Deferred(RefusalDecision(RefusalAction.RETRY, 1, 1.0), Checkpoint(10, 93)))
    assert (state.step, state.claimed.after, state.claimed.count) == (Step.FETCH, Checkpoint(10, 93), 7)


def test_the_last_message_leaves_a_batch_that_reaches_further_and_is_still_to_be_completed():
    state = decide(handling(1, claimed=replace(WORK, count=1)), outcomes.Failed(HandlerError("no")))
    assert (state.step, state.batch.examined) == (Step.DEFER, END)
    state = decide(state, Deferred(RefusalDecision(RefusalAction.RETRY, 1, 1.0), Checkpoint(10, 93)))
    assert (state.step, state.claimed.after, state.claimed.count, state.failure) == (
        Step.FETCH,
        Checkpoint(10, 93),
        0,
        None,
    )
    state = decide(state, NothingTaken(moved=True))
    assert (state.step, state.claimed) == (Step.FETCH, None)


def test_a_batch_is_over_with_the_message_at_its_end():
    state = decide(handling(1, claimed=replace(WORK, count=1)), outcomes.Failed(HandlerError("no")))
    state = decide(state, Deferred(RefusalDecision(RefusalAction.DEAD_LETTER, 1), END))
    assert (state.step, state.claimed) == (Step.FETCH, None)


def test_what_was_done_grows_again_after_a_failure():
    state = handling(2, Checkpoint(10, 94))._replace(limit=2)
    state = decide(state, Completed(2))
    assert (state.limit, state.claimed.count) == (4, 6)
    state = decide(state._replace(batch=piece_of(state.claimed, 6), step=Step.HANDLE), Completed(6))
    assert (state.claimed, state.limit, state.step) == (None, None, Step.FETCH)


ISOLATING = replace(POLICY, isolates=True)
NO = HandlerError("no")
MESSAGE = Message(10, 93, "m", "t", "p", None, "{}", None, NOON)
ROW = Checkpoint(10, 96)


def refused(action=RefusalAction.RETRY):
    return Refusal(MESSAGE, NO, RefusalDecision(action, 1, 1.0))


def isolating(state, outcome, now=0.0):
    return decide_next(state, outcome, now, ISOLATING, 0.0)


def test_where_effects_are_in_a_transaction_a_piece_that_fails_is_handled_again_in_parts():
    state = isolating(handling(8), outcomes.Failed(NO))
    assert (state.step, state.block, state.limit, state.batch.matched_count) == (Step.HANDLE, 4, None, 8)
    state = isolating(state, Sifted(4, ROW, (refused(),), block=2))
    assert (state.step, state.claimed.after, state.claimed.count, state.block) == (Step.FETCH, ROW, 4, 2)
    assert (state.state, state.reason) == (WorkerState.ACTIVE, Reason.RUNNING), "three were handled"
    state = isolating(
        state._replace(step=Step.HANDLE, batch=piece_of(state.claimed, 4)), Sifted(4, END, (), block=1000)
    )
    assert (state.claimed, state.block) == (None, None), "all of a batch at once, again"


def test_parts_grow_only_after_a_piece_of_which_all_got_through():
    assert isolating(handling(8), Sifted(8, END, (), block=6)).block == 12
    assert isolating(handling(8), Sifted(4, ROW, (), block=6)).block == 6, "there was no time for the rest"
    assert isolating(handling(8), Sifted(8, END, (refused(),), block=6)).block == 6


def test_what_was_sifted_and_is_not_completed_yet_is_completed_also_after_a_fault_of_the_database():
    state = isolating(handling(8), Sifted(8, END, (refused(),), block=2, settled=False))
    assert (state.step, state.delivered) == (Step.STORE, True)
    state = isolating(state, outcomes.Failed(TransientError("down", reason=Reason.DATABASE_UNAVAILABLE)))
    state = isolating(state, outcomes.Prepared())
    assert (state.step, state.sifted.behind) == (Step.STORE, 8)
    state = isolating(state, replace(state.sifted, settled=True))
    assert (state.step, state.claimed, state.delivered, state.sifted) == (Step.FETCH, None, False, None)


def test_a_message_to_stop_at_is_next_once_what_was_before_it_is_behind():
    stop = refused(RefusalAction.STOP)
    state = isolating(handling(8), Sifted(3, ROW, (), block=1, stop=stop))
    assert (state.step, state.state, state.claimed.after, state.claimed.count) == (
        Step.HOLD,
        WorkerState.STOPPED,
        ROW,
        5,
    )
    state = isolating(handling(8), Sifted(0, None, (), block=1, stop=stop))
    assert (state.step, state.claimed) == (Step.HOLD, WORK)


def test_where_time_was_over_before_anything_was_done_smaller_parts_are_next():
    state = isolating(handling(8), Sifted(0, None, (), block=2))
    assert (state.step, state.block, state.claimed, state.batch) == (Step.FETCH, 2, WORK, None)


AGAIN = replace(WORK, snapshot_range=None, listed=((Checkpoint(10, 93), 1), (END, 1)), count=2, again=True)


def test_starve_nothing_messages_that_failed_before_have_a_short_turn_and_then_wait_for_nine_times_as_long():
    state = decide_next(
        ProcessorState(Step.FETCH, 0.0, WorkerState.ACTIVE), Taken(piece_of(AGAIN, 2)), 0.0, ISOLATING, 0.0
    )
    state = isolating(state, Sifted(1, Checkpoint(10, 93), (refused(),), block=1), now=0.3)
    assert (state.step, state.state) == (Step.RELEASE, WorkerState.ACTIVE), "others go on with what is left"
    state = isolating(state, outcomes.HandedBack(), now=0.3)
    assert (state.step, state.claimed, decide_turn(state.owed)) == (Step.FETCH, None, Turn.FRESH)
    assert state.owed == pytest.approx(2.7)
    state = decide_next(state, Taken(piece_of(WORK, 8)), 0.3, ISOLATING, 0.0)
    state = isolating(state, Completed(8), now=0.8)
    assert (state.owed, decide_turn(state.owed)) == (pytest.approx(2.2), Turn.FRESH)
    assert decide_turn(isolating(state, NothingTaken(), now=0.8).owed) is Turn.AGAIN, "there is nothing else to do"
    assert decide_turn(isolating(state, NothingTaken(contended=True), now=0.8).owed) is Turn.FRESH


SLOW = HandlerError("too slow", reason=Reason.HANDLER_TIMEOUT)
ENDED = HandlerError("COMMIT in the handler", reason=Reason.HANDLER_ENDED_TRANSACTION)


def test_what_ran_into_the_timeout_is_handled_again_in_smaller_steps_each_with_all_the_time():
    """In parts of one transaction it would be in one step, which takes a timeout for each part."""
    state = isolating(handling(8), outcomes.Failed(SLOW))
    assert (state.step, state.limit, state.block) == (Step.FETCH, 4, None)
    state = isolating(state._replace(step=Step.HANDLE, batch=piece_of(WORK, 1)), outcomes.Failed(SLOW))
    assert (state.step, state.failure) == (Step.DEFER, SLOW)


@pytest.mark.parametrize("policy", [POLICY, ISOLATING], ids=["handed over", "in a transaction"])
@pytest.mark.parametrize("bad", [0, 5, 49, 99])
def test_of_retried_messages_the_one_that_fails_is_found_however_long_each_step_takes(policy, bad):
    """A turn that ended before would begin the next one with the whole batch again, and no attempt would count."""
    pairs = tuple(Checkpoint(10, number + 1) for number in range(100))
    claimed = replace(AGAIN, listed=tuple((pair, 1) for pair in pairs), upto=pairs[-1], count=100)
    state, now, behind = ProcessorState(Step.FETCH, 0.0, WorkerState.ACTIVE), 0.0, 0
    for _ in range(20):
        size = min(state.limit or 100, 100 - behind)
        taken = piece_of(state.claimed or replace(claimed, after=pairs[behind - 1] if behind else BEGINNING), size)
        state = decide_next(state, Taken(replace(taken, examined=pairs[behind + size - 1])), now, policy, 0.0)
        now += 60.0
        failed = behind <= bad < behind + size
        state = decide_next(state, outcomes.Failed(SLOW) if failed else Completed(size), now, policy, 0.0)
        behind += 0 if failed else size
        if state.step is Step.DEFER:
            break
        if state.step is Step.RELEASE:
            state = decide_next(state, outcomes.HandedBack(), now, policy, 0.0)
    assert (state.step, behind) == (Step.DEFER, bad)
    state = decide_next(state, Deferred(RefusalDecision(RefusalAction.RETRY, 2, 1.0), pairs[bad]), now, policy, 0.0)
    assert state.step is (Step.FETCH if bad == 99 else Step.RELEASE), "its turn is over"


def test_a_handler_that_ends_the_transaction_of_retried_messages_comes_to_its_last_attempt():
    state, now = ProcessorState(Step.FETCH, 0.0, WorkerState.ACTIVE), 0.0
    for attempt in range(1, 11):
        state = decide_next(state, Taken(piece_of(AGAIN, 2)), now, ISOLATING, 0.0)
        now += 60.0
        state = isolating(state, outcomes.Failed(ENDED), now)
        assert (state.step, state.attempt) == (Step.FETCH if attempt < 10 else Step.HOLD, attempt)


def test_starve_nothing_in_a_queue_messages_that_failed_before_are_counted():
    queue = replace(ISOLATING, delivery=ISOLATING.delivery.model_copy(update={"competing": Competing(queue="jobs")}))
    state = ProcessorState(Step.FETCH, 0.0, WorkerState.ACTIVE)
    state = decide_next(state, Taken(piece_of(WORK, 8), promoted=100), 0.0, queue, 0.0)
    assert state.owed == pytest.approx(0.9 - 0.008)
    state = decide_next(state, Completed(8), 5.0, queue, 0.0)
    assert state.owed == pytest.approx(0.892), "however long it took"


def test_to_stop_keeps_the_batch_and_a_changed_handler_goes_on_with_it():
    state = decide(handling(1), outcomes.Failed(HandlerError("no")))
    state = decide(state, Deferred(RefusalDecision(RefusalAction.STOP, 10)))
    assert (state.step, state.state, state.reason) == (Step.HOLD, WorkerState.STOPPED, Reason.ATTEMPTS_EXHAUSTED)
    assert "10 attempts (HandlerFailed): no" in state.message
    assert (state.due, state.stopped.place) == (inf, None), "about a message without a name nobody can decide"
    state = decide(state, outcomes.HandlerChanged())
    assert (state.step, state.claimed) == (Step.FETCH, WORK)


def test_a_source_that_moved_is_looked_at_soon():
    idle = decide(ProcessorState(Step.FETCH, 0.0, WorkerState.ACTIVE, joined=True, idle=9), NothingTaken())
    moved = decide(idle, outcomes.SourceMoved(useless=0))
    assert (moved.step, moved.idle) == (Step.FETCH, 0)
    assert moved.due < idle.due
    assert moved.awaits_messages


NAMED = Named("10:93", "message 'm-93'", "outbox dead-letters add orders --at 10:93")


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(Deferred(RefusalDecision(RefusalAction.STOP, 10), named=NAMED), id="alone"),
        pytest.param(Sifted(0, None, (), block=1, stop=refused(RefusalAction.STOP), named=NAMED), id="among others"),
    ],
)
def test_stopped_at_a_message_it_looks_whether_a_person_gave_it_up_and_tries_it_once_more(stop):
    state = decide(handling(1), outcomes.Failed(HandlerError("no")))
    state = decide(state, stop)
    assert (state.step, state.due, state.stopped.place) == (Step.HOLD, DECISION_POLL, "10:93")
    assert "message 'm-93' (HandlerFailed): no; " in state.message
    assert state.message.endswith("outbox dead-letters add orders --at 10:93")
    state = decide(state, outcomes.Decision(given_up=False))
    assert (state.step, state.due, state.given_up) == (Step.HOLD, DECISION_POLL, None)
    state = decide(state, outcomes.Decision(given_up=True))
    assert (state.step, state.due, state.claimed, state.given_up) == (Step.FETCH, 0.0, WORK, "10:93")


def test_a_lost_batch_is_forgotten_and_the_next_one_taken():
    state = decide(handling(), Lost())
    assert (state.step, state.claimed, state.reason) == (Step.FETCH, None, Reason.LEASE_LOST)
    state = decide(decide(handling(), outcomes.Delivered(8)), Lost())
    assert (state.step, state.claimed, state.delivered) == (Step.RELEASE, None, False)


def test_a_fault_of_the_database_hands_back_what_was_in_hand_unless_it_is_delivered():
    down = outcomes.Failed(TransientError("down", reason=Reason.DATABASE_UNAVAILABLE))
    state = decide(handling(), down)
    assert (state.step, state.claimed, state.state) == (Step.PREPARE, None, WorkerState.UNAVAILABLE)
    state = decide(decide(handling(), outcomes.Delivered(8)), down)
    assert state.claimed == WORK
    assert decide(state, outcomes.Prepared()).step is Step.STORE
    crashed = decide(state, outcomes.Prepared(crashed=True))
    assert (crashed.step, crashed.claimed, crashed.delivered) == (Step.CLAIM, None, False)


@pytest.mark.parametrize("reason", [Reason.CIRCUIT_OPEN, Reason.TARGET_UNAVAILABLE])
def test_while_the_target_is_let_be_nothing_is_kept_and_nothing_taken(reason):
    shut = outcomes.Throttled(5.0, reason, "the target failed")
    state = decide(handling()._replace(step=Step.FETCH), shut)
    assert (state.step, state.due, state.state, state.reason) == (
        Step.RELEASE, 0.0, WorkerState.RETRYING, reason
    )  # fmt: skip
    state = decide(state, outcomes.HandedBack())
    assert (state.step, state.due, state.claimed, state.batch) == (Step.FETCH, 5.0, None, None)
    state = decide(state, shut)
    assert (state.step, state.due) == (Step.FETCH, 5.0), "nothing is in hand: nothing to hand back"


def test_while_the_rate_is_used_up_the_batch_stays_in_hand():
    state = decide(handling()._replace(step=Step.FETCH), outcomes.Throttled(0.2, Reason.RUNNING, ""))
    assert (state.step, state.due, state.claimed, state.reason) == (Step.FETCH, 0.2, WORK, Reason.RUNNING)


def test_a_target_that_is_down_costs_no_attempt_and_its_batch_goes_back_while_the_wait_grows():
    down = outcomes.Failed(TransientError("no broker", reason=Reason.TARGET_UNAVAILABLE))
    state, waits = handling(), []
    for _ in range(3):
        state = decide(state, down)
        assert (state.step, state.state, state.attempt) == (Step.RELEASE, WorkerState.RETRYING, 0)
        state = decide(state, outcomes.HandedBack())
        waits.append(state.due)
        state = decide(state, Taken(piece_of(WORK, 8)))
        assert state.state is WorkerState.RETRYING, "until something was handled"
    assert waits == [1.0, 2.0, 4.0]
    state = decide(state, Completed(8))
    assert decide(state, Taken(piece_of(WORK, 8))).state is WorkerState.ACTIVE


def test_classes_say_whose_fault_it_is_and_who_failed_how_long_to_wait():
    never = Retry(never=["ValueError"], forever=["ConnectionError"])
    busy = HandlerError("busy", retry_after=30.0)
    delivery = delivering(never, WhenExhausted.SKIP)
    assert decide_refusal(1, HandlerError("no", classes=("ValueError",)), delivery, 0.0).action is RefusalAction.SKIP
    assert decide_refusal(1, busy, delivery, 0.0) == RefusalDecision(RefusalAction.RETRY, 1, 30.0)
    policy = replace(POLICY, delivery=POLICY.delivery.model_copy(update={"retry": never}))
    lost = outcomes.Failed(HandlerError("no", classes=("ConnectionError",)))
    state = decide_next(handling(1), lost, 0.0, policy, 0.0)
    assert (state.step, state.attempt) == (Step.RELEASE, 0)


def test_a_message_over_which_processes_died_is_not_handled_again():
    dying = replace(WORK, chunk=1, crash_count=10)
    state = handling(1, claimed=dying)
    assert state.step is Step.DEFER
    assert "10 processes in a row died" in str(state.failure)
    assert handling(1, claimed=replace(dying, crash_count=9)).step is Step.HANDLE


def test_asked_to_stop_only_what_was_delivered_is_still_completed():
    assert decide(handling(), outcomes.StopRequested()).step is Step.END
    state = decide(decide(handling(), outcomes.Delivered(8)), outcomes.StopRequested())
    assert (state.step, state.is_last_work) == (Step.STORE, True)
    assert decide(state, Completed(8)).step is Step.END


def test_waits_grow_while_nothing_is_there_and_are_short_while_another_cuts():
    state = decide(ProcessorState(Step.LOAD, 0.0), Joined(start_from_used=True))
    waits = []
    for _ in range(8):
        state = decide(state, NothingTaken())
        waits.append(state.due)
    assert waits == sorted(waits)
    assert waits[-1] == 0.5
    assert decide(state._replace(idle=0), NothingTaken(contended=True)).due < 0.01
    assert decide(state, NothingTaken(moved=True)).due == 0.0


@given(st.integers(3, 9), st.integers(0, 9), st.sets(st.integers(3, 18)), st.integers(1, 30))
def test_a_snapshot_reads_what_it_writes_and_sees_what_postgres_says(xmin, more, among, transaction_id):
    xmax = xmin + more
    snapshot = Snapshot(xmin, xmax, frozenset(each for each in among if xmin <= each < xmax))
    assert parse_snapshot(str(snapshot)) == snapshot
    assert snapshot.sees(transaction_id) == (transaction_id < xmax and transaction_id not in snapshot.in_progress)


def test_a_consumer_acquires_no_lease_and_forgets_what_it_had_with_the_claim():
    assert decide(ProcessorState(Step.CHECK_TARGET, 0.0), outcomes.TargetReady()).step is Step.LOAD
    lost = decide(handling()._replace(joined=True), outcomes.OwnershipLost("gone"))
    assert (lost.step, lost.joined, lost.claimed, lost.batch) == (Step.PREPARE, False, None, None)
    holder = ResourceRef(cluster="cluster", namespace="default", name="other")
    refused_claim = decide(lost._replace(step=Step.CLAIM), outcomes.ClaimAnswered(granted=False, holder=holder))
    assert (refused_claim.step, refused_claim.state) == (Step.CLAIM, WorkerState.CLAIM_REFUSED)


def test_an_idle_consumer_looks_when_something_is_due_though_the_server_writes_nothing():
    idle = ProcessorState(Step.FETCH, 0.0, WorkerState.ACTIVE, joined=True, idle=9)
    seen = decide(idle, NothingTaken(next_due=2.0))
    assert (seen.held_due, seen.due_at_rest) == (2.0, 2.0)
    assert decide(idle, NothingTaken(next_due=inf)).due_at_rest == seen.due + 4.5
    unknown = decide(idle, NothingTaken())
    assert unknown.due_at_rest == unknown.due
