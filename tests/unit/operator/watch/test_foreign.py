"""Pods and jobs that only claim to be a resource's: they count for nothing, and a person is told."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_operator.api.keys import Keys
from outbox_operator.api.observed import Observed, Role
from outbox_operator.api.resources import KIND, parse_processor
from outbox_operator.decision.decide import decide
from outbox_operator.reconcile.observe import Observer, find_runners
from outbox_operator.reconcile.reports import Reporters
from outbox_operator.reconcile.slots import SlotKeeper
from outbox_operator.settings import Budget, Images
from outbox_operator.watch.store import Store
from tests.unit.operator.building import ACTIVE, GRANTED, NOW, build_observed
from tests.unit.operator.owned import EVERYTHING, JOB, REPLICA_SET, RESOURCE, build_object, build_pod, store_of

if TYPE_CHECKING:
    from outbox_operator.watch.store import Body


async def observe(store: Store, body: Body = RESOURCE) -> Observed:
    """Observe the resource; nothing here makes the observer ask the API server."""
    reporters = Reporters(store, Keys(), "system", lambda *_: None)
    parse = partial(parse_processor, cluster="here")
    slots = SlotKeeper(store, Budget(), lambda _: None)
    observer = Observer(cast("Any", None), store, reporters, Images(), "here", parse, slots)
    return await observer.observe(body, None)


async def test_what_only_carries_the_labels_is_not_counted():
    own, bare = build_pod("own", REPLICA_SET), build_pod("bare", None)
    claimed = build_object("Job", "orders-claim-1", None, Role.CLAIM)
    seen = await observe(store_of(*EVERYTHING, own, bare, claimed))
    assert [pod.name for pod in seen.runners] == ["own"]
    assert [job.name for job in seen.jobs] == [JOB["metadata"]["name"]]
    assert seen.foreign == ("bare",)


def test_a_resource_that_is_gone_is_not_waited_for_because_of_a_label():
    """Its claim would never be given up, and what wants it would wait for a pod that never goes."""
    own, ended = build_pod("own", REPLICA_SET), build_pod("ended", REPLICA_SET, phase="Failed")
    store = store_of(REPLICA_SET, own, ended, build_pod("bare", None), build_pod("claim", JOB, Role.CLAIM))
    assert find_runners(store, ("shop", "orders"), RESOURCE["metadata"]["uid"]) == [own]


@pytest.mark.parametrize("nowhere", [{"namespace": "", "name": "orders"}, {"namespace": "shop", "name": ""}])
async def test_an_owner_that_is_no_place_is_not_looked_for(nowhere: dict[str, str]):
    """Its path would be a list's, and what is not found there counted as gone."""
    holder = {"cluster": "here", "uid": "x", **nowhere}
    refused = RESOURCE | {"status": {"ownership": {"state": "Refused", "holder": holder}}}
    assert not (await observe(store_of(*EVERYTHING), refused)).holder_gone


def heir(namespace: str, processor_id: str = "orders") -> Body:
    made = build_object(KIND, "heir", labels={}, namespace=namespace)
    return {**made, "spec": {**RESOURCE["spec"], "processorId": processor_id}}


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        pytest.param({"namespace": "shop", "name": "heir"}, False, id="it is there"),
        pytest.param({"namespace": "shop", "name": "hair"}, True, id="a name that is none"),
        pytest.param({"namespace": "other", "name": "heir"}, True, id="it asks for another processorId"),
        pytest.param({"namespace": "shop", "name": "orders"}, True, id="the resource itself"),
        pytest.param({"namespace": "unserved", "name": "heir"}, False, id="a namespace that is not seen"),
        pytest.param({"namespace": "other", "name": "heir", "cluster": "there"}, False, id="another cluster"),
        pytest.param({"namespace": "other", "name": "heir", "cluster": "here"}, True, id="this cluster by name"),
    ],
)
async def test_a_successor_is_missing_where_it_would_be_seen(target: dict[str, str], missing: bool):
    giver = {**RESOURCE, "spec": {**RESOURCE["spec"], "handOverTo": target}}
    store = Store(("shop", "other"))
    for body in (giver, heir("shop"), heir("other", "bills")):
        store.put(body)
    assert (await observe(store, giver)).successor_missing is missing


