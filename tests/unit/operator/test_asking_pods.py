"""A pod that cannot be asked any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox_operator.naming import labels_of
from outbox_operator.observed import Role
from outbox_operator.reports import Reporters
from outbox_operator.store import Store
from tests.unit.operator.building import build_report

if TYPE_CHECKING:
    from outbox_operator.store import Body


def pod(phase: str) -> Body:
    meta = {"namespace": "shop", "name": "orders-0", "uid": "pod-uid", "resourceVersion": "7"}
    labels = labels_of("orders", Role.WORKER)
    return {"kind": "Pod", "metadata": {**meta, "labels": labels}, "status": {"phase": phase, "podIP": "127.0.0.1"}}


@pytest.mark.parametrize("phase", ["Unknown", "Failed"])
async def test_a_pod_that_cannot_be_asked_any_more_is_not_heard_for_ever(phase: str):
    store = Store()
    store.put(pod(phase))
    told: list[Any] = []
    reporters = Reporters(store, told.append)
    heard = reporters.heard("pod-uid")
    assert not heard.reachable
    entry = reporters._heard.setdefault("pod-uid", heard)
    entry.report, entry.missed = build_report(), 0
    assert entry.reachable
    asking = asyncio.create_task(reporters.run())
    try:
        async with asyncio.timeout(20):
            while entry.reachable:  # noqa: ASYNC110 - what is looked at announces nothing
                await asyncio.sleep(0.05)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert entry.report is not None, "its last words stay"
    assert told == [("shop", "orders")]
