"""The decision, policy by policy: what was observed, what shall be so, and what people read."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from outbox_core.config import ResolutionAction
from outbox_core.report import Bound, ExitCode, Reason, WorkerState
from outbox_operator.conditions import ConditionType
from outbox_operator.conditions import Reason as OperatorReason
from outbox_operator.decide import POLICIES, Decision, decide
from outbox_operator.hand_over import hand_over_job_name
from outbox_operator.observed import JobView, Observed, Problem, Role
from outbox_operator.resources import ACCEPT_ANNOTATION, REWIND_ANNOTATION
from outbox_operator.status import (
    CheckpointStatus,
    ConflictsStatus,
    ConflictStatus,
    HandOverStatus,
    OwnerRef,
    OwnershipStatus,
    Phase,
    ProcessorStatus,
)
from tests.unit.operator.building import (
    NOW,
    OTHER,
    build_conflict,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    build_sibling,
    resource,
    summary_of,
)

HOLDER = OwnerRef(cluster="here", namespace="elsewhere", name="orders", uid="uid-2")
REFUSED = OwnershipStatus(state="Refused", holder=HOLDER, tries=2, attempts=1, last_try=NOW, next_try=NOW)
OPEN = ConflictStatus(
    id=7, code=2, expected="815:42", stored="815:60", new="815:50", pod="orders-0", time=NOW, needs_person=True
)
GRANTED = ProcessorStatus(ownership=OwnershipStatus(state="Granted"), checkpoint=CheckpointStatus(pair="815:42"))
BLOCKED = GRANTED.model_copy(update={"conflicts": ConflictsStatus(count=1, last=OPEN, open=OPEN)})
WAITING = ProcessorStatus(ownership=REFUSED)
ACTIVE = build_pod(report=build_report())
ELSEWHERE: dict[str, Any] = {"handOverTo": {"namespace": "elsewhere", "name": "orders"}}


def condition(decision: Decision, kind: str) -> tuple[str, str]:
    found = next(c for c in decision.status.conditions if c.type == kind)
    return found.status, found.reason


def ready(decision: Decision) -> tuple[str, str]:
    return condition(decision, "Ready")


CASES = [
    pytest.param(build_observed(), "Starting", ("False", "Starting"), 1, id="nothing is there yet"),
    pytest.param(build_observed(ACTIVE), "Running", ("True", "Running"), 1, id="a worker is active"),
    pytest.param(
        build_observed(build_pod(report=build_report(WorkerState.STANDBY, Reason.LEASE_HELD))),
        "Starting",
        ("False", "Starting"),
        1,
        id="only a standby answers",
    ),
    pytest.param(
        build_observed(
            build_pod(report=build_report(WorkerState.STANDBY, Reason.LEASE_HELD)),
            build_pod("orders-1", build_report(pod="orders-1")),
        ),
        "Running",
        ("True", "Running"),
        1,
        id="the lease holder speaks for the processor",
    ),
    pytest.param(
        build_observed(
            build_pod(report=build_report(WorkerState.RETRYING, Reason.STATEMENT_FAILED, message="no table"))
        ),
        "Retrying",
        ("False", "StatementFailed"),
        1,
        id="a worker retries",
    ),
    pytest.param(
        build_observed(
            build_pod(report=build_report(WorkerState.STOPPED, Reason.ATTEMPTS_EXHAUSTED, message="no table"))
        ),
        "Stopped",
        ("False", "AttemptsExhausted"),
        1,
        id="attempts ran out: the pod stays and tells",
    ),
    pytest.param(
        build_observed(
            build_pod(report=build_report(WorkerState.UNAVAILABLE, Reason.DATABASE_UNAVAILABLE)), previous=GRANTED
        ),
        "Unavailable",
        ("False", "DatabaseUnavailable"),
        1,
        id="the database is down: unknown is never zero",
    ),
    pytest.param(
        build_observed(replace(ACTIVE, reachable=False), previous=GRANTED),
        "Unavailable",
        ("Unknown", "WorkerUnreachable"),
        1,
        id="a pod does not answer: unknown is never zero",
    ),
    pytest.param(
        build_observed(build_pod(ip=None, phase="Pending", ready=False, problem=Problem("Unschedulable", "no node"))),
        "Unavailable",
        ("False", "Unschedulable"),
        1,
        id="a pod cannot start: its own words",
    ),
    pytest.param(
        build_observed(replace(ACTIVE, intent_hash="old")), "Starting", ("False", "RollingOut"), 1, id="a rollout"
    ),
    pytest.param(
        build_observed(
            build_pod(report=build_report(WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, claim_holder=OTHER))
        ),
        "WaitingForOwner",
        ("False", "ClaimHeld"),
        0,
        id="the claim is another's: scaled to zero",
    ),
    pytest.param(build_observed(previous=WAITING), "WaitingForOwner", ("False", "ClaimHeld"), 0, id="and stays so"),
    pytest.param(
        build_observed(siblings=(build_sibling(),)),
        "Starting",
        ("False", "Claiming"),
        0,
        id="a known duplicate starts with a try",
    ),
    pytest.param(
        build_observed(siblings=(build_sibling(granted=False),)),
        "Starting",
        ("False", "Starting"),
        1,
        id="no owner yet",
    ),
    pytest.param(
        build_observed(siblings=(build_sibling(older=False),)), "Starting", ("False", "Starting"), 1, id="a younger one"
    ),
    pytest.param(
        build_observed(build_pod(report=build_report(conflicts=summary_of(build_conflict(2), opened=True)))),
        "Blocked",
        ("False", "CheckpointAhead"),
        0,
        id="a 2 waits for a person: scaled to zero",
    ),
    pytest.param(
        build_observed(build_pod(report=build_report(conflicts=summary_of(build_conflict(3), opened=True)))),
        "Blocked",
        ("False", "CheckpointOlder"),
        0,
        id="a 3 waits for a person: scaled to zero",
    ),
    pytest.param(build_observed(previous=BLOCKED), "Blocked", ("False", "CheckpointAhead"), 0, id="and stays so"),
    pytest.param(
        build_observed(ACTIVE, previous=BLOCKED), "Blocked", ("False", "CheckpointAhead"), 0, id="nobody talks it away"
    ),
    pytest.param(
        build_observed(previous=BLOCKED, processor=build_processor(annotations={ACCEPT_ANNOTATION: "7=815:60"})),
        "Starting",
        ("False", "Resolving"),
        1,
        id="a person decided: scaled up",
    ),
    pytest.param(
        build_observed(previous=BLOCKED, processor=build_processor(annotations={ACCEPT_ANNOTATION: "6=815:60"})),
        "Blocked",
        ("False", "CheckpointAhead"),
        0,
        id="about another conflict",
    ),
    pytest.param(
        build_observed(ACTIVE, processor=build_processor(suspend=True), previous=GRANTED),
        "Suspended",
        ("False", "Stopping"),
        0,
        id="suspending",
    ),
    pytest.param(
        build_observed(processor=build_processor(suspend=True), previous=GRANTED),
        "Suspended",
        ("True", "Suspended"),
        0,
        id="suspended",
    ),
    pytest.param(
        build_observed(processor=build_processor(suspend=True), previous=BLOCKED),
        "Suspended",
        ("True", "Suspended"),
        0,
        id="suspended with an open conflict",
    ),
    pytest.param(
        build_observed(processor=build_processor(worker={"replicas": 0}), previous=GRANTED),
        "Suspended",
        ("True", "ScaledToZero"),
        0,
        id="scaled to zero",
    ),
    pytest.param(
        build_observed(ACTIVE, processor=build_processor(**ELSEWHERE), previous=GRANTED),
        "HandingOver",
        ("False", "HandingOver"),
        0,
        id="handing over drains first",
    ),
    pytest.param(
        build_observed(obstacle=Problem("NameTaken", "taken")),
        "Invalid",
        ("False", "NameTaken"),
        1,
        id="a name is taken",
    ),
]


@pytest.mark.parametrize(("observed", "phase", "answer", "replicas"), CASES)
def test_what_holds(observed: Observed, phase: str, answer: tuple[str, str], replicas: int):
    decision = decide(observed, NOW)
    assert (decision.status.phase, ready(decision), decision.replicas) == (phase, answer, replicas)


@pytest.mark.parametrize(("observed", "phase", "answer", "replicas"), CASES)
def test_deciding_again_with_the_status_written_changes_nothing(
    observed: Observed, phase: str, answer: tuple[str, str], replicas: int
):
    first = decide(observed, NOW)
    again = decide(replace(observed, previous=first.status), NOW)
    assert (again.status.phase, ready(again), again.replicas) == (phase, answer, replicas)
    assert again.status == first.status
    assert again.happenings == ()


@pytest.mark.parametrize(("observed", "phase", "answer", "replicas"), CASES)
def test_all_questions_are_answered_for_the_generation(
    observed: Observed, phase: str, answer: tuple[str, str], replicas: int
):
    status = decide(observed, NOW).status
    assert [c.type for c in status.conditions] == list(ConditionType)
    assert {c.observed_generation for c in status.conditions} == {3}
    assert isinstance(phase, str)
    assert answer
    assert replicas >= 0


def test_ready_and_stalled_are_never_both_true():
    for case in CASES:
        decision = decide(case.values[0], NOW)  # type: ignore[arg-type]
        assert not (ready(decision)[0] == "True" and condition(decision, "Stalled")[0] == "True")


def test_every_policy_decides_some_case():
    reasons = {decide(case.values[0], NOW).verdict.reason for case in CASES}  # type: ignore[arg-type]
    assert len(POLICIES) == 11
    assert len(reasons) >= len(POLICIES)


def test_every_reason_is_one_word_with_a_sentence():
    assert all(reason.value.isalpha() for reason in OperatorReason)


# --- ownership --------------------------------------------------------------------------------------------------------


def finished_try(code: int, **fields: Any) -> Observed:
    report = build_report(WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, claim_holder=OTHER)
    pod = build_pod(
        "try", role=Role.CLAIM, phase="Failed", job="orders-claim-2", last_words=report, exit_code=code, ready=False
    )
    job = JobView("orders-claim-2", Role.CLAIM, finished=True, succeeded=code == 0)
    return build_observed(pod, jobs=(job,), previous=WAITING, **fields)


def test_a_due_try_is_started_once_the_pods_are_gone():
    assert [job.name for job in decide(build_observed(previous=WAITING), NOW).start_jobs] == ["orders-claim-2"]
    assert decide(build_observed(ACTIVE, previous=WAITING), NOW).start_jobs == ()


def test_a_try_that_is_not_due_waits():
    later = REFUSED.model_copy(update={"next_try": NOW + timedelta(seconds=30)})
    decision = decide(build_observed(previous=ProcessorStatus(ownership=later)), NOW)
    assert decision.start_jobs == ()


def test_a_refused_try_backs_off_and_its_job_is_deleted_after_it_is_written():
    decision = decide(finished_try(ExitCode.CLAIM_HELD), NOW)
    ownership = decision.status.ownership
    assert (ownership.state, ownership.attempts, ownership.tries) == ("Refused", 2, 3)
    assert timedelta(seconds=20) <= (ownership.next_try or NOW) - NOW <= timedelta(seconds=22)
    assert decision.finished_jobs == ()
    again = decide(replace(finished_try(ExitCode.CLAIM_HELD), previous=decision.status), NOW)
    assert again.finished_jobs == ("orders-claim-2",)
    assert again.status.ownership == ownership


def test_a_granted_try_scales_up():
    decision = decide(finished_try(ExitCode.DONE), NOW)
    assert decision.status.ownership.state == "Granted"
    assert decision.replicas == 1
    assert "OwnershipGranted" in [happening.reason for happening in decision.happenings]


def test_a_known_duplicate_of_another_database_starts_after_its_try():
    hinted = decide(build_observed(siblings=(build_sibling(),)), NOW)
    assert [job.name for job in hinted.start_jobs] == ["orders-claim-0"]
    assert condition(hinted, "Stalled")[0] == "False"
    job = JobView("orders-claim-0", Role.CLAIM, finished=True, succeeded=True)
    granted = decide(build_observed(siblings=(build_sibling(),), jobs=(job,), previous=hinted.status), NOW)
    assert (granted.status.ownership.state, granted.replicas) == ("Granted", 1)


def test_a_try_that_cannot_ask_says_why():
    hinted = decide(build_observed(siblings=(build_sibling(),)), NOW).status
    stuck = build_pod(
        "try", role=Role.CLAIM, phase="Pending", ip=None, problem=Problem("ConnectionSecretInvalid", "db")
    )
    decision = decide(build_observed(stuck, siblings=(build_sibling(),), previous=hinted), NOW)
    assert (decision.status.phase, ready(decision)) == ("Unavailable", ("False", "ConnectionSecretInvalid"))


def test_the_backoff_ends_at_five_minutes():
    tired = REFUSED.model_copy(update={"attempts": 50})
    observed = replace(finished_try(ExitCode.CLAIM_HELD), previous=ProcessorStatus(ownership=tired))
    wait = (decide(observed, NOW).status.ownership.next_try or NOW) - NOW
    assert timedelta(minutes=5) <= wait <= timedelta(minutes=5, seconds=30)


def test_a_holder_that_is_gone_is_swept_at_once():
    later = REFUSED.model_copy(update={"next_try": NOW + timedelta(minutes=4), "last_try": NOW - timedelta(minutes=1)})
    decision = decide(build_observed(previous=ProcessorStatus(ownership=later), holder_gone=True), NOW)
    assert decision.sweep_uids == ("uid-2",)
    assert [job.role for job in decision.start_jobs] == [Role.CLAIM]


def test_a_hand_over_to_this_resource_is_tried_at_once():
    later = REFUSED.model_copy(update={"next_try": NOW + timedelta(minutes=4), "last_try": NOW - timedelta(minutes=1)})
    giver = build_sibling(granted=False, handed_over_to="here/shop/orders", handed_over_at=NOW)
    decision = decide(build_observed(previous=ProcessorStatus(ownership=later), siblings=(giver,)), NOW)
    assert [job.role for job in decision.start_jobs] == [Role.CLAIM]


def test_a_pod_that_is_going_has_no_say_in_ownership():
    refused = build_report(WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, claim_holder=OTHER)
    observed = build_observed(build_pod(report=refused, deleting=True), previous=GRANTED)
    assert decide(observed, NOW).status.ownership.state == "Granted"


def test_a_report_of_an_earlier_resource_of_the_name_has_no_say():
    stranger = build_report().model_copy(update={"resource": resource(uid="older")})
    decision = decide(build_observed(build_pod(report=stranger)), NOW)
    assert decision.status.ownership.state == "Unknown"
    assert ready(decision)[0] != "True"


def test_a_refusal_names_the_owner_everywhere():
    report = build_report(WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, claim_holder=OTHER)
    decision = decide(build_observed(build_pod(report=report), previous=GRANTED), NOW)
    messages = [c.message for c in decision.status.conditions if c.type in ("Ready", "OwnershipGranted", "Stalled")]
    assert all("here/elsewhere/orders" in message for message in messages)
    assert any("here/elsewhere/orders" in happening.message for happening in decision.happenings)


# --- intents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observed", "told"),
    [
        pytest.param(build_observed(ACTIVE), (), id="nobody goes"),
        pytest.param(build_observed(ACTIVE, processor=build_processor(suspend=True)), ("orders-0",), id="suspend"),
        pytest.param(
            build_observed(replace(ACTIVE, intent_hash="old"), build_pod("orders-1", build_report())),
            ("orders-0",),
            id="rollout: the old pod only",
        ),
        pytest.param(
            build_observed(replace(ACTIVE, deleting=True), processor=build_processor(suspend=True)),
            (),
            id="told before",
        ),
        pytest.param(build_observed(ACTIVE, previous=BLOCKED), ("orders-0",), id="conflict"),
    ],
)
def test_pods_that_go_keep_the_claim(observed: Observed, told: tuple[str, ...]):
    assert decide(observed, NOW).keep_claim == told


# --- conflicts --------------------------------------------------------------------------------------------------------


def test_a_decided_conflict_is_carried_out_and_then_forgotten():
    processor = build_processor(annotations={REWIND_ANNOTATION: "7=790:40"})
    before = decide(build_observed(previous=BLOCKED, processor=processor), NOW)
    assert before.resolution is not None
    assert (before.resolution.action, before.resolution.pair) == (ResolutionAction.REWIND, "790:40")
    assert before.remove_annotations == ()
    after = decide(build_observed(ACTIVE, previous=before.status, processor=processor), NOW)
    assert after.status.conflicts.open is None
    assert after.remove_annotations == (REWIND_ANNOTATION,)
    assert "ConflictResolved" in [happening.reason for happening in after.happenings]


def test_an_unreadable_annotation_decides_nothing_and_says_how_to_write_it():
    processor = build_processor(annotations={ACCEPT_ANNOTATION: "yes please"})
    decision = decide(build_observed(previous=BLOCKED, processor=processor), NOW)
    assert decision.replicas == 0
    assert "AnnotationInvalid" in [happening.reason for happening in decision.happenings]
    assert "7=815:42" in next(c.message for c in decision.status.conditions if c.type == "Ready")


def test_a_conflict_shows_both_pairs_and_both_ways_out():
    opened = summary_of(build_conflict(2), opened=True)
    decision = decide(build_observed(build_pod(report=build_report(conflicts=opened)), previous=GRANTED), NOW)
    message = next(c.message for c in decision.status.conditions if c.type == "Ready")
    for words in ("815:42", "815:60", "accept-checkpoint='7=815:60'", "rewind-checkpoint='7=815:42'"):
        assert words in message
    assert condition(decision, "CheckpointHealthy") == ("False", "CheckpointAhead")
    assert condition(decision, "Suspended") == ("True", "ConflictOpen")


def test_the_last_words_of_a_pod_tell_of_a_conflict_too():
    words = build_report(
        WorkerState.BLOCKED, Reason.CHECKPOINT_AHEAD, conflicts=summary_of(build_conflict(2), opened=True)
    )
    pod = build_pod(phase="Failed", last_words=words, exit_code=0, ready=False)
    assert decide(build_observed(pod, previous=GRANTED), NOW).status.phase == Phase.BLOCKED


def test_a_4_within_the_resource_is_an_event_and_no_condition():
    moved = build_conflict(4, holder=resource(), holder_pod="orders-1")
    decision = decide(
        build_observed(build_pod(report=build_report(conflicts=summary_of(moved))), previous=GRANTED), NOW
    )
    assert [h.reason for h in decision.happenings if h.reason == "OwnershipMoved"] == ["OwnershipMoved"]
    assert condition(decision, "CheckpointHealthy")[0] == "True"
    assert decision.replicas == 1


def test_a_4_by_another_resource_is_a_condition_until_it_is_owner_again():
    taken = build_conflict(4, holder=OTHER)
    refused = build_report(
        WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, claim_holder=OTHER, conflicts=summary_of(taken)
    )
    decision = decide(build_observed(build_pod(report=refused), previous=GRANTED), NOW)
    assert condition(decision, "CheckpointHealthy") == ("False", "NotOwner")
    again = build_observed(build_pod(report=build_report(conflicts=summary_of(taken))), previous=decision.status)
    assert condition(decide(again, NOW), "CheckpointHealthy")[0] == "True"


def test_strangers_are_counted_and_told():
    report = build_report(conflicts=summary_of(build_conflict(4, holder=resource()), strangers=5))
    decision = decide(build_observed(build_pod(report=report), previous=GRANTED), NOW)
    assert decision.status.conflicts.strangers == 5
    assert "StrangerRefused" in [happening.reason for happening in decision.happenings]


def test_counters_never_go_back_because_a_process_knows_less():
    starting = build_observed(build_pod(report=build_report(WorkerState.STARTING, Reason.STARTING)), previous=BLOCKED)
    assert decide(starting, NOW).status.conflicts == BLOCKED.conflicts


# --- hand-over --------------------------------------------------------------------------------------------------------


def test_a_hand_over_goes_through_its_steps():
    processor = build_processor(**ELSEWHERE)
    draining = decide(build_observed(ACTIVE, processor=processor, previous=GRANTED), NOW)
    assert draining.status.hand_over is not None
    assert (draining.status.hand_over.step, draining.replicas, draining.start_jobs) == ("Draining", 0, ())
    assert draining.keep_claim == ("orders-0",)
    moving = decide(build_observed(processor=processor, previous=draining.status), NOW)
    name = hand_over_job_name(processor)
    assert [(job.name, job.role) for job in moving.start_jobs] == [(name, Role.HAND_OVER)]
    job = JobView(name, Role.HAND_OVER, finished=True, succeeded=True)
    done = decide(build_observed(processor=processor, previous=moving.status, jobs=(job,)), NOW)
    assert done.status.hand_over is not None
    assert (done.status.hand_over.step, ready(done)) == ("Done", ("True", "HandedOver"))
    assert condition(done, "OwnershipGranted") == ("False", "HandedOver")
    assert decide(build_observed(processor=processor, previous=done.status, jobs=(job,)), NOW).finished_jobs == (name,)


def test_a_hand_over_that_fails_says_why():
    processor = build_processor(**ELSEWHERE)
    name = hand_over_job_name(processor)
    words = build_report(WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, message="a/b/c holds the claim")
    pod = build_pod("give", role=Role.HAND_OVER, phase="Failed", job=name, last_words=words, exit_code=10, ready=False)
    job = JobView(name, Role.HAND_OVER, finished=True, succeeded=False)
    decision = decide(build_observed(pod, processor=processor, jobs=(job,)), NOW)
    assert condition(decision, "Stalled") == ("True", "HandOverFailed")
    assert "a/b/c holds the claim" in decision.verdict.message


def test_a_hand_over_taken_back_asks_for_the_claim_again():
    handed = ProcessorStatus(
        ownership=OwnershipStatus(state="HandedOver", holder=HOLDER, tries=1),
        hand_over=HandOverStatus(to="here/elsewhere/orders", step="Done", time=NOW),
    )
    decision = decide(build_observed(previous=handed), NOW)
    assert decision.status.phase == Phase.WAITING
    assert [job.role for job in decision.start_jobs] == [Role.CLAIM]


# --- source -----------------------------------------------------------------------------------------------------------


def test_a_bound_that_stands_still_names_its_holder():
    bound = Bound(transaction_id="900", age_seconds=95, holder="prepared transaction 'stuck'")
    decision = decide(build_observed(build_pod(report=build_report(bound=bound))), NOW)
    message = next(c.message for c in decision.status.conditions if c.type == "SourceCurrent")
    assert condition(decision, "SourceCurrent") == ("False", "BoundStalled")
    assert "prepared transaction 'stuck'" in message


def test_transition_times_move_only_with_the_answer():
    first = decide(build_observed(ACTIVE), NOW).status
    later = NOW + timedelta(minutes=5)
    second = decide(build_observed(ACTIVE, previous=first), later).status
    assert {c.last_transition_time for c in second.conditions} == {NOW}
    third = decide(build_observed(previous=second), later).status
    assert next(c for c in third.conditions if c.type == "Ready").last_transition_time == later
