"""The operator killed at any moment ends in the same state; and what its absence costs, which is no message."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.kubernetes.cluster import wait
from tests.support.kubernetes.operator import OperatorProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.kubernetes.operator import Installed
    from tests.support.kubernetes.room import Resource, Room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(280)]

FAIL_OVER_WITHIN = 20.0
RECONCILES = "outbox_operator_reconcile_seconds"


def step_of(resource: Resource) -> str:
    found: str = (resource.status.get("handOver") or {}).get("step", "")
    return found


STEPS = {
    "nothing is written yet": lambda _: True,
    "the status says so": lambda giver: step_of(giver) in ("Draining", "Transferring", "Done"),
    "the pods are going": lambda giver: (
        all("deletionTimestamp" in pod["metadata"] for pod in giver.pods()) and step_of(giver)
    ),
    "the pods are gone": lambda giver: not giver.pods(),
    "the job is there": lambda giver: _jobs(giver) or step_of(giver) == "Done",
    "the claim is given": lambda giver: giver.status["ownership"]["state"] == "HandedOver",
}


BY_DAY = ("the pods are going", "the job is there")
"""Before and after the giver's pods are gone; at night it is killed at every step."""


def _jobs(resource: Resource) -> list[str]:
    jobs = resource.cluster.items("Job", resource.namespace)
    return [job["metadata"]["name"] for job in jobs if f"{resource.name}-give-" in job["metadata"]["name"]]


@pytest.mark.timeout(500)  # six times killed: 100 s alone, and three times that beside all other tests
@pytest.mark.parametrize(
    "steps",
    [pytest.param(BY_DAY, id="two steps"), pytest.param(tuple(STEPS), id="each step", marks=pytest.mark.nightly)],
)
def test_a_hand_over_completes_when_the_operator_is_killed_at_each_step(
    room: Room, release: Installed, tmp_path: Path, steps: tuple[str, ...]
):
    with OperatorProcess(release, tmp_path) as operator:
        giver, taker = room.processor("one", processorId="shared"), None
        giver.until_ready()
        produced = 0
        for number, step in enumerate(steps):
            taker = room.processor(f"heir{number}", processorId="shared")
            taker.until_condition("OwnershipGranted", "False", "ClaimHeld")
            room.shop.produce(3)
            produced += 3
            giver.spec(handOverTo={"namespace": room.namespace, "name": taker.name})
            _await_quickly(giver, step, STEPS[step])
            operator.kill()
            operator.start()
            giver.until_ready("HandedOver")
            taker.until_ready()
            claims = room.shop.query("SELECT name FROM outbox.processor_claims")
            assert claims == [(taker.name,)], f"killed when {step}"
            assert giver.pods() == []
            giver.delete()
            giver = taker
        giver.until("everything is handled", lambda: len(room.handled()) >= produced)
        assert len(set(room.handled())) == len(room.handled()) == produced


def _await_quickly(giver: Resource, step: str, reached: Callable[[Resource], Any]) -> None:
    deadline = time.monotonic() + 60
    while not reached(giver):
        assert time.monotonic() < deadline, f"waited 60 s in vain: {step}"
        time.sleep(0.02)


def test_while_it_is_away_workers_go_on_and_a_change_waits(room: Room, release: Installed, tmp_path: Path):
    with OperatorProcess(release, tmp_path) as operator:
        orders = room.processor("orders")
        orders.until_ready()
        operator.kill()
        room.shop.produce(5)
        wait("messages are handled", lambda: len(room.handled()) == 5, within=20)
        since = orders.condition("Ready")["lastTransitionTime"]
        operator.start()
        wait("it decides again", lambda: operator.metrics().get(f"{RECONCILES}_count", 0) > 0, within=60)
        orders.until_ready()
        assert orders.condition("Ready")["lastTransitionTime"] == since, "nothing turned because its process is another"
        operator.kill()
        orders.spec(suspend=True)
        operator.start()
        orders.until_ready("Suspended")
        assert orders.pods() == []


def test_deleted_while_it_is_away_the_resource_goes_and_its_claim_can_be_taken(
    room: Room, release: Installed, tmp_path: Path
):
    with OperatorProcess(release, tmp_path) as operator:
        orders = room.processor("orders")
        orders.until_ready()
        operator.kill()
        orders.delete()
        wait("the resource is gone", lambda: not orders.read(), within=10)
        orders.until_no_pods()
        vacated = room.shop.query(
            "UPDATE outbox.processor_claims SET vacated_at = NULL WHERE vacated_at IS NOT NULL RETURNING name"
        )
        assert vacated == [("orders",)]
        operator.start()
        # As if the pod could not vacate it: such a claim has no end, but its cluster knows that the holder is gone.
        heir = room.processor("heir", processorId="orders")
        heir.until_ready()


@pytest.mark.calm
def test_another_replica_takes_over_in_time(room: Room, release: Installed, tmp_path: Path):
    with OperatorProcess(release, tmp_path) as first:
        orders = room.processor("orders")
        orders.until_ready()
        with OperatorProcess(release, tmp_path, identity="operator-1"):
            first.kill()
            started = time.monotonic()
            orders.spec(suspend=True)
            orders.until("the other replica acts", lambda: _is_observed(orders), FAIL_OVER_WITHIN)
            print(f"the other replica acted {time.monotonic() - started:.1f} s after SIGKILL")
            orders.until_ready("Suspended")


def _is_observed(resource: Resource) -> bool:
    body = resource.read()
    return bool(body["status"]["observedGeneration"] == body["metadata"]["generation"])


def test_it_is_small_and_serves_its_own_health(room: Room, release: Installed, tmp_path: Path):
    with OperatorProcess(release, tmp_path) as operator:
        for number in range(3):
            room.processor(f"orders{number}").until_ready()
        assert operator.get("livez")[0] == operator.get("readyz")[0] == 200
        metrics = operator.metrics()
        resident = metrics["process_resident_memory_bytes"] / 1e6
        print(f"operator resident: {resident:.0f} MB")
        assert resident < 150
        assert metrics[f"{RECONCILES}_count"] > 0
        assert any(name.startswith("outbox_processor_ready{") and value == 1 for name, value in metrics.items())
