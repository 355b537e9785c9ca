"""Handing the processorId over, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outbox_core.report import Reason, WorkerState
from outbox_operator.api.observed import JobView, Role
from outbox_operator.api.status import HandOverStatus, OwnershipStatus, Phase, ProcessorStatus
from outbox_operator.decision.decide import decide
from outbox_operator.decision.hand_over import hand_over_job_name
from tests.unit.operator.building import (
    ACTIVE,
    ELSEWHERE,
    GRANTED,
    HOLDER,
    NOW,
    WAITING,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    condition,
    ready,
)

HANDED = ProcessorStatus(
    ownership=OwnershipStatus(state="HandedOver", holder=HOLDER, tries=1),
    hand_over=HandOverStatus(to="here/elsewhere/orders", step="Done", time=NOW),
)


def test_a_hand_over_goes_through_its_steps():
    processor = build_processor(**ELSEWHERE)
    draining = decide(build_observed(ACTIVE, processor=processor, previous=GRANTED), NOW)
    assert draining.status.hand_over is not None
    assert (draining.status.hand_over.step, draining.replicas, draining.start_jobs) == ("Draining", 0, ())
    assert draining.keep_claim == ("orders-0",)
    moving = decide(build_observed(processor=processor, previous=draining.status), NOW)
    name = hand_over_job_name(processor)
    assert [(job.name, job.role) for job in moving.start_jobs] == [(name, Role.HAND_OVER)]
    job = JobView(name, finished=True, succeeded=True)
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
    job = JobView(name, finished=True, succeeded=False)
    decision = decide(build_observed(pod, processor=processor, jobs=(job,)), NOW)
    assert condition(decision, "Stalled") == ("True", "HandOverFailed")
    assert "a/b/c holds the claim" in decision.result.message


def test_a_hand_over_taken_back_asks_for_the_claim_again():
    decision = decide(build_observed(previous=HANDED), NOW)
    assert decision.status.phase == Phase.WAITING
    assert [job.role for job in decision.start_jobs] == [Role.CLAIM]


MISSING = (
    "there is no other OutboxProcessor here/elsewhere/orders with processorId 'orders': create it, or correct "
    "spec.handOverTo or take it out; nothing is handed over until then"
)


def test_a_hand_over_to_what_is_not_there_stops_nothing_and_names_it():
    """The claim would stay another resource's, and nothing would handle messages."""
    processor = build_processor(**ELSEWHERE)
    missing = build_observed(ACTIVE, processor=processor, previous=GRANTED, successor_missing=True)
    waiting = decide(missing, NOW)
    assert waiting.status.hand_over is not None
    assert (waiting.status.hand_over.step, waiting.replicas, waiting.keep_claim) == ("Waiting", 1, ())
    assert (ready(waiting), condition(waiting, "Stalled")) == (("False", "HandOverFailed"), ("True", "HandOverFailed"))
    assert waiting.result.message == MISSING
    drained = decide(build_observed(processor=processor, previous=waiting.status, successor_missing=True), NOW)
    assert (drained.replicas, drained.start_jobs) == (1, ()), "also where it goes away while pods are drained"
    there = decide(replace(missing, previous=waiting.status, successor_missing=False), NOW)
    assert there.status.hand_over is not None
    assert (there.status.hand_over.step, there.replicas) == ("Draining", 0)


def test_a_transfer_that_has_begun_is_not_called_off():
    """What its job does is not known before it has ended: workers beside it would be refused."""
    processor = build_processor(**ELSEWHERE)
    job = JobView(hand_over_job_name(processor), finished=False, succeeded=False)
    decision = decide(build_observed(processor=processor, jobs=(job,), successor_missing=True), NOW)
    assert decision.status.hand_over is not None
    assert (decision.status.hand_over.step, decision.replicas) == ("Transferring", 0)


@pytest.mark.parametrize(
    ("spec", "previous", "reason"),
    [
        pytest.param({"suspend": True}, GRANTED, "Suspended", id="suspended"),
        pytest.param({"worker": {"replicas": 0}}, GRANTED, "HandOverFailed", id="scaled to zero"),
        pytest.param({}, WAITING, "ClaimHeld", id="the claim is another's"),
        pytest.param({}, HANDED, "HandOverFailed", id="the claim was given to another before"),
    ],
)
def test_a_hand_over_to_what_is_not_there_starts_no_pods_either(
    spec: dict[str, Any], previous: ProcessorStatus, reason: str
):
    processor = build_processor(handOverTo={"namespace": "elsewhere", "name": "heir"}, **spec)
    decision = decide(build_observed(processor=processor, previous=previous, successor_missing=True), NOW)
    assert (decision.replicas, decision.result.reason) == (0, reason)
    assert decision.result.message.endswith(MISSING.replace("elsewhere/orders", "elsewhere/heir"))
