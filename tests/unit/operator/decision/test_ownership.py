"""Who owns the processorId: tries of the claim, siblings, and what pods are told before they go."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from outbox_core.report import ExitCode, Reason, WorkerState
from outbox_operator.api.observed import JobView, Observed, Problem, Role
from outbox_operator.api.status import ProcessorStatus
from outbox_operator.decision.decide import decide
from tests.unit.operator.building import (
    ACTIVE,
    BLOCKED,
    GRANTED,
    NOW,
    OTHER,
    REFUSED,
    WAITING,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    build_sibling,
    condition,
    ready,
    resource,
)


def finished_try(code: int, **fields: Any) -> Observed:
    report = build_report(WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, claim_holder=OTHER)
    pod = build_pod(
        "try", role=Role.CLAIM, phase="Failed", job="orders-claim-2", last_words=report, exit_code=code, ready=False
    )
    job = JobView("orders-claim-2", finished=True, succeeded=code == 0)
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
    assert "OwnershipGranted" in [event.reason for event in decision.events]


def test_a_known_duplicate_of_another_database_starts_after_its_try():
    hinted = decide(build_observed(siblings=(build_sibling(),)), NOW)
    assert [job.name for job in hinted.start_jobs] == ["orders-claim-0"]
    assert condition(hinted, "Stalled")[0] == "False"
    job = JobView("orders-claim-0", finished=True, succeeded=True)
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


def test_an_owner_that_has_not_noticed_yet_does_not_take_a_refusal_back():
    """The standby was told first, and ended: what is left to hear is the former owner, in the middle of a batch."""
    decision = decide(build_observed(ACTIVE, previous=ProcessorStatus(ownership=REFUSED)), NOW)
    assert decision.status.ownership.state == "Refused"
    assert decision.replicas == 0


def test_a_report_of_an_earlier_resource_of_the_name_has_no_say():
    older = build_report().model_copy(update={"resource": resource(uid="older")})
    decision = decide(build_observed(build_pod(report=older)), NOW)
    assert decision.status.ownership.state == "Unknown"
    assert ready(decision)[0] != "True"


def test_a_refusal_names_the_owner_everywhere():
    report = build_report(WorkerState.CLAIM_REFUSED, Reason.CLAIM_HELD, claim_holder=OTHER)
    decision = decide(build_observed(build_pod(report=report), previous=GRANTED), NOW)
    messages = [c.message for c in decision.status.conditions if c.type in ("Ready", "OwnershipGranted", "Stalled")]
    assert all("here/elsewhere/orders" in message for message in messages)
    assert any("here/elsewhere/orders" in event.message for event in decision.events)


@pytest.mark.parametrize(
    ("observed", "told"),
    [
        pytest.param(build_observed(ACTIVE), (), id="no pod goes"),
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


AHEAD = NOW + timedelta(hours=1)


def ahead(**fields: Any) -> ProcessorStatus:
    """What a leader wrote whose clock was an hour ahead."""
    return ProcessorStatus(ownership=REFUSED.model_copy(update={"last_try": AHEAD, "next_try": AHEAD, **fields}))


def test_a_try_that_a_clock_ahead_of_ours_planned_waits_no_longer_than_one_of_ours():
    first = decide(build_observed(previous=ahead()), NOW)
    planned = first.status.ownership.next_try or AHEAD
    assert planned <= NOW + timedelta(minutes=6)
    assert decide(build_observed(previous=first.status), planned).start_jobs != ()


def test_nor_does_the_owners_end_wait_for_that_clock():
    gone = decide(build_observed(previous=ahead(), holder_gone=True), NOW)
    assert gone.status.ownership.next_try == NOW + timedelta(seconds=3)
