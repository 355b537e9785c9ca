"""Ready means able to do its part: an API server that refuses, or knows no such resource, keeps a process unready."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from prometheus_client import REGISTRY

from outbox_operator import health
from outbox_operator.api.resources import KIND
from outbox_operator.cluster.election import Leader
from outbox_operator.cluster.kube import KubeError
from outbox_operator.main import find_fault, lead
from outbox_operator.reconcile.controller import Controller
from outbox_operator.settings import read_settings

if TYPE_CHECKING:
    import pytest
    from prometheus_client.core import Metric


class Server:
    """Keeps one Lease, and lists nothing; what is in `refused` gets a 403."""

    def __init__(self, *refused: str, holder: str = "") -> None:
        self.refused = set(refused)
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 60}
        self.lease: dict[str, Any] = {"metadata": {"resourceVersion": "1"}, "spec": spec}

    def _ask(self, kind: str) -> None:
        if kind in self.refused:
            raise KubeError(403, "Forbidden", kind)

    async def get(self, _place: object) -> dict[str, Any]:
        self._ask("Lease")
        return self.lease

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.lease = {**manifest, "metadata": {"resourceVersion": "2"}}
        return self.lease

    async def list(self, kind: str, _namespace: str, **_: object) -> tuple[list[dict[str, Any]], int]:
        self._ask(kind)
        return [], 1


def taking_part(server: Server) -> Leader:
    return Leader(cast("Any", server), "system", "lease", "one")


async def tried(leader: Leader) -> None:
    """Let it take part until its first try has an answer; it goes on trying."""
    attempt = asyncio.create_task(leader.acquire())
    await asyncio.wait({attempt}, timeout=0.2)
    attempt.cancel()


async def test_a_standby_that_knows_who_is_active_is_ready():
    leader = taking_part(Server(holder="another"))
    assert find_fault(leader, None), "nothing was asked yet"
    await tried(leader)
    assert not leader.active
    assert find_fault(leader, None) == ""


async def test_without_rights_on_the_lease_nothing_is_ready():
    leader = taking_part(Server("Lease"))
    await tried(leader)
    assert "Lease" in find_fault(leader, None)


async def leading(server: Server, *flags: str) -> tuple[Leader, Controller]:
    leader = taking_part(server)
    await leader.acquire()
    return leader, Controller(cast("Any", server), read_settings(["--namespace", "shop", *flags], {}), "cluster")


async def test_the_active_process_is_ready_when_it_has_listed_what_it_serves():
    server = Server(KIND)
    leader, controller = await leading(server)
    assert find_fault(leader, None)
    running = asyncio.create_task(controller.run())
    await asyncio.wait({running}, timeout=0.2)
    assert f"cannot list {KIND} in namespace shop" in find_fault(leader, controller), "the CRD is missing, or the right"
    server.refused.clear()
    async with asyncio.timeout(5):
        while find_fault(leader, controller):  # noqa: ASYNC110 - a state, not an event
            await asyncio.sleep(0.05)
    running.cancel()


async def test_nothing_works_on_when_a_process_that_was_told_to_end_gives_the_lease_up():
    working: set[str] = set()

    async def work(part: str) -> None:
        working.add(part)
        try:
            await asyncio.sleep(60)
        finally:
            working.discard(part)

    controller = SimpleNamespace(run=lambda: work("controller"), listed=lambda: work("watches"))
    leading = asyncio.create_task(lead(cast("Any", controller), cast("Any", None)))
    await asyncio.sleep(0.01)
    assert working == {"controller", "watches"}
    leading.cancel()
    await asyncio.wait({leading})
    assert working == set()


class Scraped:
    """Figures that take until they may be read."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def collect(self) -> list[Metric]:
        self.begun.set()
        self.may_end.wait(10)
        return []


async def test_a_scrape_of_many_resources_holds_nothing_else_up():
    figures = Scraped()
    figures.may_end.set()
    REGISTRY.register(figures)
    figures.begun.clear()
    figures.may_end.clear()
    runner = await health.serve(0, lambda: 0.0, lambda: "")
    try:
        (port,) = (port for host, port, *_ in runner.addresses if ":" not in host)
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            scrape = asyncio.create_task(session.get(f"{url}/metrics"))
            assert await asyncio.to_thread(figures.begun.wait, 5)
            async with session.get(f"{url}/livez") as answer:
                assert answer.status == 200
            assert not scrape.done()
            figures.may_end.set()
            async with await scrape as answer:
                assert "outbox_operator_leader" in await answer.text()
    finally:
        figures.may_end.set()
        REGISTRY.unregister(figures)
        await runner.cleanup()


def failed_rounds() -> float:
    return REGISTRY.get_sample_value("outbox_operator_failed_rounds_total") or 0


async def test_a_process_that_cannot_list_any_more_counts_it_and_is_unready_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("outbox_operator.reconcile.controller.UNREADY_AFTER", 0.3)
    monkeypatch.setattr("outbox_operator.watch.informer.FIRST_WAIT", 0.1)
    monkeypatch.setattr("outbox_operator.watch.informer.LONGEST_WAIT", 0.1)
    server = Server()
    leader, controller = await leading(server, "--check-seconds", "0.1")
    running = asyncio.create_task(controller.run())

    async def until(fault: str) -> None:
        async with asyncio.timeout(5):
            while find_fault(leader, controller) != fault:  # noqa: ASYNC110 - a state, not an event
                await asyncio.sleep(0.02)

    await until("")
    before = failed_rounds()
    server.refused = {"Job"}
    async with asyncio.timeout(5):
        while failed_rounds() == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert find_fault(leader, controller) == "", "the API server may be being restarted"
    await until("cannot list Job in namespace shop: 403 Forbidden: Job")
    assert failed_rounds() >= before + 2
    assert controller.stale_seconds < 1, "a new process would be refused the same"
    server.refused.clear()
    await until("")
    running.cancel()
