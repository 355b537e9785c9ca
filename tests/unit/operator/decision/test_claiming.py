"""A resource that asks before its workers start: what a person sees meanwhile, and how it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_operator.api.observed import Problem, Role, Sibling
from outbox_operator.api.status import OwnershipStatus, ProcessorStatus
from outbox_operator.decision.decide import Decision, decide
from tests.unit.operator.building import NOW, build_observed, build_pod, build_sibling

TRYING = ProcessorStatus(ownership=OwnershipStatus(state="Trying", tries=3, next_try=NOW))
PULL = Problem("ImageUnavailable", "image 'nothing' cannot be pulled")


def said(decision: Decision, kind: str) -> tuple[str, str]:
    return next((c.status, c.reason) for c in decision.status.conditions if c.type == kind)


def test_an_object_that_cannot_be_made_is_named_and_no_worker_starts() -> None:
    decision = decide(
        build_observed(previous=TRYING, siblings=(build_sibling(),), obstacle=Problem("NameTaken", "taken")), NOW
    )
    assert said(decision, "Ready") == ("False", "NameTaken")
    assert decision.replicas == 0


def test_why_the_asking_pod_does_not_start_is_said_of_the_workers() -> None:
    asking = replace(build_pod("orders-claim-3"), role=Role.CLAIM, phase="Pending", problem=PULL)
    decision = decide(build_observed(asking, previous=TRYING, siblings=(build_sibling(),)), NOW)
    assert said(decision, "WorkersAvailable") == ("False", "ImageUnavailable")
    assert decision.replicas == 0


@pytest.mark.parametrize(
    "siblings",
    [
        pytest.param((), id="the other resource is gone"),
        pytest.param((build_sibling(granted=False),), id="the other one owns nothing any more"),
        pytest.param((build_sibling(older=False),), id="the other one is younger"),
    ],
)
def test_without_another_resource_that_may_own_it_workers_start(siblings: tuple[Sibling, ...]) -> None:
    decision = decide(build_observed(previous=TRYING, siblings=siblings), NOW)
    assert decision.replicas == 1
    assert decision.status.ownership.state == "Unknown"
    assert decision.status.ownership.tries == 4, "a try under way must not be heard later"
