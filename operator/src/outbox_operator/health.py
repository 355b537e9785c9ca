"""Serves /livez, /readyz and /metrics. Kopf's own endpoint answers 200 while nothing works, so it is not used.

/livez fails when the loop has not come round for too long, or when watches stay silent although things change; the
event loop's own lag is caught by the probe's timeout. /readyz is good in a standby that knows who is active, and in the
active process once it has listed what it serves: without the CRD, or the rights to read it, nothing becomes ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable

STALE_SECONDS: Final = 120.0


async def serve(port: int, stale_seconds: Callable[[], float], ready: Callable[[], bool]) -> web.AppRunner:
    """Start serving; the caller cleans the runner up."""

    async def livez(_: web.Request) -> web.Response:
        age = stale_seconds()
        return web.Response(text=f"last round {age:.0f} s ago\n", status=200 if age < STALE_SECONDS else 503)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ready\n", status=200) if ready() else web.Response(text="starting\n", status=503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
