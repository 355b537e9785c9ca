"""Conflicts: what is shown, what a person decides, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outbox_core.config import ResolutionAction
from outbox_core.report import Reason, WorkerState
from outbox_operator.api.naming import label_decision
from outbox_operator.api.observed import WorkloadView
from outbox_operator.api.resources import ACCEPT_ANNOTATION, REWIND_ANNOTATION
from outbox_operator.api.status import Phase
from outbox_operator.decision.decide import decide
from tests.unit.operator.building import (
    ACTIVE,
    BLOCKED,
    GRANTED,
    HASH,
    NOW,
    OTHER,
    build_conflict,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    condition,
    resource,
    summary_of,
)


def test_a_decided_conflict_is_carried_out_and_then_forgotten():
    processor = build_processor(annotations={REWIND_ANNOTATION: "7=790:40"})
    before = decide(build_observed(previous=BLOCKED, processor=processor), NOW)
    assert before.resolution is not None
    assert (before.resolution.action, before.resolution.pair) == (ResolutionAction.REWIND, "790:40")
    assert before.remove_annotations == ()
    label = label_decision(before.resolution)
    assert before.decision_label == label
    started, workload = replace(ACTIVE, decision=label), WorkloadView(1, HASH, decision=label)
    after = decide(build_observed(started, previous=before.status, processor=processor, workload=workload), NOW)
    assert after.status.conflicts.open is None
    assert (after.resolution, after.decision_label) == (None, label), "to forget it is no reason to replace pods"
    assert after.remove_annotations == (REWIND_ANNOTATION,)
    assert "ConflictResolved" in [event.reason for event in after.events]


def test_a_standby_that_has_not_looked_again_closes_no_conflict():
    processor = build_processor(annotations={REWIND_ANNOTATION: "7=790:40"})
    standby = build_pod(report=build_report(WorkerState.STANDBY, Reason.LEASE_HELD))
    decision = decide(build_observed(standby, previous=BLOCKED, processor=processor), NOW)
    assert decision.status.conflicts.open is not None
    assert decision.remove_annotations == ()


def test_a_decision_that_could_not_be_carried_out_says_why():
    processor = build_processor(annotations={ACCEPT_ANNOTATION: "7=815:61"})
    words = "the decision on the resource names another pair than the one stored now"
    report = build_report(
        WorkerState.BLOCKED,
        Reason.CHECKPOINT_AHEAD,
        message=f"conflict 7: changed; {words}",
        conflicts=summary_of(build_conflict(2), opened=True),
    )
    decision = decide(build_observed(build_pod(report=report), previous=BLOCKED, processor=processor), NOW)
    assert condition(decision, "Stalled") == ("True", "CheckpointAhead")
    assert words in next(c.message for c in decision.status.conditions if c.type == "Ready")
    assert decision.replicas == 1, "corrected, its pods are replaced; scaled down, they would be made again and again"


def test_an_unreadable_annotation_decides_nothing_and_says_how_to_write_it():
    processor = build_processor(annotations={ACCEPT_ANNOTATION: "yes please"})
    decision = decide(build_observed(previous=BLOCKED, processor=processor), NOW)
    assert decision.replicas == 0
    assert "AnnotationInvalid" in [event.reason for event in decision.events]
    assert "7=815:42" in next(c.message for c in decision.status.conditions if c.type == "Ready")


@pytest.mark.parametrize(
    ("annotation", "spec", "words"),
    [
        pytest.param("yes please", {}, "must be CONFLICT=TRANSACTION_ID:POSITION", id="unreadable"),
        pytest.param("6=815:60", {}, "is about conflict 6, open is 7", id="about another conflict"),
        pytest.param("yes please", {"suspend": True}, "must be CONFLICT=", id="unreadable, suspended"),
    ],
)
def test_an_annotation_that_decides_nothing_is_told_once(annotation: str, spec: dict[str, Any], words: str):
    processor = build_processor(annotations={ACCEPT_ANNOTATION: annotation}, **spec)
    first = decide(build_observed(previous=BLOCKED, processor=processor), NOW)
    assert any(words in told.message for told in first.events if told.reason == "AnnotationInvalid")
    assert words in next(c.message for c in first.status.conditions if c.type == "CheckpointHealthy")
    again = decide(build_observed(previous=first.status, processor=processor), NOW)
    assert again.events == ()


def test_an_annotation_without_a_conflict_is_no_news():
    processor = build_processor(annotations={ACCEPT_ANNOTATION: "yes please"})
    decision = decide(build_observed(ACTIVE, previous=GRANTED, processor=processor), NOW)
    assert "AnnotationInvalid" not in [event.reason for event in decision.events]


def test_a_conflict_shows_both_pairs_and_both_ways_out():
    opened = summary_of(build_conflict(2), opened=True)
    decision = decide(build_observed(build_pod(report=build_report(conflicts=opened)), previous=GRANTED), NOW)
    message = next(c.message for c in decision.status.conditions if c.type == "Ready")
    for words in ("815:42", "815:60", "accept-checkpoint='7=815:60'", "rewind-checkpoint='7=815:42'"):
        assert words in message
    assert message.count("kubectl annotate -n shop obp orders ") == 2, "as it is pasted, from any namespace"
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
    assert [h.reason for h in decision.events if h.reason == "OwnershipMoved"] == ["OwnershipMoved"]
    assert condition(decision, "CheckpointHealthy")[0] == "True"
    assert decision.replicas == 1


def test_a_4_by_another_resource_is_a_condition_until_it_is_owner_again():
    taken = build_conflict(4, holder=OTHER)
    refused = build_report(
        WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, claim_holder=OTHER, conflicts=summary_of(taken)
    )
    decision = decide(build_observed(build_pod(report=refused), previous=GRANTED), NOW)
    assert condition(decision, "CheckpointHealthy") == ("False", "NotOwner")
    tried = decision.status.model_copy(update={"ownership": GRANTED.ownership})
    again = build_observed(build_pod(report=build_report(conflicts=summary_of(taken))), previous=tried)
    assert condition(decide(again, NOW), "CheckpointHealthy")[0] == "True"


def test_refused_calls_of_unowned_callers_are_counted_and_told():
    report = build_report(conflicts=summary_of(build_conflict(4, holder=resource()), unowned_calls=5))
    decision = decide(build_observed(build_pod(report=report), previous=GRANTED), NOW)
    assert decision.status.conflicts.unowned_calls == 5
    assert "UnownedCallerRefused" in [event.reason for event in decision.events]


def test_counters_never_go_back_because_a_process_knows_less():
    starting = build_observed(build_pod(report=build_report(WorkerState.STARTING, Reason.STARTING)), previous=BLOCKED)
    assert decide(starting, NOW).status.conflicts == BLOCKED.conflicts


@pytest.mark.parametrize(
    "other", [pytest.param("6=815:42", id="about a former conflict"), pytest.param("yes please", id="unreadable")]
)
def test_an_annotation_that_decides_nothing_does_not_hide_the_one_that_does(other: str):
    processor = build_processor(annotations={ACCEPT_ANNOTATION: other, REWIND_ANNOTATION: "7=790:40"})
    decision = decide(build_observed(previous=BLOCKED, processor=processor), NOW)
    assert decision.resolution is not None
    assert (decision.resolution.action, decision.resolution.pair) == (ResolutionAction.REWIND, "790:40")
    started = replace(ACTIVE, decision=label_decision(decision.resolution))
    after = decide(build_observed(started, previous=decision.status, processor=processor), NOW)
    assert after.remove_annotations == (REWIND_ANNOTATION,)


def test_two_annotations_about_the_open_conflict_decide_nothing_and_say_so():
    processor = build_processor(annotations={ACCEPT_ANNOTATION: "7=815:61", REWIND_ANNOTATION: "7=790:40"})
    decision = decide(build_observed(previous=BLOCKED, processor=processor), NOW)
    assert decision.resolution is None
    told = next(event.message for event in decision.events if event.reason == "AnnotationInvalid")
    assert "both decide conflict 7: remove one of them" in told
    assert told in next(c.message for c in decision.status.conditions if c.type == "Ready")


def test_a_conflict_that_was_decided_in_the_database_is_closed_by_a_worker_that_saw_it_closed():
    processor = build_processor(delivery={"mode": "Partitioned", "partitions": {"count": 4, "key": {"column": "key"}}})
    decided = build_report(conflicts=summary_of(build_conflict(2)))
    decision = decide(build_observed(build_pod(report=decided), previous=BLOCKED, processor=processor), NOW)
    assert decision.status.conflicts.open is None
    assert "ConflictResolved" in [event.reason for event in decision.events]
    assert condition(decision, "CheckpointHealthy")[0] == "True"


def test_a_worker_that_looked_before_the_conflict_was_recorded_closes_none():
    processor = build_processor(delivery={"mode": "Partitioned", "partitions": {"count": 4, "key": {"column": "key"}}})
    older = build_report(conflicts=summary_of(build_conflict(4, 6, holder=resource())))
    decision = decide(build_observed(build_pod(report=older), previous=BLOCKED, processor=processor), NOW)
    assert decision.status.conflicts.open is not None
