"""The claim of a deleted resource is given up once none of its pods may run any more, and not before."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_operator.api.resources import KIND
from outbox_operator.cluster.kube import KubeError
from outbox_operator.reconcile import release
from outbox_operator.reconcile.controller import Controller
from outbox_operator.settings import read_settings
from tests.unit.operator.owned import REPLICA_SET, RESOURCE, build_object, build_pod

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox_operator.cluster.kube import Where
    from outbox_operator.watch.store import Body

GRANTED: Body = RESOURCE | {"status": {"ownership": {"state": "Granted"}}}


class Server:
    """Keeps what is created, and tells it; a job that may run has ended at once."""

    def __init__(self) -> None:
        self.bodies: dict[str, Body] = {}
        self.controller: Controller | None = None
        self.ran: list[str] = []
        self.versions = itertools.count(8)

    def put(self, body: Body) -> Body:
        meta = {**body["metadata"], "resourceVersion": str(next(self.versions))}
        if body["kind"] == "Job" and not body["spec"].get("suspend"):
            self.ran.append(meta["name"])
            body = {**body, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
        self.bodies[meta["uid"]] = {**body, "metadata": meta}
        if self.controller is not None:
            self.controller.seen(self.bodies[meta["uid"]], deleted=False)
        return self.bodies[meta["uid"]]

    def remove(self, body: Body) -> None:
        assert self.controller is not None
        self.controller.seen(self.bodies.pop(body["metadata"]["uid"]), deleted=True)

    async def create(self, manifest: Body) -> Body | None:
        uid = f"{manifest['kind']} {manifest['metadata']['name']}"
        return None if uid in self.bodies else self.put({**manifest, "metadata": {**manifest["metadata"], "uid": uid}})

    async def patch(self, place: Where, patch: Any) -> Body:
        job = self.bodies[f"{place.kind} {place.name}"]
        return self.put({**job, "spec": {**job["spec"], **patch["spec"]}})


def leaving(name: str) -> Body:
    """A pod whose process may still run; it cannot be told anything, and what made it is gone already."""
    pod = build_pod(name, REPLICA_SET, deletionTimestamp="2026-01-01T12:00:00Z")
    return pod | {"status": {"phase": "Running"}}


class Bench:
    """An operator at work."""

    def __init__(self) -> None:
        self.server = Server()
        self.work: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the operator, or another one after it: of what it knew there is left what the API server has."""
        self.stop()
        controller = Controller(cast("Any", self.server), read_settings([], {}), "here")
        self.server.controller = controller
        for body in self.server.bodies.values():
            controller.seen(body, deleted=False)
        self.work = asyncio.create_task(controller._releaser.run())

    def stop(self) -> None:
        if self.work is not None:
            self.work.cancel()

    def delete(self, resource: Body) -> None:
        assert self.server.controller is not None
        self.server.controller.seen(resource, deleted=True)

    async def ran(self, count: int, within: float) -> list[str]:
        """The jobs that were let run once there are so many, or the time is over."""
        for _ in range(int(within / 0.05)):
            if len(self.server.ran) >= count:
                break
            await asyncio.sleep(0.05)
        return self.server.ran


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.start()
    yield bench
    bench.stop()


