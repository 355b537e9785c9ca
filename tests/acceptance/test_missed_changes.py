"""Watches that deliver no deletion: listings find it, with the rights that the chart gives and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.kubernetes.api_proxy import ApiProxy
from tests.support.kubernetes.cluster import wait
from tests.support.kubernetes.operator import OperatorProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.cluster import Body
    from tests.support.kubernetes.operator import Installed
    from tests.support.kubernetes.room import Resource, Room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

ROUND = 60
"""Seconds that are enough for the next look at every kind, with the grace that its watch is given."""
NO_NODE = {"podTemplate": {"spec": {"nodeSelector": {"node": "of-nobody"}}}}
MISSED = "outbox_operator_missed_changes_total"
FAILED = "outbox_operator_failed_rounds_total"


@pytest.fixture
def proxy(room: Room) -> Iterator[ApiProxy]:
    with ApiProxy(room.cluster) as found:
        yield found


@pytest.fixture
def operator(release: Installed, proxy: ApiProxy, tmp_path: Path) -> Iterator[OperatorProcess]:
    with OperatorProcess(release, tmp_path, server=proxy.url, told={"OUTBOX_CHECK_SECONDS": "15"}) as process:
        yield process


def claim_job(beside: Resource) -> Body | None:
    jobs = beside.cluster.items("Job", beside.namespace)
    return next((job for job in jobs if job["metadata"]["name"].startswith(f"{beside.name}-claim-")), None)


def lose_a_pod(orders: Resource) -> None:
    """A pod goes in one step, so that a watch that misses its deletion has nothing but a running pod."""
    (pod,) = orders.pods()
    orders.cluster.delete("Pod", orders.namespace, pod["metadata"]["name"], grace=0)
    uid = pod["metadata"]["uid"]
    orders.until("another pod is there", lambda: [p for p in orders.pods() if p["metadata"]["uid"] != uid])


def test_missed_deletions_of_a_pod_and_a_job_are_found(room: Room, operator: OperatorProcess, proxy: ApiProxy):
    orders = room.processor("orders")
    orders.until_ready()
    # It asks the database first whose the processorId is, by a job that no node takes.
    beside = room.processor("beside", processorId="orders", worker=NO_NODE)
    first: Body = beside.until("its claim is tried", lambda: claim_job(beside) or {})
    beside.until_condition("Ready", "False", "Unschedulable")

    proxy.hidden = {("DELETED", "Pod"), ("DELETED", "Job")}
    lose_a_pod(orders)
    room.cluster.delete("Job", room.namespace, first["metadata"]["name"])

    def made_again() -> bool:
        job = claim_job(beside)
        return job is not None and job["metadata"]["uid"] != first["metadata"]["uid"]

    beside.until("the try is made again", made_again, within=ROUND)
    orders.spec(suspend=True)
    orders.until_ready("Suspended", within=ROUND)
    assert orders.status["replicas"] == 0
    metrics = operator.metrics()
    assert metrics[MISSED] >= 2
    assert metrics[FAILED] == 0
    assert proxy.refused == [], "calls that the chart's roles do not allow"


def without_listing(rules: list[Body], resource: str) -> list[Body]:
    """The rules, without the right to list a resource, which has a rule of its own."""
    (own,) = [rule for rule in rules if rule["resources"] == [resource]]
    verbs = [verb for verb in own["verbs"] if verb != "list"]
    return [{**rule, "verbs": verbs} if rule is own else rule for rule in rules]


@pytest.mark.nightly
def test_a_kind_that_cannot_be_listed_shows_and_keeps_no_other_from_being_healed(
    room: Room, operator: OperatorProcess, proxy: ApiProxy
):
    orders = room.processor("orders")
    orders.until_ready()
    wait("it is ready", lambda: operator.get("readyz") == (200, "ready\n"), within=10)
    (role,) = [r for r in room.cluster.items("Role", room.namespace) if r["metadata"]["name"].endswith(":processors")]

    def grant(rules: Any) -> None:
        room.cluster.patch("Role", room.namespace, role["metadata"]["name"], {"rules": rules})

    grant(without_listing(role["rules"], "rolebindings"))
    proxy.hidden = {("DELETED", "Pod")}
    lose_a_pod(orders)
    orders.spec(suspend=True)
    orders.until_ready("Suspended", within=ROUND)

    wait("it is unready", lambda: operator.get("readyz")[0] == 503, within=2 * ROUND)
    said = operator.get("readyz")[1]
    assert f"cannot list RoleBinding in namespace {room.namespace}: 403 Forbidden" in said
    assert operator.get("livez")[0] == 200
    assert operator.metrics()[FAILED] >= 2
    grant(role["rules"])
    wait("it is ready again", lambda: operator.get("readyz")[0] == 200, within=ROUND)
