"""Serves /livez, /readyz and /metrics. Kopf's own endpoint answers 200 while nothing works, so it is not used.

/livez fails when what is due, or asking pods, stands still for too long, or watches stay silent although things change;
the event loop's own lag is caught by the probe's timeout. /readyz is good in a standby that knows who is active, and in
the active process while it can list what it serves: without the CRD, or the rights to read it, nothing becomes or stays
ready. That is no matter of liveness, because a new process would be refused the same; what watches deliver is decided
meanwhile, and an unready Deployment is what rollouts, Argo CD and alerts look at.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable

STALE_SECONDS: Final = 120.0


async def serve(port: int, stale_seconds: Callable[[], float], find_fault: Callable[[], str]) -> web.AppRunner:
    """Start serving; the caller cleans the runner up. What `find_fault` says keeps the process unready."""

    async def livez(_: web.Request) -> web.Response:
        age = stale_seconds()
        return web.Response(text=f"at a standstill for {age:.0f} s\n", status=200 if age < STALE_SECONDS else 503)

    async def readyz(_: web.Request) -> web.Response:
        fault = find_fault()
        return web.Response(text=f"{fault or 'ready'}\n", status=503 if fault else 200)

    async def metrics(_: web.Request) -> web.Response:
        # Of thousands of resources that takes a second.
        text = await asyncio.to_thread(generate_latest)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
