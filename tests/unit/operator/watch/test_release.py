"""The claim of a deleted resource is given up once none of its pods may run any more, and not before."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_operator.api.resources import KIND, parse_processor
from outbox_operator.reconcile import release
from outbox_operator.reconcile.release import Releaser
from outbox_operator.settings import Images
from tests.unit.operator.owned import REPLICA_SET, RESOURCE, build_object, build_pod, store_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox_operator.watch.store import Body, Store

GRACE = 1
GRANTED: Body = RESOURCE | {
    "spec": {**RESOURCE["spec"], "worker": {"terminationGracePeriodSeconds": GRACE}},
    "status": {"ownership": {"state": "Granted"}},
}


class Server:
    """Takes what is created; the watch tells at once that a job has ended."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.created: list[str] = []

    async def create(self, manifest: Body) -> Body:
        self.created.append(f"{manifest['kind']} {manifest['metadata']['name']}")
        meta = {**manifest["metadata"], "uid": manifest["metadata"]["name"], "resourceVersion": "8"}
        ended = {"conditions": [{"type": "Complete", "status": "True"}]}
        self.store.put({**manifest, "metadata": meta, "status": ended})
        return {**manifest, "metadata": meta}


def leaving(name: str) -> Body:
    """A pod whose process may still run; it cannot be told anything."""
    pod = build_pod(name, REPLICA_SET, deletionTimestamp="2026-01-01T12:00:00Z")
    return pod | {"status": {"phase": "Running"}}


class Bench:
    """A releaser at work over a store."""

    def __init__(self, *bodies: Body) -> None:
        self.store = store_of(*bodies)
        self.server = Server(self.store)
        parse = partial(parse_processor, cluster="here")
        self.releaser = Releaser(cast("Any", self.server), self.store, Images(), parse)

    async def jobs(self, count: int, within: float) -> list[str]:
        """The jobs that were made once there are so many, or the time is over."""
        for _ in range(int(within / 0.05)):
            if len(self.made) >= count:
                break
            await asyncio.sleep(0.05)
        return self.made

    @property
    def made(self) -> list[str]:
        return [each for each in self.server.created if each.startswith("Job")]


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(release, "DRAIN_SECONDS", 0.1)
    # What made the pods is gone already, so whose they are cannot be told any more.
    bench = Bench()
    running = asyncio.create_task(bench.releaser.run())
    yield bench
    running.cancel()


async def test_a_pod_that_still_works_keeps_the_claim_however_long_it_takes(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    """It may publish for as long as it is there: what wants the claim would publish the same beside it."""
    caplog.set_level("INFO")
    pod = leaving("slow")
    bench.store.put(pod)
    bench.releaser.release(GRANTED)
    assert await bench.jobs(1, within=GRACE + 1.5) == []
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.__dict__["pods"] == ["slow"]
    bench.store.remove(pod)
    assert await bench.jobs(1, within=5) == ["Job orders-release-uid-o"]


async def test_pods_that_are_gone_end_the_wait_at_once(bench: Bench):
    bench.releaser.release(GRANTED)
    assert await bench.jobs(1, within=0.4) == ["Job orders-release-uid-o"]


async def test_a_pod_on_a_lost_node_holds_up_no_other_deletion(bench: Bench):
    """It is listed until its node is deleted: as many of them as may be worked off at a time must not end it."""
    bench.store.put(leaving("lost"))
    for number in range(release.AT_ONCE):
        meta = {**GRANTED["metadata"], "uid": f"stuck-{number}"}
        bench.releaser.release({**GRANTED, "metadata": meta})
    other = build_object(KIND, "bills", labels={}) | {"spec": RESOURCE["spec"], "status": GRANTED["status"]}
    bench.releaser.release(other)
    assert await bench.jobs(1, within=3) == ["Job bills-release-uid-o"]
