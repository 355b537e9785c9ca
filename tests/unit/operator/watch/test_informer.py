"""An informer lists once, compares now and then, and lists anew what watches missed."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_operator.api.naming import PROCESSOR_LABEL
from outbox_operator.cluster.kube import KubeError
from outbox_operator.reconcile.controller import Controller
from outbox_operator.settings import read_settings
from outbox_operator.watch.informer import Informer
from outbox_operator.watch.store import Store
from tests.unit.operator.watch.test_listings import pod

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from outbox_operator.watch.store import Body


class Server:
    """Lists what is there; what a test hides from the watch is only listed."""

    def __init__(self, *there: Body) -> None:
        self.there = list(there)
        self.version = 5
        self.refused = ""
        self.calls: list[str] = []

    async def list(self, *_: str, from_memory: bool = False, **__: object) -> tuple[Sequence[Body], int]:
        self.calls.append("look" if from_memory else "list")
        if self.refused:
            raise KubeError(403, "Forbidden", self.refused)
        return [*self.there], self.version


@asynccontextmanager
async def informed(server: Server, store: Store, *, check: float = 0.05) -> AsyncIterator[Informer]:
    def seen(body: Body, deleted: bool) -> None:
        if deleted:
            store.remove(body)
        else:
            store.put(body)

    informer = Informer(cast("Any", server), store, "Pod", "shop", seen, check)
    task = asyncio.create_task(informer.run())
    try:
        yield informer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - a state, not an event
            await asyncio.sleep(0.01)


def names(store: Store) -> list[str]:
    return [body["metadata"]["name"] for body in store.all_of("Pod")]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_operator.watch.informer.FIRST_WAIT", 0.01)
    monkeypatch.setattr("outbox_operator.watch.informer.GRACE", 0.05)


async def test_it_lists_once_while_watches_miss_nothing():
    server, store = Server(pod("a", 4)), Store()
    async with informed(server, store) as informer:
        await until(lambda: server.calls.count("look") >= 2)
        assert (server.calls.count("list"), names(store), informer.silent) == (1, ["a"], 0)


async def test_what_watches_missed_is_found_by_one_listing():
    server, store = Server(pod("a", 4)), Store()
    async with informed(server, store) as informer:
        await until(lambda: server.calls.count("look") >= 1)
        server.there, server.version = [pod("b", 7)], 8
        await until(lambda: names(store) == ["b"])
        await until(lambda: server.calls[-1] == "look")
        assert server.calls.count("list") == 2
        await until(lambda: informer.silent == 0)


async def test_what_a_watch_delivers_a_little_later_was_not_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outbox_operator.watch.informer.GRACE", 0.5)
    server, store = Server(pod("a", 4)), Store()
    async with informed(server, store) as informer:
        await asyncio.wait_for(informer.listed.wait(), 5)
        server.there, server.version = [pod("b", 7)], 8
        looks = server.calls.count("look")
        await until(lambda: server.calls.count("look") > looks)
        store.put(pod("b", 7))
        store.remove(pod("a", 8))
        await until(lambda: server.calls.count("look") > looks + 1)
        assert (server.calls.count("list"), informer.silent) == (1, 0)


async def test_it_says_what_it_is_refused_until_it_is_not():
    server, store = Server(), Store()
    server.refused = "no list"
    async with informed(server, store) as informer:
        await until(lambda: server.calls.count("list") >= 2)
        assert informer.failing_seconds > 0
        assert informer.failure == "cannot list Pod in namespace shop: 403 Forbidden: no list"
        server.refused = ""
        await until(informer.listed.is_set)
        await until(lambda: informer.failing_seconds == 0)


def test_who_loses_an_object_to_another_label_looks_again_too():
    controller = Controller(cast("Any", Server()), read_settings(["--namespace", "shop"], {}), "cluster")
    controller.seen(pod("a", 4), deleted=False)
    controller.queue.forget(("shop", "orders"))
    taken = pod("a", 5)
    taken["metadata"]["labels"] = {**taken["metadata"]["labels"], PROCESSOR_LABEL: "bills"}
    controller.seen(taken, deleted=False)
    assert controller.queue.depth == 2
    controller.queue.forget(("shop", "orders"))
    assert controller.queue.depth == 1


def test_what_kopf_lists_again_is_not_decided_again():
    controller = Controller(cast("Any", Server()), read_settings(["--namespace", "shop"], {}), "cluster")
    for body, due in ((pod("a", 4), 1), (pod("a", 4), 0), (pod("a", 3), 0), (pod("a", 5), 1)):
        controller.seen(body, deleted=False)
        assert controller.queue.depth == due, body
        controller.queue.forget(("shop", "orders"))
