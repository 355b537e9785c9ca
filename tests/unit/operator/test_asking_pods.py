"""What an operator that was just started does not know yet, and a pod that cannot be asked any more."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web

from outbox_operator.controller import Controller
from outbox_operator.decide import decide
from outbox_operator.manifests import template_hash
from outbox_operator.naming import TEMPLATE_LABEL, labels_of
from outbox_operator.observed import Role
from outbox_operator.reports import Reporters
from outbox_operator.resources import API_VERSION, KIND, parse_processor
from outbox_operator.settings import Images, Settings
from outbox_operator.store import Store
from tests.unit.operator.building import ACTIVE, GRANTED, NOW, UID, build_observed, build_report

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox_operator.kube import Where
    from outbox_operator.store import Body

META = {"namespace": "shop", "name": "orders", "uid": UID, "resourceVersion": "5", "generation": 3}
RESOURCE: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {**META, "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {"source": {"connection": {"secretRef": {"name": "db"}}}, "target": {"sql": {"statement": "SELECT 1"}}},
    "status": decide(build_observed(ACTIVE, previous=GRANTED), NOW).status.model_dump(
        mode="json", by_alias=True, exclude_none=True
    ),
}


def pod(phase: str = "Running") -> Body:
    labels = labels_of("orders", Role.WORKER)
    labels[TEMPLATE_LABEL] = template_hash(parse_processor(RESOURCE, "here"), Images())
    meta = {"namespace": "shop", "name": "orders-0", "uid": "pod-uid", "creationTimestamp": "2026-01-01T00:00:00Z"}
    status = {"phase": phase, "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    version = "7" if phase == "Running" else "8"
    return {"kind": "Pod", "metadata": {**meta, "labels": labels, "resourceVersion": version}, "status": status}


class OneResource:
    """An API server with one resource and its pod; keeps what is written to the status."""

    def __init__(self) -> None:
        self.statuses: list[dict[str, Any]] = []

    async def list(self, kind: str, _namespace: str, **_: object) -> tuple[list[Body], int]:
        return {KIND: [RESOURCE], "Pod": [pod()]}.get(kind, []), 9

    async def get(self, _place: Where) -> None:
        return None

    async def apply_status(self, manifest: Body) -> Body:
        self.statuses.append(manifest["status"])
        version = str(10 + len(self.statuses))
        return {**RESOURCE, "metadata": {**META, "resourceVersion": version}, "status": manifest["status"]}

    async def apply(self, manifest: Body) -> Body:
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "owned", "resourceVersion": "20"}}

    async def create(self, manifest: Body) -> Body:
        return manifest


@pytest.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A worker's process that answers at the pod's address."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=build_report().model_dump_json(by_alias=True))

    app = web.Application()
    app.add_routes([web.get("/status", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr("outbox_operator.reports.STATUS_PORT", runner.addresses[0][1])
    monkeypatch.setattr("outbox_operator.reports.PERIOD", 0.05)
    yield
    await runner.cleanup()


@asynccontextmanager
async def going_on(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def wait_for(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is looked at announces nothing
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("worker")
async def test_a_new_leader_hears_the_workers_before_it_says_anything_of_them():
    server = OneResource()
    settings = Settings("here", ("shop",), Images(), "system", "lease", "one", 0, "INFO")
    async with going_on(Controller(cast("Any", server), settings, "here").run()):
        await wait_for(lambda: server.statuses)
        await asyncio.sleep(0.3)
    ready = [c["status"] for status in server.statuses for c in status["conditions"] if c["type"] == "Ready"]
    assert set(ready) == {"True"}, "Ready turned because the process was another one"
    assert all(status["owner"]["pod"] == "orders-0" for status in server.statuses)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("phase", ["Unknown", "Failed"])
async def test_a_pod_that_cannot_be_asked_any_more_is_not_heard_for_ever(phase: str):
    store = Store()
    store.put(pod())
    told: list[Any] = []
    reporters = Reporters(store, told.append)
    async with going_on(reporters.run()):
        await wait_for(lambda: reporters.heard("pod-uid").reachable)
        told.clear()
        store.put(pod(phase))
        await wait_for(lambda: not reporters.heard("pod-uid").reachable)
    assert reporters.heard("pod-uid").report is not None, "its last words stay"
    assert told == [("shop", "orders")]
