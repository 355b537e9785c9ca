"""The election's clock: a holder ends before another may take over, however slow the API server is."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from outbox_operator.cluster.leader import LEASE_SECONDS, RENEW_DEADLINE, Leader

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


def taking_part(server: SlowServer, identity: str = "one") -> Leader:
    return Leader(cast("Any", server), "system", "lease", identity, deadline=DEADLINE, period=PERIOD)


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
