"""What an operator makes of a group of resources that share pods, while some of them change or go."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from prometheus_client import REGISTRY

from outbox_core.report import Intent
from outbox_operator.api.keys import Keys
from outbox_operator.api.naming import labels_of
from outbox_operator.api.resources import KIND
from outbox_operator.cluster.kube import KubeError
from outbox_operator.reconcile import controller as module
from outbox_operator.reconcile import shared
from outbox_operator.reconcile.controller import Controller
from outbox_operator.settings import read_settings
from tests.unit.operator.owned import LONG_AGO, RESOURCE, build_object, build_pod

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from outbox_operator.cluster.kube import Where
    from outbox_operator.watch.store import Body

NAME = "small-shared"
GOING = "2026-01-01T13:00:00Z"


class Cluster:
    """An API server that keeps what it is given, and tells it at once to an operator at work."""

    def __init__(self) -> None:
        self.bodies: dict[tuple[str, str], Body] = {}
        self.refuses: KubeError | None = None
        self.templates: set[str] = set()
        """Of pods that were asked for."""
        self._numbers = itertools.count(8)
        self.controller = Controller(cast("Any", self), read_settings([], {}), "here")

    def put(self, body: Body) -> Body:
        place = body["kind"], body["metadata"]["name"]
        number, before = str(next(self._numbers)), self.bodies.get(place, {"metadata": {}})["metadata"]
        made = {"uid": before.get("uid", f"uid-{number}"), "creationTimestamp": LONG_AGO, "generation": 1}
        body = {**body, "metadata": {**made, **body["metadata"], "resourceVersion": number}}
        self.bodies[place] = body
        if body["kind"] not in ("Secret", "Event"):
            self.controller.seen(body, deleted=False)
        return body

    def remove(self, kind: str, name: str) -> None:
        body = self.bodies.pop((kind, name))
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(next(self._numbers))}}
        self.controller.seen(body, deleted=True)

    async def apply(self, manifest: Body) -> Body:
        if self.refuses is not None:
            raise self.refuses
        if manifest["kind"] == "Deployment":
            self.templates.add(json.dumps(manifest["spec"]["template"]))
        return self.put(manifest)

    async def apply_status(self, manifest: Body) -> Body | None:
        found = self.bodies.get((KIND, manifest["metadata"]["name"]))
        return None if found is None else self.put({**found, "status": manifest["status"]})

    async def create(self, manifest: Body) -> Body | None:
        return None if (manifest["kind"], manifest["metadata"]["name"]) in self.bodies else self.put(manifest)

    async def get(self, place: Where) -> Body | None:
        return self.bodies.get((place.kind, place.name))

    async def delete(self, place: Where) -> None:
        self.remove(place.kind, place.name)

    def share(self, name: str, group: str | None = "small", created: str = LONG_AGO, **spec: Any) -> Body:
        """Create a resource, or change it."""
        meta = {**RESOURCE["metadata"], "name": name, "uid": f"uid-of-{name}", "creationTimestamp": created}
        worker = {} if group is None else {"worker": {"shared": group}}
        return self.put({**RESOURCE, "metadata": meta, "spec": {**RESOURCE["spec"], **worker, **spec}})

    def put_pod(self) -> None:
        """Make a pod of the group as its Deployment asks for now."""
        deployment = self.bodies["Deployment", NAME]
        template = deployment["spec"]["template"]["metadata"]
        replica_set = self.put(build_object("ReplicaSet", "a-set", deployment, labels=template["labels"]))
        self.put({**build_pod("a", replica_set, **template), "status": {"phase": "Running"}})

    def runs(self) -> list[str]:
        """Names of the resources that the shared pods run."""
        found = self.bodies.get(("ConfigMap", NAME))
        return [] if found is None else [name.removesuffix(".json") for name in found["data"]]

    def ready(self, name: str) -> tuple[str, str, str]:
        """Status, reason and message of the condition Ready."""
        status = self.bodies[KIND, name].get("status") or {}
        found = [each for each in status.get("conditions", ()) if each["type"] == "Ready"]
        return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")

    async def until(self, told: Callable[[], bool], within: float = 3.0) -> None:
        for _ in range(int(within / 0.02)):
            if told():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"runs {self.runs()}: {[self.ready(name) for kind, name in self.bodies if kind == KIND]}")


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(module, "SETTLE", 0.05)
    cluster = Cluster()
    work = asyncio.create_task(cluster.controller.queue.run())
    yield cluster
    work.cancel()


async def test_a_deletion_that_another_program_holds_up_is_waited_for_by_no_other_resource(cluster: Cluster):
    """Its finalizer may stay for hours, and nothing but the deletion itself tells that it is gone at last."""
    bills = cluster.share("bills")
    cluster.share("mails")
    await cluster.until(lambda: cluster.runs() == ["bills", "mails"])
    going = {**bills["metadata"], "deletionTimestamp": GOING, "finalizers": ["example.com/archive"]}
    cluster.put({**bills, "metadata": going})
    await cluster.until(lambda: cluster.runs() == ["mails"])
    cluster.share("stock")
    await cluster.until(lambda: cluster.runs() == ["mails", "stock"])
    cluster.remove(KIND, "bills")
    cluster.remove(KIND, "stock")
    await cluster.until(lambda: cluster.runs() == ["mails"])
    cluster.remove(KIND, "mails")
    await cluster.until(lambda: ("Deployment", NAME) not in cluster.bodies)
    assert cluster.controller._shared._wanted == {}
    assert cluster.controller._shared._left == {}


async def test_what_a_group_meets_is_said_until_it_is_gone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """It is tried again every few seconds: a resource that is looked at meanwhile says the same."""
    cluster.refuses = KubeError(403, "Forbidden", "exceeded quota: few")
    cluster.share("bills")
    await cluster.until(lambda: cluster.ready("bills")[1] == "ApplyFailed")
    assert "Correct what it names (rights, quota, how many resources share a name)" in cluster.ready("bills")[2]
    groups, told = cluster.controller._shared, []

    async def apply(_: Body) -> Body:
        told.append(groups.problem_of(cluster.bodies[KIND, "bills"]))
        raise KubeError(403, "Forbidden", "exceeded quota: few")

    with monkeypatch.context() as patched:
        patched.setattr(cluster, "apply", apply)
        assert not await groups.reconcile(("shop", "shared.small"))
    assert told, "it was tried"
    assert None not in told
    cluster.refuses = None
    assert await groups.reconcile(("shop", "shared.small"))
    assert groups.problem_of(cluster.bodies[KIND, "bills"]) is None


async def test_a_new_resource_of_another_source_stops_none_of_those_that_run(cluster: Cluster):
    """In one process it would come first by its name."""
    cluster.share("mails")
    await cluster.until(lambda: cluster.runs() == ["mails"])
    before = cluster.bodies["Deployment", NAME]["spec"]["template"]
    cluster.share("bills", created=GOING, source={"connection": {"secretRef": {"name": "there"}}})
    await cluster.until(lambda: cluster.ready("bills")[:2] == ("False", "InvalidSpec"))
    assert "'mails', names: name that one, or share another name" in cluster.ready("bills")[2]
    assert cluster.bodies["Deployment", NAME]["spec"]["template"] == before
    assert cluster.ready("mails")[1] == "Starting"
    cluster.share("bills", created=GOING)
    await cluster.until(lambda: cluster.runs() == ["bills", "mails"] and cluster.ready("bills")[1] == "Starting")


@pytest.mark.parametrize("group", [None, "other"])
async def test_a_resource_that_moves_away_and_stops_is_stopped_once_its_former_pods_are_gone(
    cluster: Cluster, group: str | None
):
    """A person who waits for `Suspended` may change then what the processor works on."""
    cluster.share("bills")
    cluster.share("mails")
    await cluster.until(lambda: cluster.runs() == ["bills", "mails"])
    cluster.put_pod()
    cluster.share("bills", group, suspend=True)
    await cluster.until(lambda: cluster.ready("bills")[1] == "Stopping" and cluster.runs() == ["mails"])
    await asyncio.sleep(0.2)
    assert cluster.ready("bills")[1] == "Stopping"
    cluster.remove("Pod", "a")
    cluster.controller.queue.add(("shop", "bills"))
    await cluster.until(lambda: cluster.ready("bills")[:2] == ("True", "Suspended"))


async def test_pods_of_a_former_group_are_being_replaced(cluster: Cluster):
    cluster.share("bills")
    cluster.share("mails")
    await cluster.until(lambda: cluster.runs() == ["bills", "mails"])
    cluster.put_pod()
    cluster.share("bills", "other")
    await cluster.until(lambda: cluster.ready("bills")[1] == "RollingOut")


async def test_what_a_person_made_with_the_labels_of_a_group_stays(cluster: Cluster):
    """A Service for the pods, for example, with their labels copied."""
    service = build_object("Service", "small-metrics", labels=labels_of("shared.small"))
    cluster.put(service)
    cluster.share("bills", worker={"shared": "small", "replicas": 2})
    await cluster.until(lambda: ("PodDisruptionBudget", NAME) in cluster.bodies)
    cluster.share("bills")
    await cluster.until(lambda: ("PodDisruptionBudget", NAME) not in cluster.bodies)
    cluster.remove(KIND, "bills")
    await cluster.until(lambda: ("Deployment", NAME) not in cluster.bodies)
    assert ("Service", "small-metrics") in cluster.bodies


async def test_changes_within_a_second_replace_pods_once_also_while_those_tell_of_themselves(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "SETTLE", 0.3)
    cluster.share("bills")
    await cluster.until(lambda: cluster.runs() == ["bills"])
    for number in range(8):
        cluster.share(f"p{number}")
        cluster.put_pod()
        await asyncio.sleep(0.05)
    await cluster.until(lambda: len(cluster.runs()) == 9)
    assert len(cluster.templates) <= 4


async def test_a_resource_keeps_its_own_pods_until_those_that_it_shall_share_are_made(cluster: Cluster):
    """What is in the way of those may be there for long, and must not stop it."""
    cluster.share("bills", None)
    await cluster.until(lambda: ("Deployment", "bills-worker") in cluster.bodies)
    cluster.put(build_object("ConfigMap", NAME, labels={}))
    cluster.share("bills")
    await cluster.until(lambda: cluster.ready("bills")[1] == "NameTaken")
    assert ("Deployment", "bills-worker") in cluster.bodies
    del cluster.bodies["ConfigMap", NAME]
    await cluster.controller.reconcile(("shop", "shared.small"))
    await cluster.until(lambda: ("Deployment", "bills-worker") not in cluster.bodies and cluster.runs() == ["bills"])
    cluster.share("bills", None)
    await cluster.until(lambda: ("Deployment", "bills-worker") in cluster.bodies)
    cluster.share("bills", suspend=True)
    await cluster.until(lambda: ("Deployment", "bills-worker") not in cluster.bodies)


async def test_pods_that_are_replaced_keep_the_claims_of_those_that_stay(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Else another cluster's resource would take them all over where the next pod takes long to start."""
    told: list[list[str]] = []

    async def tell(pods: list[Body], intent: Intent, key: bytes, resources: list[str]) -> None:
        assert ([pod["metadata"]["name"] for pod in pods], intent) == (["a"], Intent.KEEP_CLAIM)
        assert key == Keys().of("shop/shared.small")
        told.append(resources)

    monkeypatch.setattr(shared, "tell_intent", tell)
    cluster.share("bills")
    cluster.share("mails")
    await cluster.until(lambda: cluster.runs() == ["bills", "mails"])
    cluster.put_pod()
    await asyncio.sleep(0.3)
    assert told == []
    cluster.share("stock")
    await cluster.until(lambda: told[-1:] == [["bills", "mails"]])
    cluster.remove(KIND, "bills")
    await cluster.until(lambda: told[-1:] == [["mails"]])
    cluster.share("mails", None)
    cluster.remove(KIND, "stock")
    await cluster.until(lambda: cluster.runs() == [])
    assert told[-1] == ["mails"], "it stays elsewhere"


async def test_a_group_that_cannot_be_made_counts_as_a_reconcile_that_failed(cluster: Cluster):
    """An alert asks for it: no condition tells what passes by itself and does not."""
    name = "outbox_operator_reconcile_failures_total"
    before = REGISTRY.get_sample_value(name) or 0
    cluster.refuses = KubeError(500, "InternalError", "etcdserver: request is too large")
    cluster.share("bills")
    await cluster.until(lambda: (REGISTRY.get_sample_value(name) or 0) > before)
