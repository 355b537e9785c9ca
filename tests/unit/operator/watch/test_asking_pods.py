"""Which pods are asked, and a pod that cannot be asked any more."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from outbox_operator.api.keys import Keys
from outbox_operator.reconcile import reports
from outbox_operator.reconcile.reports import PERIOD, Heard, Reporters
from tests.unit.operator.building import build_report
from tests.unit.operator.owned import EVERYTHING, REPLICA_SET, build_pod, store_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox_core.report import Report


@asynccontextmanager
async def asking(reporters: Reporters) -> AsyncIterator[None]:
    """Ask in the background."""
    task = asyncio.create_task(reporters.run())
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("phase", ["Unknown", "Failed"])
async def test_a_pod_that_cannot_be_asked_any_more_is_not_heard_for_ever(phase: str):
    pod = build_pod("orders-0", REPLICA_SET, phase=phase)
    told: list[Any] = []
    reporters = Reporters(store_of(*EVERYTHING, pod), Keys(), "system", lambda key, _: told.append(key))
    heard = reporters.heard(pod)
    assert not heard.reachable
    entry = reporters._heard.setdefault(pod["metadata"]["uid"], heard)
    entry.reports, entry.missed = {"orders": build_report()}, 0
    assert entry.reachable
    async with asking(reporters):
        while entry.reachable:  # noqa: ASYNC110 - what is looked at announces nothing
            await asyncio.sleep(0.05)
    assert entry.reports, "its last words stay"
    assert told == [("shop", "orders")]


async def test_a_pod_that_is_not_the_resources_own_is_not_asked():
    own, foreign = build_pod("own", REPLICA_SET), build_pod("foreign", None)
    reporters = Reporters(store_of(*EVERYTHING, own, foreign), Keys(), "system", lambda *_: None)
    async with asking(reporters):
        await reporters.asked.wait()
    assert reporters._heard.keys() == {own["metadata"]["uid"]}


async def test_a_fault_about_one_pod_keeps_no_other_from_being_asked():
    bad, good = (build_pod(name, REPLICA_SET, uid=f"uid-of-{name}") for name in ("bad", "good"))
    rounds = asyncio.Event()

    def refuse(*_: Any) -> None:
        rounds.set()
        raise RuntimeError("a fault of ours")

    reporters = Reporters(store_of(*EVERYTHING, bad, good), Keys(), "system", refuse)
    for pod in (bad, good):
        reporters._heard[pod["metadata"]["uid"]] = Heard({"orders": build_report()})
    async with asking(reporters):
        while reporters._heard["uid-of-good"].missed < 3:  # noqa: ASYNC110 - what is looked at announces nothing
            await asyncio.sleep(0.05)
    assert rounds.is_set(), "the fault was met"
    assert reporters.stuck_seconds < PERIOD + 5


async def test_pods_that_do_not_answer_delay_no_news_of_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "PARALLEL", 2)
    monkeypatch.setattr(reports, "PERIOD", 0.01)
    silent = [build_pod(f"silent-{number}", REPLICA_SET, uid=f"silent-{number}") for number in range(60)]
    asked: list[str] = []

    async def fetch(_: object, place: str, __: object, **___: object) -> list[Report]:
        asked.append(place)
        if "silent" in place:
            await asyncio.sleep(0.1)
            raise TimeoutError
        return [build_report()]

    monkeypatch.setattr(reports, "fetch_reports", fetch)
    for pod in silent:
        pod["status"]["podIP"] = "silent"
    good = build_pod("good", REPLICA_SET)
    reporters = Reporters(store_of(*EVERYTHING, good, *silent), Keys(), "system", lambda *_: None)
    for pod in silent:
        reporters._heard[pod["metadata"]["uid"]] = Heard(missed=reports.PATIENCE)
    async with asking(reporters):
        await reporters.asked.wait()
        asked.clear()
        while sum("silent" in place for place in asked) < 30:  # noqa: ASYNC110 - what is looked at announces nothing
            await asyncio.sleep(0.01)
    assert sum("silent" not in place for place in asked) >= 10
