"""The election's clock: a holder ends before another may take over, however slow the API server is."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
from kubernetes.config import ConfigException

from outbox_operator.cluster import election
from outbox_operator.cluster.election import LEASE_SECONDS, RENEW_DEADLINE, Election, Leader
from outbox_operator.cluster.kube import Kube, KubeError

DEADLINE = 0.6
PERIOD = 0.1
SLACK = 0.2


class SlowServer:
    """Keeps one Lease; silent once it is told to be."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.silent = False

    async def _answer(self) -> dict[str, Any] | None:
        await asyncio.sleep(60 if self.silent else 0)
        return self.lease

    async def get(self, _place: object) -> dict[str, Any] | None:
        return await self._answer()

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        return await self.replace(manifest)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        await self._answer()
        version = str(time.monotonic_ns())
        self.lease = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}}
        return self.lease


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "RENEW_DEADLINE", DEADLINE)
    monkeypatch.setattr(election, "PERIOD", PERIOD)


def taking_part(server: SlowServer, identity: str = "one") -> Leader:
    return Leader(cast("Any", server), "system", "lease", identity)


async def test_a_holder_whose_api_server_falls_silent_ends_at_its_deadline():
    server = SlowServer()
    leader = taking_part(server)
    await leader.acquire()
    acquired = time.monotonic()
    server.silent = True
    await leader.keep()
    assert time.monotonic() - acquired < DEADLINE + SLACK, "a call that is under way must not prolong it"
    assert not leader.active
    assert RENEW_DEADLINE + 2 < LEASE_SECONDS


async def test_the_deadline_counts_from_the_last_renewal_not_from_when_keeping_began():
    server = SlowServer()
    leader = taking_part(server)
    await leader.acquire()
    acquired = time.monotonic()
    server.silent = True
    await asyncio.sleep(DEADLINE / 2)
    await leader.keep()
    assert time.monotonic() - acquired < DEADLINE + SLACK


async def test_a_holder_that_is_answered_stays():
    server = SlowServer()
    leader, other = taking_part(server), taking_part(server, "two")
    await leader.acquire()
    keeping = asyncio.create_task(leader.keep())
    waiting = asyncio.create_task(other.acquire())
    done, _ = await asyncio.wait({keeping, waiting}, timeout=3 * DEADLINE)
    keeping.cancel()
    waiting.cancel()
    assert not done
    assert (leader.active, other.active) == (True, False)


async def test_a_holder_that_reads_another_one_in_the_lease_ends_at_once():
    server = SlowServer()
    leader = taking_part(server)
    await leader.acquire()
    assert server.lease is not None
    server.lease["spec"]["holderIdentity"] = "two"
    acquired = time.monotonic()
    await leader.keep()
    assert time.monotonic() - acquired < PERIOD + SLACK, "each write from here on is beside another's"
    assert not leader.active
    assert server.lease["spec"]["holderIdentity"] == "two"


class Session:
    """Keeps a Lease, and then answers what is none."""

    def __init__(self) -> None:
        self.server = SlowServer()
        self.tries = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """There is nothing to close."""

    async def get(self, place: object) -> dict[str, Any] | None:
        self.tries += 1
        return {"kind": "Status"} if self.tries == 2 else await self.server.get(place)

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        return await self.server.create(manifest)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        return await self.server.replace(manifest)


async def test_a_holder_that_meets_what_it_does_not_know_ends_before_it_gives_the_lease_up(
    monkeypatch: pytest.MonkeyPatch,
):
    session, seen = Session(), []

    def lost() -> None:
        lease = session.server.lease
        seen.append(lease["spec"]["holderIdentity"] if lease is not None else None)

    monkeypatch.setattr(election, "Kube", lambda: session)
    taking = Election("system", "lease", "one", lost=lost)
    await taking.acquire()
    await asyncio.to_thread(taking._thread.join, 10)
    assert seen == ["one"], "another process takes a Lease that is given up within seconds"


@pytest.mark.parametrize("fault", [OSError("no such file"), ConfigException("Token file exists but empty")])
async def test_a_token_that_cannot_be_read_is_a_try_that_failed(fault: Exception):
    kube = Kube.__new__(Kube)

    def read(*_: object, **__: object) -> str:
        raise fault

    kube._configuration = cast("Any", SimpleNamespace(host="http://localhost", get_api_key_with_prefix=read))
    kube._session, kube._slots = cast("Any", object()), asyncio.Semaphore()
    with pytest.raises(KubeError) as err:
        await kube.call("GET", "api")
    assert err.value.status == 0
    assert not err.value.refused
