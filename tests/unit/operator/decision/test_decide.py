"""The decision, policy by policy: what was observed, what shall be so, and what people read."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from outbox_core.report import FailureSummary, HighWaterMark, Reason, Unfinished, WorkerState
from outbox_operator.api.observed import Observed, Problem
from outbox_operator.api.reasons import ConditionType
from outbox_operator.api.reasons import Reason as OperatorReason
from outbox_operator.api.resources import ACCEPT_ANNOTATION
from outbox_operator.decision.decide import decide
from outbox_operator.decision.policies import POLICIES
from tests.unit.operator.building import (
    ACTIVE,
    BLOCKED,
    ELSEWHERE,
    GRANTED,
    NOW,
    OTHER,
    WAITING,
    build_conflict,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    build_sibling,
    condition,
    ready,
    summary_of,
)

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
        build_observed(replace(ACTIVE, reachable=False, unreachable_message="not heard"), previous=GRANTED),
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
        build_observed(
            build_pod(report=build_report(WorkerState.STARTING), ready=False, problem=Problem("Crashing", "ended"))
        ),
        "Unavailable",
        ("False", "Crashing"),
        1,
        id="a process that ends again and again is heard while it starts",
    ),
    pytest.param(
        build_observed(replace(ACTIVE, intent_hash="old")), "Starting", ("False", "RollingOut"), 1, id="a rollout"
    ),
    pytest.param(
        build_observed(ACTIVE, build_pod("orders-1", build_report(WorkerState.STANDBY), intent_hash="old")),
        "Running",
        ("False", "RollingOut"),
        1,
        id="a rollout whose owner is new already, and a standby not yet",
    ),
    pytest.param(
        build_observed(ACTIVE, build_pod("orders-1", intent_hash="old")),
        "Running",
        ("False", "RollingOut"),
        1,
        id="a rollout whose owner is new already, and a pod of the former spec that was not heard yet",
    ),
    pytest.param(
        build_observed(ACTIVE, build_pod("liar", intent_hash="old", unreachable_message="it has another key")),
        "Running",
        ("True", "Running"),
        1,
        id="a pod that its owner references make ours, and that is not believed",
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
        build_observed(ACTIVE, previous=BLOCKED),
        "Blocked",
        ("False", "CheckpointAhead"),
        0,
        id="a report without it does not close it",
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
    assert again.events == ()


@pytest.mark.parametrize(("observed", "phase", "answer", "replicas"), CASES)
def test_all_questions_are_answered_for_the_generation(
    observed: Observed, phase: str, answer: tuple[str, str], replicas: int
):
    status = decide(observed, NOW).status
    assert [c.type for c in status.conditions] == [t for t in ConditionType if t is not ConditionType.SWAPPED]
    assert {c.observed_generation for c in status.conditions} == {3}
    assert isinstance(phase, str)
    assert answer
    assert replicas >= 0


def test_of_ready_reconciling_and_stalled_one_at_most_is_true():
    for case in CASES:
        decision = decide(case.values[0], NOW)  # type: ignore[arg-type]
        answers = [condition(decision, kind)[0] for kind in ("Ready", "Reconciling", "Stalled")]
        assert answers.count("True") <= 1, case.id


def test_what_is_in_the_way_is_said_beside_what_matters_more():
    """Without it a suspend that the API server refuses would stay `Stopping`."""
    suspended = build_processor(suspend=True)
    decision = decide(
        build_observed(ACTIVE, processor=suspended, obstacle=Problem("ApplyFailed", "no such field")), NOW
    )
    said = next(c for c in decision.status.conditions if c.type == "Ready")
    assert (said.reason, said.message) == (
        "Stopping",
        "pods are finishing or rolling back their batch; ApplyFailed: no such field",
    )


def test_every_policy_decides_some_case():
    reasons = {decide(case.values[0], NOW).result.reason for case in CASES}  # type: ignore[arg-type]
    assert len(POLICIES) == 11
    assert len(reasons) >= len(POLICIES)


def test_every_reason_is_one_word_with_a_sentence():
    assert all(reason.value.isalpha() for reason in OperatorReason)


def test_a_bound_that_stands_still_names_its_holder():
    mark = HighWaterMark(transaction_id="900", age_seconds=95, holder="prepared transaction 'stuck'")
    decision = decide(build_observed(build_pod(report=build_report(high_water_mark=mark))), NOW)
    message = next(c.message for c in decision.status.conditions if c.type == "SourceCurrent")
    assert condition(decision, "SourceCurrent") == ("False", "HighWaterMarkStalled")
    assert "prepared transaction 'stuck'" in message


@pytest.mark.parametrize("age", [0, 95])
def test_what_was_seen_of_the_bound_does_not_stay_while_the_database_is_away(age: int):
    mark = HighWaterMark(transaction_id="900", age_seconds=age, holder="prepared transaction 'stuck'")
    report = build_report(WorkerState.RETRYING, Reason.DATABASE_UNAVAILABLE, high_water_mark=mark)
    decision = decide(build_observed(build_pod(report=report)), NOW)
    assert condition(decision, "SourceCurrent") == ("Unknown", "NotObserved")


def test_a_manifest_that_a_person_must_change_is_stalled_and_not_under_way():
    report = build_report(WorkerState.UNAVAILABLE, Reason.INVALID_CONFIGURATION, message="it holds 2 statements")
    decision = decide(build_observed(build_pod(report=report), previous=GRANTED), NOW)
    told = ("InvalidConfiguration",)
    assert [condition(decision, kind) for kind in ("Ready", "Stalled", "Reconciling")] == [
        ("False", *told), ("True", *told), ("False", *told),
    ]  # fmt: skip
    assert (decision.status.phase, decision.replicas) == ("Unavailable", 1), "the pod stays, and tells when it is right"


def test_mode_competing_has_no_bound_that_could_stall():
    report = build_report(unfinished=Unfinished(consumers=2))
    assert condition(decide(build_observed(build_pod(report=report)), NOW), "SourceCurrent") == ("True", "AsExpected")


@pytest.mark.parametrize(
    ("circuits", "answer"),
    [
        (["Open", "Closed"], ("False", "CircuitOpen")),
        (["HalfOpen"], ("False", "CircuitOpen")),
        (["HalfOpen", "Closed"], ("True", "AsExpected")),
        (["Closed"], ("True", "AsExpected")),
    ],
)
def test_messages_flow_only_once_a_probe_was_handled(circuits, answer):
    reports = [build_report(circuit=circuit, failures=FailureSummary()) for circuit in circuits]
    pods = [build_pod(f"orders-{n}", report) for n, report in enumerate(reports)]
    standby = build_pod("orders-9", build_report(WorkerState.STANDBY, circuit="Closed"))
    assert condition(decide(build_observed(*pods, standby), NOW), "MessagesFlow") == answer


def test_one_of_anything_is_singular():
    report = build_report(
        failures=FailureSummary(held=1, dead_letters=1), unfinished=Unfinished(retries=1, consumers=1),
        conflicts=summary_of(build_conflict(0)),
    )  # fmt: skip
    former = build_pod("orders-1", intent_hash="old")
    decision = decide(build_observed(build_pod(report=report), former, previous=GRANTED), NOW)
    said = {c.type: c.message for c in decision.status.conditions}
    assert said["Ready"] == "messages are being handled; still to be replaced: 1 pod of the former spec or version"
    assert said["CheckpointHealthy"] == "1 refusal so far"
    assert said["MessagesFlow"].startswith("1 dead letter, to be decided by a person")


def test_transition_times_move_only_with_the_answer():
    first = decide(build_observed(ACTIVE), NOW).status
    later = NOW + timedelta(minutes=5)
    second = decide(build_observed(ACTIVE, previous=first), later).status
    assert {c.last_transition_time for c in second.conditions} == {NOW}
    third = decide(build_observed(previous=second), later).status
    assert next(c for c in third.conditions if c.type == "Ready").last_transition_time == later
