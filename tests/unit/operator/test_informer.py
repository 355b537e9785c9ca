"""An informer lists once, goes on where a watch ended, and begins anew where it cannot, or has missed something."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_operator.informer import Informer
from outbox_operator.kube import KubeError, _lines
from outbox_operator.store import Store
from tests.unit.operator.test_listings import pod

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from outbox_operator.store import Body

Bodies = list["Body"]
Step = tuple[str, "Body"] | KubeError | None
"""What a watch does next: tell an event, break off with an error, or (None) end."""


class Server:
    """Lists what is there, and tells in each watch what a test put there; after that a watch stays silent."""

    def __init__(self) -> None:
        self.there: list[Body] = []
        self.version = 5
        self.steps: asyncio.Queue[Step] = asyncio.Queue()
        self.calls: list[str] = []

    async def list(self, _kind: str, _namespace: str, **_: object) -> tuple[list[Body], int]:
        self.calls.append("list")
        return list(self.there), self.version

    async def list_metadata(self, *_: str, **__: object) -> tuple[Bodies, int]:
        self.calls.append("look")
        return list(self.there), self.version

    async def watch(self, _kind: str, _namespace: str, version: str, **_: object) -> AsyncIterator[tuple[str, Body]]:
        self.calls.append(f"watch {version}")
        while (step := await self.steps.get()) is not None:
            if isinstance(step, KubeError):
                raise step
            yield step


@asynccontextmanager
async def informed(server: Server, store: Store, *, check: float = 60) -> AsyncIterator[Informer]:
    def seen(body: Body, *, deleted: bool) -> None:
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
    monkeypatch.setattr("outbox_operator.informer.FIRST_WAIT", 0.01)
    monkeypatch.setattr("outbox_operator.informer.GRACE", 0.05)


async def test_it_lists_once_and_goes_on_where_a_watch_ended_or_broke():
    server, store = Server(), Store()
    server.there = [pod("a", 4)]
    async with informed(server, store) as informer:
        await asyncio.wait_for(informer.listed.wait(), 5)
        server.steps.put_nowait(("ADDED", pod("b", 6)))
        server.steps.put_nowait(None)
        server.steps.put_nowait(("BOOKMARK", pod("", 8)))
        server.steps.put_nowait(KubeError(0, "Unreachable", "reset"))
        server.steps.put_nowait(("DELETED", pod("a", 9)))
        await until(lambda: names(store) == ["b"])
    assert server.calls == ["list", "watch 5", "watch 6", "watch 8"]


async def test_what_was_deleted_while_no_watch_could_tell_is_found_by_the_next_listing():
    server, store = Server(), Store()
    server.there = [pod("a", 4), pod("b", 4)]
    async with informed(server, store):
        await until(lambda: names(store) == ["a", "b"])
        server.there, server.version = [pod("b", 4)], 9
        server.steps.put_nowait(KubeError(410, "Expired", "too old resource version"))
        await until(lambda: names(store) == ["b"])
        await until(lambda: server.calls == ["list", "watch 5", "list", "watch 9"])


async def test_a_watch_that_missed_something_is_begun_anew():
    server, store = Server(), Store()
    server.there = [pod("a", 4)]
    async with informed(server, store, check=0.05) as informer:
        await until(lambda: server.calls.count("look") >= 2)
        assert (server.calls.count("list"), informer.silent) == (1, 0), "nothing was missed"
        server.there, server.version = [pod("b", 7)], 8
        await until(lambda: names(store) == ["b"])
        assert server.calls.count("list") == 2
        await until(lambda: informer.silent == 0)


async def test_it_fails_while_it_is_refused():
    server, store = Server(), Store()
    async with informed(server, store) as informer:
        await asyncio.wait_for(informer.listed.wait(), 5)
        for _ in range(2):
            server.steps.put_nowait(KubeError(403, "Forbidden", "no watch"))
        await until(lambda: server.calls.count("list") == 3)
        assert informer.failing_seconds > 0, "a listing alone is no success"
        assert informer.failure == "cannot list or watch Pod in namespace shop: 403 Forbidden: no watch"
        await until(lambda: informer.failing_seconds == 0)


async def test_lines_are_read_whatever_pieces_they_come_in():
    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            for piece in (b'{"a"', b": 1}\n{}", b"\n\n", b"[", b"]\n"):
                yield piece

    assert [line async for line in _lines(cast("Any", Content()))] == [b'{"a": 1}', b"{}", b"[]"]
