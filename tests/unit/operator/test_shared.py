"""Pods that resources share: what is rendered for a group, and when its pods are replaced."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_core.config import ProcessorConfig, Resolution, ResolutionAction
from outbox_operator.api.naming import config_name, labels_of, pods_label, shared_name, workload_name
from outbox_operator.api.observed import Role
from outbox_operator.decision.decide import decide
from outbox_operator.reconcile.shared import SharedPods
from outbox_operator.rendering.manifests import build_owned
from outbox_operator.rendering.shared import (
    Member,
    build_shared,
    find_misfits,
    hash_member,
    read_parts,
    runs_what_left,
)
from outbox_operator.settings import Images
from outbox_operator.watch.owner_references import is_own
from outbox_operator.watch.store import group_of
from tests.unit.operator.building import NOW, build_observed, build_processor
from tests.unit.operator.owned import RESOURCE, build_object, build_pod, store_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_operator.api.resources import Processor
    from outbox_operator.watch.store import Body

IMAGES = Images(worker="registry/worker:1")
BROKER = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}}}
GROUP = ("shop", "shared.small")


def sharing(name: str, **spec: Any) -> Processor:
    processor = build_processor(name=name, worker={"shared": "small", **spec.pop("worker", {})}, **spec)
    return processor.model_copy(update={"uid": f"uid-of-{name}"})


def member(processor: Processor, replicas: int, resolution: Resolution | None = None, **fields: Any) -> Member:
    return Member(processor, replicas, resolution, **{"created": NOW, **fields})


def rendered(*members: Member) -> tuple[Body, Body]:
    config_map, *_, deployment = build_shared(GROUP, members, IMAGES)
    return config_map, deployment


def parts(deployment: Body) -> dict[str, Any]:
    return read_parts(deployment["spec"]["template"]["metadata"])


def test_a_group_has_a_file_and_a_part_for_each_that_runs_and_is_owned_by_all():
    bills, mails = sharing("bills"), sharing("mails", target=BROKER)
    config_map, deployment = rendered(member(bills, 1), member(mails, 2), member(sharing("idle"), 0))
    assert sorted(config_map["data"]) == ["bills.json", "mails.json"]
    assert ProcessorConfig.model_validate_json(config_map["data"]["bills.json"]).processor_id == "bills"
    assert {name: part.uid for name, part in parts(deployment).items()} == {
        "bills": "uid-of-bills", "mails": "uid-of-mails"
    }  # fmt: skip
    assert deployment["spec"]["replicas"] == 2
    owners = deployment["metadata"]["ownerReferences"]
    assert [each["name"] for each in owners] == ["bills", "mails", "idle"]
    assert not any(each.get("controller") for each in owners), "only one could be"
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    secrets = [each["secret"] for each in volumes if each["name"].startswith("connection-")]
    assert [each["secretName"] for each in secrets] == ["broker", "db"], "each once"
    assert all(each["optional"] for each in secrets), "a missing one keeps none of the others from starting"


def test_what_a_running_pod_need_not_be_restarted_for_is_in_no_hash():
    bills = sharing("bills")
    later = bills.model_copy(update={"generation": bills.generation + 1})
    assert hash_member(later, IMAGES) == hash_member(bills, IMAGES)
    assert hash_member(sharing("bills", delivery={"batchSize": 7}), IMAGES) != hash_member(bills, IMAGES)
    assert hash_member(bills, replace(IMAGES, worker="registry/worker:2")) != hash_member(bills, IMAGES)
    templates = [
        rendered(each)[1]["spec"]["template"]
        for each in (member(bills, 1), member(later, 1), member(bills, 1, sweep_uids=("gone",)))
    ]
    assert templates[0] == templates[1] == templates[2]


def test_a_decision_replaces_the_pod_and_is_in_its_file():
    decided = Resolution(conflict_id=3, action=ResolutionAction.ACCEPT, pair="1:2")
    before = rendered(member(sharing("bills"), 1))
    config_map, deployment = rendered(member(sharing("bills"), 1, decided, decision="abc"))
    assert parts(deployment)["bills"].decision == "abc"
    assert deployment["spec"]["template"] != before[1]["spec"]["template"]
    assert json.loads(config_map["data"]["bills.json"])["resolution"]["conflictId"] == 3


def test_a_group_of_which_none_runs_has_no_pods():
    _, deployment = rendered(member(sharing("bills"), 0))
    assert deployment["spec"]["replicas"] == 0
    assert parts(deployment) == {}


def test_several_replicas_have_a_budget_and_no_resource_has_nothing():
    bills = sharing("bills")
    kinds = [[each["kind"] for each in build_shared(GROUP, [member(bills, n)], IMAGES)] for n in (1, 2)]
    assert kinds == [["ConfigMap", "Deployment"], ["ConfigMap", "PodDisruptionBudget", "Deployment"]]
    assert build_shared(GROUP, [], IMAGES) == []


@pytest.mark.parametrize(
    ("left", "running"),
    [
        pytest.param(lambda mails: [member(mails, 0)], True, id="suspended"),
        pytest.param(lambda _: [], True, id="deleted"),
        pytest.param(lambda mails: [member(mails.model_copy(update={"uid": "another"}), 2)], True, id="made again"),
        pytest.param(lambda mails: [member(mails, 2)], False, id="as it was"),
        pytest.param(lambda mails: [member(mails, 2), member(sharing("stock"), 2)], False, id="one more"),
    ],
)
def test_pods_that_run_what_shall_not_run_end_before_others_begin(
    left: Callable[[Processor], list[Member]], running: bool
):
    bills, mails = member(sharing("bills"), 2), sharing("mails")
    _, deployment = rendered(bills, member(mails, 2))
    pods = [{"metadata": deployment["spec"]["template"]["metadata"]}]
    members = [bills, *left(mails)]
    assert runs_what_left(pods, members) is running
    *_, changed = build_shared(GROUP, members, IMAGES, at_once=running)
    assert changed["spec"]["strategy"]["type"] == ("Recreate" if running else "RollingUpdate")


def test_those_of_another_source_than_the_oldest_do_not_fit():
    there = {"connection": {"secretRef": {"name": "there"}}}
    old, young = member(sharing("mails"), 0), member(sharing("bills", source=there), 1, created=NOW + timedelta(days=1))
    also = member(sharing("stock"), 1, created=NOW + timedelta(days=2))
    (problem,) = find_misfits([young, old, also]).values()
    assert problem.message == (
        "source.connection names Secret 'there', and the pods of worker.shared 'small' read Secret 'db', which the "
        "oldest of their resources, 'mails', names: name that one, or share another name"
    )
    assert list(find_misfits([young, also])) == ["stock"], "the oldest is gone"
    assert find_misfits([]) == {}


def test_a_resource_that_shares_owns_nothing_of_its_own():
    assert build_owned(sharing("bills"), IMAGES, 1, None, ()) == []


def test_no_object_of_a_group_has_the_name_or_label_of_a_resources_own():
    for name in ("small", "small-shared", "shared-small"):
        own = build_processor(name=name)
        assert workload_name(sharing("bills")) not in (workload_name(own), config_name(name))
        assert pods_label(sharing("bills")) != pods_label(own)
    assert len(shared_name("s" * 40)) <= 63


@pytest.mark.parametrize("text", ["", "[]", "{", '{"bills": 1}', '{"bills": ["a", "b", "c", "d"]}'])
def test_an_annotation_that_another_client_changed_names_no_resource(text: str):
    assert read_parts({"annotations": {"outbox-operator.dev/members": text}}) == {}


def body(name: str, shared: str | None) -> Body:
    worker = {} if shared is None else {"worker": {"shared": shared}}
    meta = RESOURCE["metadata"] | {"name": name, "uid": f"uid-of-{name}"}
    return {**RESOURCE, "metadata": meta, "spec": RESOURCE["spec"] | worker}


def test_the_store_knows_who_shares_pods_also_after_a_change():
    store = store_of(body("bills", "small"), body("mails", "small"), body("own", None))
    assert store.in_group(GROUP) == [("shop", "bills"), ("shop", "mails")]
    moved = body("mails", "other")
    moved["metadata"]["resourceVersion"] = "8"
    store.put(moved)
    assert store.in_group(GROUP) == [("shop", "bills")]
    assert store.in_group(("shop", "shared.other")) == [("shop", "mails")]
    store.remove(moved)
    assert store.in_group(("shop", "shared.other")) == []


@pytest.mark.parametrize(("name", "own"), [("small-shared", True), ("mine", False)])
def test_a_shared_pod_is_of_the_one_deployment_of_its_group(name: str, own: bool):
    labels: dict[str, Any] = {"labels": labels_of("shared.small", Role.WORKER)}
    deployment = build_object("Deployment", name, None, **labels)
    replica_set = build_object("ReplicaSet", f"{name}-1", deployment, **labels)
    pod = build_pod("a", replica_set, **labels)
    assert is_own(pod, store_of(deployment, replica_set, pod)) == own


def test_the_store_knows_the_shared_pods_of_a_namespace():
    first, second = (build_pod(name, None, labels=labels_of(f"shared.{name}", Role.WORKER)) for name in "ab")
    store = store_of(second, first, build_pod("c", None))
    assert [each["metadata"]["name"] for each in store.shared_pods("shop")] == ["a", "b"]
    assert store.shared_pods("other") == []
    store.remove(first)
    assert store.shared_pods("shop") == [second]


def test_a_group_is_looked_at_again_only_when_a_resource_wants_something_else():
    store = store_of(body("bills", "small"))
    pods = SharedPods(cast("Any", None), store, IMAGES, cast("Any", None))
    bills = body("bills", "small")
    assert group_of(bills) == GROUP
    assert pods.note(bills) == {GROUP}
    assert pods.note(bills) == set()
    assert pods.note(body("bills", "other")) == {GROUP, ("shop", "shared.other")}
    assert pods.note(body("bills", None)) == {("shop", "shared.other")}
    assert pods.note(bills) == {GROUP}
    store.remove(bills)
    assert pods.note(bills) == {GROUP}, "it is gone"
    assert pods.note(bills) == set(), "what was decided about it comes late"


@pytest.mark.parametrize(("processor", "name"), [(build_processor(), "orders"), (sharing("bills"), "shared.small")])
def test_status_selects_the_pods_that_run_the_resource(processor: Processor, name: str):
    selector = decide(build_observed(processor=processor), NOW).status.selector
    assert selector == f"outbox-operator.dev/processor={name},outbox-operator.dev/role=worker"
