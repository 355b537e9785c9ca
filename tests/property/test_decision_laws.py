"""Laws of the operator's decision, whatever is observed: it always answers, settles, and never guesses zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_core.report import LeaseView, Reason, WorkerState
from outbox_operator.api.observed import JobView, Observed, Origin, PodView, Problem, Role, Slots, WorkloadView
from outbox_operator.api.resources import ACCEPT_ANNOTATION, REWIND_ANNOTATION
from outbox_operator.api.status import OwnershipStatus, ProcessorStatus
from outbox_operator.decision.decide import Decision, decide
from outbox_operator.decision.hand_over import hand_over_job_name
from outbox_operator.decision.ownership import claim_job_name
from outbox_operator.decision.rollout import WAS_NOT_READY, WAS_READY, format_rendered
from outbox_operator.reconcile.apply import dump_status
from tests.unit.operator.building import (
    BLOCKED,
    ELSEWHERE,
    GRANTED,
    HASH,
    NOW,
    OTHER,
    WAITING,
    build_conflict,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    build_sibling,
    resource,
    summary_of,
)

TRYING = ProcessorStatus(ownership=OwnershipStatus(state="Trying", tries=3, next_try=NOW))
PROCESSORS = [
    build_processor(annotations=annotations, **spec)
    for annotations in ({}, {ACCEPT_ANNOTATION: "7=815:60"}, {REWIND_ANNOTATION: "6=1:1"}, {ACCEPT_ANNOTATION: "?"})
    for spec in ({}, {"suspend": True}, {"worker": {"replicas": 0}}, {"worker": {"replicas": 2}}, ELSEWHERE)
]
PROBLEMS = st.sampled_from([None, Problem("Unschedulable", "no node"), Problem("ImageUnavailable", "no image")])
CONFLICTS = st.builds(
    lambda code, number, holder, opened: summary_of(
        build_conflict(code, number, holder=holder if code == 4 else None), opened=opened and code in (2, 3)
    ),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([6, 7, 8]),
    st.sampled_from([None, OTHER, resource()]),
    st.booleans(),
)

WORKLOADS = st.builds(
    WorkloadView,
    replicas=st.sampled_from([0, 1]),
    intent_hash=st.sampled_from([HASH, "old"]),
    slot=st.sampled_from(["", WAS_READY, WAS_NOT_READY]),
    rendered=st.sampled_from(["", format_rendered(Origin(3, "spec", ""), {}), format_rendered(Origin(2, "s", ""), {})]),
)


@st.composite
def reports(draw: st.DrawFn) -> Any:
    fields: dict[str, Any] = {"claim_holder": draw(st.sampled_from([None, OTHER, resource()]))}
    if draw(st.booleans()):
        fields["conflicts"] = draw(CONFLICTS)
    if draw(st.booleans()):
        fields["lease"] = LeaseView(
            epoch=4, pod=draw(st.sampled_from(["orders-0", "orders-1"])), held=draw(st.booleans())
        )
    report = build_report(draw(st.sampled_from(WorkerState)), draw(st.sampled_from(Reason)), **fields)
    return report.model_copy(update={"resource": draw(st.sampled_from([resource(), resource(uid="older")]))})


@st.composite
def pods(draw: st.DrawFn, name: str) -> PodView:
    return build_pod(
        name,
        role=draw(st.sampled_from([Role.WORKER, Role.WORKER, Role.CLAIM, Role.HAND_OVER])),
        phase=draw(st.sampled_from(["Pending", "Running", "Running", "Succeeded", "Failed"])),
        ready=draw(st.booleans()),
        deleting=draw(st.booleans()),
        intent_hash=draw(st.sampled_from([HASH, HASH, "old"])),
        report=draw(st.none() | reports()),
        reachable=draw(st.booleans()),
        last_words=draw(st.none() | reports()),
        exit_code=draw(st.sampled_from([None, 0, 1, 10])),
        problem=draw(PROBLEMS),
        job=draw(st.sampled_from(["", "orders-claim-2", "orders-claim-3"])),
    )


@st.composite
def observations(draw: st.DrawFn) -> Observed:
    processor = draw(st.sampled_from(PROCESSORS))
    previous = draw(st.sampled_from([ProcessorStatus(), GRANTED, BLOCKED, WAITING, TRYING]))
    names = [claim_job_name("orders", previous.ownership.tries), hand_over_job_name(processor)]
    jobs = draw(st.lists(st.sampled_from(names), unique=True))
    return build_observed(
        *[draw(pods(name)) for name in draw(st.lists(st.sampled_from(["orders-0", "orders-1", "try"]), unique=True))],
        processor=processor,
        previous=previous,
        jobs=tuple(
            JobView(name, finished=finished, succeeded=finished and won)
            for name in jobs
            for finished, won in [(draw(st.booleans()), draw(st.booleans()))]
        ),
        siblings=draw(st.sampled_from([(), (build_sibling(),), (build_sibling(granted=False),)])),
        holder_gone=draw(st.booleans()),
        successor_missing=draw(st.booleans()),
        obstacle=draw(PROBLEMS),
        workload=draw(st.none() | WORKLOADS),
        origin=Origin(3, "spec", draw(st.sampled_from(["", "image"]))),
        slots=Slots(free=draw(st.booleans())),
    )


def written(decision: Decision) -> ProcessorStatus:
    """The status as the API server gives it back."""
    return ProcessorStatus.model_validate(dump_status(decision.status))


@given(observations())
@settings(max_examples=200, deadline=None)
def test_it_always_answers_with_a_status_that_can_be_read_again(observed: Observed):
    decision = decide(observed, NOW)
    assert dump_status(written(decision)) == dump_status(decision.status)
    conditions = {c.type: c.status for c in decision.status.conditions}
    true = [kind for kind in ("Ready", "Reconciling", "Stalled") if conditions[kind] == "True"]
    assert len(true) <= 1, "kubectl wait, kstatus and Argo CD read the same from them"
    assert decision.look_again.total_seconds() > 0


@given(observations())
@settings(max_examples=200, deadline=None)
def test_with_its_status_written_it_settles(observed: Observed):
    """Two looks at most: the first may learn how a job ended, which changes what is asked next."""
    first = decide(observed, NOW)
    second = decide(replace(observed, previous=written(first)), NOW)
    third = decide(replace(observed, previous=written(second)), NOW)
    assert dump_status(third.status) == dump_status(second.status)
    assert third.replicas == second.replicas
    assert third.events == ()


@given(observations())
@settings(max_examples=200, deadline=None)
def test_pods_are_taken_away_only_for_what_is_known(observed: Observed):
    decision = decide(observed, NOW)
    spec = observed.processor.spec
    status = decision.status
    asked = spec.suspend or spec.hand_over_to is not None or spec.worker.replicas == 0
    known = status.conflicts.open is not None or status.ownership.state in ("Refused", "Trying", "HandedOver")
    assert (decision.replicas == 0) <= (asked or known)
    if status.ownership.state == "Refused" or (status.conflicts.open is not None and decision.resolution is None):
        assert decision.replicas == 0