FORMER = build_object("Deployment", "orders-worker", RESOURCE, uid="of-before")
LEFT = build_object("ReplicaSet", "orders-worker-0", FORMER)
OLD_JOB = build_object("Job", "orders-claim-9", build_object(KIND, "orders", uid="of-before"), Role.CLAIM)
ALIEN = build_object("ReplicaSet", "alien-1", build_object("Deployment", "alien", None))

GOES = [
    pytest.param((LEFT, build_pod("a", LEFT)), id="its Deployment was deleted by hand"),
    pytest.param((build_pod("a", LEFT),), id="so was the ReplicaSet"),
    pytest.param((OLD_JOB, build_pod("a", OLD_JOB)), id="its resource was replaced"),
]
STAYS = [
    pytest.param((ALIEN, build_pod("a", ALIEN)), id="made by a Deployment that the operator does not see"),
    pytest.param((build_pod("a", build_object("CronJob", "nightly")),), id="made by a kind that it does not see"),
    pytest.param((build_pod("a", build_object("Job", "orders-nightly")),), id="made by a Job that it does not see"),
    pytest.param((build_object("ReplicaSet", "orders-worker-0"), build_pod("a", LEFT)), id="left behind for good"),
]


@pytest.mark.parametrize("found", GOES)
async def test_a_pod_that_goes_because_what_made_it_is_gone_is_no_stranger(found: tuple[Body, ...]):
    assert (await observe(store_of(*EVERYTHING, *found))).foreign == ()


@pytest.mark.parametrize("found", STAYS)
async def test_a_pod_that_stays_is_named(found: tuple[Body, ...]):
    assert (await observe(store_of(*EVERYTHING, *found))).foreign == ("a",)


QUIET = [
    pytest.param(build_pod("a", None, phase="Succeeded"), id="it has ended"),
    pytest.param(build_pod("a", None, deletionTimestamp="2026-01-01T12:00:00Z"), id="it goes"),
    pytest.param(build_pod("a", None, creationTimestamp="2999-01-01T12:00:00Z"), id="what made it may not be seen yet"),
    pytest.param(build_pod("a", None, Role.RELEASE), id="nothing owns the pod of a release job"),
    pytest.param(build_pod("a", REPLICA_SET), id="it is the resource's own"),
]


@pytest.mark.parametrize("pod", QUIET)
async def test_a_pod_that_is_no_trouble_makes_no_event(pod: Body):
    assert (await observe(store_of(*EVERYTHING, pod))).foreign == ()


def test_a_person_is_told_once_and_the_condition_names_it_as_long_as_it_is_there():
    decision = decide(build_observed(ACTIVE, previous=GRANTED, foreign=("bare",)), NOW)
    (event,) = [each for each in decision.events if each.reason == "ForeignPod"]
    assert event.warning
    assert event.message == (
        "pods bare carry this resource's labels and were not made for it: they are neither asked nor believed; "
        "delete them, or take the label outbox-operator.dev/processor off"
    )
    (condition,) = [each for each in decision.status.conditions if each.type == "WorkersAvailable"]
    assert (condition.status, condition.message) == ("True", f"pods ready: 1 of 1; {event.message}")

    others = tuple(f"bare-{number}" for number in range(5))
    again = decide(build_observed(ACTIVE, previous=decision.status, foreign=others), NOW)
    assert [each for each in again.events if each.reason == "ForeignPod"] == []
    (condition,) = [each for each in again.status.conditions if each.type == "WorkersAvailable"]
    assert "pods bare-0, bare-1, bare-2 and 2 more carry" in condition.message