async def test_a_pod_that_still_works_keeps_the_claim_however_long_it_takes(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    """It may publish for as long as it is there: what wants the claim would publish the same beside it."""
    caplog.set_level("INFO")
    pod = bench.server.put(leaving("slow"))
    bench.delete(GRANTED)
    assert await bench.ran(1, within=1.2) == []
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.__dict__["pods"] == ["slow"]
    bench.server.remove(pod)
    assert await bench.ran(1, within=5) == ["orders-release-uid-o"]


async def test_an_operator_that_is_started_again_meanwhile_gives_it_up_all_the_same(bench: Bench):
    """Resource and pods are gone by then: nothing else says whose claim is left in which database."""
    pod = bench.server.put(leaving("slow"))
    bench.delete(GRANTED)
    assert await bench.ran(1, within=0.3) == []
    bench.start()
    assert await bench.ran(1, within=0.7) == []
    bench.server.remove(pod)
    assert await bench.ran(1, within=5) == ["orders-release-uid-o"]
    bench.start()
    assert await bench.ran(2, within=0.7) == ["orders-release-uid-o"], "once"


async def test_pods_that_are_gone_end_the_wait_at_once(bench: Bench):
    bench.delete(GRANTED)
    assert await bench.ran(1, within=0.4) == ["orders-release-uid-o"]


async def test_a_pod_on_a_lost_node_holds_up_no_other_deletion(bench: Bench):
    """It is listed until its node is deleted: as many of them as may be worked off at a time must not end it."""
    bench.server.put(leaving("lost"))
    for number in range(release.AT_ONCE):
        bench.delete({**GRANTED, "metadata": {**GRANTED["metadata"], "uid": f"{number}-is-stuck"}})
    other = build_object(KIND, "bills", labels={}) | {"spec": RESOURCE["spec"], "status": GRANTED["status"]}
    bench.delete(other)
    assert await bench.ran(1, within=3) == ["bills-release-uid-o"]


@pytest.mark.parametrize("call", ["create", "patch"])
@pytest.mark.parametrize("status", [0, 500])
async def test_a_call_that_fails_is_made_again(bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str, status: int):
    monkeypatch.setattr(release, "AGAIN", 0.2)
    failed: list[object] = []

    async def fail(*arguments: object) -> None:
        failed.append(arguments)
        raise KubeError(status, "InternalError", "the API server is restarted")

    monkeypatch.setattr(bench.server, call, fail)
    bench.delete(GRANTED)
    assert await bench.ran(1, within=0.3) == []
    assert failed
    monkeypatch.undo()
    assert await bench.ran(2, within=1) == ["orders-release-uid-o"], "once"


async def test_a_job_that_may_not_run_yet_is_let_run_once_it_may(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release, "AGAIN", 0.2)

    async def refuse(*_: object) -> None:
        raise KubeError(403, "Forbidden", "no")

    with monkeypatch.context() as patched:
        patched.setattr(bench.server, "patch", refuse)
        bench.delete(GRANTED)
        assert await bench.ran(1, within=0.3) == []
    assert await bench.ran(1, within=1) == ["orders-release-uid-o"]


async def test_an_operator_that_ends_after_any_call_leaves_all_that_the_job_mounts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    create = bench.server.create

    async def end_after(manifest: Body) -> Body | None:
        made = await create(manifest)
        bench.stop()
        await asyncio.sleep(0)
        return made

    monkeypatch.setattr(bench.server, "create", end_after)
    bench.delete(GRANTED)
    assert await bench.ran(1, within=0.2) == []
    bench.start()
    assert await bench.ran(1, within=1) == ["orders-release-uid-o"]
    (job,) = (body for body in bench.server.bodies.values() if body["kind"] == "Job")
    mounted = [volume["configMap"]["name"] for volume in volumes_of(job) if "configMap" in volume]
    assert [name for name in mounted if f"ConfigMap {name}" not in bench.server.bodies] == []


def volumes_of(job: Body) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = job["spec"]["template"]["spec"]["volumes"]
    return volumes


async def test_what_the_api_server_refuses_ends_no_other_work(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_: object) -> None:
        raise KubeError(403, "Forbidden", "the namespace is being terminated")

    monkeypatch.setattr(bench.server, "create", refuse)
    bench.delete(GRANTED)
    await asyncio.sleep(0.1)
    monkeypatch.undo()
    bench.delete({**GRANTED, "metadata": {**GRANTED["metadata"], "uid": "another"}})
    assert await bench.ran(1, within=3) == ["orders-release-anoth"]


@pytest.mark.parametrize("ends", ["removed", "ended"])
def test_who_waits_for_the_claim_is_looked_at_when_the_last_pod_is_gone(monkeypatch: pytest.MonkeyPatch, ends: str):
    """While a pod of the deleted owner is there the claim is not asked for, and the next try may be minutes away."""
    controller = Controller(cast("Any", Server()), read_settings([], {}), "here")
    holder = {"cluster": "here", "namespace": "shop", "name": "orders", "uid": RESOURCE["metadata"]["uid"]}
    waiting = build_object(KIND, "copy", namespace="other") | {
        "spec": {**RESOURCE["spec"], "processorId": "orders"},
        "status": {"ownership": {"state": "Refused", "holder": holder}},
    }
    owner_of_none = build_object(KIND, "bills") | {"spec": RESOURCE["spec"]}
    pod = build_pod("orders-0", REPLICA_SET)
    for body in (RESOURCE, waiting, owner_of_none, pod):
        controller.seen(body, deleted=False)
    controller.seen(RESOURCE, deleted=True)
    woken: list[Any] = []
    monkeypatch.setattr(controller.queue, "add", lambda key, *_: woken.append(key))
    if ends == "removed":
        controller.seen(pod, deleted=True)
    else:
        later = {**pod["metadata"], "resourceVersion": "8"}
        controller.seen({**pod, "metadata": later, "status": {"phase": "Succeeded"}}, deleted=False)
    assert [key for key in woken if key != ("shop", "orders")] == [("other", "copy")]
